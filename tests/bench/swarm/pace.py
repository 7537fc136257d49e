"""Episodes that are played for nothing, with and without a pace: 96 agents, and weights that may be one version behind.

verl launches its own engine here. A step trains 16 episodes, so most of what 96 agents play is stale before its turn.
Agents come when the trainer waits for them: until it is there, nobody holds them.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from tests.bench import table
from tests.bench.swarm.stage import LIMIT_S, Ran
from tests.e2e.players import Players
from tests.kit.proxy_process import ProxyProcess
from tests.kit.tiny_model import build
from tests.kit.trainer_process import RATE, TrainerProcess

AGENTS, GROUPS, SIZE, STEPS = 96, 2, 8, 8
ARMS: dict[str, dict[str, Any]] = {"free": {"ahead": 0}, "paced": {}}
MOST = 0.02


def run(folder: Path, arm: str) -> Ran:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with ProxyProcess(None, folder / "proxy") as proxy:
        ours = {
            "model": build(folder / "model"), "proxy_url": proxy.url, "groups": GROUPS, "group_size": SIZE,
            "total_steps": STEPS, "max_staleness": 1, **ARMS[arm],
        }  # fmt: skip
        with TrainerProcess(folder, ours, {RATE: 1e-2}) as trainer:
            trainer.until(lambda: trainer.phase() == "waiting for episodes", LIMIT_S)
            with Players(proxy.url, model="policy", group_size=SIZE, parallel=AGENTS):
                return {"lines": trainer.finish(LIMIT_S), "status": proxy.report()}


def wasted(ran: Ran) -> tuple[int, int]:
    """Episodes that became stale, and of how many that were trained or discarded."""
    discarded = ran["status"]["discarded"]
    stale = discarded.get("stale", 0)
    return stale, stale + sum(line["episodes"] for line in ran["lines"])


def report(runs: dict[str, Ran]) -> bool:
    rows = []
    for arm, ran in runs.items():
        (stale, played), counts = wasted(ran), ran["status"]["episodes"]
        rest = counts["ready"] + counts["sealed"] + counts["leased"]
        behind = max(line["staleness_max"] for line in ran["lines"])
        share = f"{stale / played:.1%}"
        rows.append([arm, str(len(ran["lines"])), str(stale), str(played), share, str(rest), str(behind)])
    head = ("agents", "steps", "stale", "of", "for nothing", "left at the end", "versions behind, at most")
    table.show(f"{AGENTS} agents, max_staleness 1", head, rows)
    stale, played = wasted(runs["paced"])
    return table.verdicts([(f"with the pace, at most {MOST:.0%} are played for nothing", stale <= MOST * played)])

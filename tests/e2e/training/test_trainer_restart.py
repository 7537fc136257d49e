"""A trainer that two daemons feed is killed in the middle of a step, started again, loses its engine, is started again,
loses a daemon, which comes back, and is told to stop."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from tests.e2e.players import Players
from tests.kit.proxy_process import ProxyProcess
from tests.kit.tiny_model import build
from tests.kit.trainer_process import TrainerFailed, TrainerProcess, living

GROUPS, SIZE, SAVE_FREQ = 2, 4, 2


def policy_version(proxy: ProxyProcess) -> int:
    return int(proxy.report()["models"]["policy"]["policy_version"])


def trained_by(proxy: ProxyProcess) -> int:
    return int(proxy.report()["episodes"]["trained"])


def steps(trainer: TrainerProcess) -> list[int]:
    return [line["step"] for line in trainer.metrics()]


def batches(trainer: TrainerProcess) -> list[str]:
    return [line["batch"] for line in trainer.metrics()]


def beginnings(trainer: TrainerProcess) -> list[int]:
    """The steps from which each of its lives went on."""
    return [int(step) for step in re.findall(r"training from step (\d+)", trainer.log.read_text())]


def loses_itself(trainer: TrainerProcess) -> None:
    """SIGKILL in the middle of a step; the next life goes on from the last checkpoint and leaves no process behind."""
    trainer.until(lambda: trainer.phase() == "training", 60)
    below = trainer.below()
    trainer.signal(signal.SIGKILL)
    trainer.wait(10)
    done = batches(trainer)
    trainer.start()
    trainer.until(lambda: len(beginnings(trainer)) == 2, 400)
    resumed = beginnings(trainer)[1]
    assert resumed % SAVE_FREQ == 0 and abs(resumed - len(done)) < SAVE_FREQ
    assert living(below, 5) == []
    trainer.until(lambda: len(steps(trainer)) > resumed + 1, 200)
    kept = min(resumed, len(done))
    assert batches(trainer)[:kept] == done[:kept]


def loses_its_engine(trainer: TrainerProcess, daemons: Sequence[ProxyProcess]) -> None:
    """It says so, opens the gates and ends; the next life trains on."""
    engine = [process for process in trainer.below() if "EngineCore" in " ".join(process.cmdline())]
    engine[0].kill()
    assert trainer.wait(120) == 1
    assert {daemon.report()["models"]["policy"]["gate"] for daemon in daemons} == {"open"}
    assert "the engine" in trainer.log.read_text()
    reached = max(steps(trainer))
    for _ in range(2):  # as a supervisor would: vLLM on a CPU was seen to die by itself at its start
        trainer.start()
        with suppress(TrainerFailed):
            trainer.until(lambda: max(steps(trainer), default=0) > reached, 400)
            break


def loses_a_daemon(trainer: TrainerProcess, one: ProxyProcess, two: ProxyProcess) -> None:
    """The other one feeds it alone, until the killed one is back with all that it had."""
    trainer.until(lambda: min(trained_by(daemon) for daemon in (one, two)) > 0, 200)
    two.kill()
    alone = len(steps(trainer))
    trainer.until(lambda: len(steps(trainer)) > alone + 2, 200)
    two.start()
    before = trained_by(two)
    trainer.until(lambda: trained_by(two) > before, 200)
    trainer.until(lambda: policy_version(one) == policy_version(two) > alone, 200)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_trainer_and_what_it_needs_may_die_at_any_time(tmp_path: Path) -> None:
    model = build(tmp_path / "tiny")
    with ProxyProcess(None, tmp_path / "one") as one, ProxyProcess(None, tmp_path / "two") as two:
        ours = {
            "model": str(model), "proxy_url": f"{one.url},{two.url}", "groups": GROUPS, "group_size": SIZE,
            "max_tokens": 256, "save_freq": SAVE_FREQ,
        }  # fmt: skip
        players = [Players(url, model="policy", group_size=SIZE, parallel=GROUPS * SIZE) for url in (one.url, two.url)]
        verl = {"actor_rollout_ref.actor.optim.lr": 1e-4}
        with TrainerProcess(tmp_path, ours, verl, lease_s=15.0) as trainer, players[0], players[1]:
            trainer.until(lambda: 3 in steps(trainer), 400)
            loses_itself(trainer)
            loses_its_engine(trainer, (one, two))
            last_life = trainer.below()
            loses_a_daemon(trainer, one, two)
            trainer.signal(signal.SIGTERM)
            assert trainer.wait(120) == 0
            assert living(last_life, 20) == []
        time.sleep(1.0)
        ends = [daemon.report() for daemon in (one, two)]

    metrics = trainer.metrics()
    assert steps(trainer) == list(range(1, len(metrics) + 1)), "no step is missing and none is there twice"
    assert len(set(batches(trainer))) == len(metrics)
    settled = sum(end["episodes"]["trained"] + end["discarded"].get("filtered", 0) for end in ends)
    told = sum(line["episodes"] + line["rejected_episodes"] for line in metrics)
    assert settled == told, "what was leased once more is in the weights once"
    for end in ends:
        counts = end["episodes"]
        assert counts["leased"] == 0
        assert counts["opened"] == sum(count for state, count in counts.items() if state != "opened")
    assert "Traceback" not in trainer.log.read_text()

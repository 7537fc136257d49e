"""Does the gate hold, on real parts? A tiny model learns from its users through it; then what they would get is made
worse in three ways.

    .venv-engine/bin/python -m tests.bench.traffic.candidates [--seeds N] [--out FILE]

One vLLM holds both adapters, people play `words`, all of whose questions are alike here, and a judge by function reads
what they say next. A gate comes after every `EVERY` steps of 16 chats, and 128 held-out episodes decide. The model
learns until what serves is right in `GOOD` of its answers. Then come three candidates that must not be promoted:

- *damaged*: noise is added to the adapter's files, and the engine loads it again, before it plays.
- *flipped*: the judge calls bad what users call good, in `FLIPPED` times as many steps. (Of four steps what is good now
  often keeps its place, and such a candidate is not bad.)
- *rate*: that in four steps, at a hundred times the learning rate. (With a true judge this model plays better with it.)

Beside them somebody calls all along who has not consented. How long this one waits is told by what the trainer does.
A finished seed is written to ``--out`` and never repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any, TypedDict
from unittest.mock import patch

import httpx
import torch
from safetensors.torch import load_file, save_file

from ajet_trainer.engines import adapters
from ajet_trainer.run_folder import read_json
from integrations.tutorials.traffic.app import Chat
from tests.bench import table
from tests.bench.traffic import words
from tests.bench.traffic.run import CHATS, IDLE_S, OPTIONS, judging
from tests.e2e.training.trained_rows import LORA
from tests.kit.environment import clean
from tests.kit.proxy_process import ProxyProcess
from tests.kit.source import ROOT
from tests.kit.tiny_model import build
from tests.kit.trainer_process import PYTHON, RATE, TrainerProcess
from tests.kit.vllm_process import HOLDS_TWO, vllm_server

HERE = Path(__file__).parent
EVERY, FLIPPED, GOOD, MOST_GATES = 4, 3, 0.5, 12
SLOW_RATE, SHARPER = 5e-3, 6.0
"""The tiny model knows all words about alike. With a larger last norm, an adapter can make much of a difference."""
VERDICT = re.compile(r"\b(not )?promoted\b[^:]*: ([+-][\d.]+) over \d+ pairs")
GATE = "evaluating the candidate"


class Gate(TypedDict):
    """`kind` of a candidate, by how much it was better than what served, and whether it was promoted; `serves` is the
    held-out mean of what serves after it."""

    kind: str
    difference: float
    promoted: bool
    serves: float


class Seed(TypedDict):
    """`waits` has how long answers took to who has not consented, by what the trainer did as they were asked for: how
    many, the slowest of a hundred, and the slowest, in seconds."""

    began_at: float
    gates: list[Gate]
    waits: dict[str, tuple[int, float, float]]
    seconds: float
    date: str


class Place:
    """Where it happens: an engine, a daemon, a trainer, and who plays."""

    def __init__(self, folder: Path, seed: int, engine: str, proxy: ProxyProcess) -> None:
        self.folder, self.engine, self.proxy = folder, engine, proxy
        ours = {
            "model": folder / "tiny", "proxy_url": proxy.url, "engine_urls": [engine], "groups": CHATS,
            "group_size": 1, "min_group_size": 1, "turn_gamma": 0.0, "candidate": "next",
            "promote_every": EVERY, "max_staleness": FLIPPED * EVERY, "eval_episodes": 128,
            "save_freq": 10, "total_steps": 1000,
        }  # fmt: skip
        theirs = {"algorithm.adv_estimator": "ajet_running", "actor_rollout_ref.rollout.seed": seed}
        self.trainer = TrainerProcess(folder, ours, {**LORA, RATE: SLOW_RATE, **theirs})
        self.gates, self.took = list[Gate](), defaultdict[str, list[float]](list)
        self._over = threading.Event()

    def incumbent(self) -> dict[str, Any]:
        return read_json(self.trainer.run_dir / "incumbent.json")

    def serves(self) -> float:
        """The held-out mean of what serves, from 0 to 1."""
        return statistics.fmean(one["reward"] for one in self.incumbent()["played"] if one["reward"] is not None)

    def gate(self, kind: str) -> Gate:
        """The next verdict, once it has come."""
        known, version = len(self.gates), self.incumbent().get("version")
        self.trainer.until(lambda: len(self._verdicts()) > known)
        refused, difference = self._verdicts()[known]
        if not refused:
            self.trainer.until(lambda: self.incumbent()["version"] != version)
        made = Gate(kind=kind, difference=float(difference), promoted=not refused, serves=round(self.serves(), 4))
        sys.stderr.write(f"  {kind}: {difference}, {refused}promoted; serves {made['serves']:.3f}\n")
        self.gates.append(made)
        return made

    def _verdicts(self) -> list[tuple[str, str]]:
        return VERDICT.findall(self.trainer.log.read_text())

    def restart(self, *settings: str) -> None:
        self.trainer.signal(signal.SIGTERM)
        self.trainer.wait()
        self.trainer.start(*settings)

    def damage(self) -> None:
        """Waits until the engine has a candidate that nobody has played yet, and adds noise to it."""
        before = self._candidate()
        self.trainer.until(lambda: self.trainer.phase().startswith(GATE) and self._candidate() not in ("", before))
        folder = Path(self._candidate())
        path = folder / "adapter_model.safetensors"
        noisy = {name: one + 3 * one.std() * torch.randn_like(one) for name, one in load_file(path).items()}
        save_file(noisy, path)
        adapters.load_into([self.engine], "next", folder)

    def _candidate(self) -> str:
        cards = httpx.get(f"{self.engine}/v1/models").json()["data"]
        return next((str(card["root"]) for card in cards if card["id"] == "next"), "")

    @contextmanager
    def played(self) -> Iterator[None]:
        """Somebody plays what is held out."""
        command = [
            str(ROOT / ".venv/bin/ajet"), "run", "--proxy", self.proxy.url, "--task", "held-out", "--eval", "--wanted",
            "--parallel", "8", "--quiet", "--reward-from", "stdout", "--", str(PYTHON), str(HERE / "held_out.py"),
        ]  # fmt: skip
        with (self.folder / "held_out.log").open("ab") as log:
            playing = subprocess.Popen(command, env=clean(PYTHONPATH=str(ROOT)), stdout=log, stderr=log)
        try:
            yield
        finally:
            playing.terminate()  # an interrupt is ignored by whom a shell has put into the background
            playing.wait(300)

    @contextmanager
    def visited(self) -> Iterator[None]:
        """Users come, sixteen whenever nothing is left to learn from, and one who has not consented all along."""
        threads = [threading.Thread(target=visit, daemon=True) for visit in (self._consenting, self._other)]
        at = {"OPENAI_BASE_URL": f"{self.proxy.url}/v1", "OPENAI_API_KEY": "none"}
        with patch.dict(os.environ, at):
            for thread in threads:
                thread.start()
            try:
                yield
            finally:
                self._over.set()
                for thread in threads:
                    thread.join()

    def _consenting(self) -> None:
        with ThreadPoolExecutor(CHATS) as people:
            while not self._over.wait(IDLE_S + 1):  # then all of them are sealed
                status = self.proxy.report()
                if not status["episodes"]["ready"] + status["traffic"]["awaiting"]:
                    list(people.map(lambda _: words.talk(Chat(max_tokens=1).say, words.ALIKE), range(CHATS)))

    def _other(self) -> None:
        body = {"model": "policy", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
        with httpx.Client(base_url=self.proxy.url, headers={"X-AJet-Traffic": "0"}, timeout=300) as client:
            while not self._over.wait(0.05):
                phase, began = self.trainer.phase(), time.monotonic()
                client.post("/v1/chat/completions", json=body).raise_for_status()
                self.took[phase].append(time.monotonic() - began)


def run(seed: int) -> Seed:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = sharper(build(folder / "tiny", seed=seed))
        with (
            vllm_server(model, folder / "vllm.log", options=HOLDS_TWO) as engine,
            ProxyProcess(f"policy={engine}", folder / "proxy", options=OPTIONS) as proxy,
        ):
            place = Place(folder, seed, engine, proxy)
            with place.trainer:
                place.trainer.until(lambda: place.trainer.phase().startswith("waiting for episodes"))
                with place.visited():
                    began_at = journey(place)
    waits = {phase: (len(took), round(sorted(took)[-1 - len(took) // 100], 3), round(max(took), 3))
             for phase, took in sorted(place.took.items())}  # fmt: skip
    return {"began_at": began_at, "gates": place.gates, "waits": waits, "seconds": round(time.monotonic() - began),
            "date": time.strftime("%Y-%m-%d")}  # fmt: skip


def sharper(model: Path) -> Path:
    path = model / "model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"] *= SHARPER
    save_file(weights, path, {"format": "pt"})
    return model


def journey(place: Place) -> float:
    """Learns until what serves is good, and then tries what must not serve. Returns what it began with."""
    def judged(how: str) -> Any:
        return judging(f"{HERE / 'words.py'}:{how}", place.proxy, place.folder)

    with judged("score"):
        with place.played():
            place.trainer.until(lambda: bool(place.incumbent()))
            began_at = round(place.serves(), 4)
            while place.gate("learning")["serves"] < GOOD and len(place.gates) < MOST_GATES:
                pass
        place.damage()
        with place.played():
            place.gate("damaged")
    with judged("flipped"), place.played():
        place.restart(f"promote_every={FLIPPED * EVERY}")
        place.gate("flipped")
        place.restart(f"{RATE}={100 * SLOW_RATE}")
        place.gate("rate")
    return began_at


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/reports/candidates.json", help="to go on from")
    given = parser.parse_args()
    found: dict[str, Seed] = json.loads(given.out.read_text()) if given.out.exists() else {}
    for seed in range(given.seeds):
        if str(seed) not in found:
            sys.stderr.write(f"seed {seed}\n")
            found[str(seed)] = run(seed)
            given.out.write_text(json.dumps(found, indent=1) + "\n")
    report([found[str(seed)] for seed in range(given.seeds)])


def report(seeds: Sequence[Seed]) -> None:
    rows = [
        [str(seed), gate["kind"], f"{gate['difference']:+.3f}", "yes" if gate["promoted"] else "no",
         f"{gate['serves']:.3f}"] for seed, found in enumerate(seeds) for gate in found["gates"]
    ]  # fmt: skip
    table.show("gates", ("seed", "candidate", "better by", "promoted", "serves then"), rows)
    phases = sorted({phase for found in seeds for phase in found["waits"]})
    rows = []
    for phase in phases:
        told = [found["waits"][phase] for found in seeds if phase in found["waits"]]
        rows.append([phase, str(sum(one[0] for one in told)),
                     *(f"{1000 * statistics.median(one[place] for one in told):.0f}" for place in (1, 2))])  # fmt: skip
    table.show("waits of users, medians of the seeds", ("trainer", "calls", "p99, ms", "slowest, ms"), rows)
    made = [gate for found in seeds for gate in found["gates"] if gate["kind"] != "learning"]
    bad = [gate for gate in made if gate["difference"] <= -0.2]
    table.verdicts([
        (f"{len(made)} were made worse by 0.2 or more", bad == made),
        (f"none of the {len(bad)} that are is promoted", not any(gate["promoted"] for gate in bad)),
        ("what serves is never more than 0.1 below its best", max(map(fallen, seeds)) <= 0.1),
        ("learning is promoted within 3 gates in all seeds but one",
         sum(any(gate["promoted"] for gate in found["gates"][:3]) for found in seeds) >= len(seeds) - 1),
    ])  # fmt: skip


def fallen(found: Seed) -> float:
    """The furthest that what serves was below its best until then."""
    levels = [found["began_at"], *(gate["serves"] for gate in found["gates"])]
    return max(best - level for best, level in zip(accumulate(levels, max), levels, strict=True))


if __name__ == "__main__":
    main()

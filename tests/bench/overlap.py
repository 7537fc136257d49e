"""The gain of overlap: reward by wall time, staleness and idle shares of ``overlap`` 0, 1 and 2, side by side.

    .venv-engine/bin/python -m tests.bench.overlap [--steps N] [--rounds N]

Goal: no token that is trained is ever more than ``overlap`` versions behind.

One vLLM stands alone and serves the tiny model of the tests. Each run has a proxy of its own, whose gate pauses
engines, and the real trainer, which first gives the engine the untrained weights. Agents play games of three turns,
rewarded for the share of tokens from the lower half of the vocabulary, which the model learns. They are paced: besides
the batch that trains, ``overlap`` + 1 batches of games may be open or ready, and each that goes is followed by a new
one. Runs of the modes follow each other, in one order and in the other, so that a slow hour hits all. What is said of a
mode is the median of its runs.

The clock of a run starts when its trainer first waits for episodes. The reward at a moment is the mean of the last
three steps that had ended by then.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from ajet_sdk.errors import AjetError
from tests.bench import table
from tests.e2e.players import Players
from tests.kit import tiny_model
from tests.kit.proxy_process import ProxyProcess
from tests.kit.trainer_process import FLOAT32, RATE, TrainerFailed, TrainerProcess
from tests.kit.vllm_process import vllm_server

MODES = (0, 1, 2)
GROUPS, SIZE, TURNS, TOKENS = 2, 8, 3, 24
LAST = 3
"""Steps whose mean is the reward at a moment."""
MOMENTS = 4
LIMIT_S = 1200.0
VERL = {**FLOAT32, RATE: 1e-2}


@dataclass(frozen=True, slots=True)
class Ran:
    """One run: the lines of its `metrics.jsonl`, when each was written, and the proxy's last status."""

    overlap: int
    lines: Sequence[Mapping[str, Any]]
    times: Sequence[float]
    status: Mapping[str, Any]

    def reward(self, moment: float) -> float:
        """At `moment`, or of the first step if that ended later."""
        ended = [line["reward_mean"] for line, at in zip(self.lines, self.times, strict=True) if at <= moment]
        return statistics.fmean(ended[-LAST:] or [self.lines[0]["reward_mean"]])

    def idle(self, who: str) -> float:
        """The median over steps, without the first, which waits for the first games."""
        return float(statistics.median(line["idle"][who] for line in self.lines[1:]))

    @property
    def unused(self) -> float:
        """The share of the finished games that nobody trained, because they became stale."""
        stale, trained = self.status["discarded"].get("stale", 0), sum(line["episodes"] for line in self.lines)
        return float(stale / (stale + trained))


@contextmanager
def paced(proxy: ProxyProcess, most: int) -> Iterator[None]:
    """While inside, games are begun so that `most` are always open or ready, and no more."""
    over, begun = threading.Event(), itertools.count()
    players = Players(proxy.url, model="tiny", group_size=SIZE, parallel=0, temperatures=(1.0,) * TURNS, tokens=TOKENS)

    def play() -> None:
        """One game. A game that the end of a run cuts short was none."""
        with suppress(httpx.HTTPError, AjetError):
            players.play("half")

    def begin() -> None:
        number = next(begun)
        while not over.wait(0.05):
            episodes = proxy.report()["episodes"]
            gone = episodes["opened"] - sum(episodes[state] for state in ("open", "sealed", "ready"))
            while number - gone < most:
                pool.submit(play)
                number = next(begun)

    with ThreadPoolExecutor(most) as pool:
        starter = threading.Thread(target=begin)
        starter.start()
        try:
            yield
        finally:
            over.set()
            starter.join()


def run(engine: str, model: Path, folder: Path, overlap: int, steps: int) -> Ran:
    """A whole run in `folder`."""
    folder.mkdir()
    with ProxyProcess(f"tiny={engine}", folder / "proxy", options=["--gate-mode=pause"]) as proxy:
        ours = {
            "model": model, "model_name": "tiny", "engine_urls": [engine], "proxy_url": proxy.url,
            "groups": GROUPS, "group_size": SIZE, "max_tokens": 512, "overlap": overlap, "total_steps": steps,
        }  # fmt: skip
        with TrainerProcess(folder, ours, VERL) as trainer:
            trainer.until(lambda: trainer.phase() == "waiting for episodes", LIMIT_S)
            began, times = time.monotonic(), list[float]()
            with paced(proxy, (overlap + 1) * GROUPS * SIZE):
                while len(times) < steps:
                    times += [time.monotonic() - began] * (len(trainer.metrics()) - len(times))
                    if trainer.process.poll() is not None and len(trainer.metrics()) < steps:
                        raise TrainerFailed(trainer.words())
                    if time.monotonic() - began > LIMIT_S:
                        raise TrainerFailed(f"{len(times)} steps in {LIMIT_S:.0f} s\n{trainer.words()}")
                    time.sleep(0.05)
            lines = trainer.finish(LIMIT_S)
        return Ran(overlap, lines, times, proxy.report())


def show(runs: Sequence[Ran]) -> bool:
    """Prints what the runs came to; whether no bound was passed."""
    by_mode = {mode: [one for one in runs if one.overlap == mode] for mode in MODES}
    end = min(one.times[-1] for one in runs)
    moments = [end * part / MOMENTS for part in range(1, MOMENTS + 1)]
    rows = []
    for mode, some in by_mode.items():
        stale = [line["staleness_mean"] for one in some for line in one.lines]
        row = [f"{statistics.median(one.reward(moment) for one in some):.2f}" for moment in moments]
        row += [
            f"{statistics.median(one.reward(one.times[-1]) for one in some):.2f}",
            f"{statistics.median(one.times[-1] for one in some):.0f}",
            f"{statistics.fmean(stale):.2f}", str(max(line["staleness_max"] for one in some for line in one.lines)),
            *(f"{statistics.median(one.idle(who) for one in some):.0%}" for who in ("trainer", "engine")),
            f"{statistics.median(one.unused for one in some):.0%}",
        ]
        rows.append([str(mode), *row])
    head = ["overlap", *(f"reward at {moment:.0f} s" for moment in moments), "at the end", "seconds", "staleness, mean",
            "largest", "trainer idle", "engine idle", "games unused"]  # fmt: skip
    steps = len(runs[0].lines)
    table.show(f"{steps} steps of each mode, medians of {len(runs) // len(MODES)} runs", head, rows)
    each = [[str(one.overlap), f"{one.times[-1]:.0f}", f"{one.reward(one.times[-1]):.2f}",
             f"{one.idle('trainer'):.0%}", f"{one.idle('engine'):.0%}", f"{one.unused:.0%}"]
            for one in runs]  # fmt: skip
    table.show("Each run, in order", ["overlap", "seconds", "reward", "trainer idle", "engine idle", "unused"], each)
    held = all(line["staleness_max"] <= one.overlap for one in runs for line in one.lines)
    return table.verdicts([("no token is more than overlap versions behind", held)])


def main() -> None:
    parser = argparse.ArgumentParser(description="What overlap gains.")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    runs: list[Ran] = []
    with tempfile.TemporaryDirectory(prefix="ajet-bench-") as name:
        folder = Path(name)
        model = tiny_model.build(folder / "model")
        with vllm_server(model, folder / "vllm.log") as engine:
            for number in range(options.rounds):
                for mode in MODES if number % 2 == 0 else reversed(MODES):
                    place = folder / f"{number}-{mode}"
                    runs.append(run(engine, model, place, mode, options.steps))
                    sys.stderr.write(f"round {number}, overlap {mode}: {runs[-1].times[-1]:.0f} s\n")
    sys.exit(not show(runs))


if __name__ == "__main__":
    main()

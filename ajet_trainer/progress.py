"""The signs of a run for a person or a progress bar: one line a phase and a step, `phase.json`, `metrics.jsonl`.

`phase.json` is ``{"phase", "step", "of", "config", "refused"}``, replaced atomically; ``of`` is 0 when the run has no
planned end, ``config`` is the digest of the configuration in force, and ``refused`` says what keeps a later one from
being in force, if it was tried. `metrics.jsonl` has one JSON object a step. Its line of step
0, if there is one, is the evaluation of the model that the run began with. A resumed run first drops the lines of steps
that its checkpoint does not hold, so that each step stands in the file once.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ajet_sdk.untrainable import SIGNAL
from ajet_trainer.run_folder import put
from ajet_trainer.trained_rows import take_back

WAITS = ("wait", "drain", "eval")
"""Parts of a step in which the trainer has nothing to do."""


class Progress:
    """Writes into `run_dir` (made if missing) and through `say`."""

    def __init__(self, run_dir: str | Path, total_steps: int, say: Callable[[str], None], config: str = "") -> None:
        """`config` is the digest of the run's configuration."""
        self.run_dir = Path(run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.total_steps = total_steps
        self.config, self.refused = config, ""
        self.step = 0
        self.say = say
        self.timing: dict[str, float] = {}
        """Seconds of the parts of the step that is under way."""
        self._took: dict[str, float] = {}
        """The same of all steps so far."""
        self.clock: Callable[[], float] = time.monotonic
        self._said: set[str] = set()
        self.metrics_path = self.run_dir / "metrics.jsonl"

    def phase(self, phase: str, *, quiet: bool = False) -> None:
        """The run is now at `phase`; unless `quiet`, a line says so."""
        known = {
            "phase": phase, "step": self.step, "of": self.total_steps, "config": self.config, "refused": self.refused,
        }  # fmt: skip
        put(self.run_dir / "phase.json", json.dumps(known) + "\n", lasting=False)
        if not quiet:
            self.say(phase)

    @contextmanager
    def part(self, name: str, phase: str) -> Iterator[None]:
        """Runs a part of a step, which the phase names and the timing counts."""
        self.phase(phase, quiet=True)
        with timed(self.timing, name, self.clock), timed(self._took, name, self.clock):
            yield

    @property
    def waited(self) -> float:
        """Seconds so far in which the trainer had nothing to do."""
        return sum(self._took.get(name, 0.0) for name in WAITS)

    def times(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The seconds that each part of the step took so far, and those of the learner that are in `metrics`."""
        learner = {k.removeprefix("timing_s/"): v for k, v in metrics.items() if k.startswith("timing_s/")}
        return {name: round(seconds, 3) for name, seconds in (self.timing | learner).items()}

    def say_once(self, line: str) -> None:
        """Says `line` the first time in a run. `metrics.jsonl` counts in each step what it is about."""
        if line not in self._said:
            self._said.add(line)
            self.say(line)

    def resume_at(self, step: int, line: str = "") -> None:
        """Continues after `step`. Later lines of `metrics.jsonl` belong to weights that are gone, and are dropped. The
        checkpoint's own `line` is added if it is missing."""
        self.step = step
        take_back(self.run_dir, step)
        found = self.metrics_path.read_text().splitlines() if self.metrics_path.exists() else []
        kept = [one for one in found if (known := _step(one)) is not None and known <= step]
        if line and _step(line) == step and step not in map(_step, kept):
            kept.append(line)
        if not found + kept:
            return
        put(self.metrics_path, "".join(one + "\n" for one in kept))

    def has(self, step: int) -> bool:
        """True if `metrics.jsonl` has the line of `step`."""
        return self.metrics_path.exists() and step in map(_step, self.metrics_path.read_text().splitlines())

    def record(self, metrics: Mapping[str, Any]) -> None:
        """Appends one step to `metrics.jsonl` and says it in a line."""
        self.step = int(metrics["step"])
        with self.metrics_path.open("a") as file:
            file.write(line_of(metrics) + "\n")
        of = f"/{self.total_steps}" if self.total_steps else ""
        parts = [f"step {self.step}{of}"]
        if "reward_mean" in metrics:  # a line of step 0 has an evaluation alone
            parts.append(f"reward {metrics['reward_mean']:.3f} ± {metrics['reward_std']:.3f}")
            if agents := metrics.get("reward_by_agent"):
                parts.append(", ".join(f"{agent or 'no agent'} {mean:.3f}" for agent, mean in agents.items()))
            parts.append(f"{metrics['episodes']} episodes, {metrics['sampled_tokens']} sampled tokens")
        if flat := metrics.get("groups_without_signal"):
            why = "" if flat < metrics["groups"] else f": the rewards of each are all equal; {SIGNAL}"
            parts.append(f"{flat} of {metrics['groups']} groups without a signal{why}")
        if skipped := metrics.get("skipped_updates"):
            parts.append(f"{skipped:.0f} of {metrics['updates'] + skipped:.0f} updates left out: gradient not finite")
        if "eval_reward_mean" in metrics:
            parts.append(f"eval {metrics['eval_reward_mean']:.2f} ({metrics['eval_episodes']})")
        drift = metrics.get("rollout_probs_diff_mean")
        if drift is not None:
            parts.append(f"drift {drift:.1e}")
        parts.append(
            " ".join(f"{name} {seconds:.1f}s" for name, seconds in metrics["timing"].items() if seconds >= 0.05)
        )
        self.say(" · ".join(parts))


@contextmanager
def timed(seconds: dict[str, float], part: str, clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Adds the time spent inside to ``seconds[part]``."""
    start = clock()
    try:
        yield
    finally:
        seconds[part] = seconds.get(part, 0.0) + clock() - start


def line_of(metrics: Mapping[str, Any]) -> str:
    """`metrics` as they stand in `metrics.jsonl`."""
    return json.dumps(finite(metrics))


def finite(value: Any) -> Any:
    """`value` with NaN and infinities as None, since neither is JSON."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def numbers(figures: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Every number of `figures` with its name; one of a table within is called ``TABLE/NAME``."""
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from numbers(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)):
            yield f"{prefix}{name}", value


def _step(line: str) -> int | None:
    """The step of a line of `metrics.jsonl`; None for a line that a crash cut short."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None

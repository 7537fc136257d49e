"""Steps that failed, and on which episodes: what has been in three of them is set aside.

A step that fails ends the run, and a supervisor starts it again. The daemon then leases the same episodes, and without
this the same step would fail for ever. So `attempts.json` of the run folder holds a try for each step: it is written
before the step and removed after it. A process that is killed in between leaves its try behind.

An episode that stands in `MAX_ATTEMPTS` tries is refused from then on (`step_failed`), and its batch is acknowledged
without it. `failed/BATCH.json` keeps for reading what was set aside. A try that ended for another reason is taken back:
a lost engine, a stop. A step without an optimizer update has failed too, but it ends no run. Where steps fail whatever
they hold, batches are not the reason. So after `IN_A_ROW` failed steps without one that worked, nothing more is set
aside and the run does not continue.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from ajet_sdk.errors import AjetError
from ajet_sdk.sample import Batch, BatchEpisode, Group
from ajet_trainer.batch import to_rows
from ajet_trainer.run_folder import put, read_json

MAX_ATTEMPTS = 3
IN_A_ROW = 3 * MAX_ATTEMPTS
REASON: Final = "step_failed"
KILLED = "the process ended during the step"
KEPT = 8000
"""Characters of a traceback that are kept, counted from its end."""


class NoUpdate(RuntimeError):
    """A step has made no optimizer update. The learner is as it was before, and may go on."""


class StepsFail(AjetError):
    """Steps fail whatever they hold; the message says where to read more."""

    type = "steps_fail"


class Attempts:
    """The tries of the run in `run_dir`, oldest first."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir, self._path = run_dir, run_dir / "attempts.json"
        found: dict[str, Any] = {"tries": [], "in_a_row": 0}
        found |= read_json(self._path)  # a power cut may leave an empty file
        self._tries: list[dict[str, Any]] = found["tries"]
        self._in_a_row: int = found["in_a_row"]

    def begin(self, names: Iterable[str]) -> None:
        """A step on the episodes `names` begins now."""
        self._tries.append({"episodes": sorted(names), "why": KILLED})
        self._in_a_row += 1
        self._write()

    def failed(self, why: str) -> None:
        """The step that began last has failed."""
        self._tries[-1]["why"] = why[-KEPT:]
        self._write()

    def take_back(self) -> None:
        """The step that began last has ended for a reason that is not in its episodes."""
        self._tries.pop()
        self._in_a_row -= 1
        self._write()

    def worked(self) -> None:
        """The step that began last has trained its episodes: no earlier failure was due to them."""
        trained = set(self._tries[-1]["episodes"])
        for one in self._tries:
            one["episodes"] = [name for name in one["episodes"] if name not in trained]
        self._tries = [one for one in self._tries if one["episodes"]]
        self._in_a_row = 0
        self._write()

    def given_up(self) -> dict[str, str]:
        """The episodes that are not tried again, and the end of what their last step said."""
        last = {name: one["why"] for one in self._tries for name in one["episodes"]}
        tries = Counter(name for one in self._tries for name in one["episodes"])
        return {
            name: f"{count} steps with it failed, the last with: {(last[name].strip().splitlines() or [''])[-1]}"
            for name, count in tries.items()
            if count >= MAX_ATTEMPTS
        }

    def set_aside(self, batch: Batch, names: Iterable[str]) -> Path:
        """Writes the episodes `names` of `batch` into a file for reading. Raises `StepsFail` where all steps fail."""
        if self._in_a_row >= IN_A_ROW:
            raise StepsFail(
                f"{self._in_a_row} steps in a row have failed, on several batches, so it is not the batches: "
                f"{self._path} has their errors. Delete that file to try again"
            )
        wanted = set(names)
        kept = [(group.task, [one for one in group.episodes if one.episode in wanted]) for group in batch.groups]
        groups = [Group(task, tuple(episodes)) for task, episodes in kept if episodes]
        folder = self._run_dir / "failed"
        folder.mkdir(exist_ok=True)
        safe = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in batch.batch)
        path = folder / f"{safe}.json"
        path.write_text(json.dumps(self._account(batch.batch, groups), indent=1) + "\n")
        return path

    def _account(self, batch: str, groups: Sequence[Group]) -> Mapping[str, Any]:
        names = {one.episode for group in groups for one in group.episodes}
        errors = [one["why"] for one in self._tries if not names.isdisjoint(one["episodes"])]
        rows = [
            {"row": row.key, "tokens": row.tokens, "sampled": row.sampled, "reward": row.reward}
            for row in to_rows(batch, groups)
        ]
        episodes = [_shown(one) for group in groups for one in group.episodes]
        return {"batch": batch, "errors": errors, "episodes": episodes, "rows": rows}

    def _write(self) -> None:
        put(self._path, json.dumps({"in_a_row": self._in_a_row, "tries": self._tries}) + "\n")


def _shown(episode: BatchEpisode) -> Mapping[str, Any]:
    samples = [
        {"sample": sample.sample, "agent": sample.agent, "calls": list(sample.calls), "tokens": len(sample.token_ids),
         "sampled": sum(sample.loss_mask), "policy_versions": list(map(list, sample.policy_versions))}
        for sample in episode.samples
    ]  # fmt: skip
    return {"episode": episode.episode, "task": episode.task, "reward": episode.reward, "samples": samples}

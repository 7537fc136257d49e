from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from ajet_trainer.attempts import IN_A_ROW, KILLED, MAX_ATTEMPTS, Attempts, NoUpdate, StepsFail
from ajet_trainer.batch import Row
from ajet_trainer.engines import EngineLost
from tests.trainer.making import batch
from tests.trainer.scripted_learner import Killed
from tests.trainer.test_step import Setting


def broken(
    setting: Setting, how: BaseException, *, only: str = "0g1", dead_engine: bool = False, stopping: bool = False
) -> None:
    """Starts one process whose learner fails on batches with the task `only`; it trains until it fails."""
    run = setting.start()
    tasks, failed = setting.proxy.given, list[BaseException]()

    def train(rows: Sequence[Row]) -> dict[str, float]:
        if any(tasks[row.group] == only for row in rows):
            run.stopping = lambda: stopping
            failed.append(how)
            raise how
        return type(setting.learner).train(setting.learner, rows)

    def check() -> None:
        if dead_engine and failed:
            raise EngineLost("the engine is gone")

    setting.learner.train, setting.learner.check = train, check  # type: ignore[method-assign]
    run.start()
    try:
        run.loop()
    finally:
        if isinstance(how, Exception):
            run.close()
        else:
            setting.proxy.expire()


def tries(folder: Path) -> int:
    return len(json.loads((folder / "attempts.json").read_text())["tries"])


@pytest.mark.parametrize("how", [ValueError("no such shape\n(3, 4)"), Killed()], ids=["raises", "is killed"])
def test_a_batch_that_fails_three_steps_is_set_aside_and_the_run_goes_on(tmp_path: Path, how: BaseException) -> None:
    """Over restarts of the process, which a kill may be the reason for."""
    setting = Setting(tmp_path, 3)
    for _ in range(MAX_ATTEMPTS):
        with pytest.raises(type(how)):
            broken(setting, how)
    broken(setting, how)
    assert setting.learner.version == 2
    said = "(3, 4)" if isinstance(how, ValueError) else KILLED
    ends = f"step_failed: 3 steps with it failed, the last with: {said}"
    assert setting.proxy.filtered == {f"0g{g}e{e}": ends for g in range(2) for e in range(2)}
    assert sorted(setting.proxy.trained) == sorted(f"{n}g{g}" for n in range(3) for g in range(2))
    (path,) = (tmp_path / "failed").iterdir()
    held = json.loads(path.read_text())
    assert (len(held["errors"]), len(held["rows"])) == (3, 4)
    assert [one["episode"] for one in held["episodes"]] == ["0g0e0", "0g0e1", "0g1e0", "0g1e1"]
    assert any(str(path) in line for line in setting.said)


@pytest.mark.parametrize(("how", "more"), [
    (KeyboardInterrupt(), {}), (RuntimeError("worker died"), {"dead_engine": True}),
    (RuntimeError("Ray got the SIGTERM too"), {"stopping": True}), (EngineLost("no room for the weights"), {}),
])  # fmt: skip
def test_a_stop_or_a_lost_engine_is_not_the_batchs_fault(
    tmp_path: Path, how: BaseException, more: dict[str, bool]
) -> None:
    setting = Setting(tmp_path, 2)
    for _ in range(MAX_ATTEMPTS + 1):
        with pytest.raises((KeyboardInterrupt, RuntimeError)):
            broken(setting, how, **more)
        assert tries(tmp_path) == 0
    setting.whole()
    assert setting.proxy.filtered == {}
    assert setting.learner.version == 2


def test_a_lost_engine_does_not_hide_why_the_step_failed(tmp_path: Path) -> None:
    """Both may have died of one thing, such as memory."""
    words = "the engine is gone; before that the step failed with MemoryError: too little"
    with pytest.raises(EngineLost, match=words):
        broken(Setting(tmp_path, 1), MemoryError("too little\nand more"), dead_engine=True)


@pytest.mark.parametrize(("colocated", "overlap"), [(True, None), (False, None), (False, 0)])
def test_a_step_without_an_update_has_no_version_and_its_batch_is_set_aside_after_three(
    tmp_path: Path, colocated: bool, overlap: int | None
) -> None:
    """In one run, which goes on: no push of a new version, no acknowledgement, no line of `metrics.jsonl`."""
    setting = Setting(tmp_path, 3, overlap=overlap, total_steps=2)
    run = setting.start(colocated=colocated)
    tasks, served = setting.proxy.given, list[int]()

    def train(rows: Sequence[Row]) -> dict[str, float]:
        served.append(setting.proxy.version)
        if any(tasks[row.group] == "0g1" for row in rows):
            raise NoUpdate("the gradient is not finite in any of 2 updates")
        return type(setting.learner).train(setting.learner, rows)

    setting.learner.train = train  # type: ignore[method-assign]
    run.start()
    run.loop()
    run.close()
    assert served == [0, 0, 0, 0, 1] and setting.learner.version == 2
    assert setting.told("nack", "ack") == [
        "nack lease0", "nack lease1", "nack lease2", "ack lease3 0", "ack lease4 1", "ack lease5 2",
    ]  # fmt: skip
    why = "step_failed: 3 steps with it failed, the last with: the gradient is not finite in any of 2 updates"
    assert setting.proxy.filtered == {f"0g{g}e{e}": why for g in range(2) for e in range(2)}
    assert setting.proxy.gate == "open" and setting.proxy.version == 2
    assert len(setting.lines()) == 2
    assert sum("step 1 made no update, and is tried again: the gradient" in line for line in setting.said) == 3
    assert not run.keeper.held


def test_a_step_that_works_forgets_what_failed_before(tmp_path: Path) -> None:
    setting = Setting(tmp_path, 1)
    for _ in range(MAX_ATTEMPTS - 1):
        with pytest.raises(ValueError, match="once"):
            broken(setting, ValueError("once"))
    assert tries(tmp_path) == MAX_ATTEMPTS - 1
    setting.whole()
    assert tries(tmp_path) == 0 and not (tmp_path / "failed").exists()


def test_where_every_step_fails_no_batch_is_to_blame(tmp_path: Path) -> None:
    """Nothing more is thrown away then, and the run says why it does not go on."""
    attempts = Attempts(tmp_path)
    for number in range(IN_A_ROW):
        attempts.begin([f"e{number // MAX_ATTEMPTS}"])
        attempts.failed("Traceback\nOutOfMemory: no room")
    with pytest.raises(StepsFail, match="9 steps in a row have failed"):
        attempts.set_aside(batch(), ["e2"])
    attempts.begin(["good"])
    attempts.worked()
    assert attempts.set_aside(batch("b/1"), []).name == "b_1.json"
    assert Attempts(tmp_path).given_up()["e2"].endswith("OutOfMemory: no room")


@pytest.mark.parametrize("left", ["", "{", "[]"])
def test_what_a_power_cut_left_of_the_tries_keeps_no_run_from_its_start(tmp_path: Path, left: str) -> None:
    (tmp_path / "attempts.json").write_text(left)
    assert Attempts(tmp_path).given_up() == {}
    Attempts(tmp_path).begin(["e"])
    assert tries(tmp_path) == 1

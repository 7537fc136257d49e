from __future__ import annotations

import json
import math
from contextlib import suppress
from pathlib import Path

from ajet_trainer.progress import Progress, finite, line_of
from tests.trainer.test_link import Clock


def line(step: int, **more: object) -> dict[str, object]:
    base = {
        "step": step,
        "reward_mean": 0.5,
        "reward_std": 0.1,
        "episodes": 4,
        "sampled_tokens": 9,
        "timing": {"train": 1.0},
    }
    return {**base, **more}


def test_a_phase_is_replaced_whole_and_said_unless_quiet(tmp_path: Path) -> None:
    said: list[str] = []
    progress = Progress(tmp_path / "run", 7, said.append, "digest")
    progress.phase("starting Ray")
    progress.phase("draining", quiet=True)
    told = {"phase": "draining", "step": 0, "of": 7, "config": "digest", "refused": ""}
    assert json.loads((tmp_path / "run/phase.json").read_text()) == told
    assert said == ["starting Ray"]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["phase.json"]


def test_a_part_that_ends_in_an_error_took_its_time_and_some_parts_are_waits(tmp_path: Path) -> None:
    progress, clock = Progress(tmp_path, 1, lambda line: None), Clock()
    progress.clock = clock
    for name in ("wait", "drain", "train", "push", "eval", "wait"):
        with suppress(KeyError), progress.part(name, "waiting"):
            clock.now += 1.0
            raise KeyError
    assert progress.timing == {"wait": 2.0, "drain": 1.0, "train": 1.0, "push": 1.0, "eval": 1.0}
    assert progress.waited == 4.0


def test_a_step_is_one_line_of_json_and_one_line_to_read(tmp_path: Path) -> None:
    said: list[str] = []
    progress = Progress(tmp_path, 7, said.append)
    progress.record(line(3, rollout_probs_diff_mean=math.nan, learner={"x": math.inf, "y": [1.0, math.nan]}))
    record = json.loads(progress.metrics_path.read_text())
    assert record["rollout_probs_diff_mean"] is None
    assert record["learner"] == {"x": None, "y": [1.0, None]}
    assert said[0].startswith("step 3/7 · reward 0.500 ± 0.100 · 4 episodes, 9 sampled tokens")
    assert progress.step == 3
    progress.record(line(4, reward_by_agent={"white": 0.25, "": -0.25}))
    assert "reward 0.500 ± 0.100 · white 0.250, no agent -0.250 · 4 episodes" in said[1]


def test_a_step_says_how_many_groups_have_no_signal_and_how_many_updates_were_left_out(tmp_path: Path) -> None:
    said: list[str] = []
    progress = Progress(tmp_path, 8, said.append)
    step = {"reward_mean": 0.5, "reward_std": 0.1, "episodes": 160, "sampled_tokens": 9, "groups": 20, "timing": {}}
    progress.record({"step": 1, **step, "groups_without_signal": 16, "updates": 3, "skipped_updates": 1})
    progress.record({"step": 2, **step, "groups_without_signal": 0, "updates": 4, "skipped_updates": 0})
    assert "· 16 of 20 groups without a signal · 1 of 4 updates left out: gradient not finite" in said[0]
    assert "signal" not in said[1] and "updates" not in said[1]
    progress.record({"step": 3, **step, "groups_without_signal": 20})
    assert "· 20 of 20 groups without a signal: the rewards of each are all equal; choose tasks that the" in said[2]


def test_resuming_drops_the_lines_of_lost_steps_and_a_torn_last_line(tmp_path: Path) -> None:
    progress = Progress(tmp_path, 0, lambda _: None)
    for step in (1, 2, 3):
        progress.record(line(step))
    with progress.metrics_path.open("a") as file:
        file.write('{"step": 4, "rew')
    Progress(tmp_path, 0, lambda _: None).resume_at(2)
    assert [json.loads(text)["step"] for text in progress.metrics_path.read_text().splitlines()] == [1, 2]


def test_resuming_ends_a_last_line_that_was_cut_before_its_end(tmp_path: Path) -> None:
    progress = Progress(tmp_path, 0, lambda _: None)
    progress.metrics_path.write_text(line_of(line(1)))
    progress.resume_at(1)
    progress.record(line(2))
    assert [json.loads(text)["step"] for text in progress.metrics_path.read_text().splitlines()] == [1, 2]


def test_resuming_writes_the_line_that_a_crash_left_out(tmp_path: Path) -> None:
    progress = Progress(tmp_path, 0, lambda _: None)
    progress.resume_at(1, line_of(line(1)))
    progress.resume_at(2, line_of(line(2)))
    progress.resume_at(2, line_of(line(2)))
    progress.resume_at(3, line_of(line(2)))
    assert [json.loads(text)["step"] for text in progress.metrics_path.read_text().splitlines()] == [1, 2]


def test_numbers_that_json_lacks_become_null() -> None:
    assert finite({"a": (1, math.nan)}) == {"a": [1, None]}

"""Shares of lanes by step: how a file says them, and when a run tells the daemon."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from ajet_sdk.routes import SetMix
from ajet_sdk.settings import ConfigError
from ajet_trainer.config import load
from ajet_trainer.mix import Mixture, read_mix, shares_at
from tests.trainer.test_link import Clock, link
from tests.trainer.test_step import Setting

SCHEDULE = (Mixture(0, {"math": 1.0}), Mixture(2, {"math": 0.4, "code": 0.6}))


def written(tmp_path: Path, text: str) -> Any:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return load(str(path)).mix


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[trainer]\nmodel = "m"\n', ()),
        ('[trainer]\nmodel = "m"\n[mix]\nmath = 0.4\ncode = 0.6\n', (Mixture(0, {"math": 0.4, "code": 0.6}),)),
        ('mix = [{step = 0, math = 1}, {step = 2, math = 0.4, code = 0.6}]\n[trainer]\nmodel = "m"\n', SCHEDULE),
        ('[trainer]\nmodel="m"\n[[mix]]\nstep=0\nmath=1\n[[mix]]\nstep=2\nmath=0.4\ncode=0.6\n', SCHEDULE),
    ],
)
def test_a_file_says_the_shares_for_the_run_or_by_step(
    tmp_path: Path, text: str, expected: tuple[Mixture, ...]
) -> None:
    assert written(tmp_path, text) == expected


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (0.5, "a table of lanes"), ("math", "a table of lanes"), ([], "a table of lanes"), ([1], "a table of lanes"),
        ({"step": 0, "math": 1}, "step is of a list"),
        ({}, "1 to 100 lanes"), ({"math": 0.5}, "add up to 1"), ({"math": "much"}, "'math' must be a number"),
        ({"math": True}, "'math' must be a number"), ({"math": 2, "code": -1}, "from 0 to 1"),
        ({"math": float("nan")}, "from 0 to 1"), ([{"math": 1}], "its step"), ([{"step": -1, "math": 1}], "its step"),
        ([{"step": 1.5, "math": 1}], "its step"), ([{"step": 1, "math": 1}], "begin with step = 0"),
        ([{"step": 0, "math": 1}, {"step": 0, "math": 1}], "later and later"),
    ],
)  # fmt: skip
def test_what_is_no_mix_is_named(given: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        read_mix(given, "FILE: ")
    assert refused.value.message.startswith("FILE: mix")


def test_the_latest_table_holds() -> None:
    assert [shares_at(SCHEDULE, step) for step in (0, 1, 2, 9)] == [SCHEDULE[0].shares] * 2 + [SCHEDULE[1].shares] * 2
    assert shares_at((), 3) is None


def test_a_run_tells_the_daemon_when_the_shares_change_and_lets_everybody_play_at_its_end(tmp_path: Path) -> None:
    setting = Setting(tmp_path, 4, mix=SCHEDULE, group_size=2)
    setting.whole()
    assert setting.proxy.mixes == [
        SetMix({"math": 1.0}, 2, 2), SetMix({"math": 0.4, "code": 0.6}), SetMix(ahead=0),
    ]  # fmt: skip


def test_a_run_without_a_mix_sets_the_pace_alone(tmp_path: Path) -> None:
    setting = Setting(tmp_path, 2, group_size=2, ahead=7)
    setting.whole()
    assert setting.proxy.mixes == [SetMix(None, 7, 2), SetMix(ahead=0)]


@pytest.mark.parametrize("theirs", [7, 2])
def test_an_end_leaves_what_an_operator_has_set(tmp_path: Path, theirs: int) -> None:
    """Of the pace: only the trainer's own is taken back."""
    asked = list[tuple[str, str, dict[str, Any]]]()

    def answers(request: httpx.Request) -> httpx.Response:
        asked.append((request.method, str(request.url), json.loads(request.content or b"{}")))
        return httpx.Response(200, json={"ahead": theirs})

    made = link(answers, Clock(), model="planner")
    made.let_go(2)
    assert asked[0][0] == "GET" and asked[0][1].endswith("/mix?model=planner")
    assert [body for method, _, body in asked[1:]] == ([{"ahead": 0, "model": "planner"}] if theirs == 2 else [])


@pytest.mark.parametrize(
    ("options", "pace"),
    [({}, 2), ({"ahead": 0}, 0), ({"overlap": 3}, 6), ({"overlap": 0}, 2), ({"overlap": 3, "ahead": 4}, 4)],
)
def test_agents_may_be_ahead_by_the_batches_that_overlap(tmp_path: Path, options: dict[str, Any], pace: int) -> None:
    assert Setting(tmp_path, 1, **options).config.pace == pace

"""``ajet top``: frames of any size, and what a terminal is sent."""

from __future__ import annotations

import io
import re
import signal
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_sdk import Client
from ajet_sdk.text import columns
from ajet_sdk.top import BARS, ENTER, LEAVE, Poll, Rates, age, fit, recent_mean, screenful, sparkline, watch
from tests.kit.control_stub import DROP, ControlStub

EVIL = "\x1b[2J\x1b]0;x\x07name\n名前" * 3
STATUS: dict[str, Any] = {
    "version": "1", "gate": {"state": "closing"}, "requests": {"in_flight": 3, "waiting": 2},
    "models": {EVIL: {"policy_version": 7, "upstreams": ["a"]}}, "journal": {"healthy": False},
    "episodes": {"opened": 5, "open": 1, "trained": 4}, "groups": {"waiting": 1, "ready": 2, "leased": 1},
    "drift": {"template": 1, "retokenized": 9}, "discarded": {"aborted": 2},
    "alerts": ["drift is high", "the journal cannot write"], "tokens": {"generated": 100}, "calls": {"complete": 4},
}
SEEN: dict[str, Any] = {
    "now": 100.0,
    "rewards": {
        "train": {"episodes": 80, "points": [{"episodes": 40, "mean": 0.25}, {"episodes": 40, "mean": 0.75}]},
        "eval": {"episodes": 0, "points": []},
    },
    "tasks": [{"task": f"task {n} {EVIL}", "episodes": 8, "mean": 0.5, "recent_mean": 0.75, "recent": [0.5, 1.0],
               "eval": n == 1} for n in range(50)],
    "quiet": [{"episode": f"ep-{n}", "task": None, "agent": EVIL, "quiet_s": 100.0 - n, "in_flight": n % 2, "calls": 3}
              for n in range(50)],
    "lanes": [{"lane": f"lane {n} {EVIL}", "share": n / 10, "leased": 7, "owed": -2, "open": 3, "ready": 11}
              for n in range(5)],
    "leases": [{"batch": "batch-1", "model": "m", "episodes": 16, "lease_until": 220.0}],
}


def test_columns_stand_below_each_other_whatever_the_script() -> None:
    tasks = [{**SEEN["tasks"][0], "task": task} for task in ("plain", "名前" * 40, "e\u0301" * 3)]
    rows = text({}, {"now": 0.0, "tasks": tasks}, None, 200, 60).splitlines()[-4:]
    words = ("episodes", "8 ", "8 ", "8 ")
    assert len({columns(row[: row.index(word)]) for row, word in zip(rows, words, strict=True)}) == 1
    assert "名…" in rows[2]


def test_what_is_to_be_judged_has_a_line_if_there_is_any() -> None:
    spans = [{"policy_versions": [one, one], "episodes": 20, "mean": one / 4} for one in (2, 4)]
    counts = {"sealed": 9, "awaiting": 3, "judged": 5, "rewarded": 0, "not_judged": 1, "withdrawn": 0, "lost": 0}
    traffic = counts | {"oldest_s": 240.0, "holdout": {"m": spans}}
    shown = text(STATUS | {"traffic": traffic}, None, None, 80, 24)
    assert "judgements  3 awaiting, 5 judged, 1 not judged; the oldest awaits one for 4 min\n" in shown
    assert "held-out chats, m  1.000 at version 4  ▁█" in shown
    assert "judgements" not in text(STATUS | {"traffic": dict.fromkeys(traffic, 0)}, None, None, 80, 24)


def text(*args: Any) -> str:
    return "\n".join(line for _, line in screenful(*args))


def test_a_frame_tells_all_that_an_owner_asks() -> None:
    others = {"policy_version": 2, "upstreams": ["a"]}
    team = {"coder": {"updates": 3}, "planner": {"updates": 5, "waits_for": "coder"}}
    shown = text(STATUS | {"any_model": others, "teams": [team]}, SEEN, Rates(1234.5, 6.78), 200, 60)
    for part in (
        "any other model  policy version 2, 1 engine", "team  coder 3, planner 5 (waits for coder)",
        "gate closing · 3 in flight · 2 held · 1,234 tokens/s, 6.8 calls/s", "drift is high",
        "the journal cannot write", "policy version 7, 1 engine", "opened 5 = open 1", "1 waiting, 2 ready, 1 leased",
        "0.500 latest of 80  ▁█",
        "batch-1: 16 episodes of m, runs out in 2 min", "broken chains  retokenized 9, template 1", "aborted 2",
        "ep-0", "the model", "the agent", "(eval)",
    ):
        assert part in shown, part


def test_lanes_are_shown_where_there_are_several() -> None:
    shown = text(STATUS, SEEN, None, 200, 60)
    assert any(line.split()[-5:] == ["0.1", "7", "-2", "3", "11"] for line in shown.splitlines())
    alone = [{"lane": "default", "share": 0.0, "leased": 0, "owed": 0, "open": 3, "ready": 1}]
    assert "lane " not in text(STATUS, SEEN | {"lanes": alone, "tasks": []}, None, 200, 60)


def test_eighty_columns_hold_every_figure() -> None:
    long = "a task of more than forty characters, in words"
    counts = dict.fromkeys(("trained", "recorded"), 12_345) | {"opened": 24_690, "leased": 0}
    slow = {"task": long, "agent": long, "episode": "ep-0123456789abcdef", "calls": 123}
    quiet = [one | slow for one in SEEN["quiet"]]
    tasks = [one | {"task": long, "eval": True} for one in SEEN["tasks"]]
    lines = text(STATUS | {"episodes": counts}, SEEN | {"quiet": quiet, "tasks": tasks}, None, 80, 200).splitlines()
    assert "opened 24690 = trained 12345 + recorded 12345" in lines
    assert sum(line.endswith("123    ep-0123456789abcdef") for line in lines) == len(quiet)
    assert all(line.rstrip()[-1] in BARS for line in lines if "(eval)" in line)
    assert "opened 0 = 0" in text({"episodes": {"opened": 0}}, None, None, 80, 24)


def test_without_an_admins_key_it_shows_what_the_status_has() -> None:
    shown = text(STATUS, None, None, 80, 24)
    assert "need an admin's key" in shown and "opened 5" in shown
    assert "tokens/s" not in shown


def test_a_proxy_that_says_little_is_shown_all_the_same() -> None:
    assert text({}, {}, None, 80, 24).startswith("ajet · gate unknown")


@given(st.integers(1, 250), st.integers(1, 70), st.booleans())
def test_no_line_is_wider_and_no_frame_higher_than_the_terminal(width: int, height: int, admin: bool) -> None:
    lines = screenful(STATUS, SEEN if admin else None, Rates(1e9, 1.0), width, height)
    assert len(lines) <= height
    for _, line in lines:
        assert line.isprintable() and fit(line, width) == line


def test_wide_characters_take_two_columns() -> None:
    assert (fit("名前x", 3), fit("名前x", 5), fit("e\u0301a", 2)) == ("名", "名前x", "e\u0301a")


@given(st.lists(st.floats(-10, 10), max_size=300), st.integers(1, 80))
def test_a_sparkline_has_its_lowest_and_highest_bar(values: list[float], width: int) -> None:
    line = sparkline(values, width)
    assert len(line) == min(width, len(values))
    assert not line or "▁" in line


def test_means_and_ages() -> None:
    assert sparkline([0, 1], 2) == "▁█"
    assert recent_mean([{"episodes": 64, "mean": 0.0}, {"episodes": 64, "mean": 1.0}]) == 1.0
    assert recent_mean([]) is None
    assert [age(seconds) for seconds in (-1, 89, 600, 7200, 1e6)] == ["0 s", "89 s", "10 min", "2 h", "12 d"]


def test_rates_are_made_of_two_answers(stub: ControlStub, monkeypatch: pytest.MonkeyPatch) -> None:
    at, tokens = 0.0, 100
    monkeypatch.setattr("ajet_sdk.top.time", SimpleNamespace(monotonic=lambda: at))
    with Client(stub.url) as client:
        stub.status = lambda: STATUS | {"tokens": {"generated": tokens}}  # type: ignore[method-assign]
        poll = Poll(client)
        assert poll.ask()[2] is None
        at, tokens = 2.0, 150
        assert poll.ask()[2] == Rates(25.0, 0.0)


class Terminal(io.StringIO):
    """The text that a terminal of 60 columns and 12 lines is sent."""

    def isatty(self) -> bool:
        return True

    def screens(self) -> list[list[str]]:
        """The lines of each screen, each of which begins at the upper left and clears what it leaves free."""
        found = re.findall(r"\033\[H(.*?)\033\[J", self.getvalue(), re.DOTALL)
        return [[re.sub(r"\033\[[0-9;]*[mK]", "", line) for line in one.split("\r\n")] for one in found]


def watched(stub: ControlStub, monkeypatch: pytest.MonkeyPatch, *naps: Callable[[], object]) -> Terminal:
    """The text that a terminal is sent until Ctrl-C, which comes after these `naps`."""
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("LINES", "12")
    sleeping, terminal = iter(naps), Terminal()

    def nap(_seconds: float) -> None:
        next(sleeping, lambda: signal.raise_signal(signal.SIGINT))()

    monkeypatch.setattr("ajet_sdk.top.time", SimpleNamespace(monotonic=time.monotonic, sleep=nap))
    with Client(stub.url, deadline=0.2) as client, pytest.raises(KeyboardInterrupt):
        watch(client, 0.1, terminal)
    return terminal


def test_a_terminal_shows_one_screen_after_the_other_and_then_what_it_showed_before(
    stub: ControlStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = iter(range(1, 9))
    stub.status = lambda: STATUS | {"models": {EVIL: {"policy_version": next(told)}}}  # type: ignore[method-assign]
    terminal = watched(stub, monkeypatch, lambda: None, lambda: None)
    text = terminal.getvalue()
    assert text.startswith(ENTER) and text.endswith(LEAVE)
    assert re.sub(r"\033\[H.*?\033\[J", "", text, flags=re.DOTALL) == ENTER + LEAVE
    for number, screen in enumerate(terminal.screens(), 1):
        assert screen[0].startswith("ajet 1 · gate closing") and len(screen) <= 12
        (model,) = (line for line in screen if "policy version" in line)
        assert model.endswith(f"policy version {number}, 0 engines")
        assert all(line.isprintable() and fit(line, 60) == line for line in screen)


def test_a_proxy_that_went_away_is_waited_for(stub: ControlStub, monkeypatch: pytest.MonkeyPatch) -> None:
    stub.status = lambda: STATUS | {"alerts": [*map(str, range(99))]}  # type: ignore[method-assign]
    terminal = watched(stub, monkeypatch, lambda: stub.faults.extend([DROP] * 100_000), stub.faults.clear)
    there, away, back = terminal.screens()
    assert away[0].startswith("no answer, trying again: is ajet-proxy at") and len(away[0]) == 60
    assert away[1:] == there[:11] and back[1:] == there[1:] and len(there) == 12

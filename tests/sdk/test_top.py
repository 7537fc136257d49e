"""``ajet top``: frames of any size, and the whole program in a real terminal."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_sdk import Client
from ajet_sdk.text import columns
from ajet_sdk.top import BARS, Poll, Rates, age, fit, recent_mean, screenful, sparkline
from tests.kit.control_stub import DROP, ControlStub
from tests.kit.patience import PATIENT
from tests.kit.screen import Screen

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


def test_what_serves_any_model_is_shown() -> None:
    assert "any model  policy version 2, 1 engine" in text(
        {"any_model": {"policy_version": 2, "upstreams": ["a"]}}, None, None, 80, 24
    )


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


def test_a_team_has_a_line() -> None:
    team = {"coder": {"updates": 3}, "planner": {"updates": 5, "waits_for": "coder"}}
    assert "team  coder 3, planner 5 (waits for coder)\n" in text(STATUS | {"teams": [team]}, None, None, 80, 24)


def test_a_frame_tells_all_that_an_owner_asks() -> None:
    shown = text(STATUS, SEEN, Rates(1234.5, 6.78), 200, 60)
    for part in (
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


def test_rates_are_made_of_two_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    at, tokens = 0.0, 100
    monkeypatch.setattr("ajet_sdk.top.time", SimpleNamespace(monotonic=lambda: at))
    with ControlStub() as stub, Client(stub.url) as client:
        stub.status = lambda: STATUS | {"tokens": {"generated": tokens}}  # type: ignore[method-assign]
        poll = Poll(client)
        assert poll.ask()[2] is None
        at, tokens = 2.0, 150
        assert poll.ask()[2] == Rates(25.0, 0.0)


class Terminal:
    """``ajet top`` as the foreground program of a pseudo-terminal."""

    def __init__(self, url: str, rows: int, columns: int) -> None:
        self.screen = Screen(rows, columns)
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self.fd, inner = pty.openpty()
        self.resize(rows, columns)
        code = f"{PATIENT}from ajet_sdk import cli; cli.LOOK_S = 0.5; cli.main()"
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, "top", "--every", "0.1", "--proxy", url], stdin=inner, stdout=inner,
            stderr=inner, start_new_session=True, env=environment,
        )
        os.close(inner)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.fd)

    def end(self, number: int) -> int:
        """The exit code after this signal, when everything it wrote is on the screen."""
        self.process.send_signal(number)
        while self.read():
            pass
        return self.process.wait()

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def until(self, word: str) -> list[str]:
        while not any(word in line for line in self.screen.lines):
            assert self.read(), self.screen.lines
        return self.screen.lines

    def read(self) -> bool:
        """Feed the screen with what came; False at the end."""
        try:
            data = os.read(self.fd, 65536)
        except OSError:
            return False
        self.screen.feed(self._decoder.decode(data))
        return bool(data)


def test_in_a_real_terminal_it_redraws_one_screen_and_gives_the_old_one_back() -> None:
    with ControlStub() as stub:

        def status() -> dict[str, Any]:
            return STATUS | {"models": {EVIL: {"policy_version": min(3, stub.count("GET", "/status"))}}}

        stub.status = status  # type: ignore[method-assign]
        with Terminal(stub.url, 12, 60) as terminal:
            terminal.until("gate closing")
            assert terminal.screen.second and not terminal.screen.cursor_shown
            lines = terminal.until("policy version 3")
            assert sum("policy version" in line for line in lines) == 1
            assert lines[0].startswith("ajet 1 · gate closing")
            assert terminal.end(signal.SIGINT) == 130
            assert not terminal.screen.second and terminal.screen.cursor_shown
            assert "interrupted" in "".join(terminal.screen.lines)


def test_a_proxy_that_went_away_is_waited_for() -> None:
    with ControlStub() as stub, Terminal(stub.url, 24, 100) as terminal:
        terminal.until("opened 0")
        stub.faults.extend([DROP] * 100_000)
        terminal.until("no answer, trying again")
        terminal.until("opened 0")
        stub.faults.clear()
        while any("no answer" in line for line in terminal.screen.lines):
            assert terminal.read()
        assert terminal.end(signal.SIGTERM) == 130

"""Unanswered attempts: each by its own fate, whatever came before and after, and the same after a replay."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from ajet_proxy.core.ledger import attempts
from ajet_proxy.core.ledger.attempts import AWAY, HELD, MORE, UNSERVED, fate
from ajet_sdk.errors import NotFound
from tests.kit.histories import folded
from tests.kit.ledger_rig import LedgerRig, picture

WORLD = ("engine_error", "engine_aborted", "engine_silent", "truncated", "restarted", "not_written", "capture_failed")
OWN = ("disconnected", "stalled")
ANSWERED = ("no_token_ids", "multimodal", "unaskable", "weights_changed")


@dataclass
class Asked:
    """A request as the oracle keeps it. ``came`` is what became of it, or None while it runs."""

    agent: str | None
    said: str
    number: float
    call: str = ""
    came: str | None = None


@dataclass
class Oracle:
    """Everything that was ever asked, looked through anew each time."""

    asked: list[Asked] = field(default_factory=list)

    def unanswered(self) -> set[tuple[str | None, str]]:
        return {(one.agent, one.said) for one in self.asked if one.came == "world" and not any(
            other.came == "answered" and other.number > one.number and other.said.startswith(one.said)
            and one.agent in (None, other.agent) for other in self.asked
        )}  # fmt: skip


class Story:
    """A random story of one episode. What a request says is a text; a key of it is the text itself."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.rig, self.oracle = LedgerRig(), Oracle()
        self.rig.open("x")
        self.begun = 0
        self.open: dict[str, tuple[str, ...]] = {}

    def text(self) -> str:
        return "".join(self.dice.choice("ab") for _ in range(self.dice.randint(1, 4)))

    def begin(self) -> None:
        agent, said = self.dice.choice(("", "judge")), self.text()
        open_now = self.rig.state.episodes["x"].attempts.open_to(agent)
        (call,) = self.rig.begin("x", agent=agent, said=said)
        self.open[call] = tuple(key for key in open_now if said.startswith(key))
        self.begun += 1
        self.oracle.asked.append(Asked(agent, said, self.begun, call))

    def _one(self, *came: str | None) -> Asked | None:
        found = [one for one in self.oracle.asked if one.call and one.came in came]
        return self.dice.choice(found) if found else None

    def end(self) -> None:
        if (one := self._one(None)) is None:
            return
        one.came = self.dice.choice(("answered", "own", "world"))
        begins = self.open[one.call]
        if one.came == "answered" and self.dice.random() < 0.7:
            self.rig.finish("x", one.call, begins=begins)
        elif one.came == "answered":
            self.rig.lose("x", one.call, self.dice.choice(ANSWERED), begins=begins)
        elif self.dice.random() < 0.3:
            self.rig.lose("x", one.call, "refused", status=503 if one.came == "world" else 400)
        else:
            self.rig.lose("x", one.call, self.dice.choice(WORLD if one.came == "world" else OWN))

    def take_back(self) -> None:
        """The client was not sent the end after all. No later request is taken to know of that."""
        if (one := self._one("answered")) is not None:
            is_latest = one.number == self.begun
            one.came = self.dice.choice(("own", "world")) if is_latest else "own"
            reason = "not_written" if one.came == "world" else "disconnected"
            self.rig.lose("x", one.call, reason, taken_back=True)

    def turn_away(self) -> None:
        """A request becomes no call."""
        agent, said = self.dice.choice(("", "judge")), self.text()
        reason = self.dice.choice((HELD, UNSERVED))
        self.rig.run(self.rig.commands.lose_request("x", reason, at=self.rig.at, agent=agent, said=said))
        self.oracle.asked.append(Asked(agent, said, self.begun, came="world"))

    def restart(self) -> None:
        self.rig.restart()
        for one in self.oracle.asked:
            one.came = one.came or "world"
        self.oracle.asked.append(Asked(None, "", self.begun, came="world"))

    def told(self) -> set[tuple[str | None, str]]:
        kept = self.rig.state.episodes["x"].attempts.lost
        return {(one.agent, one.said) for one in kept if not one.answered_by}


@pytest.mark.parametrize("seed", range(300))
def test_what_went_unanswered_is_what_an_oracle_says(seed: int) -> None:
    story = Story(seed)
    steps = [story.begin] * 6 + [story.end] * 6 + [story.take_back, story.turn_away] + [story.restart] * (seed % 2)
    for _ in range(40):
        story.rig.at += 1.0
        story.dice.choice(steps)()
        assert story.told() == story.oracle.unanswered()
        assert bool(story.rig.unanswered("x")) == bool(story.told())
    assert picture(folded(story.rig.events)) == picture(story.rig.state)


@pytest.fixture
def rig(rig: LedgerRig) -> LedgerRig:
    rig.open("x")
    return rig


def lost(rig: LedgerRig, said: str = "a", reason: str = "engine_error", **more: Any) -> str:
    (call,) = rig.begin("x", said=said, **more)
    rig.lose("x", call, reason)
    return call


@pytest.mark.parametrize(("reason", "status", "came"), [
    *((reason, 0, "world") for reason in WORLD), *((reason, 0, "own") for reason in (*OWN, "retried")),
    *((reason, 0, "answered") for reason in ANSWERED), ("episode_discarded", 0, "own"), ("refused", 0, "own"),
    *(("refused", status, "own") for status in (400, 413, 422)),
    *(("refused", status, "world") for status in (401, 403, 404, 408, 409, 429, 500, 502, 503, 504)),
])  # fmt: skip
def test_whose_fault_a_loss_is(reason: str, status: int, came: str) -> None:
    assert fate(reason, status=status) == came


def test_an_answer_that_cannot_be_recorded_is_an_answer_if_it_had_an_end() -> None:
    assert fate("capture_failed", told=True) == "answered"


def test_one_of_several_choices_that_the_world_failed(rig: LedgerRig) -> None:
    calls = rig.begin("x", choices=3, said="a")
    rig.finish("x", calls[0])
    assert rig.unanswered("x") == []
    for call in calls[1:]:
        rig.lose("x", call, "engine_aborted")
    assert [one["call"] for one in rig.unanswered("x")] == [calls[1]]


def test_a_retry_that_takes_the_place_of_a_running_call_decides(rig: LedgerRig) -> None:
    rig.begin("x", said="a", body="b", key="k")
    (again,) = rig.begin("x", said="a", body="b", key="k")
    assert rig.unanswered("x") == []
    rig.lose("x", again, "engine_silent")
    assert [one["call"] for one in rig.unanswered("x")] == [again]


def test_what_the_engine_contradicts_after_its_finish_was_answered(rig: LedgerRig) -> None:
    call = rig.call("x", said="a")
    rig.lose("x", call, "engine_error", taken_back=True)
    assert rig.unanswered("x") == []


def test_an_entry_says_what_is_known(rig: LedgerRig) -> None:
    (call,) = rig.begin("x", said="a", agent="planner", model="m")
    rig.lose("x", call, "refused", status=429)
    rig.run(rig.commands.lose_request("x", UNSERVED, at=rig.at, detail="memory_limit"))
    assert rig.unanswered("x") == [
        {"at": rig.at, "reason": "refused", "agent": "planner", "call": call, "model": "m",
         "detail": "the engine answered 429"},
        {"at": rig.at, "reason": "unserved", "detail": "memory_limit"},
    ]  # fmt: skip


def test_the_daemon_was_away(rig: LedgerRig) -> None:
    """Whoever asked then. Any later answer makes it good, and a second absence takes the place of the first."""
    before = rig.at
    for _ in range(2):
        rig.at += 10.0
        rig.restart()
    (away,) = rig.unanswered("x")
    assert away == {"at": before + 20.0, "reason": AWAY, "since": before + 10.0}
    rig.call("x", said="b", agent="any")
    assert rig.unanswered("x") == []


def test_a_sealed_episode_missed_nothing_while_the_daemon_was_away(rig: LedgerRig) -> None:
    rig.call("x")
    rig.begin("x")
    rig.seal("x")
    rig.restart()
    assert [one["reason"] for one in rig.unanswered("x")] == ["restarted"]


def test_an_episode_whose_agent_sent_nonsense_is_not(rig: LedgerRig) -> None:
    (call,) = rig.begin("x")
    rig.lose("x", call, "refused", status=400)
    rig.reward("x")
    assert (rig.state.episodes["x"].reason, rig.state.episodes["x"].cause) == ("incomplete_call", None)


def test_an_episode_with_nothing_but_lost_calls_is_the_worlds_failure() -> None:
    rig = LedgerRig(watch=True)
    client = rig.join()
    rig.open("x", client=client)
    lost(rig)
    rig.reward("x")
    known = rig.state.episodes["x"]
    assert (known.state, known.reason, known.cause) == ("discarded", "incomplete_call", "infra")
    assert rig.state.clients.live[client].failures == {"infra": 1}


def test_many_are_kept_and_further_ones_counted() -> None:
    rig = LedgerRig()
    rig.open("x")
    rig.begin("x", said="last", agent="other")
    for place in range(attempts.MOST + 5):
        lost(rig, said=f"{place}.")
    told = rig.unanswered("x")
    assert len(told) == attempts.MOST + 1
    assert (told[-1]["reason"], told[-1]["detail"]) == (MORE, "5 or more were not kept")
    assert rig.commands.lose_request("x", HELD, at=rig.at, agent="", said="newer") == ()
    rig.finish("x", *rig.begin("x", said="all"), begins=[f"{place}." for place in range(attempts.MOST)])
    assert [one["reason"] for one in rig.unanswered("x")] == [MORE]
    lost(rig, said="room again")
    assert [one["reason"] for one in rig.unanswered("x")] == ["engine_error", MORE]


def test_a_request_for_an_episode_that_is_over_or_never_was(rig: LedgerRig) -> None:
    assert rig.commands.lose_request("never", HELD, at=rig.at) == ()
    rig.abort("x")
    assert rig.commands.lose_request("x", HELD, at=rig.at) == ()
    with pytest.raises(NotFound):
        rig.unanswered("never")

"""Requests that say that they are sent again: of which earlier one, and when that may be of one that nobody knows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ajet_proxy.core.ledger.episode import Episode
from ajet_proxy.core.ledger.retries import UnseenRequests, repeats
from ajet_proxy.core.ledger.transcript import Asked, CallEntry, Transcript
from tests.kit.ledger_rig import LedgerRig, blank
from tests.kit.steps import steps

ONE, OTHER = ("ep", "one"), ("ep", "other")


def attempt(name: str, body: str, key: str | None = None, *, state: str = "complete", reason: str | None = None,
            at: float = 0.0, retries: int = 0) -> tuple[str, CallEntry]:
    return name, CallEntry(Asked(at, "m", "", "path", body, key, retries), state, reason)


@pytest.mark.parametrize(("body", "key", "retries", "first"), [
    ("one", None, 1, "lost"),          # an attempt of which nothing came goes before others
    ("two", None, 1, None),            # may be of either, and of one that never came
    ("three", None, 1, "alone"),       # can be no other
    ("three", None, 2, "alone"),
    ("answering", None, 1, "asked"),
    ("four", None, 1, None),           # what was repeated already is nobody's first attempt
    ("five", None, 1, None),
    ("six", None, 1, None),            # as often tried as this: another one's second attempt
    ("six", None, 2, "second"),
    ("seven", None, 1, "first of two"),
    ("seven", None, 2, None),
    ("other", "k", 0, "keyed"),
    ("one", "k", 1, "keyed"),          # with a key the body counts for nothing
    ("one", "unknown", 1, None),
    ("one", "unknown", 0, None),
    ("several", "l", 0, "gone"),       # of attempts with one key those of which nothing came go first
    ("several", "n", 0, "under way"),  # then those that are still answered
    ("several", "o", 0, "late"),       # then the latest
])  # fmt: skip
def test_which_attempt_a_request_repeats(body: str, key: str | None, retries: int, first: str | None) -> None:
    known = Transcript(dict([
        attempt("whole", "one"), attempt("lost", "one", state="lost", reason="disconnected"),
        attempt("running", "two", state="running"), attempt("done", "two", at=9.0), attempt("alone", "three"),
        attempt("asked", "answering", state="running"),
        attempt("repeated", "four", state="lost", reason="retried"), attempt("second", "six", retries=1),
        attempt("first of two", "seven"), attempt("second of two", "seven", retries=1),
        attempt("keyed", "eight", "k"), attempt("gone", "l", "l", state="lost"), attempt("got", "l", "l", at=1.0),
        attempt("under way", "n", "n", state="running"), attempt("there", "n", "n", at=1.0),
        attempt("early", "o", "o"), attempt("late", "o", "o", at=1.0),
    ]))  # fmt: skip
    for name, entry in list(known.calls.items()):
        known.calls[f"{name}'s sibling"] = replace(entry)
    expected = () if first is None else (first, f"{first}'s sibling")
    assert repeats(known, body, key, retries) == expected


def test_a_retry_among_thousands_of_equal_calls_costs_what_they_number() -> None:
    made = []
    for choices in (100, 400):
        rig = LedgerRig()
        episode = rig.open()
        for number in range(10):
            for call in rig.begin(episode, body="same", choices=choices):
                rig.finish(episode, call, (1, 2), (3, number, 4))
        made.append(steps(lambda known=rig.state.episodes[episode].transcript: repeats(known, "same", None, 1)))  # type: ignore[misc]
    assert made[1] < 5 * made[0]


def test_another_agent_s_request_is_another_one(rig: LedgerRig) -> None:
    episode = rig.open()
    planner = rig.call(episode, body="same", agent="planner")
    known = rig.state.episodes[episode].transcript
    assert repeats(known, "same", None, 1, agent="critic") == ()
    assert repeats(known, "same", None, 1, agent="planner") == (planner,)


@pytest.mark.parametrize(("state", "first"), [("lost", ("one",)), ("running", ()), ("complete", ())])
def test_where_an_attempt_may_have_been_missed_only_a_lost_one_is_repeated(state: str, first: tuple[str, ...]) -> None:
    known = Transcript(dict([attempt("one", "same", state=state)]))
    assert repeats(known, "same", None, 1, unseen=True) == first
    assert repeats(known, "same", None, 1) == ("one",)


def test_where_an_attempt_may_have_been_missed_an_answer_is_repeated_that_may_not_have_been_sent() -> None:
    rig = LedgerRig()
    episode = rig.open()
    sent = rig.call(episode, body="sent")
    rig.run(rig.commands.answers_sent([sent], at=rig.at))
    unsent, twice = rig.call(episode, body="unsent"), rig.call(episode, body="twice")
    rig.call(episode, body="twice")
    gone = rig.call(episode, body="gone")
    rig.lose(episode, gone)
    rig.restart()
    new = rig.call(episode, body="new")
    known = rig.state.episodes[episode].transcript
    for body, repeated in (("sent", ()), ("unsent", (unsent,)), ("twice", ()), ("new", ())):
        assert repeats(known, body, None, 1, unseen=True) == repeated
    assert (repeats(known, "twice", None, 1), repeats(known, "new", None, 1)) == ((), (new,))
    assert known.calls[twice].doubtful and not known.calls[new].doubtful


def test_an_answer_that_a_later_call_goes_on_from_was_received(rig: LedgerRig) -> None:
    episode = rig.open()
    one, two = rig.begin(episode, body="same", choices=2)
    rig.finish(episode, one, (1, 2), (3,))
    rig.finish(episode, two, (1, 2), (4,))
    known = rig.state.episodes[episode].transcript
    assert repeats(known, "same", None, 1) == (one, two)
    rig.call(episode, (1, 2), (3, 4), body="another one says that and more")
    assert repeats(known, "same", None, 1) == (one, two)
    again = rig.call(episode, (1, 2), (6,), body="same")
    assert repeats(known, "same", None, 1) == ()
    rig.call(episode, (1, 2, 3), (5,), body="later")
    assert repeats(known, "same", None, 1) == (again,)
    rig.call(episode, (1, 2, 6), (5,), body="later still")
    assert repeats(known, "same", None, 1) == ()


def test_an_answer_of_no_tokens_is_not_known_to_be_received(rig: LedgerRig) -> None:
    episode = rig.open()
    silent = rig.call(episode, (1, 2), (), body="same")
    rig.call(episode, (1, 2), (3,), body="other")
    assert repeats(rig.state.episodes[episode].transcript, "same", None, 1) == (silent,)


def test_what_nothing_says_to_be_a_retry_repeats_nothing(rig: LedgerRig) -> None:
    episode = rig.open()
    for _ in range(2):
        rig.begin(episode, body="same")
    assert (rig.state.tallies.calls["running"], rig.state.tallies.calls["lost"]) == (2, 0)
    rig.begin(episode, body="same", key="k")
    rig.begin(episode, body="same", key="k")
    assert (rig.state.tallies.calls["running"], rig.state.tallies.calls["lost"]) == (3, 1)


def opened(at: float) -> Episode:
    """An episode that opened then."""
    return blank(at=at)


def test_a_retry_may_be_of_a_request_that_was_not_let_in() -> None:
    unseen = UnseenRequests(since=10.0)
    for _ in range(2):
        unseen.refused(ONE, 20.0)
    assert unseen.explains(ONE, opened(20.0)) and unseen.explains(ONE, None)
    assert not unseen.explains(OTHER, opened(20.0))
    unseen.let_in(ONE)  # a retry of one of the two
    assert unseen.explains(ONE, opened(20.0))
    for _ in range(2):
        unseen.let_in(ONE)
        assert not unseen.explains(ONE, opened(20.0))


def test_before_the_proxy_ran_or_read_what_came_any_request_may_have_been_missed() -> None:
    unseen = UnseenRequests(since=10.0)
    assert unseen.explains(ONE, opened(10.0)) and not unseen.explains(ONE, opened(10.5))
    unseen.unread(11.0)
    assert unseen.explains(ONE, opened(10.5)) and not unseen.explains(ONE, opened(11.5))
    assert not unseen.explains(ONE, None)


def test_what_nobody_read_was_one_tenant_s() -> None:
    unseen = UnseenRequests(since=10.0)
    unseen.unread(11.0, tenant="other")
    assert not unseen.explains(ONE, opened(10.5))
    unseen.unread(11.0, tenant="")
    assert unseen.explains(ONE, opened(10.5)) and not unseen.explains(ONE, opened(11.5))
    unseen.unread(12.0)
    assert unseen.explains(ONE, opened(11.5)) and not unseen.explains(ONE, opened(12.5))


def test_with_too_many_to_remember_any_may_have_been_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ajet_proxy.core.ledger.retries.MOST_NOTED", 2)
    unseen = UnseenRequests(since=10.0)
    for number in range(3):
        unseen.refused(("ep", str(number)), 20.0 + number)
    assert unseen.since == 22.0 and unseen.explains(OTHER, opened(22.0))
    assert not unseen.explains(ONE, opened(23.0))

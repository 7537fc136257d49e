"""The signs that one name stands for several runs, and one derived task for several tasks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from ajet_proxy.core.conversation.history import PROBE, ChatHistory, Mark, Marks, read
from ajet_proxy.core.ledger import episodes, session_names, shared_names
from ajet_proxy.core.ledger.events import NameShared
from ajet_proxy.core.ledger.session_names import SessionNames
from ajet_proxy.core.ledger.shared_names import NAMES, TASKS, SharedNames
from ajet_sdk.routes import OpenEpisode
from tests.kit.ledger_rig import LedgerRig

HISTORY = read(ChatHistory, {"messages": [{"role": "user", "content": "hello"}]}, b"", exact=False)


def asked(
    said: str = "a", *, retries: int = 0, key: str | None = None, history: Any = HISTORY, body: str = "h", **more: Any
) -> Any:
    request = {
        "said": said, "sent": {"retries": retries, "idempotency_key": key, "body_hash": body}, "history": history,
    }
    return SimpleNamespace(**{"prompt": said * 24, "begins": True, "probe": False} | request | more)


def shared(
    rig: LedgerRig, names: SessionNames | None = None, going: tuple[str, ...] = ()
) -> tuple[Any, dict[str, str]]:
    alerts = dict[str, str]()
    return SharedNames(names or SessionNames(()), lambda history: going, alerts), alerts


def called(rig: LedgerRig, *said: str) -> Any:
    """An episode with whole calls that said this, whichever way they named it."""
    name = rig.open("me")
    for one in said:
        (call,) = rig.begin(name)
        entry = rig.state.episodes[name].transcript.calls[call]
        entry.asked = SimpleNamespace(said=one, idempotency_key="k", body_hash="h", agent="x")  # type: ignore[assignment]
        entry.state = "complete"
    return rig.state.episodes[name]


@pytest.mark.parametrize(("request_", "shows"), [
    (asked(), True), (asked(retries=1), False), (asked(history=None), False), (asked(key="k"), False),
    (asked(key="other"), True), (asked("b"), False), (asked(retries=1, body="other"), True),
])  # fmt: skip
def test_a_second_conversation_that_begins_alike_is_a_sign(rig: LedgerRig, request_: Any, shows: bool) -> None:
    signs, _ = shared(LedgerRig())
    assert signs.shows("body", called(LedgerRig(), "a"), "me", "x", request_) == shows


@pytest.mark.parametrize("longest", [PROBE, PROBE + 1])
def test_a_probe_is_no_sign_beside_longer_answers_alone(longest: int) -> None:
    """Runs of yes and no have none."""
    rig = LedgerRig()
    rig.open("me")
    for sampled in (1, longest):
        rig.call("me", sampled=range(sampled), agent="x")
    signs, _ = shared(LedgerRig())
    (said,) = {entry.asked.said for entry in rig.state.episodes["me"].transcript.calls.values()}
    assert signs.shows("body", rig.state.episodes["me"], "me", "x", asked(said, probe=True)) is (longest == PROBE)


def test_an_equal_request_in_flight_may_be_the_same_again() -> None:
    signs, _ = shared(LedgerRig())
    assert not signs.may_be_again(None, asked())
    known = called(LedgerRig(), "a")
    assert not signs.may_be_again(known, asked())
    next(iter(known.transcript.calls.values())).state = "running"
    assert signs.may_be_again(known, asked()) and not signs.may_be_again(known, asked(body="other"))


def test_what_is_no_sign() -> None:
    lost = called(LedgerRig(), "a")
    next(iter(lost.transcript.calls.values())).state = "lost"
    signs, _ = shared(LedgerRig())
    assert not signs.shows("body", lost, "me", "x", asked())
    sealed = called(LedgerRig(), "a")
    sealed.state = "sealed"
    assert not signs.shows("body", sealed, "me", "x", asked())
    assert not signs.shows("body", called(LedgerRig(), "a"), "me", "y", asked()), "another agent asks the same"
    going, _ = shared(LedgerRig(), going=("me",))
    assert not going.shows("body", called(LedgerRig(), "a"), "me", "x", asked())


def test_several_conversations_are_an_alert_until_the_episode_ends() -> None:
    alerts, told = dict[str, str](), list[str]()
    signs: Any = SharedNames(SessionNames(()), lambda history: (), alerts, told.append)
    for way, request in (("harness", asked("b")), ("body", asked("b", begins=False))):
        assert not signs.shows(way, called(LedgerRig(), "a"), "me", "x", request)
        assert alerts == {}
    assert not signs.shows("body", called(LedgerRig(), "a"), "me", "x", asked("b"))
    assert "(me)" in alerts[NAMES]
    assert not signs.shows("body", called(LedgerRig(), "a"), "me", "x", asked("c"))
    assert told == [alerts[NAMES]]
    signs.ended("other")
    signs.ended("me")
    assert alerts == {}


def test_a_call_that_goes_on_from_a_sealed_episode_of_the_name_is_a_sign(
    rig: LedgerRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episodes, "MOST_SEALED", 2)
    said = Marks((Mark("k"),))

    def shows(episode: str, way: str = "body", known: Any = None) -> bool:
        signs, _ = shared(LedgerRig(), SessionNames((), rig.state.episodes.sealed_lineage))
        return signs.shows(way, known, episode, "x", asked(history=said))

    def ends(episode: str, key: str, way: str = "body") -> None:
        rig.run(rig.commands.open_episode(OpenEpisode(), episode=episode, at=rig.at, tenant="", identified_by=way))
        rig.finish(episode, *rig.begin(episode), marks=(Mark(key),))

    ends("given-up", "k")
    rig.abort("given-up")
    ends("named", "k", "path")
    rig.seal("named")
    for episode, key in (("me", "k"), ("me.2", "k1"), ("other", "k2")):
        ends(episode, key)
        rig.seal(episode)
        assert not shows("given-up.2") and not shows("named.2") and not shows("me.3", "harness")
        assert shows("me.3") == shows("me.3", known=called(LedgerRig(), "b")) == (episode != "other")
    assert rig.state.episodes.lineage.continued(said) == ()


def test_second_conversations_that_differ_under_one_derived_task_are_an_alert(monkeypatch: pytest.MonkeyPatch) -> None:
    signs, alerts = shared(LedgerRig())
    rig = LedgerRig()
    first, second, given = (rig.open(task="t" if name == "given" else None) for name in ("first", "second", "given"))
    for name in (first, second):
        rig.begin(name, prompt="p" * 24)
    one, two = (rig.state.episodes[name] for name in (first, second))
    for known, request in (
        (None, asked()), (rig.state.episodes[given], asked()), (one, asked("p")), (one, asked(begins=False)),
        (one, asked(prompt="")), (one, asked(probe=True)), (one, asked("x")), (one, asked("y")), (two, asked("x")),
    ):
        signs.derived(known, request)
        assert alerts == {}
    signs.derived(two, asked("z"))
    assert "give each episode its task" in alerts[TASKS]
    with mock.patch.object(shared_names, "MOST_TASKS", 0):
        signs.derived(two, asked("z"))


def test_the_latest_shared_names_are_kept(rig: LedgerRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episodes, "MOST_SHARED", 2)
    for name in ("a", "b", "a", "c"):
        rig.run([NameShared(rig.at, name)])
    assert list(rig.state.episodes.shared_names) == ["a", "c"]
    assert "'c' (of 2)" in rig.state.alerts()["shared names"]


def test_a_session_is_a_part_of_the_one_that_began_it(monkeypatch: pytest.MonkeyPatch) -> None:
    names = SessionNames(())
    assert names.root("top", None) == names.root("top", "top") == "top"
    assert names.root("child", "top") == names.root("child", None) == names.root("grandchild", "child") == "top"
    assert names.root("child", None, "another tenant") == "child"
    assert names.root("top", "grandchild") in ("top", "child", "grandchild"), "a circle ends"
    monkeypatch.setattr(session_names, "MOST_PARENTS", 1)
    names = SessionNames(())
    names.root("a", "b")
    names.root("c", "d")
    assert (names.root("a", None), names.root("c", None)) == ("a", "d")
    for session, parent in (("e" * 1001, "f"), ("e", "f" * 1001)):
        assert names.root(session, parent) == session, "what is kept has a bound"

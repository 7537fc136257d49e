"""Several daemons behind one face: who is asked, in which order, and what happens when one of them is not there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import pytest

from ajet_sdk.errors import AjetError, Conflict, Forbidden, NotFound, NotReady, ProxyUnreachable
from ajet_sdk.routes import Lease, SetMix
from ajet_sdk.sample import Batch, Group
from ajet_trainer.config import Config
from ajet_trainer.daemons import ANSWER_S, PATIENCE_S, Away, Daemons
from ajet_trainer.link import Link
from tests.trainer.making import batch, episode
from tests.trainer.test_link import Clock

ASK = Lease(groups=4, group_size=2, wait_s=2.0)


class Fake:
    """A link that answers from `errors` (by the name of the method), and else well; `log` is what it was asked."""

    def __init__(self, url: str, groups: int = 0) -> None:
        self.url, self.groups, self.deadline_s = url, groups, 5.0
        self.log: list[tuple[Any, ...]] = []
        self.errors: dict[str, Callable[[], AjetError | None]] = {}
        self.down = False
        self.busy: float | None = 1.5
        self.slower: tuple[str, int] | None = None
        self.tries: list[float] = []
        self.told: dict[str, Any] = {}

    def within(self, deadline_s: float) -> Fake:
        self.tries.append(deadline_s)
        return self

    def _asked(self, name: str, *values: Any) -> None:
        self.log.append((name, *values))
        if self.down:
            raise ProxyUnreachable(f"no answer from {self.url}")
        error = self.errors.get(name, lambda: None)()
        if error is not None:
            raise error

    def meet(self) -> None:
        self._asked("meet")

    def says(self, word: str) -> dict[str, Any]:
        self._asked(word)
        return dict(self.told)

    def lease(self, ask: Lease) -> Batch | None:
        self._asked("lease", ask.groups, ask.wait_s)
        if self.groups < ask.groups:
            return None
        self.groups -= ask.groups
        groups = [Group(f"t{n}", (episode("a"), episode("b"))) for n in range(ask.groups)]
        return batch(f"{self.url}#{self.groups}", *groups)

    def busy_s(self) -> float | None:
        self._asked("busy")
        return self.busy

    def waits_for(self) -> tuple[str, int] | None:
        self._asked("waits for")
        return self.slower

    def ack(self, name: str, version: int, filtered: Mapping[str, str] | None = None) -> None:
        self._asked("ack", name, version)
        self.filtered = filtered

    def nack(self, name: str) -> None:
        self._asked("nack", name)

    def extend(self, name: str, lease_s: float) -> None:
        self._asked("extend", name, lease_s)

    def close_gate(self, reason: str, wait_s: float) -> None:
        self._asked("close", reason, wait_s)

    def open_gate(self, version: int) -> None:
        self._asked("open", version)

    def direct(self, mix: SetMix) -> None:
        self._asked("direct", mix)

    def let_go(self, ahead: int) -> None:
        self._asked("let_go", ahead)

    def announce(self, model: str, version: int, upstreams: Sequence[str] | None = None) -> None:
        self._asked("announce", model, version, upstreams)


class Two:
    """Two daemons, time that passes only while someone sleeps, and what was said."""

    def __init__(self, *groups: int) -> None:
        self.clock, self.said = Clock(), list[str]()
        self.fakes = [Fake(f"http://{name}", count) for name, count in zip("ab", groups or (0, 0), strict=False)]
        links = cast(list[Link], self.fakes)
        self.all = Daemons(links, deadline_s=60.0, say=self.said.append, clock=self.clock, sleep=self.clock.sleep)

    @property
    def logs(self) -> list[list[str]]:
        return [[entry[0] for entry in fake.log] for fake in self.fakes]


def test_one_daemon_is_asked_for_all_groups_at_once() -> None:
    one = Two(8)
    leased = one.all.lease(ASK)
    assert leased is not None
    assert (leased.daemon, len(leased.batch.groups)) == ("http://a", 4)
    assert one.fakes[0].log == [("lease", 4, 2.0)]
    assert one.all.account() == {"http://a": {"groups": 4, "away": None}}


def test_groups_are_taken_in_turn_and_nobody_is_starved() -> None:
    two = Two(100, 2)
    assert [leased.daemon[-1] for _ in range(6) if (leased := two.all.lease(ASK))] == ["a", "b", "a", "b", "a", "a"]
    assert two.all.account() == {"http://a": {"groups": 4, "away": None}, "http://b": {"groups": 2, "away": None}}
    assert {entry[1:] for entry in two.fakes[0].log} == {(1, 0.0)}


def test_with_nothing_ready_the_waiting_is_shared() -> None:
    two = Two(0, 0)
    assert two.all.lease(ASK) is None
    assert two.fakes[0].log == two.fakes[1].log == [("lease", 1, 0.0), ("lease", 1, 1.0)]


def test_a_lease_is_settled_where_it_came_from() -> None:
    two = Two()
    two.all.ack("http://b", "b1", 3, {"e": "why"})
    assert two.fakes[1].filtered == {"e": "why"}
    two.all.nack("http://a", "b2")
    two.all.extend("http://b", "b3", 60.0)
    assert two.fakes[0].log == [("nack", "b2")]
    assert two.fakes[1].log == [("ack", "b1", 3), ("extend", "b3", 60.0)]
    assert two.fakes[1].tries == [0.0]


def test_a_daemon_that_is_gone_is_done_without_and_asked_again_with_growing_pauses() -> None:
    two = Two(5, 5)
    two.all.announce("policy", 1, ["http://e"])
    two.all.open_gate(1)
    two.fakes[0].down = True
    assert [leased.daemon[-1] for _ in range(2) if (leased := two.all.lease(ASK))] == ["b", "b"]
    assert two.said == ["the daemon at http://a is away, training continues with 1 of 2: no answer from http://a"]
    two.fakes[0].log.clear()
    for _ in range(40):
        two.clock.now += 1.0
        two.all.look()
    assert len(two.fakes[0].log) == 5
    assert two.all.account()["http://a"] == {"groups": 0, "away": "no answer from http://a"}
    two.all.open_gate(2)
    two.fakes[0].down = False
    two.fakes[0].log.clear()
    two.clock.now += 30.0
    two.all.look()
    assert two.fakes[0].log == [("announce", "policy", 2, ["http://e"]), ("open", 2)]
    assert two.said[1:] == ["the daemon at http://a is back"]
    assert [leased.daemon[-1] for _ in range(2) if (leased := two.all.lease(ASK))] == ["a", "b"]


def test_an_acknowledgement_waits_for_its_daemon_unless_it_is_the_last_chance() -> None:
    two = Two()
    two.fakes[0].down = True
    for _ in range(2):
        with pytest.raises(Away, match="http://a is away: no answer"):
            two.all.ack("http://a", "b1", 1)
    assert two.logs == [["ack"], []]
    with pytest.raises(Away):
        two.all.ack("http://a", "b1", 1, last=True)
    assert (two.logs[0], two.fakes[0].tries) == (["ack", "ack"], [60.0])


@pytest.mark.parametrize("error", [NotFound("gone"), Conflict("expired"), Forbidden("an agent's key")])
def test_a_refusal_is_no_absence(error: AjetError) -> None:
    two = Two(1, 1)
    two.fakes[0].errors = dict.fromkeys(("ack", "lease", "open"), lambda: error)
    for ask in (lambda: two.all.ack("http://a", "b", 1), lambda: two.all.lease(ASK), lambda: two.all.open_gate(1)):
        with pytest.raises(type(error)):
            ask()  # type: ignore[no-untyped-call]
    assert two.said == []


def test_a_batch_whose_daemon_moved_is_acknowledged_where_it_is_known() -> None:
    two = Two()
    two.fakes[0].errors["ack"] = lambda: NotFound("no batch")
    two.all.ack("", "b1", 1, {"e": "why"})
    assert two.logs == [["ack"], ["ack"]]
    assert two.fakes[1].filtered == {"e": "why"}
    two.fakes[1].errors["ack"] = lambda: NotFound("no batch")
    with pytest.raises(NotFound, match="no daemon knows batch b1"):
        two.all.ack("", "b1", 1)
    two.fakes[1].down = True
    with pytest.raises(Away):
        two.all.ack("", "b1", 1)


def test_gates_close_at_the_same_time() -> None:
    two = Two()
    together = threading.Barrier(2, timeout=20)

    def meet() -> None:
        together.wait()

    for fake in two.fakes:
        fake.errors["close"] = meet
    two.all.close_gate("weights", 60.0)
    assert two.logs == [["close"], ["close"]]


@pytest.mark.parametrize("dies", ["close", "open"])
def test_one_that_dies_around_an_update_keeps_no_other_closed(dies: str) -> None:
    two = Two()
    two.all.announce("policy", 0)
    if dies == "close":
        two.fakes[0].down = True
    two.all.close_gate("weights", 60.0)
    two.fakes[0].down = True
    two.all.open_gate(1)
    assert two.fakes[1].log[-1] == ("open", 1)
    assert len(two.said) == 1
    two.fakes[0].down = False
    two.clock.now += 60.0
    two.all.look()
    assert two.fakes[0].log[-2:] == [("announce", "policy", 1, None), ("open", 1)]


def test_one_that_comes_back_during_an_update_is_closed_with_the_others() -> None:
    two = Two()
    two.all.announce("policy", 0)
    two.fakes[0].down = True
    two.all.close_gate("weights", 60.0)
    two.fakes[0].down = False
    two.clock.now += 60.0
    two.all.close_gate("weights", 60.0)
    assert two.logs == [["announce", "close", "announce", "close"], ["announce", "close", "close"]]
    two.all.open_gate(1)
    assert (two.logs[0][-1], two.logs[1][-1]) == ("open", "open")


@pytest.mark.parametrize("names", ["a", "ab"])
def test_one_that_was_emptied_unseen_hears_the_policy_again(names: str) -> None:
    """It came back between two questions, with another data directory, and knows nothing."""
    fakes = [Fake(f"http://{name}") for name in names]
    daemons = Daemons(cast(list[Link], fakes), sleep=lambda seconds: None)
    daemons.announce("policy", 3, ("http://engine",))
    daemons.open_gate(3)
    for fake in fakes:
        fake.log.clear()
    assert daemons.lease(ASK) is None
    for fake in fakes:
        assert fake.log[-2:] == [("announce", "policy", 3, ("http://engine",)), ("open", 3)]
    daemons.close_gate("weights", 60.0)
    daemons.open_gate(4)
    for fake in fakes:
        assert fake.log[-2:] == [("announce", "policy", 4, ("http://engine",)), ("open", 4)]


def test_draining_is_asked_for_in_slices_until_its_limit() -> None:
    two = Two()

    def still() -> AjetError:
        two.clock.now += 5.0
        return NotReady("2 calls are still in flight", code="gate_closing")

    two.fakes[0].errors["close"] = still
    with pytest.raises(NotReady, match="still in flight"):
        two.all.close_gate("weights", 12.0)
    assert [entry[2] for entry in two.fakes[0].log] == [5.0, 5.0, 2.0]
    assert two.logs[1] == ["close"]
    assert two.said == []


def test_the_absence_of_all_ends_the_run_after_the_time_of_a_first_connection() -> None:
    two = Two(1, 1)
    for fake in two.fakes:
        fake.down = True
    assert two.all.lease(ASK) is None
    assert two.said[-1] == "the daemon at http://b is away, no other is left: no answer from http://b"
    for _ in range(29):
        assert two.all.lease(ASK) is None
    two.clock.now += 5.0
    with pytest.raises(ProxyUnreachable, match=r"no daemon has answered for 60 s; the last said: no answer from"):
        two.all.lease(ASK)
    two.all.close_gate("weights", 1.0)
    two.all.open_gate(1)


def test_one_alone_that_is_gone_ends_the_run() -> None:
    one = Two(1)
    one.fakes[0].down = True
    for ask in (lambda: one.all.lease(ASK), lambda: one.all.ack("http://a", "b", 1), lambda: one.all.open_gate(1)):
        with pytest.raises(ProxyUnreachable):
            ask()  # type: ignore[no-untyped-call]
    assert one.said == []


def test_at_a_first_meeting_who_answers_takes_the_key_and_somebody_answers() -> None:
    two = Two()
    two.all.meet()
    assert two.fakes[0].tries == two.fakes[1].tries == [60.0]
    two.fakes[1].errors["meet"] = lambda: Forbidden("the key is of scope agent")
    with pytest.raises(Forbidden, match="http://b: the key is of scope agent"):
        two.all.meet()
    two.fakes[0].down = two.fakes[1].down = True
    with pytest.raises(ProxyUnreachable, match=r"no answer from http://a\. Is ajet-proxy running"):
        two.all.meet()


def test_a_run_starts_without_a_daemon_that_is_away() -> None:
    two = Two(100, 100)
    two.fakes[1].down = True
    two.all.meet()
    assert two.said == [
        "the daemon at http://b is away, training continues with 1 of 2: no answer from http://b"
    ]
    two.all.announce("policy", 3)
    assert two.logs == [["meet", "comes", "announce"], ["meet"]]
    two.fakes[1].down = False
    two.clock.sleep(2.0)
    two.all.look()
    assert two.said[1:] == ["the daemon at http://b is back"]
    let_in = [("meet",), ("comes",), ("begins",)]
    assert two.fakes[1].log[1:] == [*let_in, ("announce", "policy", 3, None), ("open", 3)]


def test_what_goes_of_another_run_is_said_before_ours_is_announced() -> None:
    two = Two()
    two.all.meet()
    two.fakes[1].told = {"run": "r", "discarded": 12, "void": 2}
    two.all.begin()
    assert two.said == [
        "http://b: another run had this model: 12 of its episodes are discarded, and 2 of its leases are void"
    ]
    assert two.logs == [["meet", "comes", "begins"]] * 2
    assert two.all.gone == {"other_run_episodes": 12, "other_run_leases": 2}


def test_who_was_replaced_hears_it_before_anything_is_pushed() -> None:
    two = Two()
    two.all.meet()
    two.all.check()
    two.fakes[0].errors["beats"] = lambda: Conflict("another one", code="other_trainer")
    two.all.beat()
    with pytest.raises(Conflict, match="another one"):
        two.all.check()
    two.all.leave()
    assert two.logs[1] == ["meet", "comes", "beats", "beats", "beats", "leaves"]


def test_the_end_of_a_run_tries_everyone_once_more_and_soon() -> None:
    two = Two()
    two.fakes[0].down = True
    two.all.close_gate("weights", 1.0)
    two.fakes[0].down = False
    two.all.hurry(3.0)
    two.all.open_gate(4)
    assert [fake.deadline_s for fake in two.fakes] == [3.0, 3.0]
    assert "back" in two.said[-1]


def test_configured_daemons_get_their_keys_and_limits() -> None:
    one = Daemons.of(Config(proxy_url=("http://a/",), key=("k",)), print, deadline_s=7.0)
    assert one.urls == ("http://a",)
    assert [link.deadline_s for link in links(one)] == [7.0]
    several = Daemons.of(Config(proxy_url=("http://a", "http://b"), key=("k", "l")), print)
    assert [link.deadline_s for link in links(several)] == [PATIENCE_S, PATIENCE_S]
    assert [link._answer_s for link in links(several)] == [ANSWER_S, ANSWER_S]
    assert [link._http.headers["authorization"] for link in links(several)] == ["Bearer k", "Bearer l"]
    shared = Daemons.of(Config(proxy_url=("http://a", "http://b"), key=("k",)), print)
    assert {link._http.headers["authorization"] for link in links(shared)} == {"Bearer k"}


def links(daemons: Daemons) -> list[Link]:
    return [member.link for member in daemons._members]


def test_nobody_is_waited_for_to_tell_how_busy_engines_were() -> None:
    """Who is away or of an older release is left out, and goes not away for it."""
    two = Two(1, 1)
    a, b = two.fakes
    assert two.all.busy() == {a.url: 1.5, b.url: 1.5}
    a.down = True
    assert two.all.busy() == {b.url: 1.5}
    a.down, b.busy = False, None
    assert two.all.busy() == {a.url: 1.5}
    assert [seen["away"] for seen in two.all.account().values()] == [None, None]


def test_any_daemon_may_tell_for_whom_is_waited() -> None:
    two = Two(1, 1)
    a, b = two.fakes
    assert two.all.waits_for() is None
    a.down, b.slower = True, ("coder", 2)
    assert two.all.waits_for() == ("coder", 2)
    assert [seen["away"] for seen in two.all.account().values()] == [None, None]


def test_a_daemon_that_was_away_is_told_the_mix_when_it_is_back() -> None:
    two = Two()
    two.fakes[1].down = True
    two.all.direct(SetMix({"a": 1.0}, 2))
    two.fakes[1].down = False
    two.clock.sleep(100.0)
    two.fakes[1].log.clear()
    two.all.look()
    assert ("direct", SetMix({"a": 1.0}, 2)) in two.fakes[1].log


def test_what_is_told_of_a_mix_later_leaves_the_rest_as_it_is() -> None:
    two = Two()
    two.all.direct(SetMix({"a": 1.0}, 2))
    two.fakes[1].down = True
    two.all.direct(SetMix(ahead=5))
    assert two.fakes[0].log[-1] == ("direct", SetMix(ahead=5))
    two.fakes[1].down = False
    two.clock.sleep(100.0)
    two.all.look()
    assert ("direct", SetMix({"a": 1.0}, 5)) in two.fakes[1].log


def test_an_older_daemon_knows_no_mix() -> None:
    two = Two()
    two.fakes[0].errors["direct"] = lambda: NotFound("no control route")
    two.all.direct(SetMix(ahead=2))
    assert two.fakes[1].log == [("direct", SetMix(ahead=2))]

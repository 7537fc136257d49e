"""A gate for each model: who is held by whose, and that one model is served as if there were no others."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from ajet_proxy.core.ledger import events as ev
from ajet_proxy.core.ledger import views
from ajet_proxy.core.ledger.gates import Gate
from ajet_sdk.errors import Conflict
from tests.kit.histories import folded
from tests.kit.ledger_rig import LedgerRig, of_two, picture
from tests.kit.refused import refused


def test_a_model_is_closed_and_opened_while_the_other_stays_as_it_is() -> None:
    rig = of_two()
    assert rig.gate_close("m") == (ev.GateClosed(rig.at, "weights", "m"),)
    assert rig.gate_close("m") == ()
    assert (rig.state.gates.shut(), rig.state.gates.state("m"), rig.state.gates.state("n")) == ({"m"}, "closed", "open")
    assert rig.gate_open(1, "n") == ()
    assert rig.gate_open(2, "m") == (ev.GateOpened(rig.at, 2, "m"),)
    assert rig.gate_open(2, "m") == ()
    assert [rig.state.weights.policy_version(model) for model in ("m", "n", "other")] == [2, 1, 0]
    assert rig.state.gates.overall() == "open"


def test_who_names_no_model_is_told_to_where_there_are_several() -> None:
    rig = of_two()
    before = picture(rig.state)
    for ask in (rig.gate_close, lambda: rig.gate_open(2)):
        with refused(Conflict, "several_models", param="model", match=r"several models are announced \(m, n\)"):
            ask()
    assert picture(rig.state) == before


def test_a_gate_waits_for_the_calls_of_its_own_model() -> None:
    rig = of_two()
    (mine,), (other,) = rig.begin("a", model="m"), rig.begin("b", model="n")
    rig.gate_close("m")
    gates = rig.state.gates
    assert (gates.state("m"), gates.overall(), gates.in_flight("m")) == ("closing", "closing", 1)
    rig.finish("a", mine)
    assert (gates.state("m"), gates.overall(), gates.in_flight("n")) == ("closed", "closed", 1)
    rig.finish("b", other)
    assert rig.state.gates.running == {}


def test_with_one_model_its_gate_is_that_of_all_requests_whether_it_is_named_or_not() -> None:
    for closes, opens in product((None, "m"), repeat=2):
        rig = LedgerRig(watch=True)
        rig.announce("m", 1)
        (call,) = rig.begin("a", model="judge")
        rig.gate_close(closes)
        assert rig.gate_close(None) == ()
        assert (rig.state.gates.overall(), rig.state.gates.state("m")) == ("closing", "closing")
        rig.finish("a", call)
        assert (rig.state.gates.overall(), rig.state.gates.state("m")) == ("closed", "closed")
        rig.gate_open(2, opens)
        assert rig.state.gates.overall() == "open"
        assert [rig.state.weights.policy_version(model) for model in ("m", "judge")] == [2, 0]
        assert rig.gate_open(2, opens) == ()


def test_before_any_model_is_announced_a_gate_holds_everybody(rig: LedgerRig) -> None:
    rig.gate_close("m")
    assert (rig.state.gates.overall(), rig.state.gates.shut()) == ("closed", {"m"})
    rig.gate_open(1)
    assert (rig.state.gates.overall(), rig.state.gates.table) == ("open", {"m": Gate(False, rig.at)})
    rig.gate_close()
    rig.announce("m", 1)
    rig.gate_open(1, "m")
    assert rig.state.gates.overall() == "open"


def test_what_was_closed_before_any_model_was_announced_is_the_gate_of_the_first() -> None:
    for named in (None, "m", "n"):
        rig = LedgerRig(watch=True)
        rig.gate_close(named)
        rig.announce("m", 1)
        rig.announce("n", 1)
        shut = {named or "m"}
        assert (rig.state.gates.shut(), rig.state.gates.table.keys()) == (shut, {"m", "n"})
        rig.gate_open(2, named or "m")
        assert rig.state.gates.shut() == set()


def test_a_gate_of_a_model_that_nobody_announced_is_none_of_those_that_are() -> None:
    rig = of_two()
    waiting = rig.open()
    rig.gate_close("ghost")
    assert (rig.state.gates.overall(), rig.state.gates.any()) == ("open", Gate())
    assert views.status(rig.state)["gate"] == {"state": "open", "since": None, "reason": None}
    rig.later(100)
    assert rig.state_of(waiting) == "discarded", "nothing holds its requests"
    rig.gate_close("n")
    assert (rig.state.gates.overall(), rig.state.gates.any().shut) == ("closed", True)


def test_silence_counts_while_another_models_gate_is_shut() -> None:
    rig = of_two()
    held, free = rig.open(model="m"), rig.open(model="n")
    unknown, both = rig.open(), rig.open(members={"x": "m", "y": "n"})
    rig.gate_close("m")
    rig.later(100)
    assert [rig.state_of(name) for name in (held, free, unknown, both)] == ["open", "discarded", "open", "open"]
    rig.gate_open(2, "m")
    rig.later(99)
    assert {rig.state_of(name) for name in (held, unknown, both)} == {"open"}
    rig.later(1)
    assert {rig.state_of(name) for name in (held, unknown, both)} == {"discarded"}


def test_an_episode_whose_request_is_held_is_not_idle_whatever_model_it_asks() -> None:
    rig = of_two()
    episode = rig.open(model="m")
    rig.gate_close("n")
    rig.at += 100
    assert rig.commands.expire(rig.at, {episode}) == ()
    assert len(rig.commands.expire(rig.at)) == 1


def test_a_gate_that_opens_changes_the_version_of_no_other_model(rig: LedgerRig) -> None:
    rig.announce("m", 4)
    rig.run([ev.GateOpened(rig.at, 9, "unknown")])
    assert {model: served.version for model, served in rig.state.weights.served.items()} == {"m": 4}


def test_a_gate_of_several_is_as_it_was_after_a_restart() -> None:
    rig = of_two()
    rig.begin("a", model="n")
    rig.gate_close("m")
    rig.restart()
    assert (rig.state.gates.shut(), rig.state.gates.running) == ({"m"}, {})
    assert picture(folded(rig.events)) == picture(rig.state)


WHAT = st.sampled_from(["close", "open", "call", "end", "wait"])
STEPS = st.lists(st.tuples(WHAT, st.sampled_from(["m", "n"]), st.integers(1, 9)), max_size=30)


def played(steps: list[tuple[str, str, int]], only: str | None = None) -> tuple[object, ...]:
    """The view that `m` has of two models' trainers and agents; of its own alone, if `only` those of a model move."""
    rig, running, seen = of_two(), dict[str, list[str]](m=[], n=[]), list[object]()
    for what, model, version in steps:
        rig.at += 1.0
        if only in (None, model):
            if what == "close":
                rig.gate_close(model)
            elif what == "open":
                rig.gate_open(version, model)
            elif what == "call":
                running[model] += rig.begin(f"of-{model}", model=model)
            elif what == "end" and running[model]:
                rig.lose(f"of-{model}", running[model].pop())
        gates = rig.state.gates
        seen.append((gates.state("m"), gates.of("m"), rig.state.weights.policy_version("m"), gates.in_flight("m")))
    return tuple(seen)


@given(STEPS)
def test_nothing_that_another_model_does_changes_a_models_gate(steps: list[tuple[str, str, int]]) -> None:
    assert played(steps) == played(steps, only="m")


def test_the_gate_is_closing_while_calls_are_in_flight(rig: LedgerRig) -> None:
    episode = rig.open()
    assert not rig.state.gates.any().shut
    (call,) = rig.begin(episode)
    assert rig.state.gates.overall() == "open"
    rig.run([ev.GateClosed(5.0, "weights")])
    assert (rig.state.gates.overall(), rig.state.gates.any()) == ("closing", Gate(True, 5.0, "weights"))
    rig.finish(episode, call)
    assert rig.state.gates.overall() == "closed"
    rig.run([ev.GateClosed(9.0, "why")])
    assert rig.state.gates.any() == Gate(True, 5.0, "weights"), "closing a closed gate changes nothing"
    rig.run([ev.GateOpened(10.0, 1)])
    assert (rig.state.gates.overall(), rig.state.gates.any()) == ("open", Gate(False, 10.0, stood=5.0))
    rig.run([ev.GateOpened(11.0, 2)])
    assert rig.state.gates.any() == Gate(False, 10.0, stood=5.0), "nor does opening an open one"

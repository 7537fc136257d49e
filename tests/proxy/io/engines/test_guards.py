"""Whose gate holds a request: its own model's, and never another's."""

from __future__ import annotations

import pytest

from ajet_proxy.io.engines.upstream import Engines

A, B, C = "http://a", "http://b", "http://c"


def engines(fixed: dict[str, tuple[str, ...]], **announced: tuple[str, ...]) -> Engines:
    return Engines(fixed, lambda model: announced.get(model, ()), lambda: tuple(announced))


def held_by(known: Engines, model: str) -> set[str]:
    """The gates that hold a request for `model`, of all that may be shut."""
    home = known.home(model)
    return {gate for gate in ("", "planner", "coder", "absent") if not known.passes({gate}.copy, home)}


EVERY = {"", "planner", "coder", "absent"}
OWN = {"planner": (A,), "coder": (B,)}


@pytest.mark.parametrize(
    ("known", "model", "holds"),
    [
        (engines({}), "planner", EVERY),  # nobody is announced: whoever closes, closes for all
        (engines({"": (A,)}), "", EVERY),
        (engines({"judge": (C,)}), "judge", EVERY),
        (engines({}, planner=(A,)), "planner", {"", "planner"}),
        (engines({}, planner=(A,)), "gpt-4o", {"", "planner"}),  # the only model will serve it
        (engines({"judge": (C,)}, planner=(A,)), "judge", {"", "planner"}),
        (engines({}, **OWN), "planner", {"", "planner"}),
        (engines({}, **OWN), "coder", {"", "coder"}),
        (engines({}, **OWN), "gpt-4o", {"", "planner", "coder"}),  # either engine may be asked
        (engines({"judge": (C,)}, **OWN), "judge", {""}),
        (engines({"": (B,)}, planner=(A,), coder=()), "gpt-4o", {"", "coder"}),
        (engines({"": (C,)}, **OWN), "gpt-4o", {""}),
        (engines({}, planner=(A,), coder=(A,)), "planner", {"", "planner"}),  # two adapters of one engine
        (engines({}, planner=(A,), coder=(A,)), "coder", {"", "coder"}),
    ],
)
def test_a_request_waits_at_the_gate_of_the_model_that_will_serve_it(
    known: Engines, model: str, holds: set[str]
) -> None:
    assert held_by(known, model) == holds


def test_what_is_no_models_own_counts_as_the_only_models_or_as_nobodys() -> None:
    assert [engines({}, planner=(A,)).home(model) for model in ("planner", "gpt-4o", "")] == ["planner"] * 3
    known = engines({"judge": (C,)}, **OWN)
    assert [known.home(model) for model in ("planner", "judge", "gpt-4o", "")] == ["planner", "judge", "", ""]


def test_an_announced_model_without_engines_is_not_sent_to_another_models() -> None:
    known = engines({}, planner=(A,), coder=())
    assert (known.candidates("coder"), known.candidates("gpt-4o")) == ((), (A,))


def test_behind_a_gate_are_a_models_engines_or_all_if_it_is_the_only_one() -> None:
    one, two = engines({"judge": (C,)}, planner=(A,)), engines({"judge": (C,)}, **OWN)
    assert [set(one.behind(gate)) for gate in ("", "planner")] == [{A, C}, {A, C}]
    assert [set(two.behind(gate)) for gate in ("", "planner", "coder")] == [{A, B, C}, {A}, {B}]


@pytest.mark.parametrize(
    ("known", "gate", "shares"),
    [
        (engines({}, planner=(A,), coder=(A,)), "planner", True),
        (engines({}, planner=(A, C), coder=(B, C)), "coder", True),
        (engines({"": (A,)}, planner=(), coder=()), "planner", True),
        (engines({"planner": (A,), "coder": (A,)}), "planner", True),  # before any trainer has come
        (engines({"planner": (A,), "coder": (A,)}, planner=()), "", True),
        (engines({"": (A,)}, planner=()), "coder", True),  # whose trainer comes second
        (engines({}, **OWN), "planner", False),
        (engines({"": (A,)}, planner=()), "planner", False),
        (engines({"": (A,)}), "planner", False),
        (engines({"": (A,)}), "", False),
        (engines({"judge": (C,)}, planner=(A,)), "", False),
    ],
)
def test_an_engine_that_another_model_is_served_by_too_is_told(known: Engines, gate: str, shares: bool) -> None:
    assert known.shares(gate) is shares

"""Which engines serve a model, whose gate holds a request, and telling engines to pause."""

from __future__ import annotations

import pytest

from ajet_proxy.io.engines.pause import EngineControl
from ajet_proxy.io.engines.upstream import Engines
from ajet_sdk.errors import EngineError
from tests.kit.answering import saying
from tests.kit.engine_stub import EngineStub
from tests.kit.ports import free_port

A, B, C = "http://a", "http://b", "http://c"


def engines(fixed: dict[str, tuple[str, ...]], **announced: tuple[str, ...]) -> Engines:
    return Engines(fixed, lambda model: announced.get(model, ()), lambda: tuple(announced))


def test_what_was_announced_stands_before_what_was_configured() -> None:
    known = engines({"a": ("http://fixed",), "": ("http://any/v1/",)}, a=("http://new/v1",), b=())
    assert known.of("a") == ("http://new",)
    assert known.of("b") == known.of("c") == ("http://any",)
    assert known.names() == ("", "a", "b")
    assert known.all() == ("http://any", "http://new")


def test_a_model_nobody_knows_still_reaches_an_engine() -> None:
    known = engines({}, a=("http://x", "http://y"), b=("http://y",))
    assert known.of("gpt") == ()
    assert known.candidates("gpt") == ("http://x", "http://y")
    assert known.candidates("b") == ("http://y",)
    assert engines({}, a=()).candidates("a") == ()


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


# --- pausing


async def test_pause_and_resume_reach_every_engine() -> None:
    async with EngineStub() as one, EngineStub() as two:
        control = EngineControl(key="k")
        await control.pause((one.url, two.url))
        assert await control.resume((one.url, two.url), 7) == []
        for stub in (one, two):
            assert [(r.path, r.headers["authorization"]) for r in stub.requests] == [
                ("/pause", "Bearer k"), ("/update_weight_version", "Bearer k"), ("/resume", "Bearer k")
            ]
            assert stub.requests[1].body == {"new_version": "7"}


async def test_engines_that_cannot_say_so() -> None:
    async with saying("/pause", 500) as url:
        with pytest.raises(EngineError, match="answered 500"):
            await EngineControl().pause((url,))
        with pytest.raises(EngineError, match="VLLM_SERVER_DEV_MODE=1"):
            await EngineControl().resume((url,), 1)
    with pytest.raises(EngineError, match="cannot be reached"):
        await EngineControl().pause((f"http://127.0.0.1:{free_port()}",))


async def test_no_engine_sends_the_proxy_elsewhere() -> None:
    async with EngineStub() as other, saying("/pause", 307, Location=f"{other.url}/pause") as url:
        with pytest.raises(EngineError, match="answered 307"):
            await EngineControl().pause((url,))
        assert other.requests == []


async def test_an_engine_that_is_gone_does_not_keep_the_others_from_being_frozen() -> None:
    gone = f"http://127.0.0.1:{free_port()}"
    async with EngineStub() as stub, saying("/pause", 500) as unwell:
        await EngineControl().pause((gone, stub.url))
        assert [request.path for request in stub.requests] == ["/pause"]
        with pytest.raises(EngineError, match="answered 500"):
            await EngineControl().pause((gone, stub.url, unwell))
    with pytest.raises(EngineError, match="cannot be reached"):
        await EngineControl().pause((gone, gone))

"""Which engine serves a model, and telling engines to pause."""

from __future__ import annotations

import pytest

from ajet_proxy.io.engines.pause import EngineControl
from ajet_proxy.io.engines.upstream import Engines
from ajet_sdk.errors import EngineError
from tests.kit.answering import answering
from tests.kit.engine_stub import EngineStub
from tests.kit.ports import free_port


def engines(fixed: dict[str, tuple[str, ...]], announced: dict[str, tuple[str, ...]]) -> Engines:
    return Engines(fixed, lambda model: announced.get(model, ()), lambda: tuple(announced))


def test_what_was_announced_stands_before_what_was_configured() -> None:
    known = engines({"a": ("http://fixed",), "": ("http://any/v1/",)}, {"a": ("http://new/v1",), "b": ()})
    assert known.of("a") == ("http://new",)
    assert known.of("b") == known.of("c") == ("http://any",)
    assert known.names() == ("", "a", "b")
    assert known.all() == ("http://any", "http://new")


def test_a_model_nobody_knows_still_reaches_an_engine() -> None:
    known = engines({}, {"a": ("http://x", "http://y"), "b": ("http://y",)})
    assert known.of("gpt") == ()
    assert known.candidates("gpt") == ("http://x", "http://y")
    assert known.candidates("b") == ("http://y",)
    assert engines({}, {"a": ()}).candidates("a") == ()


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
    async with answering("/pause", 500) as url:
        with pytest.raises(EngineError, match="answered 500"):
            await EngineControl().pause((url,))
        with pytest.raises(EngineError, match="VLLM_SERVER_DEV_MODE=1"):
            await EngineControl().resume((url,), 1)
    with pytest.raises(EngineError, match="cannot be reached"):
        await EngineControl().pause((f"http://127.0.0.1:{free_port()}",))


async def test_no_engine_sends_the_proxy_elsewhere() -> None:
    async with EngineStub() as other, answering("/pause", 307, Location=f"{other.url}/pause") as url:
        with pytest.raises(EngineError, match="answered 307"):
            await EngineControl().pause((url,))
        assert other.requests == []


async def test_an_engine_that_is_gone_does_not_keep_the_others_from_being_frozen() -> None:
    gone = f"http://127.0.0.1:{free_port()}"
    async with EngineStub() as stub, answering("/pause", 500) as unwell:
        await EngineControl().pause((gone, stub.url))
        assert [request.path for request in stub.requests] == ["/pause"]
        with pytest.raises(EngineError, match="answered 500"):
            await EngineControl().pause((gone, stub.url, unwell))
    with pytest.raises(EngineError, match="cannot be reached"):
        await EngineControl().pause((gone, gone))

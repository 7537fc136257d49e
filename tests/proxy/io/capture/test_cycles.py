"""A request that has ended holds nothing: its ids and its body are freed at once, without a garbage collection.

A daemon looks for garbage seldom, so a cycle that holds a prompt's ids would stay for as long as thousands of requests.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kit.engine_stub import EngineStub, Fault
from tests.kit.wire import send
from tests.proxy.io.front import Front, until

LONG = "hello " * 2000
SAID = [{"role": "user", "content": LONG}]
CHAT = {"model": "stub", "messages": SAID}
TOOL = {"type": "function", "function": {"name": "guess", "parameters": {"type": "object"}}}
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "stub", "prompt": LONG},
    "/v1/messages": {**CHAT, "max_tokens": 9},
    "/v1/responses": {"model": "stub", "input": LONG},
}
MORE: tuple[dict[str, Any], ...] = ({"n": 3}, {"temperature": 0.5}, {"tools": [TOOL]}, {"echo": True})
ASKED = [
    *((path, body | {"stream": stream}) for path, body in PATHS.items() for stream in (False, True)),
    *(("/v1/chat/completions", CHAT | more) for more in MORE),
]
FAULTS = [
    None, Fault("status"), Fault("status", status=400), Fault("cut", after=60), Fault("reset", after=60),
    Fault("silent_close"), Fault("no_logprobs"), Fault("no_token_ids"), Fault("refuses_ids"), Fault("not_vllm"),
    Fault("error_event", after=1), Fault("no_finish"), Fault("abort"), Fault("hang"),
]

CONNECTIONS = {"_Connection", "Tap"}


@contextlib.contextmanager
def garbage() -> Iterator[list[Any]]:
    """The objects that only a garbage collection frees, of those that were made within this block; the list is filled
    at its end. What was there before is not looked through."""
    found: list[Any] = []
    gc.freeze()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        found += gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.unfreeze()
        gc.enable()


def held(found: list[Any]) -> set[str]:
    """The classes of the proxy's own among them, and of whatever holds something as long as a prompt. A connection that
    was closed may hold itself: it holds no request."""
    own = (one for one in found if type(one).__module__.startswith("ajet_proxy."))
    large = (two for one in found for two in (one, *gc.get_referents(one)) if sys.getsizeof(two) > len(LONG) / 2)
    return {type(one).__qualname__ for one in (*own, *large)} - CONNECTIONS


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.kind}-{fault.status}" if fault else "well")
async def test_a_request_that_has_ended_is_freed_at_once(stub: EngineStub, front: Front, fault: Fault | None) -> None:
    async def ask(path: str, body: dict[str, Any]) -> None:
        stub.faults = [fault] if fault else []
        with contextlib.suppress(OSError, EOFError, TimeoutError):
            await send(front.url + f"/e/ep{path}", body=body, timeout=0.3 if fault and fault.kind == "hang" else 60)

    for path, body in ASKED:  # what is asked once of an engine is asked now
        await ask(path, body)
    with garbage() as found:
        for path, body in ASKED:
            await ask(path, body)
        await until(lambda: not front.gate.in_flight)
    assert held(found) == set()

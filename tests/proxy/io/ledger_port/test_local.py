"""The questions of a front to the ledger, without HTTP: nothing that began stays running, the gate counts whoever is
in."""

from __future__ import annotations

import asyncio
import contextlib
from types import MappingProxyType

import pytest

from ajet_proxy.core.identity.headers import Headers, retry_keys
from ajet_proxy.core.identity.keys import EVERYTHING
from ajet_proxy.core.identity.ladder import identify
from ajet_proxy.core.ledger.events import CallLost, CallStarted
from ajet_proxy.io.ledger_port.cancellation import ignore
from ajet_proxy.io.ledger_port.port import CallRequest, Gone
from ajet_sdk.errors import AjetError, BadRequest, Conflict, EngineError
from ajet_sdk.routes import Abort, GateOpen
from tests.proxy.io.front import Front, leave, until


def asking(path: str = "/e/ep/v1/chat/completions", *, choices: int = 2, **headers: str) -> CallRequest:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    identity = identify(path=path, headers=Headers(named), body=None, claims=EVERYTHING)
    sent = retry_keys(MappingProxyType({}), identity.path, b"{}", scope=b"")
    return CallRequest(identity, None, sent, "m", choices, "/v1/messages")


def losses(front: Front) -> list[tuple[str, str]]:
    return [(event.call, event.reason) for event in front.of(CallLost)]


@pytest.mark.parametrize(
    ("error", "reason"),
    [(EngineError("broken"), "engine_error"), (asyncio.CancelledError(), "disconnected"), (None, "disconnected")],
)
async def test_whoever_leaves_leaves_no_call_running(error: BaseException | None, reason: str) -> None:
    front = Front("http://engine")
    with contextlib.suppress(AjetError, asyncio.CancelledError):
        async with front.ledger_port.begin(asking(), ignore) as begun:
            assert front.gate.in_flight == 1 and front.running == 2
            front.ledger_port.lose([Gone(begun.episode, begun.calls[0], "truncated")])
            if error is not None:
                raise error
    assert losses(front) == [(begun.calls[0], "truncated"), (begun.calls[1], reason)]
    assert front.gate.in_flight == 0
    assert front.ledger_port._discards._watching == {}


async def test_who_waits_comes_in_when_the_ledger_says_that_the_gate_is_open() -> None:
    """Whatever becomes of who opened it, who may not live to hear the answer."""
    front = Front("http://engine")
    front.close_gate()

    async def ask() -> None:
        async with front.ledger_port.begin(asking(), ignore):
            assert front.gate.in_flight == 1

    asked = asyncio.get_running_loop().create_task(ask())
    await until(lambda: front.gate.waiting == 1)
    front.store.post(front.store.commands.trainers.gate_open(GateOpen(1), at=0.0))
    async with asyncio.timeout(300):
        await asked


async def test_a_request_that_gives_up_at_the_gate_began_nothing() -> None:
    front = Front("http://engine")
    front.close_gate()

    async def ask() -> None:
        async with front.ledger_port.begin(asking(), ignore):
            pass

    asked = asyncio.get_running_loop().create_task(ask())
    await until(lambda: front.gate.waiting == 1)
    await leave(asked)
    assert not front.of(CallStarted) and front.gate.in_flight == front.gate.waiting == 0


async def test_an_episode_that_takes_no_calls_does_not_keep_the_gate_from_draining() -> None:
    front = Front("http://engine")
    front.open("ep")
    front.store.post(front.store.commands.seal("ep", at=1.0))
    with pytest.raises(Conflict):
        async with front.ledger_port.begin(asking(), ignore):
            raise AssertionError("an ended episode took a call")
    assert front.gate.in_flight == 0


@pytest.mark.parametrize("how", ["seal", "abort"])
async def test_what_is_known_of_an_episode_is_forgotten_with_it(how: str) -> None:
    front, memory = Front("http://engine"), []
    commands, ledger_port = front.store.commands, front.ledger_port
    async with ledger_port.begin(asking(choices=1), ignore) as begun:
        ledger_port.remember([(b"end", "")], b"shape", begun.calls[0], "token")
        memory.append(len(ledger_port._memory))
        front.store.post(commands.seal("ep", at=1.0) if how == "seal" else commands.abort("ep", Abort(), at=1.0))
        memory.append(len(ledger_port._memory))
        ledger_port.remember([(b"end", "")], b"shape", begun.calls[0], "token")
        memory.append(len(ledger_port._memory))
    assert memory == [1, 0, 0]


async def test_a_reward_needs_somebody_to_be_for() -> None:
    front = Front("http://engine")
    nobody = asking("/v1/chat/completions", x_ajet_reward="1")
    with pytest.raises(BadRequest, match="needs an episode"):
        await front.ledger_port.reward(await front.ledger_port.find(nobody.identity, None, nobody.sent), "rew-1", None)


async def test_the_end_of_a_call_that_nobody_began_has_no_effect() -> None:
    front = Front("http://engine")
    front.ledger_port.lose([Gone("ep-unknown", "call-unknown", "truncated")])
    assert not front.store.durable

"""A worker that dies: whatever it had entered is left, its calls are lost at once, and what was on disk stays."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from msgspec import Struct
from msgspec.structs import asdict, replace

from ajet_proxy.core.conversation.history import ChatHistory, PromptHistory, read
from ajet_proxy.core.ledger.events import CallLost
from ajet_proxy.core.protocol.responses.history import ResponseHistory
from ajet_proxy.io.ledger_port.port import Begun, CallRequest, Whole
from ajet_proxy.io.ledger_port.remote import VALUES, RemotePort
from ajet_proxy.io.ledger_port.remote_server import run
from ajet_proxy.io.ledger_port.worker_connection import WorkerConnection
from tests.kit.strategies import packed_call
from tests.proxy.io.front import Front, Listening, until
from tests.proxy.io.ledger_port.test_local import asking, ignore


async def behind(front: Front) -> tuple[RemotePort, WorkerConnection]:
    """The ledger_port of `front` as a worker has it, and the worker's connection."""
    loop, (ours, theirs) = asyncio.get_running_loop(), socket.socketpair()
    await loop.create_connection(lambda: WorkerConnection(VALUES, front.port_server), sock=ours)
    facts = front.facts()
    _, worker = await loop.create_connection(
        lambda: WorkerConnection(VALUES, lambda made: Listening(made, facts)), sock=theirs
    )
    assert isinstance(worker.peer, Listening)
    return worker.peer.ledger_port, worker


async def test_the_calls_of_a_worker_that_dies_are_lost_and_the_gate_lets_go_of_them() -> None:
    front = Front("http://engine")
    ledger_port, worker = await behind(front)

    async def call(request: CallRequest) -> None:
        async with ledger_port.begin(request, ignore):
            await asyncio.Event().wait()

    async def passing() -> None:
        async with ledger_port.enter("m"):
            await asyncio.Event().wait()

    loop = asyncio.get_running_loop()
    tasks = [loop.create_task(call(asking())), loop.create_task(passing())]
    await until(lambda: front.gate.in_flight == 2)
    front.close_gate()
    tasks.append(loop.create_task(call(asking("/e/held/v1/chat/completions"))))
    await until(lambda: front.gate.waiting == 1)
    worker.close()
    await until(lambda: not front.gate.waiting and not front.gate.in_flight)
    assert [(event.episode, event.reason) for event in front.of(CallLost)] == [("ep", "restarted")] * 2
    assert front.store.state.episodes.find("held") is None
    for task in tasks:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(end) for end in ended} <= {asyncio.CancelledError, ConnectionResetError}


async def test_a_call_that_a_worker_dies_with_before_it_is_on_disk_is_lost() -> None:
    """Its client has not been sent the end, although the ledger has it already."""
    front = Front("http://engine")
    ledger_port, worker = await behind(front)
    front.store.slow.clear()

    async def call() -> None:
        async with ledger_port.begin(asking(choices=1), ignore) as begun:
            await ledger_port.end([Whole(begun.episode, packed_call(begun.calls[0], [1], [2]))])

    task = asyncio.get_running_loop().create_task(call())
    await until(lambda: front.calls)
    worker.close()
    await until(lambda: front.lost == ["restarted"])
    assert front.store.state.tallies.calls == {"running": 0, "complete": 0, "lost": 1}
    with pytest.raises(ConnectionResetError):
        await task


@pytest.mark.parametrize("told", [False, True])
async def test_of_a_call_whose_worker_dies_nobody_knows_whether_its_client_was_sent_the_end(told: bool) -> None:
    front = Front("http://engine")
    ledger_port, worker = await behind(front)
    async with ledger_port.begin(asking(choices=1), ignore) as begun:
        await ledger_port.end([Whole(begun.episode, packed_call(begun.calls[0], [1], [2]))])
        if told:
            ledger_port.sent(begun.calls)
            await until(lambda: not front.store.state.episodes.unsent)
    async with ledger_port.enter("m"):
        worker.close()
        await until(lambda: not front.gate.in_flight)
    await until(lambda: not front.store.state.episodes.unsent)
    (entry,) = front.store.state.episodes["ep"].transcript.calls.values()
    assert (entry.state, entry.doubtful) == ("complete", not told)
    request = asking(choices=1)
    async with front.ledger_port.begin(replace(request, sent={**request.sent, "retries": 1}), ignore):
        pass  # it may repeat one that the worker had read, and had not passed on yet
    assert entry.reason == (None if told else "retried")


async def test_a_begun_call_crosses_as_it_is() -> None:
    front = Front("http://engine")
    front.open("ep", model="given")
    ledger_port, worker = await behind(front)
    async with ledger_port.begin(asking(x_ajet_agent="planner"), ignore) as begun:
        assert isinstance(begun, Begun)
        assert (begun.episode, begun.episode_model, begun.agent) == ("ep", "given", "planner")
        assert len(begun.calls) == 2 and front.running == 2
    worker.close()
    await until(lambda: not front.running and not front.gate.in_flight)
    assert {event.reason for event in front.of(CallLost)} == {"disconnected"}


def test_what_crosses_is_whole() -> None:
    """A field that a struct gets later crosses too: it goes by its fields."""
    request = asking(x_ajet_agent="a", x_ajet_reward="0.5", x_ajet_final="1")
    unpacker = VALUES.unpacker()
    unpacker.feed(VALUES.packer().pack(request))
    (again,) = unpacker
    assert plain(again) == plain(request)


def plain(value: Any) -> Any:
    return {name: plain(item) for name, item in asdict(value).items()} if isinstance(value, Struct) else value


def test_leaving_never_waits() -> None:
    async def patient() -> None:
        future: asyncio.Future[None] = asyncio.Future(loop=asyncio.new_event_loop())
        try:
            await future
        finally:
            future.get_loop().close()

    with pytest.raises(RuntimeError, match="left waiting"):
        run(patient())


TURNS = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * 2


@pytest.mark.parametrize(("route", "body"), [
    (ChatHistory, {"messages": TURNS}), (ChatHistory, {"messages": TURNS[:1]}), (ResponseHistory, {"input": TURNS}),
    (ResponseHistory, {"input": "a", "previous_response_id": "resp_1"}), (PromptHistory.of, {"prompt": "guess higher"}),
    (PromptHistory.of, {"prompt": [1, 2, 3]}),
])  # fmt: skip
def test_a_history_that_crosses_has_the_same_beginnings(route: str, body: dict[str, Any]) -> None:
    history = read(route, body, b"scope")
    assert history is not None
    unpacker = VALUES.unpacker()
    unpacker.feed(VALUES.packer().pack(history))
    (again,) = unpacker
    assert list(again.beginnings((4, 5, 8))) == list(history.beginnings((4, 5, 8)))

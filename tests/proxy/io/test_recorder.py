"""Calls end once, in the journal's order, whatever happens to their episode."""

from __future__ import annotations

from ajet_proxy.core.call import Captured, Lost, Origin, prompt_hash
from ajet_proxy.core.events import CallFinished, CallLost, TaskNamed
from ajet_proxy.io.clock import Clock
from ajet_proxy.io.metrics import Metrics
from ajet_proxy.io.recorder import Recorder
from tests.proxy.io.front import MemoryStore

WHOLE = (Captured(0, "m", (1, 2), (3,), (-0.5,), "stop"), Captured(1, "m", (1, 2), (4,), (-0.5,), "stop"))


def begun(store: MemoryStore) -> Recorder:
    store.post(store.ledger.begin_call(
        episode="ep", calls=("c0", "c1"), at=1.0, model="m", agent="", task=None, eval=False, identified_by="path",
        tenant="", body_hash="", idempotency_key=None, is_retry=False,
    ))  # fmt: skip
    origin = Origin(("c0", "c1"), "ep", "m", "", 1.0, 0, "path", ())
    return Recorder(origin, store=store, clock=Clock(), metrics=Metrics())  # type: ignore[arg-type]


def ends(store: MemoryStore) -> list[str]:
    return [
        event.call.call if isinstance(event, CallFinished) else f"{event.call}: {event.reason}"
        for event in store.durable if isinstance(event, CallFinished | CallLost)
    ]  # fmt: skip


async def test_every_choice_ends_and_the_task_is_named_once() -> None:
    store = MemoryStore()
    recorder = begun(store)
    assert not recorder.ended
    await recorder.end(WHOLE)
    assert recorder.ended and ends(store) == ["c0", "c1"]
    assert [event.task for event in store.durable if isinstance(event, TaskNamed)] == [prompt_hash((1, 2))]


async def test_the_first_end_counts() -> None:
    store = MemoryStore()
    recorder = begun(store)
    await recorder.end((WHOLE[0], Lost(1, "no_logprobs")))
    await recorder.end(WHOLE)
    recorder.lose()
    assert ends(store) == ["c0", "c1: no_logprobs"]


async def test_losing_takes_every_choice() -> None:
    store = MemoryStore()
    recorder = begun(store)
    recorder.lose()
    recorder.lose("engine_error")
    await recorder.end(WHOLE)
    assert ends(store) == ["c0: disconnected", "c1: disconnected"]


async def test_an_episode_that_nobody_knows_is_no_error() -> None:
    store = MemoryStore()
    recorder = Recorder(
        Origin(("c0",), "gone", "m", "", 1.0, 0, "path", ()), store=store, clock=Clock(), metrics=Metrics()  # type: ignore[arg-type]
    )
    await recorder.end(WHOLE[:1])
    assert recorder.ended and store.durable == []

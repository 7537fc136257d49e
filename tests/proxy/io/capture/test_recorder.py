"""Calls end once, in the journal's order, whatever happens to their episode."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from ajet_proxy.core.ledger.commands import CallAsked
from ajet_proxy.core.ledger.events import CallFinished, CallLost, CallStarted
from ajet_proxy.core.protocol.exchange import Exchange
from ajet_proxy.core.protocol.request import JsonBody
from ajet_proxy.core.protocol.routes import CAPTURED
from ajet_proxy.core.trajectory.call import Captured, Lost, Origin, Unscored
from ajet_proxy.io.capture.recorder import Recorder
from ajet_proxy.io.engines.upstream import Engines
from ajet_proxy.io.ledger_port.gatekeeper import Gatekeeper
from ajet_proxy.io.ledger_port.local import LocalPort
from ajet_proxy.io.runtime.clock import Clock
from ajet_proxy.io.runtime.metrics import Metrics
from ajet_sdk.routes import Policy
from tests.proxy.io.front import MemoryStore

WHOLE = (Captured(0, "m", (1, 2), (3,), (-0.5,), "stop"), Captured(1, "m", (1, 2), (4,), (-0.5,), "stop"))


RAW = Unscored(1, "m", (1, 2), (4,), "stop")


class Scoring:
    """Answers questions at once; `new_weights` come while it scores."""

    def __init__(self, store: MemoryStore, *, new_weights: bool = False) -> None:
        self.store = store
        self.new_weights = new_weights
        self.asked: list[Unscored] = []

    async def score(self, choice: Unscored) -> Captured | Lost:
        self.asked.append(choice)
        if self.new_weights:
            announce(self.store, 1)
        return WHOLE[choice.index]

    async def sampling(self) -> Callable[[bool], str]:
        return lambda scored: '{"logprobs":"scored"}' if scored else '{"logprobs":"processed"}'

    def stopped(self, choice: Captured) -> None:
        """Nobody asks."""


def announce(store: MemoryStore, version: int) -> None:
    store.post(store.commands.announce(Policy("m", version), at=2.0))


def port_of(store: MemoryStore) -> LocalPort:
    ledger, clock = store.state, Clock()
    gate = Gatekeeper(is_open=lambda model: True, hold_s=1.0)
    engines = Engines({}, ledger.weights.upstreams, ledger.weights.models)
    return LocalPort(store=store, gate=gate, engines=engines, clock=clock, metrics=Metrics())  # type: ignore[arg-type,return-value]


def begun(store: MemoryStore, scoring: Scoring | None = None) -> Recorder:
    started = CallStarted(1.0, "ep", ("c0", "c1"), "m", "", "path", "")
    store.post(store.commands.begin_call(CallAsked(started, ""), None))
    origin = Origin(("c0", "c1"), "ep", "m", "", 1.0, 0, "path", ())
    return Recorder(origin, scoring or Scoring(store), ledger_port=port_of(store))  # type: ignore[arg-type]


def ends(store: MemoryStore) -> list[str]:
    return [
        event.call.turn.call if isinstance(event, CallFinished) else f"{event.call}: {event.reason}"
        for event in store.durable if isinstance(event, CallFinished | CallLost)
    ]  # fmt: skip


async def test_every_choice_ends() -> None:
    store = MemoryStore()
    recorder = begun(store)
    await recorder.record(WHOLE)
    assert ends(store) == ["c0", "c1"]


async def test_the_first_end_counts() -> None:
    store = MemoryStore()
    recorder = begun(store)
    await recorder.record((WHOLE[0], Lost(1, "no_logprobs")))
    await recorder.record(WHOLE)
    recorder.sent()
    recorder.lose()
    assert ends(store) == ["c0", "c1: no_logprobs"]


async def test_what_is_whole_is_lost_once_if_its_client_was_not_sent_the_end() -> None:
    store = MemoryStore()
    recorder = begun(store)
    await recorder.record((WHOLE[0], Lost(1, "no_logprobs")))
    recorder.lose("stalled")
    recorder.lose()
    assert ends(store) == ["c0", "c1: no_logprobs", "c0: stalled"]
    assert store.state.tallies.calls == {"running": 0, "complete": 0, "lost": 2}


async def test_what_the_engine_contradicts_is_taken_back_once_although_the_end_was_sent() -> None:
    store = MemoryStore()
    recorder = begun(store)
    await recorder.record((WHOLE[0], Lost(1, "no_logprobs")))
    recorder.sent = True
    recorder.take_back("capture_failed")
    recorder.take_back("engine_error")
    recorder.lose()
    assert ends(store) == ["c0", "c1: no_logprobs", "c0: capture_failed"]
    assert store.state.tallies.calls == {"running": 0, "complete": 0, "lost": 2}


async def test_losing_takes_every_choice() -> None:
    store = MemoryStore()
    recorder = begun(store)
    recorder.lose()
    recorder.lose("engine_error")
    await recorder.record(WHOLE)
    assert ends(store) == ["c0: disconnected", "c1: disconnected"]


async def test_an_episode_that_nobody_knows_is_no_error() -> None:
    store = MemoryStore()
    origin = Origin(("c0",), "gone", "m", "", 1.0, 0, "path", ())
    recorder = Recorder(origin, Scoring(store), ledger_port=port_of(store))  # type: ignore[arg-type]
    await recorder.record(WHOLE[:1])
    assert store.durable == []


async def test_tokens_without_logprobs_are_scored_before_they_count() -> None:
    store = MemoryStore()
    scoring = Scoring(store)
    await begun(store, scoring).record((WHOLE[0], RAW))
    assert scoring.asked == [RAW]
    assert ends(store) == ["c0", "c1"]


async def test_how_choices_were_sampled_is_found_before_they_are_recorded() -> None:
    store = MemoryStore()
    scored = replace(WHOLE[1], scored=True)
    await begun(store).record((WHOLE[0], scored))
    told = [event.call.turn.sampling for event in store.durable if isinstance(event, CallFinished)]
    assert told == ['{"logprobs":"processed"}', '{"logprobs":"scored"}']


async def test_other_weights_cannot_score() -> None:
    store = MemoryStore()
    during = Scoring(store, new_weights=True)
    await begun(store, during).record((WHOLE[0], RAW))
    assert len(during.asked) == 1 and ends(store) == ["c0", "c1: weights_changed"]
    late = MemoryStore()
    recorder = begun(late, scoring := Scoring(late))
    announce(late, 1)
    await recorder.record((WHOLE[0], RAW))
    assert scoring.asked == [] and ends(late) == ["c0", "c1: weights_changed"]


async def test_weights_that_came_and_went_are_other_weights() -> None:
    store = MemoryStore()
    recorder = begun(store, scoring := Scoring(store))
    announce(store, 1)
    recorder.note_version(Exchange(CAPTURED["/v1/completions"], JsonBody(b'{"n":2}')))
    await recorder.record((Unscored(0, "m", (1,), (2,), "stop"), RAW))
    assert scoring.asked == [] and ends(store) == ["c0: weights_changed", "c1: weights_changed"]

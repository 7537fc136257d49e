"""Calls end once, in the journal's order, whatever happens to their episode."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from ajet_proxy.core.ledger.commands import CallAsked
from ajet_proxy.core.ledger.events import CallFinished, CallLost, CallStarted
from ajet_proxy.core.protocol.exchange import Exchange
from ajet_proxy.core.protocol.request import JsonBody
from ajet_proxy.core.protocol.routes import CAPTURED
from ajet_proxy.core.trajectory.call import Captured, Lost, Origin, Outcome, Unscored
from ajet_proxy.io.capture.recorder import Recorder
from ajet_proxy.io.engines.upstream import Engines
from ajet_proxy.io.engines.watch import EngineWatch
from ajet_proxy.io.ledger_port.gatekeeper import Gatekeeper
from ajet_proxy.io.ledger_port.local import LocalPort
from ajet_proxy.io.runtime.clock import Clock
from ajet_proxy.io.runtime.metrics import Metrics
from ajet_sdk.routes import Policy
from tests.proxy.io.front import MemoryStore

WHOLE = (Captured(0, "m", (1, 2), (3,), (-0.5,), "stop"), Captured(1, "m", (1, 2), (4,), (-0.5,), "stop"))
RAW = Unscored(1, "m", (1, 2), (4,), "stop")


class Scene:
    """Two calls that have begun, and answers to questions about them; `new_weights` come while it scores."""

    def __init__(self, episode: str = "ep") -> None:
        self.store = store = MemoryStore()
        self.new_weights = False
        self.asked: list[Unscored] = []
        started = CallStarted(1.0, "ep", ("c0", "c1"), "m", "", "path", "")
        store.post(store.commands.begin_call(CallAsked(started, ""), None))
        gate = Gatekeeper(is_open=lambda model: True, hold_s=1.0)
        weights = store.state.weights
        engines = Engines({}, weights.upstreams, weights.models)
        watch = EngineWatch(engines, {}, shut=tuple, data_dir=Path())
        port = LocalPort(
            store=store, gate=gate, engines=engines, clock=Clock(), metrics=Metrics(), watch=watch,  # type: ignore[arg-type]
        )  # fmt: skip
        origin = Origin(("c0", "c1"), episode, "m", "", 1.0, 0, "path", ())
        self.exchange = Exchange(CAPTURED["/v1/completions"], JsonBody(b'{"n":2}'))
        self.recorder = Recorder(origin, self.exchange, self, ledger_port=port)  # type: ignore[arg-type]

    async def record(self, outcomes: tuple[Outcome, ...]) -> None:
        self.exchange.outcomes = outcomes
        await self.recorder.record()

    async def score(self, choice: Unscored) -> Captured | Lost:
        self.asked.append(choice)
        if self.new_weights:
            self.announce(1)
        return WHOLE[choice.index]

    async def sampling(self) -> Callable[[bool], str]:
        return lambda scored: '{"logprobs":"scored"}' if scored else '{"logprobs":"processed"}'

    def stopped(self, choice: Captured) -> None:
        """Nobody asks."""

    def announce(self, version: int) -> None:
        self.store.post(self.store.commands.trainers.announce(Policy("m", version), at=2.0))

    @property
    def ends(self) -> list[str]:
        return [
            event.call.turn.call if isinstance(event, CallFinished) else f"{event.call}: {event.reason}"
            for event in self.store.durable if isinstance(event, CallFinished | CallLost)
        ]  # fmt: skip


@pytest.fixture
def scene() -> Scene:
    return Scene()


async def test_every_choice_ends(scene: Scene) -> None:
    await scene.record(WHOLE)
    assert scene.ends == ["c0", "c1"]


async def test_the_first_end_counts(scene: Scene) -> None:
    await scene.record((WHOLE[0], Lost(1, "no_logprobs")))
    await scene.record(WHOLE)
    scene.recorder.sent()
    scene.recorder.lose()
    assert scene.ends == ["c0", "c1: no_logprobs"]


async def test_what_is_whole_is_lost_once_if_its_client_was_not_sent_the_end(scene: Scene) -> None:
    await scene.record((WHOLE[0], Lost(1, "no_logprobs")))
    scene.recorder.lose("stalled")
    scene.recorder.lose()
    assert scene.ends == ["c0", "c1: no_logprobs", "c0: stalled"]
    assert scene.store.state.tallies.calls == {"running": 0, "complete": 0, "lost": 2}


async def test_what_the_engine_contradicts_is_taken_back_once_although_the_end_was_sent(scene: Scene) -> None:
    await scene.record((WHOLE[0], Lost(1, "no_logprobs")))
    scene.recorder.sent()
    scene.recorder.take_back("capture_failed")
    scene.recorder.take_back("engine_error")
    scene.recorder.lose()
    assert scene.ends == ["c0", "c1: no_logprobs", "c0: capture_failed"]
    assert scene.store.state.tallies.calls == {"running": 0, "complete": 0, "lost": 2}


async def test_losing_takes_every_choice(scene: Scene) -> None:
    scene.recorder.lose()
    scene.recorder.lose("engine_error")
    await scene.record(WHOLE)
    assert scene.ends == ["c0: disconnected", "c1: disconnected"]


async def test_an_episode_that_nobody_knows_is_no_error() -> None:
    scene = Scene("gone")
    await scene.record(WHOLE[:1])
    assert scene.ends == []


async def test_tokens_without_logprobs_are_scored_before_they_count(scene: Scene) -> None:
    await scene.record((WHOLE[0], RAW))
    assert scene.asked == [RAW]
    assert scene.ends == ["c0", "c1"]


async def test_how_choices_were_sampled_is_found_before_they_are_recorded(scene: Scene) -> None:
    await scene.record((WHOLE[0], replace(WHOLE[1], scored=True)))
    told = [event.call.turn.sampling for event in scene.store.durable if isinstance(event, CallFinished)]
    assert told == ['{"logprobs":"processed"}', '{"logprobs":"scored"}']


@pytest.mark.parametrize("late", [False, True])
async def test_other_weights_cannot_score(scene: Scene, late: bool) -> None:
    if late:
        scene.announce(1)
    scene.new_weights = True
    await scene.record((WHOLE[0], RAW))
    assert scene.asked == [RAW] * (not late) and scene.ends == ["c0", "c1: weights_changed"]


async def test_weights_that_came_and_went_are_other_weights(scene: Scene) -> None:
    scene.announce(1)
    scene.recorder.note_version()
    await scene.record((Unscored(0, "m", (1,), (2,), "stop"), RAW))
    assert scene.asked == [] and scene.ends == ["c0: weights_changed", "c1: weights_changed"]

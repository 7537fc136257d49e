"""The ends that `run` and `ajet run` make of who failed, at a proxy that only tells of it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from ajet_sdk import aio
from ajet_sdk.play.program import Program, run_program
from ajet_sdk.play.results import RunResult
from tests.kit.control_stub import ControlStub

LOST = [{"at": 1.0, "reason": "engine_error", "call": "call-1"}]
SAID = "the model never answered (engine_error)"
REQUEST = httpx.Request("POST", "http://engine/v1/chat/completions")
UNAVAILABLE = openai.InternalServerError("503", response=httpx.Response(503, request=REQUEST), body=None)
TOO_LONG = openai.BadRequestError("400", response=httpx.Response(400, request=REQUEST), body=None)


@pytest.fixture
def losing(stub: ControlStub) -> ControlStub:
    """A proxy at which every episode has an attempt that went unanswered."""
    stub.on_open = lambda record: record.update(unanswered=list(LOST))
    return stub


def agent(
    value: Any = None, error: BaseException | None = None, *, gives: float | None = None, final: bool = True,
    aborts: bool = False,
) -> Callable[..., Any]:
    """One that rewards or aborts its episode if it should, and then returns or raises."""

    async def play(task: str, episode: Any) -> Any:
        if gives is not None:
            await episode.reward(gives, final=final)
        if aborts:
            await episode.abort("its own wish")
        if error is not None:
            raise error
        return value

    return play


def told(item: RunResult) -> tuple[str, float | None, bool]:
    return item.outcome, item.reward, item.infra


WORLD = ("aborted", None, True)
AGENT = ("aborted", None, False)
GIVEN = ("rewarded", 0.25, False)


@pytest.mark.parametrize(
    ("playing", "answered", "lost"),
    [
        (agent(1.0), ("rewarded", 1.0, False), WORLD), (agent(0.0), ("rewarded", 0.0, False), WORLD),
        (agent(), AGENT, WORLD), (agent("text"), AGENT, WORLD),
        (agent(error=ValueError("no")), AGENT, WORLD), (agent(error=TOO_LONG), AGENT, WORLD),
        (agent(error=UNAVAILABLE), WORLD, WORLD), (agent(error=httpx.ConnectError("")), WORLD, WORLD),
        (agent(error=httpx.ReadTimeout("")), AGENT, WORLD), (agent(error=ConnectionResetError()), WORLD, WORLD),
        (agent(gives=0.25), GIVEN, GIVEN), (agent(error=ValueError(), gives=0.25), GIVEN, GIVEN),
        (agent(1.0, gives=0.25), ("rewarded", 1.0, False), GIVEN), (agent(aborts=True), AGENT, AGENT),
        (agent(gives=0.25, final=False), GIVEN, GIVEN),
        (agent(error=ValueError(), gives=0.25, final=False), AGENT, WORLD),
    ],
)  # fmt: skip
@pytest.mark.parametrize("unanswered", [False, True], ids=["answered", "lost"])
async def test_an_agent_of_run(
    stub: ControlStub, request: pytest.FixtureRequest, playing: Any, answered: Any, lost: Any, unanswered: bool
) -> None:
    if unanswered:
        request.getfixturevalue("losing")
    (item,) = await aio.run(playing, ["t"], repeat=1, retries=0)
    assert told(item) == (lost if unanswered else answered)
    record = stub.episodes["ep-0"]
    assert (record["state"] == "discarded") is (item.outcome == "aborted")
    assert record.get("cause") == ("infra" if item.infra else None)
    assert item.kept is item.ok


async def test_what_the_world_failed_is_played_again_whatever_it_would_have_earned(
    losing: ControlStub
) -> None:
    for value in (0.0, 1.0):
        results = await aio.run(agent(value), ["t"], repeat=1, retries=1)
        assert [(item.reason, item.again) for item in results] == [(SAID, True), (SAID, False)]


async def test_the_worlds_failures_have_their_words(losing: ControlStub) -> None:
    (item,) = await aio.run(agent(error=ValueError("no")), ["t"], repeat=1, retries=0)
    assert item.reason == f"ValueError: no; {SAID}"
    wrapped = RuntimeError("gave up")
    wrapped.__cause__ = UNAVAILABLE
    losing.episodes.clear()
    (item,) = await aio.run(agent(error=wrapped), ["t"], repeat=1, retries=0)
    assert item.reason == f"RuntimeError: gave up; {SAID}" and item.infra


async def test_a_block_of_an_episode_asks_too(losing: ControlStub) -> None:
    async with aio.episode("t") as ep:
        pass
    assert (ep.outcome.aborted, ep.outcome.infra) == (SAID, True)
    with pytest.raises(ZeroDivisionError):
        async with aio.episode("t") as ep:
            raise ZeroDivisionError
    assert losing.episodes["ep-1"]["cause"] == "infra"


async def test_a_final_reward_from_elsewhere_stands_when_the_agent_raises(
    stub: ControlStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def agent(task: str, episode: Any) -> None:
        for name, value in episode.env().items():
            monkeypatch.setenv(name, value)
        await aio.reward(0.25)
        raise ValueError("late")

    (item,) = await aio.run(agent, ["t"], repeat=1)
    assert told(item) == GIVEN and item.kept and stub.episodes["ep-0"]["state"] == "ready"


async def test_a_call_in_flight_is_waited_for_a_moment(stub: ControlStub) -> None:
    """Its client has left, and only then it is known that the engine was to blame."""

    async def agent(task: str, episode: Any) -> float:
        record = stub.episodes[episode.id]
        record["in_flight"] = 1
        looks = iter([{}, {}, {"in_flight": 0, "unanswered": LOST}])
        stub.says = lambda heard: record.update(next(looks, {})) if heard.method == "GET" else None
        return 1.0

    (item,) = await aio.run(agent, ["t"], repeat=1, retries=0)
    assert told(item) == WORLD


@pytest.mark.parametrize("error", [KeyboardInterrupt(), asyncio.CancelledError(), ConnectionResetError()], ids=repr)
async def test_an_interrupt_waits_for_no_call(stub: ControlStub, error: BaseException) -> None:
    """Nor is anybody waited for who has said already that the world failed."""
    async def agent() -> None:
        async with aio.episode("t"):
            stub.episodes["ep-0"]["in_flight"] = 1
            raise error

    with pytest.raises(type(error)):
        await agent()
    assert stub.count("GET", "/episodes/ep-0") == 1 and stub.episodes["ep-0"]["state"] == "discarded"


async def test_a_rewarded_episode_of_which_the_world_left_nothing_is_played_again(
    losing: ControlStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    move = losing.move

    def ends(record: dict[str, Any], state: str, reason: str | None = None) -> None:
        nothing = state == "ready"
        move(record, "discarded" if nothing else state, "incomplete_call" if nothing else reason)
        record["detail"] = "engine_error"

    monkeypatch.setattr(losing, "move", ends)
    first, second = await aio.run(agent(gives=0.25), ["t"], repeat=1, retries=1)
    assert (told(first), first.again, second.again) == (WORLD, True, False)
    assert first.reason == "discarded by the proxy: incomplete_call (engine_error)"


@pytest.mark.parametrize("more", [{"reward_from": "stdout"}, {"reward_cmd": "echo 1"}], ids=str)
def test_what_a_program_gave_up_itself_stays_so(stub: ControlStub, more: dict[str, str]) -> None:
    for cause in ("infra", None):
        script = f"import ajet_sdk; ajet_sdk.abort('gone', cause={cause!r}); print(1)"
        (item,) = run_program(Program((sys.executable, "-c", script), **more), ["t"], retries=0)  # type: ignore[arg-type]
        assert told(item) == ("aborted", None, cause == "infra") and item.reason == "gone"

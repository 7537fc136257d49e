"""Data sets that are played from the ledger: what is missing, what is played again, and whose turn."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from typing import Any

import pytest

import ajet_sdk
from ajet_sdk import aio, errors
from ajet_sdk.play import patience
from ajet_sdk.play.data_set import PlayedRollouts
from ajet_sdk.play.episode import aborting, opening
from ajet_sdk.play.options import RunOptions, name_of
from ajet_sdk.play.results import Progress, RunResult
from ajet_sdk.play.schedule import LATER
from tests.kit.control_stub import ControlStub, Say
from tests.kit.patience import LONG_S, reached

pytestmark = pytest.mark.usefixtures("quick")


async def one(task: Any, episode: Any) -> float:
    return 1.0


def asks_for(heard: Any, *lanes: str) -> bool:
    """Tell whether a request is for an episode, of one of these lanes if there are any."""
    return heard.path.endswith("/episodes") and (not lanes or heard.body["task"].partition("/")[0] in lanes)


def full(stub: ControlStub, *lanes: str) -> None:
    """The proxy has no room for episodes of these lanes."""
    no_room = Say(503, {"error": {"message": "full", "type": "not_ready_error", "code": "lane_full"}})
    stub.says = lambda heard: no_room if lanes and asks_for(heard, *lanes) else None


def kept(stub: ControlStub) -> Counter[str]:
    """Counts how often each task was played whole."""
    return Counter(record["task"] for record in stub.episodes.values() if record["state"] == "ready")


@pytest.mark.parametrize("parallel", [1, 3])
async def test_a_data_set_is_played_epoch_by_epoch(stub: ControlStub, parallel: int) -> None:
    results = await aio.run(one, ["a", "b"], repeat=2, parallel=parallel, play="d", epochs=2)
    assert [record["task"] for record in stub.episodes.values()] == [*"aabbaabb"]
    assert [record["place"] for record in stub.episodes.values()] == list(range(8))
    assert sorted((item.task, item.index) for item in results) == [(task, index) for task in "ab" for index in range(4)]
    assert not stub.plays, "it is whole, and ends"


class Killed(BaseException):
    """Raised by the callback of a run, to end it as a kill does: nothing more is played."""


async def test_the_next_run_plays_exactly_what_is_missing(stub: ControlStub) -> None:
    def killed(result: RunResult) -> None:
        if len(kept(stub)) == 2:
            raise Killed

    tasks = [f"t{number}" for number in range(5)]
    with pytest.raises(Killed):
        await aio.run(one, tasks, repeat=1, parallel=1, play="d", on_result=killed)
    (play,) = stub.plays.values()
    assert play.opened == 2
    await aio.run(one, tasks, repeat=1, parallel=2, play="d")
    assert kept(stub) == dict.fromkeys(tasks, 1) and len(stub.episodes) == 5


async def test_what_was_open_as_a_run_was_killed_is_waited_for(stub: ControlStub) -> None:
    """Until the proxy discards it, or another run ends it."""
    for number in range(3):
        stub.plays = {}
        async with aio.Client() as client:
            played = source(["a", "b"])
            await played.begin(client)
            orphan = await opening(client, body_of(await played.take(client, called)))
        running = asyncio.ensure_future(aio.run(one, ["a", "b"], repeat=1, play="d"))
        await reached(lambda: stub.count("GET", ":default") >= 5 * (number + 1))  # noqa: B023
        stub.discard(orphan.id, "idle_timeout")
        results = await running
        assert sorted(item.task for item in results) == ["a", "b"]


async def test_a_run_takes_the_place_of_a_dead_one_before_it_opens_anything(stub: ControlStub) -> None:
    """The episodes that the dead one has open are all that is missing, or fill the lane."""
    async with aio.Client() as client:
        played = source(["a"])
        await played.begin(client)
        orphan = await opening(client, body_of(await played.take(client, called)))
    running = asyncio.ensure_future(aio.run(one, ["a"], repeat=1, play="d", client_name="mine"))
    await reached(lambda: stub.count("GET", ":default") >= 5)
    assert [known["name"] for known in stub.clients.values()] == ["mine"] and len(stub.episodes) == 1
    stub.discard(orphan.id, "client_gone")
    assert [item.task for item in await running] == ["a"]


def source(tasks: Any, **how: Any) -> PlayedRollouts:
    return PlayedRollouts(tasks, RunOptions(**{"play": "d", "repeat": 1, **how}))


async def called(function: Any, *args: Any) -> Any:
    """Calls what the caller of a run gave."""
    return function(*args)


def body_of(turn: Any) -> ajet_sdk.routes.OpenEpisode:  # type: ignore[name-defined]
    return ajet_sdk.routes.OpenEpisode(turn.rollout.task, place=turn.place, play=turn.play)  # type: ignore[attr-defined]


async def test_whatever_discards_a_rollout_it_is_played_again_a_few_times(stub: ControlStub) -> None:
    tried: Counter[str] = Counter()

    async def agent(task: str, episode: Any) -> float:
        tried[task] += 1
        if task == "never" or (task == "late" and tried[task] < 3):
            raise RuntimeError("no idea")
        return 1.0

    results = await aio.run(agent, ["late", "never", "fine"], repeat=1, parallel=2, play="d", retries=2)
    assert tried == {"late": 3, "never": 3, "fine": 1}
    assert [(item.task, item.again) for item in results if not item.ok].count(("never", True)) == 2
    assert [item.task for item in results.failures] == ["never"]
    (play,) = stub.plays.values()
    assert (play.missing, [*play.given_back]) == (1, [1]), "it is left for the next start"
    tried["late"], tried["fine"] = 9, 9
    assert [item.task for item in await aio.run(agent, ["late", "never", "fine"], repeat=1, play="d", retries=0)] == [
        "never"
    ]


async def test_many_that_always_fail_hide_none_that_failed_once(
    stub: ControlStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than the proxy shows at once."""
    monkeypatch.setattr("ajet_proxy.core.ledger.plays.SHOWN", 10)
    tried: Counter[str] = Counter()

    async def agent(task: str, episode: Any) -> float:
        tried[task] += 1
        if task != "late" or tried[task] == 1:
            raise RuntimeError("no idea")
        return 1.0

    tasks = [f"never {number}" for number in range(17)]
    await aio.run(agent, [*tasks, "late"], repeat=1, parallel=4, play="d", retries=1)
    assert tried == {**dict.fromkeys(tasks, 2), "late": 2}
    (play,) = stub.plays.values()
    assert sorted(play.given_back) == list(range(17))


async def test_failures_of_the_world_are_given_up_as_such_and_counted_apart(stub: ControlStub) -> None:
    tried: Counter[str] = Counter()

    async def agent(task: str, episode: Any) -> float | None:
        tried[task] += 1
        if task == "away" and tried[task] < 3:
            raise ConnectionError("the sandbox is away")
        if task == "says so" and tried[task] == 1:
            await episode.abort("no disk", cause="infra")
            return None
        if task == "its own":
            raise RuntimeError("no idea")
        return 1.0

    tasks = ["away", "says so", "its own"]
    results = await aio.run(agent, tasks, repeat=1, parallel=1, infra=(ConnectionError,))
    assert tried == {"away": 3, "says so": 2, "its own": 1}
    causes = Counter((record["task"], record.get("cause")) for record in stub.episodes.values())
    assert causes == {
        ("away", "infra"): 2, ("away", None): 1, ("says so", "infra"): 1, ("says so", None): 1, ("its own", None): 1,
    }  # fmt: skip
    assert results.summary() == (
        "6 episodes: 2 rewarded, 1 aborted, 3 failures of the world (3 played again), mean reward 1"
    )
    assert [item.task for item in results.failures] == ["its own"]


@pytest.mark.parametrize("play", [None, "d"])
async def test_an_episode_that_is_held_back_is_no_failure(stub: ControlStub, play: str | None) -> None:
    """However long it takes."""
    later = Say(503, {"error": {"message": "later", "type": "not_ready_error"}}, {"Retry-After": "0"})
    stub.says = lambda heard: later if asks_for(heard) and stub.count("POST", "/episodes") < 9 else None
    results = await aio.run(one, ["a"], repeat=1, deadline=0.01, play=play)
    assert [item.ok for item in results] == [True]


async def test_a_proxy_that_refuses_ends_a_play(stub: ControlStub) -> None:
    """Its ledger is the cursor: without it nothing is known."""
    stub.says = lambda heard: Say(403) if asks_for(heard) else None
    with pytest.raises(errors.Forbidden):
        await aio.run(one, ["a", "b"], repeat=1, play="d")


async def test_lanes_are_played_in_turn_and_the_one_of_which_most_is_wanted_first(stub: ControlStub) -> None:
    tasks = ["math/1", "math/2", "code/1", "code/2", "plain"]
    await aio.run(one, tasks, repeat=1, parallel=1, play="d")
    assert [record["task"] for record in stub.episodes.values()][:3] == ["math/1", "code/1", "plain"]
    assert kept(stub) == dict.fromkeys(tasks, 1)
    stub.episodes.clear()
    stub.lanes = {"math": 1, "code": 5}
    await aio.run(one, tasks, repeat=1, parallel=1, play="d")
    assert [record["task"] for record in stub.episodes.values()] == ["code/1", "code/2", "math/1", "plain", "math/2"]


async def test_a_lane_of_which_nothing_is_wanted_waits(stub: ControlStub) -> None:
    stub.lanes = {"math": 0, "code": 1}
    full(stub, "math")
    running = asyncio.ensure_future(aio.run(one, ["math/1", "code/1"], repeat=1, parallel=1, play="d"))
    await reached(lambda: stub.count("GET", "/wanted") >= 5)
    assert kept(stub) == {"code/1": 1}
    stub.lanes = {"math": 1, "code": 0}
    full(stub)
    await running
    assert kept(stub) == {"code/1": 1, "math/1": 1}


async def test_what_finds_all_lanes_full_waits_in_one_after_the_other_as_long_as_any_run(stub: ControlStub) -> None:
    """By the same id in the same lane, by which the proxy knows who came first."""
    stub.lanes = {"math": 0, "code": 0}
    full(stub, "math", "code")
    running = asyncio.ensure_future(aio.run(one, ["math/1", "code/1"], repeat=1, parallel=1, play="d"))
    await reached(lambda: stub.count("POST", "/episodes") >= 5)
    full(stub)
    await running
    asked = [heard.body for heard in stub.heard if asks_for(heard)]
    assert [body["task"] for body in asked[:4]] == ["math/1", "code/1", "math/1", "code/1"]
    assert {body["hold_s"] for body in asked[:4]} == {15}
    assert [body["id"] for body in asked[:2]] == [body["id"] for body in asked[2:4]]


async def test_one_waits_in_a_full_lane_while_others_look_elsewhere(stub: ControlStub) -> None:
    stub.lanes, released, answer = {"math": 0, "code": 9}, threading.Event(), stub.answer

    def holding(heard: Any) -> Say:
        if asks_for(heard, "math"):
            assert released.wait(LONG_S)
        elif asks_for(heard) and stub.count("POST", "/episodes") > 6:
            released.set()
        return answer(heard)

    stub.answer = holding  # type: ignore[method-assign]
    tasks = ["math/1", "math/2", *(f"code/{number}" for number in range(7))]
    await aio.run(one, tasks, repeat=1, parallel=2, play="d")
    assert kept(stub) == dict.fromkeys(tasks, 1)


async def test_a_lane_that_is_not_named_is_one_of_the_others(stub: ControlStub) -> None:
    stub.lanes = {"math": 1, "": 3}
    await aio.run(one, ["math/1", "code/1"], repeat=1, parallel=1, play="d")
    assert [record["task"] for record in stub.episodes.values()] == ["code/1", "math/1"]


async def test_an_evaluation_is_held_back_by_no_lane(stub: ControlStub) -> None:
    stub.lanes = {"math": 0, "": 0}
    await aio.run(one, ["math/1", "code/1"], repeat=1, parallel=1, play="d", eval=True)
    assert len(stub.episodes) == 2 and not stub.count("GET", "/wanted")


async def test_a_lane_that_is_full_holds_no_other_up(stub: ControlStub) -> None:
    """Also where the proxy said before that it is wanted."""
    stub.lanes = {"math": 5, "code": 1}
    full(stub, "math")
    running = asyncio.ensure_future(
        aio.run(one, ["math/1", "code/1", "code/2"], repeat=1, parallel=1, play="d")
    )
    await reached(lambda: kept(stub) == {"code/1": 1, "code/2": 1})
    full(stub)
    await running
    assert kept(stub)["math/1"] == 1
    asked = [heard.body for heard in stub.heard if asks_for(heard)]
    assert [body["hold_s"] for body in asked if body["task"] != "math/1"] == [0, 0]


@pytest.mark.parametrize("play", [None, "d"])
async def test_a_run_says_what_it_waits_for(
    stub: ControlStub, play: str | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "LONG_S", 0.05)
    full(stub, "math")
    running = asyncio.ensure_future(aio.run(one, ["math/1"], repeat=1, parallel=2, play=play))
    await reached(lambda: caplog.messages)
    full(stub)
    assert [item.ok for item in await running] == [True]
    assert caplog.messages == [
        "waiting: lane math has as many episodes open or ready as training wants; is a trainer running?"
    ]


async def test_what_a_play_waits_for(stub: ControlStub) -> None:
    stub.lanes = {"a": 0, "b": 0, "c": 0, "d": 0}
    async with aio.Client() as client:
        played = source([f"{lane}/1" for lane in "abcd"])
        await played.begin(client)
        taken: list[Any] = [await played.take(client, called) for _ in "abcd"]
        assert [turn.waits and turn.rollout.task for turn in taken] == ["a/1", "b/1", "c/1", "d/1"]
        assert await played.take(client, called) is LATER
        assert (played.waits_for() or "").startswith("lanes a, b, c and others have as many episodes open")
        stub.lanes = {"": 1}
        for waits in taken:
            played.put_back(waits)
        for _ in range(4):
            turn: Any = await played.take(client, called)
            await opening(client, body_of(turn))
            played.put_back(turn)
        assert await played.take(client, called) is LATER
        assert played.waits_for() == "others have 4 episodes of it open"
        played.opened(turn)
        assert played.waits_for() is None


async def test_two_runs_share_a_play(stub: ControlStub) -> None:
    tasks, stub.lanes = [f"t{number}" for number in range(20)], {"": 20}
    await asyncio.gather(*(aio.run(one, tasks, repeat=1, parallel=3, play="d") for _ in range(2)))
    assert kept(stub) == dict.fromkeys(tasks, 1) and not stub.plays


@pytest.mark.parametrize("heard_by", ["/d@", "/episodes"])
async def test_a_play_that_another_run_finishes_ends_this_one_well(stub: ControlStub, heard_by: str) -> None:
    """It hears of it as it looks, or as it opens an episode."""
    finished, told = list[str](), list[Progress]()

    def finishing(heard: Any) -> None:
        if not finished and heard_by in heard.path and len(kept(stub)) == 1:
            finished.extend(stub.plays)
            stub.plays = {}

    stub.lanes, stub.says = {}, finishing
    await aio.run(one, [*"abcdef"], repeat=1, parallel=1, play="d", on_progress=told.append)
    assert finished and told[-1] == Progress(6, 6)


async def test_an_opening_whose_answer_is_lost_is_asked_for_under_the_same_name(stub: ControlStub) -> None:
    stub.says = lambda heard: Say(502) if asks_for(heard) and stub.count("POST", "/episodes") == 1 else None
    await aio.run(one, ["a"], repeat=1, play="d")
    first, second = [heard.body["id"] for heard in stub.heard if asks_for(heard)]
    assert first == second


# ---- the source alone


def test_the_name_of_a_play_tells_its_tasks_and_how_often_they_are_played() -> None:
    names = {
        source(tasks, repeat=repeat, epochs=epochs).name
        for tasks, repeat, epochs in ((["a"], 1, 1), (["b"], 1, 1), (["a"], 2, 1), (["a"], 1, 2), (["a", "b"], 1, 1))
    }
    assert len(names) == 5
    assert source(["a"]).name == source(iter(["a"])).name
    name = source(["a"], play="my data/set é.jsonl").name
    assert name.startswith("my-data-set-.jsonl-") and len(name.partition("@")[2]) == 12


def test_tasks_that_are_no_text_have_a_digest_too() -> None:
    one, two = ({"task": "t", "seed": number} for number in (1, 2))
    assert source([one]).name != source([two]).name


class Opaque:
    """A task of which a process says another text each time."""


@pytest.mark.parametrize("extra", [Opaque, lambda: {"x", Opaque()}, lambda: {1: Opaque()}, lambda: b"x"])
def test_a_play_of_tasks_that_are_no_json_is_the_same_at_every_start(extra: Any) -> None:
    def name(task: str, seed: int = 1, **more: Any) -> str:
        return source([{"id": task, "seed": seed, "extra": extra()}], **more).name

    assert len({name("t"), name("t"), name("t")}) == 1
    assert len({name("t"), name("u"), name("t", seed=2), name("t", repeat=2)}) == 4
    assert len({source([extra()], name=lambda _: "t").name for _ in range(3)}) == 1
    circle: dict[Any, Any] = {"id": "t"}
    circle["self"] = circle
    assert source([circle]).name == source([{"id": "t", 1: extra()}]).name, "of such a task only the name counts"


@pytest.mark.parametrize(
    "more", [{"when": Opaque()}, {"score": float("nan")}, {"image": b"x"}, {"tags": {"x"}}, {1: 2, "b": 3}]
)
def test_a_task_that_has_a_name_may_hold_what_is_no_json(more: dict[Any, Any]) -> None:
    assert name_of({"id": "a"} | more) == name_of({"task": "a"} | more) == "a"
    with pytest.raises(errors.BadRequest, match="pass name="):
        name_of(more)


async def test_a_lane_that_is_given_holds_all_tasks(stub: ControlStub) -> None:
    async with aio.Client() as client:
        await source(["math/1", "code/1"], lane="terminal").begin(client)
        assert [name.partition(":")[2] for name in stub.plays] == ["terminal"]
        await source(["mäth/1"]).begin(client)
    assert [name.partition(":")[2] for name in stub.plays][1].startswith("m-th-")


async def test_an_answer_that_is_no_play_is_no_proxy(stub: ControlStub) -> None:
    stub.faults.append(Say(200, {"anything": 1}))
    async with aio.Client() as client:
        with pytest.raises(errors.AjetError, match="is not an ajet proxy"):
            await source(["a"]).begin(client)


async def test_a_program_that_has_changed_may_try_all_that_failed(stub: ControlStub) -> None:
    async with aio.Client() as client:
        played = source(["a"], retries=0)
        await played.begin(client)
        for again in (False, True):
            turn: Any = await played.take(client, called)
            episode = await opening(client, body_of(turn))
            played.opened(turn)
            await aborting(client, episode.id, "no idea")
            failed = RunResult("a", 0, episode.id, "aborted", None, "no idea", 0.0)
            assert played.ended(turn, failed, 0.0, changed=False) is False, again
            assert await played.take(client, called) is None
            played.forgive()
        turn = await played.take(client, called)
        played.opened(turn)
        assert played.ended(turn, failed, 0.0, changed=True) is True


async def test_an_episode_whose_end_could_not_be_settled_is_given_up_before_the_end(stub: ControlStub) -> None:
    async with aio.Client() as client:
        played = source(["a", "b"])
        await played.begin(client)
        for name in ("failed", "settled after all"):
            turn: Any = await played.take(client, called)
            episode = await opening(client, body_of(turn))
            played.opened(turn)
            if name != "failed":
                stub.episodes[episode.id]["state"] = "leased"
            lost = RunResult("a", 0, episode.id, "failed", None, "away", 0.0, infra=True)
            assert played.ended(turn, lost, 0.0, changed=False)
        assert await played.take(client, called) is LATER
        assert [record["state"] for record in stub.episodes.values()] == ["discarded", "leased"]
        again: Any = await played.take(client, called)
        assert again.place == 0

"""Running agents over tasks: order, groups, failures as results, and a clean stop."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ajet_sdk
from ajet_sdk import aio, errors
from ajet_sdk.play import rollouts
from ajet_sdk.play.results import RunResult
from ajet_sdk.play.schedule import rollouts_at
from ajet_sdk.play.tasks import read_tasks
from ajet_sdk.play.threads import ThreadHands
from tests.kit.control_stub import DROP, ControlStub, Say
from tests.kit.patience import LONG_S, reached, until


async def one(task: Any, episode: Any) -> float:
    return 1.0


async def test_groups_of_rewarded_episodes(stub: ControlStub) -> None:
    seen: list[RunResult] = []

    async def agent(task: str, episode: Any) -> float:
        assert episode.task == task
        return len(task) / 2

    results = await aio.run(agent, ["a", "bb"], repeat=3, parallel=2, model="m", agent_name="x", on_result=seen.append)
    assert [(item.task, item.index, item.outcome, item.reward) for item in results] == [
        *(("a", index, "rewarded", 0.5) for index in range(3)),
        *(("bb", index, "rewarded", 1.0) for index in range(3)),
    ]
    assert results.mean_reward == 0.75
    assert not results.failures
    assert sorted(seen, key=lambda item: (item.task, item.index)) == list(results)
    assert {record["state"] for record in stub.episodes.values()} == {"ready"}
    assert {(record["model"], record["agent"]) for record in stub.episodes.values()} == {("m", "x")}


class Failed(BaseException):
    pass


class Mute(Exception):
    def __str__(self) -> str:
        raise KeyError("no text")


async def test_failures_are_results(stub: ControlStub) -> None:
    async def agent(task: str, episode: Any) -> Any:
        if task == "raises":
            raise RuntimeError("no idea")
        if task == "is mute":
            raise Mute
        if task == "exits":
            raise SystemExit(3)
        if task == "fails":
            raise Failed("as a test runner says it")
        if task == "cancels":
            raise asyncio.CancelledError
        if task == "rewards another way":
            stub.episodes[episode.id]["rewards"].append({"id": "header", "value": 0.25, "final": False})
            return 1.0
        if task == "aborts":
            await episode.abort("its own wish")
        if task == "rewards itself":
            await episode.reward(0.5)
        if task == "seals":
            await episode.seal()
        return {
            "text": "seven", "nan": float("nan"), "fine": True, "pair": (0.5, "half of it"), "no pair": (0.5, 1),
        }.get(task)

    tasks = [
        "raises", "is mute", "exits", "fails", "cancels", "rewards another way", "aborts", "rewards itself",
        "seals", "nothing", "text", "nan", "fine", "pair", "no pair",
    ]
    results = await aio.run(agent, tasks, repeat=1, parallel=4)
    told = {item.task: (item.outcome, item.reward, item.reason) for item in results}
    assert told["raises"] == ("aborted", None, "RuntimeError: no idea")
    assert told["is mute"] == ("aborted", None, "Mute")
    assert told["exits"] == ("aborted", None, "SystemExit: 3")
    assert told["fails"] == ("aborted", None, "Failed: as a test runner says it")
    assert told["cancels"] == ("aborted", None, "CancelledError")
    assert told["rewards another way"] == ("rewarded", 1.25, None)
    assert told["aborts"] == ("aborted", None, "its own wish")
    assert told["rewards itself"] == ("rewarded", 0.5, None)
    assert told["seals"] == ("aborted", None, "discarded by the proxy: no_reward")
    assert told["nothing"] == ("aborted", None, "left without a reward")
    assert told["text"][2] == "BadRequest: a reward must be a finite number of at most 1e+12, not 'seven'"
    assert told["nan"][0] == told["no pair"][0] == "aborted"
    assert told["pair"] == ("rewarded", 0.5, None)
    assert told["fine"] == ("rewarded", 1.0, None)
    assert "open" not in {record["state"] for record in stub.episodes.values()}


async def test_what_is_to_be_judged_awaits_that_unless_it_has_a_reward(stub: ControlStub) -> None:
    """An episode that nobody rewarded is no failure, whichever way its agent ended it. The world's failures stay the
    world's."""

    async def agent(task: str, episode: aio.Episode) -> float | None:
        if task == "raises":
            raise RuntimeError("no idea")
        if task == "world":
            stub.episodes[episode.id]["unanswered"] = [{"reason": "engine_error"}]
        if task == "seals":
            await episode.seal()
        return 0.5 if task == "rewards" else None

    tasks = ["raises", "world", "seals", "nothing", "rewards"]
    results = await aio.run(agent, tasks, repeat=1, parallel=5, retries=0, judged=True)
    told = {item.task: (item.outcome, item.reward, item.reason, item.kept) for item in results}
    assert told["raises"] == ("aborted", None, "RuntimeError: no idea", False)
    assert told["world"] == ("aborted", None, "the model never answered (engine_error)", False)
    assert told["seals"] == told["nothing"] == ("sealed", None, "awaits a judgement", True)
    assert told["rewards"] == ("rewarded", 0.5, None, True)
    assert [item.infra for item in results] == [False, True, False, False, False]
    said = "1 rewarded, 2 awaiting a judgement, 1 aborted, 1 failure of the world, mean reward 0.5"
    assert results.summary() == f"5 episodes: {said}"
    async with aio.episode("t", judged=True) as episode:
        pass
    assert stub.episodes[episode.id]["state"] == "sealed"


async def test_evaluation_episodes_say_so(stub: ControlStub) -> None:
    await aio.run(one, [{"task": "t", "question": "?"}, {"id": 7}, 8], repeat=1, eval=True)
    records = stub.episodes.values()
    assert sorted(str(record["task"]) for record in records) == ["7", "8", "t"]
    assert all(record["eval"] for record in records)


async def test_a_proxy_that_goes_away_is_a_result(stub: ControlStub) -> None:
    async def agent(task: Any, episode: Any) -> float:
        stub.faults.extend([DROP] * 50)
        return 1.0

    results = await aio.run(agent, ["a"], repeat=1, deadline=0.3)
    assert (results[0].outcome, results[0].episode, results[0].infra) == ("failed", "ep-0", True)


@pytest.mark.parametrize("task", [None, True, "", {"question": math.nan}, ["a"], 1.5, {"question": {1.5}}])
async def test_a_task_without_a_name_is_the_callers_mistake(stub: ControlStub, task: Any) -> None:
    with pytest.raises(errors.BadRequest, match="pass name="):
        await aio.run(one, [task], repeat=1)
    with pytest.raises(errors.BadRequest, match="pass name="):
        await aio.run(one, ["good", task])
    assert not stub.episodes, "nothing begins of which the results would be lost"
    await aio.run(one, [task], repeat=1, name=lambda _: "named")
    assert stub.episodes["ep-0"]["task"] == "named"


async def test_a_mapping_is_called_as_its_line_in_a_file_is(stub: ControlStub, tmp_path: Path) -> None:
    mappings: list[dict[str, Any]] = [
        {"question": "1 + 1?", "answer": 2}, {"id": 7}, {"task": {}, "id": "x"}, {"task": "t", "id": 1},
    ]  # fmt: skip
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps(dict(reversed(one.items()))) + "\n" for one in mappings))
    results = await aio.run(one, mappings, repeat=1, parallel=1)
    assert [result.task for result in results] == [line.name for line in read_tasks(file)]
    assert results[0].task.startswith("task-") and len({result.task for result in results}) == 4


async def test_tasks_that_cannot_be_had_end_the_run(stub: ControlStub) -> None:
    def tasks() -> Iterator[str]:
        yield "a"
        raise OSError("the file is gone")

    with pytest.raises(OSError, match="the file is gone"):
        await aio.run(one, tasks(), repeat=1, parallel=1)
    assert stub.episodes["ep-0"]["state"] == "ready"


@pytest.mark.parametrize(
    ("tasks", "how", "said"),
    [
        ("solve it", {}, r"list of tasks, not one text: \['solve it'\]"), (["a"], {"repeat": 0}, "at least 1"),
        (["a"], {"parallel": 0}, "at least 1"), (["a"], {"retries": -1}, "retries must be at least 0"),
        (["a"], {"wanted": True}, "only evaluations are wanted: set eval too"),
        ([], {"wanted": True, "eval": True}, "there is no task to play"),
        ([], {"play": "d"}, "there is no task to play"), ("text", {"play": "d"}, "not one text"),
        (["a"], {"epochs": 2}, "epochs belong to a play"), (["a"], {"play": "d", "epochs": 0}, "must be at least 1"),
        (["a"], {"play": "d", "wanted": True, "eval": True}, "is no play"),
    ],
)
async def test_what_cannot_be_run_is_said_before_anything_is(
    stub: ControlStub, tasks: Any, how: dict[str, Any], said: str
) -> None:
    with pytest.raises(errors.BadRequest, match=said):
        await aio.run(one, tasks, **how)
    assert not stub.heard


async def test_an_agent_of_the_other_face_is_told_where_it_belongs(stub: ControlStub) -> None:
    async def asynchronous(task: Any, episode: Any) -> float:
        return 1.0

    with pytest.raises(errors.BadRequest, match=r"ajet_sdk\.aio\.run"):
        ajet_sdk.run(asynchronous, ["a"])
    results = await aio.run(lambda task, episode: 1.0, ["a"], repeat=1)  # type: ignore[arg-type,return-value]
    assert "use ajet_sdk.run" in str(results[0].reason)


async def test_any_number_may_run_at_once(stub: ControlStub) -> None:
    assert len(await aio.run(one, ["a"], repeat=2, parallel=10**9)) == 2


def test_no_more_than_parallel_run_at_once_and_all_of_them_do(stub: ControlStub) -> None:
    together = threading.Barrier(4, timeout=LONG_S)

    def agent(task: str, episode: ajet_sdk.Episode) -> float:
        together.wait()
        return 1.0

    results = ajet_sdk.run(agent, ["a", "b"], repeat=4, parallel=4)
    assert len(results.rewards) == 8


def test_tasks_may_be_endless(stub: ControlStub) -> None:
    assert [attempt.task for attempt in itertools.islice(rollouts_at(itertools.count(), 2), 4)] == [0, 0, 1, 1]


def interrupt(when: threading.Semaphore, count: int = 1) -> None:
    """Presses Ctrl-C once that was released so often."""

    def press() -> None:
        if all(when.acquire(timeout=LONG_S) for _ in range(count)):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()


def test_an_interrupt_aborts_what_is_open_and_begins_no_more(
    stub: ControlStub, caplog: pytest.LogCaptureFixture
) -> None:
    started, go_on, seen = threading.Semaphore(0), threading.Event(), list[RunResult]()

    def agent(task: str, episode: ajet_sdk.Episode) -> float:
        started.release()
        go_on.wait()
        return 1.0

    def on_result(result: RunResult) -> None:
        seen.append(result)
        if len(seen) == 3:
            go_on.set()

    before = {*threading.enumerate()}
    interrupt(started, 3)
    with pytest.raises(KeyboardInterrupt):
        ajet_sdk.run(agent, itertools.count(), 1, 3, on_result=on_result)
    assert until(lambda: not [one for one in threading.enumerate() if one not in before and "_work" in one.name])
    details = [(record["state"], record["detail"]) for record in stub.episodes.values()]
    assert details == [("discarded", "the run was interrupted")] * 3
    assert [(item.outcome, item.reason) for item in seen] == [("aborted", "the run was interrupted")] * 3
    assert caplog.messages == ["interrupted: aborting the open episodes"]


def test_a_second_interrupt_is_not_waited_for(stub: ControlStub) -> None:
    started, pressed, over = threading.Semaphore(0), threading.Semaphore(0), threading.Event()

    def agent(task: str, episode: ajet_sdk.Episode) -> float:
        stub.faults.extend([DROP] * 10_000)
        started.release()
        over.wait()
        return 1.0

    interrupt(started)
    interrupt(pressed)
    with pytest.raises(KeyboardInterrupt):
        ajet_sdk.run(agent, ["t"], 1, say=lambda line: pressed.release(), deadline=LONG_S)
    over.set()
    stub.faults.clear()


def test_a_signal_that_wakes_no_wait_is_heard_all_the_same(stub: ControlStub) -> None:
    in_time: list[bool] = []
    interrupted = threading.Event()

    def agent(task: str, episode: ajet_sdk.Episode) -> float:
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # the thread that waits for the run is not woken
        in_time.append(interrupted.wait(LONG_S))
        return 1.0

    with pytest.raises(KeyboardInterrupt):
        ajet_sdk.run(agent, ["t"], 1, say=lambda line: interrupted.set())
    assert until(lambda: in_time) and in_time == [True]


# A task that is cancelled just as it connects leaves that socket to the garbage collector: asyncio has no other hand.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_with_no_proxy_says_that_nobody_knows_what_became_of_it(
    stub: ControlStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("episode", "rollouts"):  # neither they nor their agents end within it
        monkeypatch.setattr(f"ajet_sdk.play.{module}.STOP_DEADLINE_S", 0.3)
    started, seen = threading.Semaphore(0), list[RunResult]()

    def agent(task: str, episode: ajet_sdk.Episode) -> float:
        started.release()
        threading.Event().wait()
        return 1.0

    interrupt(started, 8)
    with pytest.raises(KeyboardInterrupt):
        ajet_sdk.run(
            agent, ["t"], 8, 8, on_result=seen.append, say=lambda line: stub.faults.extend([DROP] * 10_000)
        )
    stub.faults.clear()
    assert {(item.outcome, item.reason) for item in seen} == {
        ("failed", "the run was interrupted, and the proxy did not say what becomes of this")
    }
    gc.collect()


@pytest.mark.parametrize("itself", [False, True])
async def test_what_an_agent_cancels_ends_that_agent_alone(stub: ControlStub, itself: bool) -> None:
    """Also where later ones look at whether their task is being cancelled, as task groups do."""

    async def agent(task: str, episode: aio.Episode) -> float:
        running = asyncio.current_task()
        assert running is not None and not getattr(running, "cancelling", int)()
        if task == "odd":
            waited = asyncio.ensure_future(asyncio.sleep(3600))
            asyncio.get_running_loop().call_soon((running if itself else waited).cancel)
            await waited
        return 1.0

    results = await aio.run(agent, ["even", "odd", "last"], repeat=1, parallel=1)
    assert [(item.reward, item.reason) for item in results] == [(1.0, None), (None, "CancelledError"), (1.0, None)]


@pytest.mark.parametrize("everything", [False, True])
async def test_cancelling_aborts_what_is_open(stub: ControlStub, everything: bool) -> None:
    """The run alone, or all tasks at once, as `asyncio.run` does on its way out."""
    started = asyncio.Semaphore(0)

    async def agent(task: str, episode: aio.Episode) -> float:
        started.release()
        await asyncio.sleep(3600)
        return 1.0

    running = asyncio.ensure_future(aio.run(agent, itertools.count(), repeat=1, parallel=3))
    for _ in range(3):
        await started.acquire()
    for task in asyncio.all_tasks() - {asyncio.current_task()} if everything else {running}:
        task.cancel()
    await asyncio.wait([running])
    assert running.cancelled()
    assert [record["state"] for record in stub.episodes.values()] == ["discarded"] * 3
    assert everything or {record["detail"] for record in stub.episodes.values()} == {"the run was interrupted"}


# ---- what a trainer wants


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has what is wanted be seen at once."""
    monkeypatch.setattr(rollouts, "WANTED_S", 0.01)


async def played(tasks: Any, **how: Any) -> list[RunResult]:
    """The results of a run that plays until nothing is wanted any more, by its number."""
    seen: list[RunResult] = []
    with pytest.raises(errors.NotFound, match="no more is wanted"):
        await aio.run(one, tasks, eval=True, wanted=True, on_result=seen.append, **how)
    return seen


@pytest.mark.parametrize("parallel", [1, 4, 32])
async def test_exactly_what_is_wanted_is_played(stub: ControlStub, eager: None, parallel: int) -> None:
    stub.evaluations.extend([{"m": 5}, {"m": 3}, {"n": 2}, *[{}] * 20])
    seen = await played(["a", "b"], repeat=1, parallel=parallel)
    assert len(seen) == 10 and {item.outcome for item in seen} == {"rewarded"}
    opened = [(record["model"], record["task"], record["eval"]) for record in stub.episodes.values()]
    assert opened == [
        *(("m", task, True) for task in "ababa"), *(("m", task, True) for task in "aba"),
        *(("n", task, True) for task in "ab"),
    ], "each evaluation begins with the first task"


async def test_what_a_teachers_model_wants_is_not_played(stub: ControlStub, eager: None) -> None:
    """Its teacher never learns, so such an episode would be refused."""
    stub.evaluations.extend([{"n": 1, "m": 1}, *[{}] * 100_000])

    def ends(result: RunResult) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await aio.run(one, ["a"], eval=True, wanted=True, parallel=1, on_result=ends, teachers={"tutor": "n"})
    assert [record["model"] for record in stub.episodes.values()] == ["m"]


async def test_two_programs_go_through_the_tasks_of_an_evaluation_once(stub: ControlStub, eager: None) -> None:
    """Both ask before either opens its first episode, so one of them finds its place taken."""
    stub.evaluations.append({"m": 8})
    tasks = [f"h{number}" for number in range(8)]
    stub.faults.extend([Say(200, {"eval": {"m": 8}, "next": {"m": 0}})] * 2)
    stub.wanted, stub.next = stub.evaluations.popleft(), {"m": 0}
    await asyncio.gather(*(played(tasks, repeat=1, parallel=2) for _ in range(2)))
    assert [record["task"] for record in stub.episodes.values()] == tasks
    assert stub.count("POST", "/episodes") > 8


async def test_tasks_are_gone_through_again_and_again(stub: ControlStub, eager: None) -> None:
    stub.evaluations.append({"m": 7})
    seen = await played(iter(["a", "b"]), repeat=2, parallel=1)
    assert [(item.task, item.index) for item in seen] == [
        ("a", 0), ("a", 1), ("b", 0), ("b", 1), ("a", 2), ("a", 3), ("b", 2),
    ]  # fmt: skip


async def test_only_the_model_that_is_named_is_played(stub: ControlStub, eager: None) -> None:
    stub.evaluations.append({"m": 2, "n": 1})
    stub.faults.extend([Say(200, {"eval": {"m": 2}}), Say(200, {"eval": {"m": 2, "n": 1}, "next": {"m": 0, "n": 0}})])
    running = asyncio.ensure_future(played(["a"], repeat=1, model="n"))
    await reached(lambda: stub.episodes)
    stub.wanted, stub.evaluations = {}, deque()
    await running
    assert [record["model"] for record in stub.episodes.values()] == ["n"]


async def test_an_agent_that_fails_ends_no_evaluation_and_is_tried_again_slowly(
    stub: ControlStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub.evaluations.append({"m": 3})
    seen: list[RunResult] = []
    monkeypatch.setattr(rollouts, "WANTED_S", 0.1)

    async def fails(task: Any, episode: Any) -> float:
        raise RuntimeError("no idea")

    began = time.monotonic()
    with pytest.raises(errors.NotFound):
        await aio.run(fails, ["a"], eval=True, wanted=True, parallel=1, on_result=seen.append)
    assert [item.reason for item in seen] == ["RuntimeError: no idea"] * 3
    assert time.monotonic() - began > 4 * 0.1, "one wait for the evaluation, and one after each"


@pytest.mark.parametrize("broken", [False, True])
def test_a_fault_of_a_callback_is_raised_whatever_say_does(stub: ControlStub, broken: bool) -> None:
    """It may ask the proxy, or raise."""
    over, said = threading.Event(), list[str]()

    def agent(task: str, episode: ajet_sdk.Episode) -> float:
        assert task == "first" or over.wait(LONG_S)
        return 1.0

    def on_result(result: RunResult) -> None:
        if result.task == "first":
            assert until(lambda: len(stub.episodes) == 2)
            raise ZeroDivisionError

    def say(line: str) -> None:
        over.set()
        with ajet_sdk.Client() as client:
            said.append(str(client.ask("status").status))
        if broken:
            raise LookupError

    with pytest.raises(ZeroDivisionError):
        ajet_sdk.run(agent, ["first", "second", "third", "fourth"], 1, 2, on_result=on_result, say=say)
    assert said == ["200"] and len(stub.episodes) == 2


async def test_hands_that_get_no_thread_say_so_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    hands = ThreadHands()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    for _ in range(2):
        with pytest.raises(errors.BadRequest, match="too much for this machine"):
            await asyncio.wait_for(hands.call(print), LONG_S)


async def test_a_callback_that_raises_ends_those_who_wait_too(stub: ControlStub, eager: None) -> None:
    stub.evaluations.extend([{"m": 1}, *[{}] * 100_000])

    def raises(result: RunResult) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await aio.run(one, ["a"], eval=True, wanted=True, parallel=3, on_result=raises)


async def test_waiting_ends_when_it_is_cancelled(stub: ControlStub, eager: None) -> None:
    stub.evaluations.extend([{}] * 100_000)
    running = asyncio.ensure_future(aio.run(one, ["a"], eval=True, wanted=True, parallel=4))
    await reached(lambda: stub.count("GET", "/wanted") >= 3)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not stub.episodes


@pytest.mark.skipif(sys.version_info < (3, 12), reason="before, threads could begin after the main thread")
def test_a_run_after_the_end_of_the_main_thread_says_what_it_lacks(stub: ControlStub) -> None:
    script = """
import threading, ajet_sdk
def late():
    threading.main_thread().join()
    try:
        ajet_sdk.run(lambda task, episode: 1.0, ["a"], repeat=2)
    except ajet_sdk.AjetError as error:
        print(error)
threading.Thread(target=late).start()
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=LONG_S,
        env=os.environ | {"AJET_PROXY_URL": stub.url},
    )
    assert ended.stdout.startswith("the main thread has ended") and not ended.stderr

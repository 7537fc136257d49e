"""The blocking face: on a loop in a thread of its own, for callers of every kind."""

from __future__ import annotations

import asyncio
import contextvars
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from inspect import signature
from typing import Any

import pytest

import ajet_sdk
from ajet_sdk.blocking import LOOP, wait
from tests.kit.control_stub import ControlStub
from tests.kit.patience import reached

EXIT = """
import atexit, sys
import ajet_sdk

def end():
    with ajet_sdk.episode("t", proxy_url=sys.argv[1]) as episode:
        episode.reward(0.5)
    print(episode.outcome.reward)

if len(sys.argv) > 2:
    ajet_sdk.Client(sys.argv[1]).ask("status")  # the loop has begun
atexit.register(end)
"""
ALONE = """
import os, sys

tasks = []
os.register_at_fork(before=lambda: tasks.append(os.listdir("/proc/self/task")))  # called last, since it is the first
import ajet_sdk, ajet_sdk.blocking

ajet_sdk.blocking.END_S = 600.0

with ajet_sdk.Client(sys.argv[1]) as client:
    for _ in range(50):
        client.ask("status")
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)
print({len(found) for found in tasks})
"""
FORGOTTEN = """
import sys
import ajet_sdk

def play():
    with ajet_sdk.episode("t", proxy_url=sys.argv[1]):
        yield

def forget():
    kept = [play()]
    next(kept[0])
    kept.append(kept)

forget()
"""
LEFT_BY_A_CHILD = """
import os, sys
import ajet_sdk

with ajet_sdk.join("laptop", proxy_url=sys.argv[1]):
    child = os.fork()
os.write(1, b"left\\n")  # at once, as both write
if child:
    print(os.waitpid(child, 0)[1])
"""

FORKED_AT_THE_FIRST_CALL = """
import os, sys, threading, time, warnings
from ajet_sdk import blocking
import logging

warnings.simplefilter("ignore")  # a fork beside threads is what this is about
new_loop, go_round = blocking._new_loop, blocking.LoopThread._go_round

def slowly_made():
    time.sleep(0.3)
    logging.getLogger("of a module that is imported")
    return new_loop()

def slowly_begun(self, loop):
    time.sleep(0.3)
    go_round(self, loop)

if sys.argv[1] == "made":
    blocking._new_loop = slowly_made
else:
    blocking.LoopThread._go_round = slowly_begun

async def hello():
    print("hello")

caller = threading.Thread(target=lambda: blocking.wait(hello()), daemon=True)
caller.start()
while not (blocking.LOOP._thread if sys.argv[1] == "begun" else caller.is_alive()):
    time.sleep(0.001)
time.sleep(0.1)
if (child := os.fork()) == 0:
    os._exit(0)
os.waitpid(child, 0)
caller.join(600)
"""


def said_by(code: str, *argv: str) -> str:
    """The output of a fresh interpreter to which warnings are errors."""
    command = [sys.executable, "-W", "error", "-c", code, *argv]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_everything_of_an_episode(stub: ControlStub, monkeypatch: pytest.MonkeyPatch) -> None:
    with ajet_sdk.episode("t", model="m") as episode:
        episode.heartbeat()
        episode.reward(0.25, final=False)
        for name, value in episode.env().items():
            monkeypatch.setenv(name, value)
        ajet_sdk.reward(0.5, final=False)
        assert episode.record(tokens=True)["state"] == "open"
        episode.seal()
    assert (stub.episodes["ep-0"]["state"], stub.episodes["ep-0"]["reward"]) == ("ready", 0.75)
    with pytest.raises(ZeroDivisionError), ajet_sdk.episode("t"):
        raise ZeroDivisionError("no")
    assert stub.episodes["ep-1"]["detail"] == "ZeroDivisionError: no"
    episode = ajet_sdk.episode("t")
    episode.abort("enough", cause="infra")
    episode.close()
    assert (stub.episodes["ep-2"]["detail"], stub.episodes["ep-2"]["cause"]) == ("enough", "infra")
    episode = ajet_sdk.episode("t")
    monkeypatch.setenv("AJET_EPISODE", episode.id)
    ajet_sdk.abort("lost interest")
    episode.close()
    assert stub.episodes["ep-3"]["detail"] == "lost interest"


def test_what_a_function_shows_of_itself() -> None:
    assert list(signature(ajet_sdk.Episode.reward).parameters)[:3] == ["self", "value", "call"]
    named = (ajet_sdk.Episode.seal, ajet_sdk.reward, ajet_sdk.join)
    assert [one.__name__ for one in named] == ["seal", "reward", "join"]
    assert (ajet_sdk.episode.__doc__ or "").startswith("Opens an episode")


@pytest.mark.parametrize("before", [(), ("before",)])
def test_it_works_while_the_interpreter_ends(stub: ControlStub, before: tuple[str, ...]) -> None:
    for url in (stub.url, stub.url.replace("127.0.0.1", "localhost")):
        assert said_by(EXIT, url, *before) == "0.5\n"


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="needs a list of the system's threads")
def test_the_loops_thread_has_left_the_process_before_a_fork(stub: ControlStub) -> None:
    assert said_by(ALONE, stub.url) == "{1}\n"


@pytest.mark.parametrize("when", ["made", "begun"])
def test_a_fork_while_the_loop_is_made_or_begun_holds_up_nobody(when: str) -> None:
    assert said_by(FORKED_AT_THE_FIRST_CALL, when) == "hello\n"


def test_a_forgotten_episode_is_aborted_as_the_interpreter_ends(stub: ControlStub) -> None:
    assert said_by(FORGOTTEN, stub.url) == ""
    assert stub.episodes["ep-0"]["detail"] == "GeneratorExit"


def test_a_child_may_leave_a_membership_too(stub: ControlStub) -> None:
    assert said_by(LEFT_BY_A_CHILD, stub.url) == "left\nleft\n0\n"


async def test_it_works_in_a_thread_that_runs_an_event_loop(stub: ControlStub) -> None:
    with ajet_sdk.episode("t") as episode:
        episode.reward(0.5)
    assert len(ajet_sdk.run(lambda task, episode: 1.0, ["a"], repeat=2).rewards) == 2


async def test_what_the_own_loop_carries_out_ends_before_its_caller_who_is_cancelled() -> None:
    told: list[bool] = []

    async def waits() -> None:
        told.append(LOOP.is_here)
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0.01)
            told.append(LOOP.is_here)

    caller = asyncio.ensure_future(LOOP.carry(waits()))
    await reached(lambda: told)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert told == [True, True]


async def test_what_the_own_loop_carries_out_raises_for_its_caller_and_needs_no_thread(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails() -> None:
        raise ZeroDivisionError(LOOP.is_here)

    def no_thread(_coroutine: Any) -> Any:
        raise RuntimeError("can't start new thread")

    with pytest.raises(ZeroDivisionError, match="True"):
        await LOOP.carry(fails())
    monkeypatch.setattr(LOOP, "begin", no_thread)
    with pytest.raises(ZeroDivisionError, match="False"):
        await LOOP.carry(fails())


def test_each_worker_is_a_thread_that_keeps_what_is_its_own(stub: ControlStub) -> None:
    local, variable = threading.local(), contextvars.ContextVar("variable", default="new")
    seen: list[tuple[int, str]] = []

    def agent(task: str, episode: ajet_sdk.Episode) -> float:
        local.count = getattr(local, "count", 0) + 1
        seen.append((local.count, variable.get()))
        variable.set("known")
        return 1.0

    variable.set("the caller's")
    ajet_sdk.run(agent, ["a"], repeat=3, parallel=1)
    assert seen == [(1, "new"), (2, "known"), (3, "known")]


@pytest.mark.parametrize("error", [StopIteration("end"), SystemExit(3), TimeoutError("late"), asyncio.CancelledError()])
def test_whatever_a_blocking_agent_raises_is_its_result(stub: ControlStub, error: BaseException) -> None:
    def agent(task: str, episode: Any) -> float:
        raise error

    (item,) = ajet_sdk.run(agent, ["a"], repeat=1)
    assert (item.outcome, (item.reason or "").partition(":")[0]) == ("aborted", type(error).__name__)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
@pytest.mark.parametrize("place", ["agent", "tasks", "result"])
def test_what_would_end_a_loop_ends_the_run_alone(stub: ControlStub, error: BaseException, place: str) -> None:
    def at(found: str) -> float:
        if found == place:
            raise error
        return 1.0

    def tasks() -> Iterator[str]:
        yield "a"
        at("tasks")

    def run() -> None:
        ajet_sdk.run(lambda task, episode: at("agent"), tasks(), repeat=1, on_result=lambda result: at("result"))

    if (place, type(error)) == ("agent", SystemExit):
        run()
    else:
        with pytest.raises(type(error)):
            run()
    with ajet_sdk.episode("t") as episode:
        episode.reward(0.5)


def test_the_thread_of_the_loop_cannot_wait_for_itself(stub: ControlStub) -> None:
    episode = ajet_sdk.episode("t")

    async def destroyed() -> None:
        episode.heartbeat()

    with pytest.raises(RuntimeError, match="the thread that carries it out"):
        wait(destroyed())
    episode.close()


def test_a_reward_is_made_a_number_where_the_agent_runs(stub: ControlStub) -> None:
    class Late:
        def __init__(self, episode: ajet_sdk.Episode) -> None:
            self.episode = episode

        def __float__(self) -> float:
            return 0.5 if self.episode.record() else 0.0

    assert ajet_sdk.run(lambda task, episode: Late(episode), ["a"], repeat=1).rewards == [0.5]


def test_what_is_raised_reaches_who_waits_with_its_traceback() -> None:
    async def fails() -> None:
        raise KeyError("deep")

    with pytest.raises(KeyError, match="deep") as caught:
        wait(fails())
    assert caught.traceback[-1].name == "fails"

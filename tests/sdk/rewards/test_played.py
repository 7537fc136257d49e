"""The guide's table of who failed, played for real: `ajet run`, the daemon, a scripted engine, and openai's client."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import ajet_sdk
from ajet_sdk import aio
from ajet_sdk.play import episode as episodes
from tests.kit import cell_agent
from tests.kit.patience import LONG_S, until
from tests.kit.proxy_process import PROXY, ProxyProcess
from tests.kit.rig import Rig
from tests.kit.who_failed import AGENT, NOBODY, ROWS, WORLD
from tests.sdk.conftest import Ajet

pytestmark = pytest.mark.skipif(not PROXY.exists(), reason="needs ajet-proxy in .venv: .ci/setup daemon")

Fault = dict[str, Any]
STATUSES = (500, 503, 429, 401, 403, 404, 408, 409)
WORLD_FAULTS: dict[str, tuple[Fault, bool]] = {
    **{str(status): ({"kind": "status", "status": status}, False) for status in STATUSES},
    "503 to a stream": ({"kind": "status", "status": 503}, True),
    "error event": ({"kind": "error_event", "after": 1}, True),
    "reset": ({"kind": "reset", "after": 40}, False), "reset stream": ({"kind": "reset", "after": 400}, True),
    "cut": ({"kind": "cut", "after": 40}, False), "cut stream": ({"kind": "cut", "after": 400}, True),
    "closed": ({"kind": "silent_close"}, False), "no finish": ({"kind": "no_finish"}, True),
}
"""By its name, what the engine does to a request, and whether that streams."""
AGENT_FAULTS: dict[str, tuple[Fault, bool]] = {
    str(status): ({"kind": "status", "status": status}, False) for status in (400, 413, 422)
}
NO_FAULT: dict[str, tuple[Fault, bool]] = {"nothing": ({}, False)}
FAULTS = {WORLD: WORLD_FAULTS, AGENT: AGENT_FAULTS, NOBODY: NO_FAULT}
OPTIONS = {
    "stdout": ("--reward-from", "stdout"), "file": ("--reward-from", "file"),
    "exit-code": ("--reward-from", "exit-code"), "grader 1": ("--reward-cmd", "echo 1"),
    "grader 0": ("--reward-cmd", "echo 0"), "grader nothing": ("--reward-cmd", "echo nothing"),
    "grader fails": ("--reward-cmd", "echo 2 errors in 0.05s; exit 2"),
}
EVERY_FAULT = ("exit 0", "exit 1")
"""Ends that are played after every fault of the world. The others are played after one that streams and one that does
not."""
FEW = ("500", "cut stream")
RETURNS: dict[str, Any] = {"returns 1": 1.0, "returns 0": 0.0, "returns nothing": None}
FUNCTION_ENDS = (*RETURNS, "raises", "raises another", "gives", "gives, returns 1")


def options_of(end: str) -> tuple[str, ...]:
    named = next((name for name in OPTIONS if name in end), None)
    return OPTIONS.get(named or "", ())


def cell(failed: str, fault: str, ends: str, *, after: str = "") -> dict[str, Any]:
    spoils, stream = FAULTS[failed][fault]
    task = f"{failed}, {fault}, {ends}" + (f", {after}" if after else "")
    return {
        "task": task, "fault": spoils, "stream": stream, "ends": ends, "after": after, "happens": "", "file": "",
    }  # fmt: skip


def cells() -> Iterator[dict[str, Any]]:
    for row in ROWS:
        for ends in row.cells:
            if ends in FUNCTION_ENDS:
                continue  # below
            few = row.failed == WORLD and ends not in EVERY_FAULT
            for fault in FEW if few else FAULTS[row.failed]:
                yield cell(row.failed, fault, ends)


def controls() -> Iterator[dict[str, Any]]:
    """A lost request that was answered after all, and an answer that the agent broke off itself."""
    for ends in EVERY_FAULT:
        for fault in FEW:
            for after in ("repeats", "falls back", "goes on"):
                yield cell(WORLD, fault, ends, after=after)
        slow = {"kind": "slow", "delay_s": 0.05}
        yield cell(NOBODY, "nothing", ends, after="breaks off") | {"fault": slow, "stream": True}


def expected(of: dict[str, Any]) -> tuple[str, float | None, str | None]:
    """The state, reward and cause of a cell's episode, by the table."""
    failed, ends = of["task"].partition(",")[0], of["ends"]
    row = next(row for row in ROWS if row.failed == failed and (of["after"] or ends in row.cells))
    if row.again and not of["after"]:
        return "discarded", None, "infra"
    if row.failed == WORLD and not of["after"]:
        return "ready", 0.25, None
    if ends == "grader fails":
        return "discarded", None, "infra"
    return "ready", 0.0 if ends == "exit 1" else 1.0, None


def played(ajet: Ajet, proxy: ProxyProcess, told: list[dict[str, Any]], path: Path) -> dict[str, Any]:
    """The episode of each cell, by its task. One run plays them all."""
    path.write_text("".join(json.dumps(one) + "\n" for one in told))
    options = (f"--proxy={proxy.url}", "--parallel=2", "--retries=0", *options_of(told[0]["ends"]))
    _, out, err = ajet("run", "--tasks", str(path), "--quiet", *options, "--", sys.executable, cell_agent.__file__)
    assert "Traceback" not in err
    with Rig(proxy.url) as rig:
        known = rig.get("/episodes", params={"limit": 1000}).json()["episodes"]
    wanted = {one["task"] for one in told}
    found = [one for one in known if one["task"] in wanted]
    assert len(found) == len(wanted), f"{out}\n{err}"
    return {one["task"]: one for one in found}


def came(found: dict[str, Any]) -> tuple[str, float | None, str | None]:
    return found["state"], found["reward"], found.get("cause")


ALL = [*cells(), *controls()]


@pytest.mark.parametrize("options", sorted({options_of(one["ends"]) for one in ALL}), ids=" ".join)
def test_every_cell(ajet: Ajet, proxy: ProxyProcess, tmp_path: Path, options: tuple[str, ...]) -> None:
    told = [one for one in ALL if options_of(one["ends"]) == options]
    found = played(ajet, proxy, told, tmp_path / "cells.jsonl")
    assert {task: came(one) for task, one in found.items()} == {one["task"]: expected(one) for one in told}


# ---- the gate, and a daemon that is away

HAPPENS = ("exit 0", "exit 1", "stdout 1", "rewards, exit 1")


def unanswered(proxy: ProxyProcess, found: dict[str, Any]) -> list[str]:
    """Why requests of this episode went unanswered."""
    with Rig(proxy.url) as rig:
        return [lost["reason"] for lost in rig.record(found["episode"])["unanswered"]]


@pytest.mark.parametrize("leaves", ["gives up", ""], ids=["the client gives up", "a 503"])
def test_a_gate_that_holds_a_request_for_too_long(ajet: Ajet, engine: str, tmp_path: Path, leaves: str) -> None:
    """Its client gives up waiting, or the daemon does."""
    hold_s = str(LONG_S) if leaves else "0.2"
    options = ("--gate-hold-s", hold_s)
    with ProxyProcess(engine, tmp_path / "data", options=options) as proxy, Rig(proxy.url) as rig:
        for ends in HAPPENS:
            told = cell(WORLD, "500", ends) | {"fault": None, "happens": "the gate is shut"}
            found = played(ajet, proxy, [told | {"after": leaves}], tmp_path / "cells.jsonl")[told["task"]]
            assert came(found) == expected(told), ends
            assert unanswered(proxy, found) == ["held" if leaves else "unserved"]
            assert rig.post("/gate/open", {"policy_version": 0}).is_success


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_program_that_is_killed_while_it_waits_at_the_gate(
    ajet: Ajet, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: str
) -> None:
    """Its end is seen before the daemon knows that nobody waits any more."""
    monkeypatch.setattr(episodes, "LOOK_S", 2.0)
    told = cell(WORLD, "500", "killed", after="is killed") | {"fault": None, "happens": "the gate is shut"}
    with ProxyProcess(engine, tmp_path / "data", options=("--workers", workers)) as proxy:
        (found,) = played(ajet, proxy, [told], tmp_path / "cells.jsonl").values()
        assert (came(found), unanswered(proxy, found)) == (("discarded", None, "infra"), ["held"])


def test_a_daemon_that_was_away(ajet: Ajet, engine: str, tmp_path: Path) -> None:
    """Nobody could be asked meanwhile, and what the program then did counts for nothing."""
    pid = tmp_path / "pid"
    with ProxyProcess(engine, tmp_path / "data") as proxy:

        def comes_back() -> None:
            proxy.wait(LONG_S)
            until(lambda: not pid.exists())
            proxy.start()

        for ends in HAPPENS:
            told = cell(WORLD, "500", ends) | {"fault": None, "happens": "the daemon is away", "file": str(pid)}
            pid.write_text(str(proxy.pid))
            coming = threading.Thread(target=comes_back)
            coming.start()
            found = played(ajet, proxy, [told], tmp_path / "cells.jsonl")[told["task"]]
            coming.join()
            assert came(found) == expected(told), ends


# ---- functions: `ajet_sdk.run` and its twin


class Careless(Exception):
    """The error that an agent makes of its client's."""


def ask(client: openai.OpenAI, said: Any, *, fault: Fault | None = None, stream: bool = False) -> None:
    """One request, whose answer is read to its end."""
    headers = {"x-stub-fault": json.dumps(fault)} if fault else {}
    answer: Any = client.chat.completions.create(
        model="stub", messages=said, max_tokens=40, stream=stream, extra_headers=headers
    )
    if stream:
        list(answer)


@pytest.mark.parametrize("how", ["threads", "asyncio"])
def test_every_cell_of_functions(proxy: ProxyProcess, how: str) -> None:
    """Everything that the agent returns, raises or gives after each fault, with openai's client."""
    tasks = [
        {"task": f"{how}, {failed}, {fault}, {ends}", "failed": failed, "fault": fault, "ends": ends}
        for failed, faults in FAULTS.items() for fault in faults for ends in FUNCTION_ENDS
    ]  # fmt: skip

    def agent(task: dict[str, str], episode: Any) -> Any:
        fault, stream = FAULTS[task["failed"]][task["fault"]]
        client = shared.with_options(base_url=episode.base_url, api_key=episode.api_key)
        ask(client, cell_agent.WARM)
        try:
            ask(client, cell_agent.ASKED, fault=fault, stream=stream)
        except (openai.OpenAIError, httpx.HTTPError) as error:
            if task["ends"] == "raises":
                raise
            if task["ends"] == "raises another":
                raise Careless("no answer") from error
        if task["ends"].startswith("raises"):
            raise Careless("there was no finish, or nothing failed")
        return RETURNS.get(task["ends"], 1.0)

    def blocking(task: dict[str, str], episode: ajet_sdk.Episode) -> Any:
        value = agent(task, episode)
        if task["ends"].startswith("gives"):
            episode.reward(0.25)
        return None if task["ends"] == "gives" else value

    async def asynchronous(task: dict[str, str], episode: aio.Episode) -> Any:
        value = await asyncio.to_thread(agent, task, episode)
        if task["ends"].startswith("gives"):
            await episode.reward(0.25)
        return None if task["ends"] == "gives" else value

    more: dict[str, Any] = {"repeat": 1, "retries": 0, "parallel": 4, "proxy_url": proxy.url}
    with openai.OpenAI(base_url=proxy.url, api_key="none", max_retries=0) as shared:
        if how == "threads":
            results = ajet_sdk.run(blocking, tasks, **more)
        else:
            results = asyncio.run(aio.run(asynchronous, tasks, **more))
    found = {item.task: (item.outcome, item.reward, item.infra) for item in results}
    assert found == {one["task"]: expected_of_a_function(one["failed"], one["ends"]) for one in tasks}


def expected_of_a_function(failed: str, ends: str) -> tuple[str, float | None, bool]:
    if ends.startswith("gives"):
        return "rewarded", 1.0 if failed != WORLD and ends != "gives" else 0.25, False
    value = RETURNS.get(ends)
    return ("rewarded", value, False) if failed != WORLD and value is not None else ("aborted", None, failed == WORLD)

"""An agent that plays one cell of the guide's table of who failed (`who_failed`), as a program of `ajet run`.

Its task says how its second request fails, by the fault that the scripted engine is to show, and how it ends. Whatever
comes of its requests it leaves unsaid, as careless agents do.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
import urllib.request
from contextlib import closing, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

WARM = [{"role": "user", "content": "say: I am here"}]
ASKED = [{"role": "user", "content": "say: one two three four five six"}]
KEY = {"Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY')}"}
JSON = {"Content-Type": "application/json"}


def ask(said: Any, *, fault: Any = None, stream: bool = False, leaves: str = "") -> None:
    """One request, which it `leaves` after the first line of its answer, or while it waits at the gate."""
    url, body = urlsplit(os.environ["OPENAI_BASE_URL"]), {"model": "stub", "messages": said, "max_tokens": 40}
    headers = KEY | JSON | ({"x-stub-fault": json.dumps(fault)} if fault else {})
    with closing(HTTPConnection(url.netloc)) as connection:
        connection.request("POST", f"{url.path}/chat/completions", json.dumps(body | {"stream": stream}), headers)
        if leaves in ("gives up", "is killed"):
            until_waiting(1)
            if leaves == "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            return
        answer = connection.getresponse()
        answer.readline() if leaves == "breaks off" else answer.read()


def proxy(route: str, body: bytes | None = None, **headers: str) -> Any:
    """The answer of the proxy."""
    request = urllib.request.Request(os.environ["AJET_PROXY_URL"] + route, body, JSON | headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def until_waiting(number: int) -> None:
    """Returns once so many requests wait at the gate."""
    while proxy("/ajet/v1/status")["requests"]["waiting"] != number:
        time.sleep(0.05)


def play(cell: dict[str, Any]) -> None:
    """The requests of a cell. The first is answered, so that there is something to train."""
    ask(WARM)
    if cell["happens"] == "the gate is shut":
        proxy("/ajet/v1/gate/close", b"{}")
    elif cell["happens"] == "the daemon is away":
        os.kill(int(Path(cell["file"]).read_text()), signal.SIGKILL)
    ask(ASKED, fault=cell["fault"], stream=cell["stream"], leaves=cell["after"])
    if cell["after"] == "gives up":
        until_waiting(0)


def go_on(cell: dict[str, Any]) -> None:
    """Does what comes after the request that failed."""
    if cell["after"] == "repeats":
        ask(ASKED, stream=cell["stream"])
    elif cell["after"] == "falls back":
        ask(ASKED, stream=not cell["stream"])
    elif cell["after"] == "goes on":
        more = [{"role": "assistant", "content": "nothing came"}, {"role": "user", "content": "say: go on"}]
        ask([*ASKED, *more])


def give(how: str) -> None:
    """Gives a reward: by the SDK, by the route of the proxy, or by a header."""
    if how.startswith("rewards"):
        import ajet_sdk

        ajet_sdk.reward(0.25)
    elif how.startswith("route"):
        body = b'{"value": 0.25, "final": true, "id": "mine"}'
        proxy(f"/ajet/v1/episodes/{os.environ['AJET_EPISODE']}/rewards", body, **KEY)
    elif how.startswith("header"):
        proxy("/v1/models", None, **KEY, **{"X-AJet-Reward": "0.25"})


def end(how: str) -> None:
    """Ends as the table says: ``stdout 1``, ``file 0, exit 1``, ``killed``."""
    give(how)
    for source, value in re.findall(r"(stdout|file) (\d)", how):
        path = "/dev/stdout" if source == "stdout" else os.environ["AJET_REWARD_FILE"]
        Path(path).write_text(f"{value}\n")
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(int(how.rpartition("exit")[2].removeprefix("-code") or 0) if "exit" in how else 0)


if __name__ == "__main__":
    told = json.loads(os.environ["AJET_TASK_JSON"])
    with suppress(Exception):
        play(told)
    if told["happens"] == "the daemon is away":
        Path(told["file"]).unlink()
    go_on(told)
    end(told["ends"])

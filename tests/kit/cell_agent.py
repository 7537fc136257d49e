"""An agent that plays one cell of the guide's table of who failed (`who_failed`), as a program of `ajet run`.

Its task says how its second request fails, by the fault that the scripted engine is to show, and how it ends. Whatever
its client raises it leaves unsaid, as careless agents do.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

WARM = [{"role": "user", "content": "say: I am here"}]
ASKED = [{"role": "user", "content": "say: one two three four five six"}]


def ask(client: Any, said: Any, *, fault: Any = None, stream: bool = False, stops: bool = False) -> None:
    """One request with the client of openai; with `stops` it breaks off the answer after its first event."""
    headers = {"x-stub-fault": json.dumps(fault)} if fault else {}
    answer = client.chat.completions.create(
        model="stub", messages=said, max_tokens=40, stream=stream, extra_headers=headers
    )
    if stream:
        for _ in answer:
            if stops:
                answer.close()
                return


def play(client: Any, cell: dict[str, Any]) -> None:
    """The requests of a cell. The first is answered, so that there is something to train."""
    ask(client, WARM)
    happen(cell["happens"], cell["file"])
    if cell["timeout"] is not None:
        client = client.with_options(timeout=cell["timeout"])
    ask(client, ASKED, fault=cell["fault"], stream=cell["stream"], stops=cell["after"] == "breaks off")


def happen(what: str, path: str) -> None:
    """What happens to the daemon before the request: its gate is shut, or it is killed, whose process id is in a
    file."""
    if what == "the gate is shut":
        url = os.environ["AJET_PROXY_URL"] + "/ajet/v1/gate/close"
        urllib.request.urlopen(urllib.request.Request(url, b"{}", {"Content-Type": "application/json"})).read()
    elif what == "the daemon is away":
        os.kill(int(Path(path).read_text()), signal.SIGKILL)


def go_on(client: Any, cell: dict[str, Any]) -> None:
    """What comes after the request that failed."""
    if cell["after"] == "repeats":
        ask(client, ASKED, stream=cell["stream"])
    elif cell["after"] == "falls back":
        ask(client, ASKED, stream=not cell["stream"])
    elif cell["after"] == "goes on":
        more = [{"role": "assistant", "content": "nothing came"}, {"role": "user", "content": "say: go on"}]
        ask(client, [*ASKED, *more])


def give(how: str) -> None:
    if how.startswith("rewards"):
        import ajet_sdk

        ajet_sdk.reward(0.25)
    elif how.startswith(("route", "header")):
        route = f"/ajet/v1/episodes/{os.environ['AJET_EPISODE']}/rewards"
        url = os.environ["AJET_PROXY_URL"] + (route if how.startswith("route") else "/v1/models")
        headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
        body = b'{"value": 0.25, "final": true, "id": "mine"}' if how.startswith("route") else None
        more = {"X-AJet-Reward": "0.25"} if body is None else {}
        urllib.request.urlopen(urllib.request.Request(url, body, headers | more)).read()


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
    import openai

    told = json.loads(os.environ["AJET_TASK_JSON"])
    with openai.OpenAI(max_retries=0) as model:
        with suppress(Exception):
            play(model, told)
        if told["happens"] == "the daemon is away":
            Path(told["file"]).unlink()
        go_on(model, told)
    end(told["ends"])

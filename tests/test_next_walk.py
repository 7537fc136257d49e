"""The walk from the agent's socket to the gradient: each file on it names the next one, and one call really takes it.

The call is the second turn of an episode, streamed, before an engine that reads history as other tokens than it
sampled: so that its prompt is spliced. Its reward, its lease and a training step follow. The last file of the walk
needs verl: `tests/trainer/engine/test_updates.py` and `tests/e2e/training` enter it.
"""

from __future__ import annotations

import ast
import asyncio
import json
import re
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from ajet_proxy.io.storage.journal import Journal
from ajet_trainer.batch import Row
from ajet_trainer.config import Config
from ajet_trainer.keeper import Keeper
from ajet_trainer.link import Link
from ajet_trainer.progress import Progress
from ajet_trainer.step import Run
from tests.kit.engine_stub import EngineStub
from tests.kit.source import PACKAGES, ROOT, tree
from tests.kit.still_learner import StillLearner
from tests.proxy.serving import Client, serving

FIRST, LAST = "ajet_proxy/io/capture/front.py", "ajet_trainer/backends/verl/trainer.py"
MOST_FILES = 66
"""Which the plainest streamed call touches; a dozen are the rooms of the ledger that listen to what it makes true."""
SENT_S = 0.4
"""After this long it is noted that the client was sent the end, which belongs to a call."""


def walk() -> list[str]:
    """The files from `FIRST` on, by what their docstrings end with."""
    walked = [FIRST]
    while (step := next_of(walked[-1])) != "the gradient.":
        assert (ROOT / step).is_file(), f"{walked[-1]} leads to {step}, which is not there"
        assert step not in walked, f"{walked[-1]} leads back to {step}"
        walked.append(step)
    return walked


def next_of(module: str) -> str:
    """Where the last line of the module's docstring leads."""
    text = ast.get_docstring(tree(Path(module))) or ""
    last = text.splitlines()[-1] if text else ""
    assert last.startswith("Next: "), f"the docstring of {module} does not end with 'Next: <path>'"
    return last.removeprefix("Next: ")


class Entered:
    """The project's files in the order in which something in them is first called, in this thread and in those that
    begin later. A context; importing a file does not enter it."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self._known: dict[str, str | None] = {}

    def __enter__(self) -> Entered:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _note(self, frame: FrameType, event: str, _argument: Any) -> None:
        code = frame.f_code
        if event != "call" or code.co_filename in self._known or code.co_name == "<module>":
            return
        path = Path(code.co_filename)
        own = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PACKAGES
        self._known[code.co_filename] = None
        if own:
            self.files.append(str(path.relative_to(ROOT)))


class Learner(StillLearner):
    """Counts the rows that it is given, where a gradient would be made of them."""

    rows = 0

    def train(self, rows: Sequence[Row]) -> dict[str, float]:
        self.rows += len(rows)
        return super().train(rows)


async def turn(client: Client, episode: str, messages: list[dict[str, str]]) -> None:
    """Ask by a stream, and take the answer and another question into the history."""
    body = {"model": "stub", "messages": messages, "stream": True, "max_tokens": 5}
    answer = await client.ask("POST", f"/e/{episode}/v1/chat/completions", body)
    assert answer.status == 200
    events = [json.loads(line[6:]) for line in answer.body.decode().split("\n\n") if line.startswith("data: {")]
    said = "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "again"}]


async def in_a_thread(work: Callable[[], None]) -> None:
    """In one that begins now, so that it is profiled."""
    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


@pytest.fixture
def no_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out what the daemon does once a second, beside calls, or once for many of them: it is no part of a
    call."""
    monkeypatch.setattr("ajet_proxy.daemon.TICK_S", 3600.0)
    monkeypatch.setattr("ajet_proxy.io.ledger_port.local.SENT_S", 3600.0)
    monkeypatch.setattr("ajet_proxy.io.engines.watch.EngineWatch.run", lambda _: asyncio.sleep(3600.0))


async def told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return once the journal's thread has looked for more twice: by then the daemon has heard of all that is written,
    and none of that falls into the next call. It waits in no thread of the loop's, which would be kept, unprofiled."""
    looks, looked = threading.Semaphore(0), Journal._next_batch

    def look(journal: Journal) -> list[bytes] | None:
        looks.release()
        return looked(journal)

    monkeypatch.setattr(Journal, "_next_batch", look)
    for _ in range(2):
        while not looks.acquire(blocking=False):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.usefixtures("no_tick")
async def test_a_call_enters_the_files_of_the_walk_in_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner, entered = Learner(), Entered()
    config = Config(
        model="m", model_name="stub", groups=1, group_size=1, min_group_size=1, total_steps=1,
        run_dir=str(tmp_path / "run"),
    )
    async with EngineStub(drift=True) as stub, serving(tmp_path / "data", upstream=(stub.url,)) as client:
        with closing(Link(client.app.url)) as link:
            keeper = Keeper(link, 300.0)
            progress = Progress(config.run_dir, config.total_steps, lambda line: None)
            run = Run(config, link, learner, keeper, progress)
            await in_a_thread(run.start)
            messages = [{"role": "user", "content": "hello"}]
            await turn(client, "ep", messages)
            await told(monkeypatch)
            with entered:
                await turn(client, "ep", messages)
                await client.control("POST", "/episodes/ep/rewards", {"value": 1.0, "final": True})
                await in_a_thread(run.step)
            await in_a_thread(run.close)
    assert (learner.version, learner.rows) == (1, 1), "one timeline, because the history went out as it was sampled"
    walked = walk()
    assert walked[-1] == LAST
    assert [file for file in entered.files if file in walked] == walked[:-1]


@pytest.mark.usefixtures("no_tick")
async def test_the_plainest_streamed_call_touches_few_files(tmp_path: Path) -> None:
    """The first turn of a chat, whose path names its episode, without a key, on a connection that is kept."""
    entered = Entered()
    async with EngineStub() as stub, serving(tmp_path, upstream=(stub.url,)) as client:
        await turn(client, "before", [{"role": "user", "content": "hi"}])
        await asyncio.sleep(SENT_S)
        with entered:
            await turn(client, "plain", [{"role": "user", "content": "hi"}])
            await asyncio.sleep(SENT_S)
    files = set(entered.files) - {"ajet_sdk/sockets.py"}  # if a slow machine let the connection lapse, it makes another
    assert len(files) <= MOST_FILES, "\n".join(sorted(files))


def test_the_page_tells_the_same_walk() -> None:
    page = (ROOT / "docs/architecture.md").read_text().partition("## From socket to gradient")[2].partition("\n## ")[0]
    assert re.findall(r"^\d+\. `(\S+)`: ", page, re.MULTILINE) == walk()

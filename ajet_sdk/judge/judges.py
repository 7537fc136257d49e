"""The kinds of judges: a model behind an OpenAI-compatible address, and a function or a command of the user.

Invariant: a judge that fails, or does not answer as it must, gives no verdict at all.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import os
import random
import runpy
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from ajet_sdk.address import server
from ajet_sdk.bodies import KEY_PREFIX
from ajet_sdk.client import PASSING, Client, NoReply, Reply, Send, refused
from ajet_sdk.errors import AjetError, BadRequest
from ajet_sdk.limits import MAX_SPENT
from ajet_sdk.play.program import SECRETS
from ajet_sdk.play.threads import ThreadHands
from ajet_sdk.rewards.blame import reason_of
from ajet_sdk.rewards.judging import Budget, Verdict, count, is_value, request, seen, vote

T = TypeVar("T")
Episode = Mapping[str, Any]
"""One of the judgements of a lease."""
Verdicts = Mapping[str | None, Verdict]
"""By call; of the episode under None."""
LEASE_S = 600.0
"""Seconds of a lease. What is judged by then is posted; else somebody else may judge it."""
ASK_S, CALL_S = 120.0, 3600.0
"""For a model to answer, and for a function or a command of the user."""
BACKOFF_FIRST_S, BACKOFF_MAX_S = 1.0, 60.0
CHAT = "/chat/completions"
REFUSED = (401, 403, 404)
"""Answers by which no vote will ever come."""


class Failed(Exception):
    """No verdict came. The episode is left as it is, and awaits a judgement."""


class Away(Failed):
    """Nobody was there to judge, which says nothing about the episode."""


class Rest:
    """Waits that may be cut off when all is to end: what waits holds nothing that could be finished."""

    def __init__(self) -> None:
        self.ending = False
        self._tasks = set[asyncio.Task[Any]]()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Whatever waits does so in here."""
        task = asyncio.current_task()
        assert task is not None
        if self.ending:
            raise asyncio.CancelledError
        self._tasks.add(task)
        try:
            yield
        finally:
            self._tasks.discard(task)

    def end(self) -> None:
        """Cuts off what waits, and what will."""
        self.ending = True
        for task in self._tasks:
            task.cancel()


class Judge(Protocol):
    """Who judges. ``digest`` tells by which rubric or code."""

    digest: str

    async def judge(self, episode: Episode) -> Verdicts:
        """The verdicts on the calls of an episode; `Failed` if there are none."""

    async def compare(self, episodes: Sequence[Episode]) -> Mapping[str, Verdict]:
        """One verdict on each episode of a group, which are shown at once; `Failed` if there are none."""


class Function:
    """``score(episode)`` of the user returns a number from -1 to 1 for each call that it judges, or None. To compare
    episodes it gets all of a group, and returns a number for each of these. It has `timeout` seconds."""

    def __init__(self, score: Callable[[Any], Any], digest: str, timeout: float = CALL_S) -> None:
        self._score, self.digest, self._timeout = score, digest, timeout

    @classmethod
    def of_command(cls, command: str, mark: Mapping[str, str] = {}, timeout: float = CALL_S) -> Function:
        """A shell runs it with what it gets as JSON on its standard input; its last line has what is returned. It has
        the variables of `mark`."""
        return cls(partial(printed_by, command, mark, timeout), digest_of(command.encode()), timeout)

    async def judge(self, episode: Episode) -> Verdicts:
        return await self._said(episode, "calls of the episode", {call["call"] for call in episode["calls"]})

    async def compare(self, episodes: Sequence[Episode]) -> dict[str, Verdict]:
        return await self._said([*episodes], "episodes of the group", {one["episode"] for one in episodes})

    async def _said(self, argument: Any, of: str, names: Set[str]) -> dict[Any, Verdict]:
        def verdicts(given: Any) -> dict[Any, Verdict]:
            found = self._score(given)
            if not isinstance(found, Mapping) or not found.keys() <= names or not all(map(is_value, found.values())):
                raise Failed(f"it must say a number from -1 to 1 for {of}, not {repr(found)[:80]}")
            return {name: Verdict(float(value), f"code {self.digest}") for name, value in found.items()}

        return await called(verdicts, argument, self._timeout)


def printed_by(command: str, mark: Mapping[str, str], timeout: float, argument: Any) -> Any:
    """The JSON in the last line that `command` prints. It is killed, with what it started, after `timeout` seconds."""
    env = {name: value for name, value in os.environ.items() if name not in SECRETS} | dict(mark)
    given = json.dumps(argument).encode() + b"\n"
    with subprocess.Popen(
        command, shell=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, start_new_session=True
    ) as process:
        try:
            out, _ = process.communicate(given, timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return json.loads(out.strip().rpartition(b"\n")[2])


class Model:
    """A model at `address` (``http://host:port/v1``, with ``#NAME`` where several are served), asked `votes` times.

    While it is away, `rest` is what waits for it, and `say` is told once. It judges itself only if they `insist`.
    """

    def __init__(
        self, address: str, rubric: str, *, votes: int, budget: Budget, words: bool, say: Callable[[str], None],
        rest: Rest, insist: bool = False, timeout: float = ASK_S,
    ) -> None:
        url, _, self.name = address.partition("#")
        key = os.environ.get("OPENAI_API_KEY", "").strip()
        if server(url) is None:
            raise BadRequest(f"the model's address must look like http://127.0.0.1:8001/v1, not {url!r}", param="model")
        self._url, self._key = url.rstrip("/"), "" if key.startswith(KEY_PREFIX) else key
        self._rubric, self.digest = rubric, digest_of(rubric.encode())
        self._votes, self._budget, self._words, self._say = votes, budget, words, say
        self._rest, self._client, self._away, self._insist = rest, Client(self._url), False, insist
        self._timeout = timeout

    async def open(self) -> str:
        """Finds out which model answers, and returns its name."""
        if not self.name:
            try:
                names = [str(one["id"]) for one in (await self._send("GET", "/models", None)).json()["data"]]
            except (Failed, KeyError, TypeError) as error:
                said = "is no OpenAI-compatible address, or is away: its /models tells no names"
                raise AjetError(f"{self._url} {said}") from error
            if len(names) != 1:
                raise BadRequest(f"{self._url} serves {', '.join(names) or 'no model'}: name one as {self._url}#NAME")
            (self.name,) = names
        return self.name

    async def close(self) -> None:
        await self._client.aclose()

    def refuse_itself(self, trained: Collection[str]) -> None:
        """`BadRequest` if it is one of the models that are `trained`."""
        if self.name in trained and not self._insist:
            said = f"{self.name} is trained here, and would judge itself: name another, or insist by --self"
            raise BadRequest(said, param="model")

    async def judge(self, episode: Episode) -> Verdicts:
        self.refuse_itself({call.get("model") for call in episode["calls"]})
        out: dict[str | None, Verdict] = {}
        for call in episode["calls"]:
            shown = seen(call, words=self._words, said=episode.get("feedback"))
            out.update(await self.ask({call["call"]: shown}))
        return out

    async def compare(self, episodes: Sequence[Episode]) -> dict[str, Verdict]:
        self.refuse_itself({call.get("model") for one in episodes for call in one["calls"]})
        return await self.ask({one["episode"]: self._whole(one) for one in episodes})

    def _whole(self, episode: Episode) -> Mapping[str, Any]:
        turns = [seen(call, words=self._words, said=episode.get("feedback")) for call in episode["calls"]]
        return turns[0] if len(turns) == 1 else {f"turn {place}": turn for place, turn in enumerate(turns, 1)}

    async def ask(self, items: Mapping[str, Mapping[str, Any]]) -> dict[str, Verdict]:
        """The verdicts on `items`, which each vote is shown in another order."""
        votes, reason = list[dict[str, float] | None](), "its answers are no verdicts"
        for _ in range(self._votes):
            order = random.sample(list(items), len(items))
            shown, word = [items[key] for key in order], secrets.token_hex(8)
            body = request(self._rubric, self.name, shown, word, self._votes)
            try:
                reply = await self._send("POST", CHAT, json.dumps(body).encode())
            except Away as away:
                if await self._is_there():
                    raise Failed("it answers others, and not this") from away
                raise
            said, tokens = read(reply)
            self._budget.use(tokens)
            votes.append(vote(said, order))
            if reply.status != 200:
                reason = f"it answered {refused(reply).message[:200]}"
        verdicts = count(votes, f"{self.name}; rubric {self.digest}")
        if verdicts is None:
            raise Failed(f"{sum(one is not None for one in votes)} of {len(votes)} votes are valid: {reason}")
        return verdicts

    async def _is_there(self) -> bool:
        """Tell whether the model answers a request that is as small as can be."""
        body = request(self._rubric, self.name, [{"question": "", "answer": ""}], secrets.token_hex(8), 1)
        outcome = await self._client.attempt(self._request("POST", CHAT, json.dumps(body).encode()))
        if isinstance(outcome, NoReply) or outcome.status in PASSING:
            return False
        self._budget.use(read(outcome)[1])
        return True

    def _request(self, method: str, path: str, content: bytes | None) -> Send:
        headers = {"content-type": "application/json"}
        headers |= {"authorization": f"Bearer {self._key}"} if self._key else {}
        return Send(method, self._url + path, headers, content, self._timeout)

    async def _send(self, method: str, path: str, content: bytes | None) -> Reply:
        """The answer of the endpoint; `Away` if it has been away for as long as a lease lasts."""
        until, pause = time.monotonic() + LEASE_S, BACKOFF_FIRST_S
        while True:
            outcome = await self._client.attempt(self._request(method, path, content))
            away = isinstance(outcome, NoReply) or outcome.status in PASSING
            if away != self._away:
                reason = outcome.reason if isinstance(outcome, NoReply) else outcome.status
                self._say(f"the judge is away ({reason}): what awaits it waits" if away else "the judge is back")
            self._away = away
            if isinstance(outcome, Reply) and not away:
                if outcome.status in REFUSED:
                    raise AjetError(f"the judge at {self._url} answered {refused(outcome).message}")
                return outcome
            if time.monotonic() > until:
                raise Away("the judge was away")
            with self._rest():
                await asyncio.sleep(pause * (1 + 0.5 * self._client.chance()))
            pause = min(BACKOFF_MAX_S, 2 * pause)


def read(reply: Reply) -> tuple[Any, int]:
    """The answer of a model, and the tokens of it: one for four bytes where it does not tell, or what cannot be."""
    said, used = None, len(reply.content) // 4
    with suppress(ValueError, KeyError, IndexError, TypeError, RecursionError, OverflowError):
        found = json.loads(reply.content)
        said = found["choices"][0]["message"]["content"]
        told = int(found["usage"]["total_tokens"])
        used = told if 0 <= told <= MAX_SPENT else used
    return said, used


async def called(function: Callable[[Any], T], argument: Any, timeout: float) -> T:
    """The result of a function of the user, which is called in a thread of its own; `Failed` if it raises, ends its
    thread, or has not returned after `timeout` seconds: then its thread is left to it. It may change its `argument`,
    which is a copy."""
    hands = ThreadHands()
    try:
        found, error = await asyncio.wait_for(hands.play(lambda: function(copy.deepcopy(argument))), timeout)
    except asyncio.TimeoutError:
        raise Failed(f"no answer in {timeout:g} s") from None
    finally:
        hands.free()
    if isinstance(error, (KeyboardInterrupt, Failed)):
        raise error
    if error is not None:
        raise Failed(reason_of(error)) from error
    made: T = found
    return made


def load(word: str) -> tuple[Callable[[Any], Any], str]:
    """The function that a word such as ``judge.py:score`` names, and the digest of its file."""
    path, _, name = word.rpartition(":")
    if not path or not Path(path).is_file():
        raise BadRequest(f"{word!r} is not FILE.py:FUNCTION of a file that is there")
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        found = runpy.run_path(path).get(name)
    except (Exception, SystemExit) as error:
        raise BadRequest(f"{path} cannot be run: {reason_of(error)}") from error
    if not callable(found):
        raise BadRequest(f"{path} has no function {name!r}")
    return found, digest_of(Path(path).read_bytes())


def digest_of(data: bytes) -> str:
    """Names a rubric, or code."""
    return hashlib.sha256(data).hexdigest()[:12]

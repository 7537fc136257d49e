"""Questions to an engine about its answer: as the agent asked, within a limit of time, and never an error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from multidict import CIMultiDict

from ajet_proxy.core.protocol.chat import CHAT
from ajet_proxy.core.protocol.exchange import Exchange
from ajet_proxy.core.protocol.request import JsonBody
from ajet_proxy.core.trajectory.call import Captured, Lost, Unscored
from ajet_proxy.core.trajectory.samples import merge_calls
from ajet_proxy.io.engines import questions
from ajet_proxy.io.engines.engine import EngineState
from ajet_proxy.io.engines.questions import Facts, Questions
from ajet_proxy.io.engines.upstream import EngineRequest, Engines, Upstream
from ajet_proxy.io.engines.vllm import Vllm
from ajet_proxy.io.runtime.clock import Clock
from ajet_proxy.io.runtime.metrics import Metrics
from tests.kit.engine_stub import EngineStub, Fault
from tests.kit.engine_tokens import IM_END, logprob_of
from tests.proxy.io.capture.test_continuity import talk, turn
from tests.proxy.io.front import Front

pytestmark = pytest.mark.usefixtures("flying")

CHOICE = Unscored(0, "stub", (1, 2, 3), (7, 8, 9), "stop")
DEAD = "http://127.0.0.1:9"
TURNS = 5


@asynccontextmanager
async def asking(
    url: str, *, model: str = "stub", metrics: Metrics | None = None, read_timeout: float = 0.0, **asked: Any
) -> AsyncIterator[Questions]:
    """Questions about the answer to a chat that `asked` this."""
    engines, metrics = Engines({"": (url,)}, lambda _: (), dict), metrics or Metrics()
    upstream = Upstream(engines, clock=Clock(), metrics=metrics, read_timeout=read_timeout)
    async with upstream.connected():
        yield questions_with(Facts(upstream, metrics, None), model, asked)  # type: ignore[arg-type]


def questions_with(facts: Facts, model: str, asked: dict[str, Any]) -> Questions:
    headers = CIMultiDict({"Content-Type": "application/json", "X-Site": "north"})
    request = EngineRequest("POST", "/v1/chat/completions?x=1", headers, b"{}", model, "ep-1")
    return Questions(facts, request, Exchange(CHAT, JsonBody(json.dumps(asked).encode())), None)  # type: ignore[arg-type]


# --- logprobs of tokens that came without


async def scored(url: str, **how: Any) -> Captured | Lost:
    async with asking(url, **how) as asked:
        return await asked.score(CHOICE)


async def test_the_engine_that_sampled_is_asked_with_the_exact_ids() -> None:
    metrics = Metrics()
    async with EngineStub() as stub:
        outcome = await scored(stub.url, metrics=metrics, cache_salt="s")
    (asked,) = stub.requests
    assert (asked.path, asked.headers["x-site"]) == ("/v1/completions", "north")
    assert (asked.body["prompt"], asked.body["model"], asked.body["cache_salt"]) == ([1, 2, 3, 7, 8], "stub", "s")
    ids = (1, 2, 3, 7, 8, 9)
    expected = tuple(logprob_of(ids[:place], ids[place]) for place in (3, 4, 5))
    assert outcome == Captured(0, "stub", (1, 2, 3), (7, 8, 9), expected, "stop", scored=True)
    assert "ajet_scored_calls_total 1" in metrics.render()


async def test_a_request_that_named_no_model_is_scored_by_the_one_that_answered() -> None:
    async with EngineStub() as stub:
        outcome = await scored(stub.url, model="")
    assert isinstance(outcome, Captured) and stub.requests[0].body["model"] == "stub"


@pytest.mark.parametrize("kind", ["status", "cut", "silent_close", "hang", "no_logprobs", "not_vllm", "dead"])
async def test_an_engine_that_does_not_score_costs_a_call_and_no_error(kind: str) -> None:
    async with EngineStub() as stub:
        stub.faults += [] if kind == "dead" else [Fault(kind, after=30)]
        limit = 0.5 if kind == "hang" else 0.0
        assert await scored(DEAD if kind == "dead" else stub.url, read_timeout=limit) == Lost(0, "not_scored")


async def test_an_engine_that_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "SCORE_S", 0.2)
    async with EngineStub() as stub:
        stub.faults.append(Fault("hang"))
        assert await scored(stub.url) == Lost(0, "not_scored")


async def test_why_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with EngineStub() as stub:
        stub.faults.append(Fault("status", status=400))
        await scored(stub.url)
        await scored(DEAD)
    assert json.dumps("the engine is unwell")[1:-1] in caplog.text
    assert "cannot be reached" in caplog.text


# --- whether an answer was cut


async def cut(url: str, *last: int, model: str = "stub", **asked: Any) -> list[bool]:
    """Tell whether answers that end with each of `last` were cut, asked one after the other."""
    async with asking(url, model=model, **asked) as about:
        answers = [Captured(0, "stub", (1, 2), (5, token), (-0.5, -0.5), "tool_calls") for token in last]
        return [await about.is_cut(answer) for answer in answers]


@pytest.mark.parametrize("model", ["stub", ""])
async def test_what_ends_with_no_stop_token_was_cut_by_whatever_limit(model: str) -> None:
    async with EngineStub() as stub:
        assert await cut(stub.url, 9, IM_END, 9, IM_END, model=model) == [True, False, True, False]
        assert [body["logit_bias"] for _, body in stub.sampling.asked] == [{"9": 100.0}, {str(IM_END): 100.0}]
        assert all(body["model"] == "stub" for _, body in stub.sampling.asked)


async def test_an_engine_that_says_nothing_leaves_it_to_the_limit_of_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(questions, "STOP_S", 0.2)
    async with EngineStub() as stub:
        for status, may in ((400, None), (200, asyncio.Event())):
            stub.sampling.status, stub.sampling.may = status, may
            assert await cut(stub.url, 9, max_tokens=2) == [True]
            assert await cut(stub.url, 9, max_tokens=3) == await cut(stub.url, 9) == [False]
    assert await cut(DEAD, 9, max_tokens=2) == [True]


async def test_all_choices_of_an_answer_wait_no_longer_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "STOP_S", 0.2)
    async with EngineStub() as stub:
        stub.sampling.may = asyncio.Event()
        assert await cut(stub.url, *range(20, 30), max_tokens=2) == [True] * 10
        assert len(stub.sampling.asked) == 1


@pytest.mark.parametrize(("asked", "stop_string", "learned"), [
    ({}, None, {("stub", 9)}), ({"stop_token_ids": [8]}, None, {("stub", 9)}), ({"stop_token_ids": [9]}, None, set()),
    ({}, "END", set()), ({"stop": "END"}, None, set()),
])  # fmt: skip
def test_a_token_that_a_request_names_stops_no_other_answer(
    asked: dict[str, Any], stop_string: str | None, learned: set[tuple[str, int]]
) -> None:
    facts = Facts(None, Metrics(), None)  # type: ignore[arg-type]
    ended = Captured(0, "stub", (1, 2), (5, 9), (-0.5, -0.5), "stop", stop_string=stop_string)
    questions_with(facts, "stub", asked).stopped(ended)
    assert facts.stops == learned


# --- `repair`: text, where a prompt goes on from no call


def asked(stub: EngineStub) -> int:
    return sum(request.path == "/detokenize" for request in stub.requests)


async def test_an_engine_that_drifts_gives_one_sample_all_the_same() -> None:
    async with EngineStub(drift=True) as stub, Front(stub.url, continuity="off") as front:
        front.store.state.weights.merge_policy = "repair"
        await talk(front, TURNS)
        assert len(merge_calls(front.calls, "strict")) == TURNS
        (sample,) = merge_calls(front.calls, "repair")
        assert sample.repaired_tokens > 0
        assert [call.same_text and call.same_text[0] for call in front.calls] == [
            None, *(call.call for call in front.calls[:-1])
        ]  # fmt: skip


async def test_what_a_prompt_repeats_is_asked_once_for_all_of_its_choices() -> None:
    async with EngineStub(drift=True) as stub, Front(stub.url, continuity="off") as front:
        front.store.state.weights.merge_policy = "repair"
        past = await talk(front, 2)
        once = asked(stub)
        await turn(front, past[:-1], n=5)
        assert once < asked(stub) < 3 * once
        assert len({call.same_text for call in front.calls[1:]}) == 1 and front.calls[1].same_text


async def test_what_is_read_of_a_request_is_read_once_for_all_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have a bias on every token of a vocabulary."""
    read: list[object] = []
    for module, name in ((questions, "effective"), (questions.ending, "stop_ids")):
        was = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *said, name=name, was=was: (read.append(name), was(*said))[1])
    async with EngineStub() as stub, Front(stub.url) as front:
        for stop_token_ids in ([], [IM_END]):
            await turn(front, [{"role": "user", "content": "hi"}], n=5, temperature=0.5, stop_token_ids=stop_token_ids)
        assert sorted(map(str, read)) == ["effective"] * 2 + ["stop_ids"] * 2
        assert [call.sampling for call in front.calls] == [{"logprobs": "raw", "temperature": 0.5}] * 10


@pytest.mark.parametrize(("policy", "drift"), [("strict", True), ("repair", False)])
async def test_nothing_is_asked_where_it_would_change_nothing(policy: str, drift: bool) -> None:
    async with EngineStub(drift=drift) as stub, Front(stub.url, continuity="off") as front:
        front.store.state.weights.merge_policy = policy  # type: ignore[assignment]
        await talk(front, TURNS)
        assert asked(stub) == 0
        assert {call.same_text for call in front.calls} == {None}


@pytest.mark.parametrize("limit", [300.0, 0.0])
async def test_an_engine_that_gives_no_text_costs_nothing_but_the_joint(
    limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(questions, "TEXT_S", limit)
    async with EngineStub(drift=True, tokenizes=not limit) as stub, Front(stub.url, continuity="off") as front:
        front.store.state.weights.merge_policy = "repair"
        await talk(front, 2)
        assert len(front.calls) == 2 and not front.lost
        assert {call.same_text for call in front.calls} == {None}


@pytest.mark.parametrize("body", [b"?", b"[" * 100_000, b"5", b'{"data":5}'])
async def test_an_engine_that_answers_something_else_tells_nothing(body: bytes) -> None:
    async def say(*_: object) -> tuple[int, bytes]:
        return 200, body

    engine = Vllm(say)
    assert await engine.probe() == EngineState([], None, "")
    assert (await engine.tokenize({}), await engine.stops("m", 5)) == (None, None)
    assert await engine.score(CHOICE, "m", None) == Lost(0, "not_scored")
    with pytest.raises(ValueError, match="without a text"):
        await engine.detokenize("m", (1,))

"""A real vLLM behind the real proxy, in every dialect: the agent cannot tell the difference, and what is stored is what
was sampled.

Every request of the tables goes to the engine directly and through the proxy, with one seed or greedily. The stored ids
and logprobs must be those that the engine reports to a direct question, and a forward pass of the same weights in
transformers must give the same logprobs. ``/v1/messages`` is made of the engine's chat route, beside its own. What the
engine tells no logprobs for on ``/v1/responses`` is scored, and must come out as if it had told them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from ajet_proxy.core.protocol.anthropic.request import to_chat
from ajet_proxy.core.protocol.anthropic.template import Template
from ajet_sdk.frame import decode_batch
from tests.e2e.conftest import Pair
from tests.kit import compare, compare_events, messages_cases, record_responses, record_tapes, tapes, wire
from tests.kit.messages_cases import COUNT, COUNTED, PLAIN, REFUSED, THOUGHTFUL
from tests.kit.record_responses import LOGPROBS, PASSED_THROUGH
from tests.kit.record_tapes import CHAT, COMPLETIONS
from tests.kit.rig import Rig

pytestmark = pytest.mark.slow

MESSAGES, RESPONSES = messages_cases.ROUTE, record_responses.ROUTE
AGAIN = 4
"""So often is a request asked once more."""
NARROWED = ("structured_outputs", "tool_choice", "bad_words", "min_tokens", "text", "logit_bias")
"""Fields that change the distribution that is sampled from."""
UNKNOWN = ("response.reasoning_part.added", "response.reasoning_part.done")
"""Events of vLLM's own, which the library passes on as it finds them."""
Pairs = tuple[Pair, Pair]
Answers = Mapping[str, wire.Answer]


@dataclass(frozen=True, slots=True)
class Case:
    """A request, for the engine with a reasoning parser if it `thinks`. It is captured as a call, or refused: then with
    the `place` that the proxy names if it says so itself."""

    name: str
    route: str
    body: dict[str, Any]
    thinks: bool = False
    captured: bool = True
    place: str | None = None

    @property
    def kind(self) -> str:
        return self.route.partition("?")[0]

    def same_answer(self, seen: bytes, own: bytes) -> None:
        (compare if self.kind in (CHAT, COMPLETIONS) else compare_events).same_answer(seen, own)


def cases() -> Iterator[Case]:
    told = tapes.load()
    for thinks, table in ((False, record_tapes.cases()), (True, record_tapes.reasoning_cases())):
        for name, route, body in table:
            captured = thinks or (name not in record_tapes.PASSED and told[name, tapes.AGENT].status == 200)
            yield Case(name, route, body, thinks, captured)
    for thinks, rows in ((False, record_responses.CASES), (True, record_responses.REASONING_CASES)):
        for name, route, body in record_responses.cases(rows):
            yield Case(f"responses-{name}", route, body, thinks, not name.startswith(("error", *PASSED_THROUGH)))
    route = f"{MESSAGES}?beta=true"
    for thinks, rows in ((False, PLAIN), (True, THOUGHTFUL)):
        yield from (Case(f"messages-{name}", route, body, thinks) for name, body in messages_cases.cases(rows))
    for name, body in messages_cases.cases({name: body for name, (body, _) in REFUSED.items()}):
        place = REFUSED[name.removesuffix("-stream")][1]
        yield Case(f"messages-{name}", route, body, captured=False, place=place)
    yield from (Case(f"messages-{name}", COUNT, {"model": "tiny", **body}, captured=False)
                for name, body in COUNTED.items())  # fmt: skip


CASES = {case.name: case for case in cases()}
CAPTURED = [case for case in CASES.values() if case.captured]


def each(of: Callable[[Case], bool]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", list(filter(of, CASES.values())), ids=lambda case: case.name)


def ask(url: str, route: str, body: dict[str, Any]) -> wire.Answer:
    return asyncio.run(wire.send(url + route, body=body))


def call_of(case: Case, pairs: Pairs) -> list[dict[str, Any]]:
    with Rig(pairs[case.thinks].proxy.url) as rig:
        found: list[dict[str, Any]] = rig.record(case.name)["calls"]
        return found


@pytest.fixture(scope="module")
def through(pairs: Pairs) -> Answers:
    """Every case asked through the proxy, each in an episode that bears its name. One request after another: the
    engine's numbers may depend on what else is in a batch."""
    urls = {name: f"{pairs[case.thinks].proxy.url}/e/{name}" for name, case in CASES.items()}
    return {name: ask(urls[name], case.route, case.body) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def direct(pairs: Pairs) -> Answers:
    return {name: ask(pairs[case.thinks].engine.url, case.route, case.body) for name, case in CASES.items()}


@each(lambda case: case.place is None)
def test_the_agent_sees_the_engines_own_answer(case: Case, through: Answers, direct: Answers, pairs: Pairs) -> None:
    """The engine may differ from itself: where it is busy it puts several tokens into one event, and its parsers then
    cut the text otherwise; which of two equal beams wins depends on what it has cached. But not every time."""
    seen, own, pair = through[case.name], direct[case.name], pairs[case.thinks]
    for number in range(AGAIN + 1):
        try:
            assert (seen.status, seen.headers["content-type"]) == (own.status, own.headers["content-type"])
            case.same_answer(seen.body, own.body)
            break
        except AssertionError:
            if number == AGAIN:
                raise
            seen = ask(f"{pair.proxy.url}/e/{case.name}-again-{number}", case.route, case.body)
            own = ask(pair.engine.url, case.route, case.body)
    ours = {header for header in seen.headers if header.startswith("x-ajet-")}
    assert ours == {"x-ajet-episode", "x-ajet-call"} or not case.captured
    assert own.status == 200 or not case.captured


@each(lambda case: case.place is not None)
def test_what_the_engine_would_drop_or_call_wrong_is_refused_with_its_place(
    case: Case, through: Answers, direct: Answers
) -> None:
    from anthropic.types import ErrorResponse

    seen, own = through[case.name], direct[case.name]
    assert seen.status == 400
    error = ErrorResponse.model_validate_json(seen.body).error
    assert error.type == "invalid_request_error" and error.message.startswith(f"{case.place}: ")
    assert own.status == 200 or "type" not in own.json(), "the engine says it as well, or better"


@dataclass(frozen=True, slots=True)
class Reported:
    """An engine's own word on an answer. On ``/v1/responses`` it has logprobs of texts alone."""

    prompt: list[int]
    token_ids: list[int]
    logprobs: list[float] | None
    ends: tuple[str, ...]


@pytest.fixture(scope="module")
def reported(pairs: Pairs) -> Callable[[Case], list[Reported]]:
    """The reports of the engine on a direct question for ids and logprobs, not streamed; each is asked once."""

    @cache
    def of(name: str) -> list[Reported]:
        case = CASES.get(name) or CASES[f"{name}-stream"]
        url = pairs[case.thinks].engine.url
        plain = {key: value for key, value in case.body.items() if not key.startswith("stream")}
        if case.kind == RESPONSES:
            asked = record_responses.as_proxy(name.removeprefix("responses-"), plain)
            told = ask(url, RESPONSES, asked).json()
            texts = [item["content"][0]["logprobs"] for item in told["output"] if item["type"] == "message"]
            prompt, ids = (told[f"{side}_messages"][0]["tokens"] for side in ("input", "output"))
            logprobs = [row["logprob"] for row in texts[0]] if texts else None
            end = "length" if told["status"] == "incomplete" else "stop"
            return [Reported(prompt, ids, logprobs, (end, "tool_calls"))]
        if case.kind == MESSAGES:
            asked = to_chat(plain, Template()) | {"return_token_ids": True, "logprobs": True}
            told = ask(url, CHAT, asked).json()
        else:
            told = ask(url, case.route, record_tapes.as_proxy(name, case.route, plain)).json()
        return [
            Reported(
                told.get("prompt_token_ids") or choice["prompt_token_ids"], choice["token_ids"],
                (rows := compare.rows(choice["logprobs"]))[len(rows) - len(choice["token_ids"]) :],
                (choice["finish_reason"],),
            )
            for choice in told["choices"]
        ]  # fmt: skip

    return lambda case: of(case.name.removesuffix("-stream"))


@each(lambda case: case.captured)
def test_what_is_stored_is_what_the_engine_reports(
    case: Case, through: Answers, reported: Callable[[Case], list[Reported]], pairs: Pairs
) -> None:
    calls, told = call_of(case, pairs), reported(case)
    assert [call["call"] for call in calls] == through[case.name].headers["x-ajet-call"].split(",")
    for call, one in zip(calls, told, strict=True):
        assert call["complete"] is True
        assert (call["prompt_token_ids"], call["token_ids"]) == (one.prompt, one.token_ids)
        assert one.logprobs is None or call["logprobs"] == pytest.approx(one.logprobs, abs=1e-5)
        assert ("scored_logprobs" in call["altered"]) == (one.logprobs is None)
        assert call["finish_reason"] in one.ends


@each(lambda case: case.captured and case.kind in (MESSAGES, RESPONSES))
def test_the_providers_library_reads_every_answer(case: Case, through: Answers) -> None:
    """By its own types, without the lenience that its client has."""
    from anthropic.types import Message, RawMessageStreamEvent
    from openai.types.responses import Response, ResponseStreamEvent
    from pydantic import TypeAdapter

    whole: Any = Message if case.kind == MESSAGES else Response
    piece: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent if case.kind == MESSAGES else ResponseStreamEvent)
    body = through[case.name].body
    if not case.name.endswith("-stream"):
        assert whole.model_validate_json(body).id
        return
    events = [signed(event) for event in compare_events.events(body) if event["type"] not in UNKNOWN]
    assert [piece.validate_python(event).type for event in events] == [event["type"] for event in events]


def signed(event: dict[str, Any]) -> dict[str, Any]:
    """vLLM opens a thinking block without the empty signature that Anthropic's has."""
    block = event.get("content_block", {})
    return event | {"content_block": {"signature": "", **block}} if block.get("type") == "thinking" else event


def test_every_kind_of_answer_was_there(direct: Answers) -> None:
    """Otherwise nothing above was put to the test. A greedy tiny model ends no tool call: see the client's test."""
    assert direct["chat-reasoning"].json()["choices"][0]["message"]["reasoning"]
    assert b'"reasoning":"' not in direct["chat-quiet-stream"].body
    names = (*PLAIN, *THOUGHTFUL)
    told = {name: list(compare_events.events(direct[f"messages-{name}-stream"].body)) for name in names}
    blocks = {event["content_block"]["type"] for name in told for event in told[name] if "content_block" in event}
    assert blocks == {"text", "thinking", "tool_use"}
    ends = {name: events[-2]["delta"] for name, events in told.items()}
    assert {end["stop_reason"] for end in ends.values()} == {"end_turn", "max_tokens", "stop_sequence"}
    assert ends["stop"]["stop_sequence"] == direct["messages-stop"].json()["stop_sequence"] == "lo t"


def test_a_forward_pass_gives_the_same_logprobs(through: Answers, pairs: Pairs) -> None:
    """Scored logprobs are always the model's own; others are where nothing narrowed the choice."""
    import torch
    from transformers import AutoModelForCausalLM

    models = [AutoModelForCausalLM.from_pretrained(pair.engine.model, dtype=torch.float32) for pair in pairs]
    worst, tokens = {True: 0.0, False: 0.0}, {True: 0, False: 0}
    for case in (case for case in CAPTURED if case.kind != MESSAGES):
        for call in call_of(case, pairs):
            prompt, sampled, scored = call["prompt_token_ids"], call["token_ids"], "scored_logprobs" in call["altered"]
            if scored or not any(field in case.body for field in NARROWED):
                with torch.no_grad():
                    logits = models[case.thinks](torch.tensor([prompt + sampled])).logits[0, len(prompt) - 1 : -1]
                mine = torch.log_softmax(logits.double(), -1)[torch.arange(len(sampled)), torch.tensor(sampled)]
                off = float((mine - torch.tensor(call["logprobs"]).double()).abs().max())
                worst[scored], tokens[scored] = max(worst[scored], off), tokens[scored] + len(sampled)
    assert tokens[True] > 400 and tokens[False] > 300
    assert worst[True] < 1e-3 and worst[False] < 1e-3


def test_an_answer_that_fills_the_models_context_is_scored_to_its_last_token(pairs: Pairs) -> None:
    """Logprobs are asked for, but not how many of them: vLLM then tells none, not even beside text."""
    body = {"model": "tiny", "input": "a " * 2025, "include": [LOGPROBS], "top_logprobs": None, "ignore_eos": True}
    full = Case("full", RESPONSES, body)
    assert ask(f"{pairs[0].proxy.url}/e/full", RESPONSES, body).json()["status"] == "incomplete"
    (call,) = call_of(full, pairs)
    assert len(call["prompt_token_ids"]) + len(call["token_ids"]) == 2048
    assert call["complete"] is True and "scored_logprobs" in call["altered"]


def test_a_stored_response_is_fetched_as_the_agent_knows_it(pairs: Pairs) -> None:
    asked = {"model": "tiny", "input": "say hello", "seed": 7, "max_output_tokens": 4}
    for body in (asked, asked | {"include": [LOGPROBS], "top_logprobs": 1, "enable_response_messages": True}):
        seen = []
        for url in (f"{pairs[0].proxy.url}/e/fetched", pairs[0].engine.url):
            answer = ask(url, RESPONSES, body)
            seen += [answer.body, asyncio.run(wire.send(f"{url}{RESPONSES}/{answer.json()['id']}", method="GET")).body]
        for again in seen[1:]:
            compare_events.same_answer(seen[0], again)


# --- plain clients, which know a base URL and a key


def chats(opened: dict[str, Any]) -> None:
    from openai import OpenAI

    messages: list[dict[str, Any]] = [{"role": "user", "content": "guess a number"}]
    with OpenAI(base_url=opened["base_url"], api_key=opened["api_key"]) as client:
        for turn in range(3):
            stream = client.chat.completions.create(  # type: ignore[call-overload]
                model="tiny", messages=messages, max_tokens=8, seed=turn, stream=True
            )
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "higher"}]


def uses_tools_in_messages(opened: dict[str, Any]) -> None:
    from anthropic import Anthropic

    options: dict[str, Any] = {
        "model": "tiny", "tools": [messages_cases.TOOL], "tool_choice": {"type": "any"}, "max_tokens": 1000,
    }  # fmt: skip
    history: list[Any] = [{"role": "user", "content": "guess a number"}]
    with Anthropic(base_url=opened["env"]["ANTHROPIC_BASE_URL"], api_key=opened["api_key"]) as client:
        with client.messages.stream(messages=history, **options) as stream:
            final: Any = stream.get_final_message()
        for _ in range(2):
            uses = [block for block in final.content if block.type == "tool_use"]
            assert final.stop_reason == "tool_use" and all(set(use.input) == {"number"} for use in uses)
            results = [{"type": "tool_result", "tool_use_id": use.id, "content": "higher"} for use in uses]
            said = [block.model_dump(exclude_none=True) for block in final.content]
            history += [{"role": "assistant", "content": said}, {"role": "user", "content": results}]
            if len(history) < 5:
                final = client.messages.create(messages=history, **options)
        counted = client.messages.count_tokens(model="tiny", messages=history)
        told = client.messages.create(model="tiny", max_tokens=8, messages=history)
    assert (told.usage.input_tokens, told.usage.output_tokens) == (counted.input_tokens, 8)


def uses_tools_in_responses(opened: dict[str, Any]) -> None:
    from openai import OpenAI

    history: list[Any] = [{"role": "user", "content": "guess a number"}]
    options: dict[str, Any] = {
        "model": "tiny", "tools": [record_responses.TOOL], "tool_choice": "required", "max_output_tokens": 200,
    }  # fmt: skip
    with OpenAI(base_url=opened["base_url"], api_key=opened["api_key"]) as client:
        for turn in range(2):
            with client.responses.stream(input=history, extra_body={"seed": turn}, **options) as stream:
                assert [event.type for event in stream][-1] == "response.completed"
                final = stream.get_final_response()
            calls = [item for item in final.output if item.type == "function_call"]
            history += [item.model_dump(include={"type", "call_id", "name", "arguments"}) for item in calls]
            history += [{"type": "function_call_output", "call_id": call.call_id, "output": "higher"} for call in calls]
        said = client.responses.create(model="tiny", input=history, max_output_tokens=8, extra_body={"seed": 2})
    assert said.usage is not None and said.usage.output_tokens == 8


@pytest.mark.parametrize(("talks", "scored"), [
    (chats, [False] * 3), (uses_tools_in_messages, [False] * 3), (uses_tools_in_responses, [True, True, False]),
], ids=["chat", "messages", "responses"])  # fmt: skip
def test_a_plain_client_talks_for_several_turns(
    talks: Callable[[dict[str, Any]], None], scored: list[bool], pairs: Pairs
) -> None:
    """Then reward, lease, and the samples it became."""
    with Rig(pairs[0].proxy.url) as rig:
        opened = rig.post("/episodes", {"task": talks.__name__, "model": "tiny"}).json()
        talks(opened)
        assert rig.reward(opened["episode"], 0.25).is_success
        record = rig.record(opened["episode"])
        assert ["scored_logprobs" in call["altered"] for call in record["calls"]] == scored
        batch = decode_batch(rig.post("/batches/lease", {"group_size": 1, "model": "tiny"}).content)
        [episode] = [item for group in batch.groups for item in group.episodes]
        assert (episode.episode, episode.reward, episode.task) == (opened["episode"], 0.25, talks.__name__)
        spans = [(call, sample.token_ids[a:b]) for sample in episode.samples for call, a, b in sample.spans]
        assert sorted(spans) == sorted((call["call"], tuple(call["token_ids"])) for call in record["calls"])
        assert rig.post(f"/batches/{batch.batch}/ack", {"policy_version": 1}).is_success
        assert rig.record(opened["episode"])["state"] == "trained"

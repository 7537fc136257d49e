"""``/v1/messages`` of a real vLLM beside the proxy's, which it makes of the chat route: see `test_capture_vllm`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest

from ajet_proxy.core.protocol.anthropic.request import to_chat
from ajet_proxy.core.protocol.anthropic.template import Template
from ajet_sdk.frame import decode_batch
from tests.e2e import asking
from tests.e2e.conftest import Pair
from tests.kit import compare_messages, wire
from tests.kit.messages_cases import COUNT, COUNTED, PLAIN, REFUSED, ROUTE, THOUGHTFUL, TOOL, cases
from tests.kit.rig import Rig

pytestmark = pytest.mark.slow

THINKING = dict(cases(THOUGHTFUL))
CAPTURED = dict(cases(PLAIN)) | THINKING
DENIED = dict(cases({name: body for name, (body, _) in REFUSED.items()}))
ROUTES = dict.fromkeys(CAPTURED | DENIED, f"{ROUTE}?beta=true") | dict.fromkeys(COUNTED, COUNT)
CASES = CAPTURED | DENIED | {name: {"model": "tiny", **body} for name, body in COUNTED.items()}
SAME = [name for name in CASES if name not in DENIED or REFUSED[name.removesuffix("-stream")][1] is None]
Pairs = tuple[Pair, Pair]


def pair_of(name: str, pairs: Pairs) -> Pair:
    return pairs[name in THINKING]


@pytest.fixture(scope="module")
def through(pairs: Pairs) -> dict[str, wire.Answer]:
    """Every case asked through the proxy, each in an episode that bears its name."""
    return asyncio.run(ask_all(lambda name: f"{pair_of(name, pairs).proxy.url}/e/{name}"))


@pytest.fixture(scope="module")
def direct(pairs: Pairs) -> dict[str, wire.Answer]:
    return asyncio.run(ask_all(lambda name: pair_of(name, pairs).engine.url))


async def ask_all(url: Callable[[str], str]) -> dict[str, wire.Answer]:
    return {name: await wire.send(url(name) + ROUTES[name], body=body) for name, body in CASES.items()}


@pytest.fixture(scope="module")
def reported(pairs: Pairs) -> Callable[[str], Any]:
    """What the engine's chat route says of a case, ids and logprobs included; asked once, not streamed."""

    @cache
    def ask(case: str) -> Any:
        asked = to_chat(CASES[case], Template()) | {"return_token_ids": True, "logprobs": True}
        return asyncio.run(wire.send(f"{pair_of(case, pairs).engine.url}/v1/chat/completions", body=asked)).json()

    return lambda name: ask(name.removesuffix("-stream"))


@pytest.mark.parametrize("name", SAME)
def test_the_agent_sees_the_engines_own_answer(
    name: str, through: dict[str, wire.Answer], direct: dict[str, wire.Answer], pairs: Pairs
) -> None:
    assert (direct[name].status == 200) == (name in CAPTURED or name == "count")
    pair = pair_of(name, pairs)
    asking.once_alike(
        partial(asking.the_agent_sees, named=name in CAPTURED, same=compare_messages.same_answer),
        (through[name], direct[name]),
        lambda number: asking.both(name, number, pair.proxy.url, pair.engine.url, ROUTES[name], CASES[name]),
    )


@pytest.mark.parametrize("name", [name for name in DENIED if name not in SAME])
def test_what_the_engine_would_drop_or_call_wrong_is_refused_with_its_place(
    name: str, through: dict[str, wire.Answer], direct: dict[str, wire.Answer]
) -> None:
    from anthropic.types import ErrorResponse

    seen, (_, place) = through[name], REFUSED[name.removesuffix("-stream")]
    assert place is not None
    assert seen.status == 400
    error = ErrorResponse.model_validate_json(seen.body).error
    assert error.type == "invalid_request_error" and error.message.startswith(f"{place}: ")
    own = direct[name]
    assert own.status == 200 or "type" not in own.json(), "the engine says it as well, or better"


@pytest.mark.parametrize("name", CAPTURED)
def test_what_is_stored_is_what_the_engine_reports(
    name: str, through: dict[str, wire.Answer], reported: Callable[[str], Any], pairs: Pairs
) -> None:
    with Rig(pair_of(name, pairs).proxy.url) as rig:
        (call,) = rig.record(name)["calls"]
    told = reported(name)
    (choice,) = told["choices"]
    assert call["complete"] is True and call["call"] == through[name].headers["x-ajet-call"]
    assert call["prompt_token_ids"] == told["prompt_token_ids"]
    assert call["token_ids"] == choice["token_ids"]
    assert call["logprobs"] == pytest.approx([row["logprob"] for row in choice["logprobs"]["content"]], abs=1e-5)
    assert call["finish_reason"] == choice["finish_reason"]


@pytest.mark.parametrize("name", CAPTURED)
def test_the_anthropic_library_reads_every_answer(name: str, through: dict[str, wire.Answer]) -> None:
    """By its own types, without the lenience that its client has."""
    from anthropic.types import Message, RawMessageStreamEvent
    from pydantic import TypeAdapter

    body = through[name].body
    if name.endswith("-stream"):
        reader: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
        kinds = [reader.validate_python(signed(event)).type for event in compare_messages.events(body)]
        assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    else:
        assert Message.model_validate_json(body).type == "message"


def signed(event: dict[str, Any]) -> dict[str, Any]:
    """vLLM opens a thinking block without the empty signature that Anthropic's has."""
    block = event.get("content_block", {})
    return event | {"content_block": {"signature": "", **block}} if block.get("type") == "thinking" else event


def test_every_kind_of_answer_was_there(direct: dict[str, wire.Answer]) -> None:
    """Otherwise nothing above was put to the test. A greedy tiny model ends no tool call: see the client's test."""
    told = {name: list(compare_messages.events(direct[f"{name}-stream"].body)) for name in (*PLAIN, *THOUGHTFUL)}
    blocks = {event["content_block"]["type"] for name in told for event in told[name] if "content_block" in event}
    assert blocks == {"text", "thinking", "tool_use"}
    ends = {name: events[-2]["delta"] for name, events in told.items()}
    assert {end["stop_reason"] for end in ends.values()} == {"end_turn", "max_tokens", "stop_sequence"}
    assert ends["stop"]["stop_sequence"] == direct["stop"].json()["stop_sequence"] == "lo t"


def test_the_plain_client_uses_tools_over_several_turns(pairs: Pairs) -> None:
    """The Anthropic client, which knows a base URL and a key; then reward, lease, and the samples it became."""
    from anthropic import Anthropic

    with Rig(pairs[0].proxy.url) as rig:
        opened = rig.post("/episodes", {"task": "messages", "model": "tiny"}).json()
        base_url = opened["env"]["ANTHROPIC_BASE_URL"]
        options: dict[str, Any] = {"model": "tiny", "tools": [TOOL], "tool_choice": {"type": "any"}, "max_tokens": 1000}
        history: list[Any] = [{"role": "user", "content": "guess a number"}]
        with Anthropic(base_url=base_url, api_key=opened["api_key"]) as client:
            for streamed in (True, False):
                if streamed:
                    with client.messages.stream(messages=history, **options) as stream:
                        final: Any = stream.get_final_message()
                else:
                    final = client.messages.create(messages=history, **options)
                uses = [block for block in final.content if block.type == "tool_use"]
                assert final.stop_reason == "tool_use" and all(set(use.input) == {"number"} for use in uses)
                history += [
                    {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in final.content]},
                    {"role": "user", "content": [
                        {"type": "tool_result", "tool_use_id": use.id, "content": "higher"} for use in uses
                    ]},
                ]  # fmt: skip
            counted = client.messages.count_tokens(model="tiny", messages=history)
            said = client.messages.create(model="tiny", max_tokens=8, messages=history)
        assert (said.usage.input_tokens, said.usage.output_tokens) == (counted.input_tokens, 8)
        assert rig.reward(opened["episode"], 0.25).is_success
        record = rig.record(opened["episode"])
        batch = decode_batch(rig.post("/batches/lease", {"group_size": 1, "model": "tiny"}).content)
        [episode] = [item for group in batch.groups for item in group.episodes]
        spans = [(call, sample.token_ids[a:b]) for sample in episode.samples for call, a, b in sample.spans]
        assert sorted(spans) == sorted((call["call"], tuple(call["token_ids"])) for call in record["calls"])
        assert len(record["calls"]) == 3
        assert rig.post(f"/batches/{batch.batch}/ack", {"policy_version": 1}).is_success


def test_the_plain_client_sees_errors_as_its_own(pairs: Pairs) -> None:
    import anthropic

    proxy = pairs[0].proxy.url
    with anthropic.Anthropic(base_url=f"{proxy}/e/wrong", api_key="none", max_retries=0) as client:
        asked: dict[str, Any] = {"max_tokens": 8, "messages": [{"role": "user", "content": "hello"}]}
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(model="nobody", **asked)
        with pytest.raises(anthropic.BadRequestError, match="mcp_servers"):
            client.messages.create(model="tiny", extra_body={"mcp_servers": [{}]}, **asked)

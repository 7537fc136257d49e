"""``/v1/responses`` of a real vLLM behind the real proxy: see `test_capture_vllm`.

What the engine tells no logprobs for is scored, and must come out as if it had told them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest

from ajet_sdk.frame import decode_batch
from tests.e2e import asking
from tests.e2e.conftest import Engine, Pair
from tests.kit import compare_responses, wire
from tests.kit.proxy_process import ProxyProcess
from tests.kit.record_responses import LOGPROBS, PASSED_THROUGH, REASONING_CASES, ROUTE, TOOL, as_proxy, cases
from tests.kit.rig import Rig

pytestmark = pytest.mark.slow

PLAIN, THINKING = dict(cases()), dict(cases(REASONING_CASES))
CASES = PLAIN | THINKING
CAPTURED = [name for name in CASES if not name.startswith(("error", *PASSED_THROUGH))]
NARROWED = ("structured_outputs", "text", "logit_bias")
UNKNOWN = ("response.reasoning_part.added", "response.reasoning_part.done")
"""Events of vLLM's own, which the library passes on as it finds them."""
Pairs = tuple[Pair, Pair]


def pair_of(name: str, pairs: Pairs) -> Pair:
    return pairs[name in THINKING]


def record(name: str, pairs: Pairs) -> Any:
    """The one call of a case."""
    with Rig(pair_of(name, pairs).proxy.url) as rig:
        (call,) = rig.record(name)["calls"]
    return call


@pytest.fixture(scope="module")
def proxy(pairs: Pairs) -> ProxyProcess:
    return pairs[0].proxy


@pytest.fixture(scope="module")
def rig(proxy: ProxyProcess) -> Iterator[Rig]:
    with Rig(proxy.url) as hands:
        yield hands


@pytest.fixture(scope="module")
def through(pairs: Pairs) -> dict[str, wire.Answer]:
    """Every case asked through the proxy, each in an episode that bears its name."""
    return asyncio.run(ask_all(lambda name: f"{pair_of(name, pairs).proxy.url}/e/{name}"))


@pytest.fixture(scope="module")
def direct(pairs: Pairs) -> dict[str, wire.Answer]:
    return asyncio.run(ask_all(lambda name: pair_of(name, pairs).engine.url))


async def ask_all(url: Callable[[str], str]) -> dict[str, wire.Answer]:
    return {name: await wire.send(url(name) + ROUTE, body=body) for name, body in CASES.items()}


@pytest.fixture(scope="module")
def reported(pairs: Pairs) -> Callable[[str], Any]:
    """What the engine says itself of the answer to a case, ids and logprobs included; asked once, not streamed."""

    @cache
    def ask(case: str) -> Any:
        return asyncio.run(wire.send(pair_of(case, pairs).engine.url + ROUTE, body=as_proxy(case, CASES[case]))).json()

    return lambda name: ask(name.removesuffix("-stream"))


@pytest.mark.parametrize("name", CASES)
def test_the_agent_sees_the_engines_own_answer(
    name: str, through: dict[str, wire.Answer], direct: dict[str, wire.Answer], pairs: Pairs
) -> None:
    pair = pair_of(name, pairs)
    asking.once_alike(
        partial(asking.the_agent_sees, named=name in CAPTURED, same=compare_responses.same_answer),
        (through[name], direct[name]),
        lambda number: asking.both(name, number, pair.proxy.url, pair.engine.url, ROUTE, CASES[name]),
    )



@pytest.mark.parametrize("name", CAPTURED)
def test_the_openai_library_reads_every_answer(name: str, through: dict[str, wire.Answer]) -> None:
    """By its own types, without the lenience that its client has."""
    from openai.types.responses import Response, ResponseStreamEvent
    from pydantic import TypeAdapter

    body = through[name].body
    if name.endswith("-stream"):
        reader: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
        events = [event for event in compare_responses.events(body) if event["type"] not in UNKNOWN]
        assert [reader.validate_python(event).type for event in events] == [event["type"] for event in events]
    else:
        assert Response.model_validate_json(body).object == "response"


@pytest.mark.parametrize("name", CAPTURED)
def test_what_is_stored_is_what_the_engine_reports(
    name: str, through: dict[str, wire.Answer], reported: Callable[[str], Any], pairs: Pairs
) -> None:
    told, call = reported(name), record(name, pairs)
    assert call["complete"] is True and call["call"] == through[name].headers["x-ajet-call"]
    assert call["prompt_token_ids"] == told["input_messages"][0]["tokens"]
    assert call["token_ids"] == told["output_messages"][0]["tokens"]
    texts = [item["content"][0]["logprobs"] for item in told["output"] if item["type"] == "message"]
    if texts:
        assert call["logprobs"] == pytest.approx([row["logprob"] for row in texts[0]], abs=1e-5)
    assert ("scored_logprobs" in call["altered"]) == (not texts)
    assert call["finish_reason"] in ("length" if told["status"] == "incomplete" else "stop", "tool_calls")


def logprobs_of(model: Any, prompt: list[int], sampled: list[int]) -> Any:
    """What a forward pass of the same weights in transformers says of `sampled`."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([prompt + sampled])).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.double(), -1)[torch.arange(len(sampled)), torch.tensor(sampled)]


def test_a_forward_pass_gives_the_same_logprobs(through: dict[str, wire.Answer], pairs: Pairs) -> None:
    """Scored logprobs are always the model's own; others are where no grammar narrowed the choice."""
    import torch
    from transformers import AutoModelForCausalLM

    models = [AutoModelForCausalLM.from_pretrained(pair.engine.model, dtype=torch.float32) for pair in pairs]
    worst = {True: 0.0, False: 0.0}
    tokens = {True: 0, False: 0}
    for name in CAPTURED:
        call = record(name, pairs)
        scored = "scored_logprobs" in call["altered"]
        if scored or not any(field in CASES[name] for field in NARROWED):
            mine = logprobs_of(models[name in THINKING], call["prompt_token_ids"], call["token_ids"])
            off = float((mine - torch.tensor(call["logprobs"]).double()).abs().max())
            worst[scored] = max(worst[scored], off)
            tokens[scored] += len(call["token_ids"])
    assert tokens[True] > 400 and tokens[False] > 100
    assert worst[True] < 1e-3 and worst[False] < 1e-3


def test_an_answer_that_fills_the_models_context_is_scored_to_its_last_token(proxy: ProxyProcess, rig: Rig) -> None:
    """Logprobs are asked for, but not how many of them: vLLM then tells none, not even beside text."""
    body = {"model": "tiny", "input": "a " * 2025, "include": [LOGPROBS], "top_logprobs": None, "ignore_eos": True}
    answer = asyncio.run(wire.send(f"{proxy.url}/e/full{ROUTE}", body=body))
    assert answer.json()["status"] == "incomplete"
    (call,) = rig.record("full")["calls"]
    assert len(call["prompt_token_ids"]) + len(call["token_ids"]) == 2048
    assert call["complete"] is True and "scored_logprobs" in call["altered"]


def test_the_plain_client_uses_tools_over_several_turns(proxy: ProxyProcess, rig: Rig) -> None:
    """The OpenAI client, which knows a base URL and a key; then reward, lease, and the samples it became."""
    from openai import OpenAI

    opened = rig.post("/episodes", {"task": "responses", "model": "tiny"}).json()
    client = OpenAI(base_url=opened["base_url"], api_key=opened["api_key"])
    history: list[Any] = [{"role": "user", "content": "guess a number"}]
    options: dict[str, Any] = {"model": "tiny", "tools": [TOOL], "tool_choice": "required", "max_output_tokens": 200}
    for turn in range(2):
        with client.responses.stream(input=history, extra_body={"seed": turn}, **options) as stream:
            kinds = [event.type for event in stream]
            final = stream.get_final_response()
        assert kinds[-1] == "response.completed"
        calls = [item for item in final.output if item.type == "function_call"]
        history += [item.model_dump(include={"type", "call_id", "name", "arguments"}) for item in calls]
        history += [{"type": "function_call_output", "call_id": call.call_id, "output": "higher"} for call in calls]
    said = client.responses.create(model="tiny", input=history, max_output_tokens=8, extra_body={"seed": 2})
    client.close()
    assert said.usage is not None and said.usage.output_tokens == 8
    assert rig.reward(opened["episode"], 0.25).is_success
    record = rig.record(opened["episode"])
    assert [("scored_logprobs" in call["altered"]) for call in record["calls"]] == [True, True, False]
    batch = decode_batch(rig.post("/batches/lease", {"group_size": 1, "model": "tiny"}).content)
    [episode] = [item for group in batch.groups for item in group.episodes]
    spans = [(call, sample.token_ids[a:b]) for sample in episode.samples for call, a, b in sample.spans]
    assert sorted(spans) == sorted((call["call"], tuple(call["token_ids"])) for call in record["calls"])
    assert rig.post(f"/batches/{batch.batch}/ack", {"policy_version": 1}).is_success


def test_a_stored_response_is_fetched_as_the_agent_knows_it(pairs: Pairs) -> None:
    asked = {"model": "tiny", "input": "say hello", "seed": 7, "max_output_tokens": 4}
    for body in (asked, asked | {"include": [LOGPROBS], "top_logprobs": 1, "enable_response_messages": True}):
        seen = []
        for url in (f"{pairs[0].proxy.url}/e/fetched", pairs[0].engine.url):
            answer = asyncio.run(wire.send(url + ROUTE, body=body))
            seen += [answer.body, asyncio.run(wire.send(f"{url}{ROUTE}/{answer.json()['id']}", method="GET")).body]
        for again in seen[1:]:
            compare_responses.same_answer(seen[0], again)


def test_a_response_continues_the_one_before_it(proxy: ProxyProcess, vllm: Engine, rig: Rig) -> None:
    """The engine keeps the history: the second prompt holds the first turn, through the proxy as its very tokens."""
    first = {"model": "tiny", "input": "say hello", "seed": 7, "max_output_tokens": 12}
    told = []
    for url in (f"{proxy.url}/e/chained", vllm.url):
        before = asyncio.run(wire.send(url + ROUTE, body=first)).json()
        second = first | {"input": "again", "previous_response_id": before["id"]}
        after = asyncio.run(wire.send(url + ROUTE, body=second)).json()
        assert after["previous_response_id"] == before["id"]
        told.append(after["usage"]["input_tokens"])
        assert told[-1] > before["usage"]["input_tokens"] + 12
    one, two = rig.record("chained")["calls"]
    assert two["complete"] is True and len(two["prompt_token_ids"]) == told[0]
    history = one["prompt_token_ids"] + one["token_ids"]
    assert two["continuity"] in ("exact", "same") and two["prompt_token_ids"][: len(history)] == history

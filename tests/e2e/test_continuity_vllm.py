"""On-policy continuity on real vLLM, in three families of chat templates: long conversations of words that drift, told
in messages and in items.

What is forced by ``structured_outputs`` is sampled in pieces that no tokenizer would write, because the tiny model
knows no better; what is sampled freely is bytes that are no UTF-8. Both come back as text, which the engine reads as
other tokens. With continuity not one turn drifts; without it, on the same words, some do.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest

from tests.e2e.conftest import served
from tests.kit import wire
from tests.kit.proxy_process import ProxyProcess
from tests.kit.record_tapes import CALL, CHAT, REASONING
from tests.kit.rig import Rig

pytestmark = pytest.mark.slow

TOOL = {"type": "function", "function": {"name": "guess", "parameters": {"type": "object"}}}
FORCED = (
    " ", "\n\n", "hello  world ", "\thello\n", "é日😀", "👩‍🔬e\u0301", "guess<|im_end|>\n", "<|eot_id|>x[INST]",
    "no </think> yes\u00a0\u2028",
)  # fmt: skip
"""Answers, one a turn; between them the model says what it likes."""
WORDS = (" hello", "\n", "", "guess  <|im_start|>", "é 😀", "<think>no</think>", "[INST]", "higher\n\n")
"""The words of the user, turn by turn."""

PARSERS = {"thinking": "qwen3", "misled": "deepseek_r1"}
"""Of the families that think, the reasoning parsers: one that keeps to its turn, and one that takes the last end of
reasoning anywhere in the prompt for that of the answer to come."""


@dataclass(frozen=True, slots=True)
class Family:
    """A running engine whose chat template is of one family, with a proxy before it and one that repairs instead.
    ``thought`` is what its model thinks before it answers, as a regular expression."""

    name: str
    url: str
    on: ProxyProcess
    off: ProxyProcess

    @property
    def thought(self) -> str:
        return "<think>hello\\n[é日]</think>" if self.name in PARSERS else ""


@pytest.fixture(scope="module", params=["chatml", "llama", "thinking"])
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Family]:
    folder = tmp_path_factory.mktemp(request.param)
    with ExitStack() as stack:
        if request.param == "chatml":
            url = request.getfixturevalue("vllm").url
        else:
            parser = PARSERS.get(request.param)
            options = ("--reasoning-parser", parser, *REASONING[2:]) if parser else ()
            url = stack.enter_context(served(folder, options, family="thinking" if parser else request.param)).url
        repairs = ("--continuity", "off", "--merge-policy", "repair")
        on = stack.enter_context(ProxyProcess(url, folder / "on"))
        off = stack.enter_context(ProxyProcess(url, folder / "off", options=repairs))
        yield Family(request.param, url, on, off)
        assert "Traceback" not in on.errors() + off.errors()


def ask(url: str, episode: str, messages: list[dict[str, Any]], **body: Any) -> dict[str, Any]:
    """One turn; the assistant's message as a client puts it together."""
    asked = {"model": "tiny", "messages": messages, "temperature": 1.0, "max_tokens": 60} | body
    answer = asyncio.run(wire.send(f"{url}/e/{episode}{CHAT}", body=asked))
    assert answer.status == 200, answer.body
    if not body.get("stream"):
        message: dict[str, Any] = answer.json()["choices"][0]["message"]
        return message
    out: dict[str, Any] = {"role": "assistant", "content": "", "reasoning": "", "tool_calls": []}
    for event in answer.events()[:-1]:
        for choice in event["choices"]:
            _add(out, choice["delta"])
    return {name: value for name, value in out.items() if value or name == "content"}


def _add(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for name in ("content", "reasoning"):
        message[name] += delta.get(name) or ""
    for part in delta.get("tool_calls") or ():
        if "id" in part:
            function = {"name": part["function"]["name"], "arguments": ""}
            message["tool_calls"].append({"id": part["id"], "type": "function", "function": function})
        message["tool_calls"][part["index"]]["function"]["arguments"] += part["function"].get("arguments") or ""


def talk(family: Family, url: str, episode: str, *, tools: bool) -> list[dict[str, Any]]:
    """A conversation of twelve turns, streamed and not, forced, free and cut at the limit, with calls of tools."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
    for number, body in enumerate(turns(family, tools=tools)):
        messages.append(ask(url, episode, messages, **body, **({"tools": [TOOL]} if tools else {})))
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": "higher "}
            for call in messages[-1].get("tool_calls") or ()
        ]
        messages += results or [{"role": "user", "content": WORDS[number % len(WORDS)]}]
    assert not tools or any(message["role"] == "tool" for message in messages)
    return messages


def turns(family: Family, *, tools: bool) -> Iterator[dict[str, Any]]:
    """The requests of twelve turns."""
    words = iter(FORCED)
    for number in range(len(FORCED) * 4 // 3):
        body: dict[str, Any] = {"seed": number, "stream": number % 3 == 0}
        if number % 4 < 3:
            body |= forced(family, re.escape(next(words)))
        elif tools and number % 8 < 4:
            body |= forced(family, rf"ok{CALL}\n{CALL}") | {"max_tokens": 160}
        else:
            body["max_tokens"] = 7
        yield body


def talk_in_items(family: Family, url: str, episode: str, *, limit: int = 12) -> list[dict[str, Any]]:
    """The conversation with tools on ``/v1/responses``, up to `limit` turns; a streamed answer is kept as its events
    told it."""
    items: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
    for number, body in enumerate(itertools.islice(turns(family, tools=True), limit)):
        asked = {"max_output_tokens": body.pop("max_tokens", 60), "tools": [{"type": "function", **TOOL["function"]}]}
        output = respond(url, episode, input=items, instructions="Guess.", store=False, **asked, **body)["output"]
        items += output
        calls = [item["call_id"] for item in output if item["type"] == "function_call"]
        results = [{"type": "function_call_output", "call_id": call, "output": "higher "} for call in calls]
        items += results or [{"role": "user", "content": [{"type": "input_text", "text": WORDS[number % len(WORDS)]}]}]
    assert any(item.get("type") == "function_call_output" for item in items)
    return items


def respond(url: str, episode: str, **body: Any) -> dict[str, Any]:
    """One response; of a stream, with the items that its events told."""
    asked = {"model": "tiny", "temperature": 1.0} | body
    answer = asyncio.run(wire.send(f"{url}/e/{episode}/v1/responses", body=asked))
    assert answer.status == 200, answer.body
    if not body.get("stream"):
        response: dict[str, Any] = answer.json()
        return response
    events = [json.loads(line[6:]) for line in answer.body.decode().splitlines() if line.startswith("data: {")]
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    return events[-1]["response"] | {"output": items}


def forced(family: Family, answer: str) -> dict[str, Any]:
    """Fields that have the model think, if it does, and answer so. The marks of a thought are one token each, not
    letters."""
    marks: list[int] = []
    if family.thought:
        asked = {"model": "tiny", "prompt": "<think></think>", "add_special_tokens": False}
        marks = asyncio.run(wire.send(f"{family.url}/tokenize", body=asked)).json()["tokens"]
        assert len(marks) == 2
    return {"structured_outputs": {"regex": family.thought + answer}, "logit_bias": dict.fromkeys(map(str, marks), 100)}


def sealed(url: str, episode: str) -> tuple[dict[str, Any], dict[str, int]]:
    """The record of the episode after its reward, and the drift counters of all so far."""
    with Rig(url) as rig:
        assert rig.reward(episode).is_success
        return rig.record(episode), rig.status()["drift"]


def drifted(drift: dict[str, int]) -> int:
    return drift.get("retokenized", 0) + drift.get("template", 0)


def whole(call: dict[str, Any]) -> list[int]:
    return [*call["prompt_token_ids"], *call["token_ids"]]


def goes_on_exactly(url: str, episode: str) -> None:
    """Each call of `episode`, which ends here, goes on from the one before token for token."""
    record, drift = sealed(url, episode)
    calls = record["calls"]
    assert [call["continuity"] for call in calls[:1]] == ["first_turn"]
    assert {call["continuity"] for call in calls[1:]} <= {"exact", "same"}
    for before, call in itertools.pairwise(calls):
        assert call["prompt_token_ids"][: len(whole(before))] == whole(before)
    assert len(record["timelines"]) == 1
    assert drifted(drift) == 0


@pytest.mark.parametrize("tools", [False, True], ids=["words", "tools"])
def test_not_one_turn_drifts_with_it_and_some_do_without(family: Family, tools: bool) -> None:
    name = "tools" if tools else "words"
    messages = talk(family, family.on.url, name, tools=tools)
    assert any(message.get("reasoning") for message in messages) or not family.thought
    goes_on_exactly(family.on.url, name)

    talk(family, family.off.url, name, tools=tools)
    record, drift = sealed(family.off.url, name)
    assert {call.get("continuity") for call in record["calls"]} == {None}
    assert drifted(drift) > 0
    strict = 1 + sum(record["drift"]["tiny"]["broken_by"].values())
    repaired = sum(sample.get("repaired_tokens", 0) for sample in record["timelines"])
    if family.name == "thinking":  # which leaves thoughts out of answers: that is other text
        assert len(record["timelines"]) == strict and repaired == 0
    else:
        assert len(record["timelines"]) < strict and repaired > 0
    trained = sum(sum(sample["loss_mask"]) for sample in record["timelines"])
    assert trained == sum(len(call["token_ids"]) for call in record["calls"])


@pytest.mark.parametrize("family", ["thinking"], indirect=True)
def test_an_agent_that_leaves_the_reasoning_out_has_chosen_another_history(family: Family) -> None:
    body = forced(family, "yes")
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
    for _ in range(2):
        said = ask(family.on.url, "left-out", messages, **body)
        messages += [{"role": "assistant", "content": said["content"]}, {"role": "user", "content": "again"}]
    record, drift = sealed(family.on.url, "left-out")
    assert [call["continuity"] for call in record["calls"]] == ["first_turn", "reasoning_left_out"]
    assert [one.get("broken_by") for one in record["timelines"]] == [None, "history_edited"]
    assert drifted(drift) == 0


@pytest.mark.parametrize("family", ["misled"], indirect=True)
def test_reasoning_in_the_exact_ids_does_not_mislead_the_parser(family: Family) -> None:
    """A streamed answer's reasoning comes as reasoning; an answer in one piece is parsed without its prompt."""
    body = forced(family, "yes")
    for name in ("misled", "misled-again", "misled-at-last"):
        messages: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
        for stream in (False, True, False, True):
            said = ask(family.on.url, name, messages, stream=stream, **body)
            messages += [said, {"role": "user", "content": "again"}]
        answers = [message for message in messages if message["role"] == "assistant"]
        if not any(said["reasoning"].startswith("<think>") for said in answers):
            break  # else vLLM had the mark and words for one event, and showed both
    assert [(said["content"], said["reasoning"][:6]) for said in answers] == [("yes", "hello\n")] * 4
    ask(family.on.url, name, messages, max_tokens=3)
    record, _ = sealed(family.on.url, name)
    words = [call["continuity"] for call in record["calls"]]
    assert words == ["first_turn", *["reasoning_parser"] * 3, "exact"]


@pytest.mark.parametrize("family", ["misled"], indirect=True)
def test_nor_does_it_in_a_response(family: Family) -> None:
    body = forced(family, "yes")
    items: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
    for stream in (False, True, True):
        said = respond(family.on.url, "misled-items", input=items, stream=stream, **body)["output"]
        assert [item["type"] for item in said] == ["reasoning", "message"]
        items += [*said, {"role": "user", "content": "again"}]
    respond(family.on.url, "misled-items", input=items, max_output_tokens=3)
    record, _ = sealed(family.on.url, "misled-items")
    words = [call["continuity"] for call in record["calls"]]
    assert words == ["first_turn", *["reasoning_parser"] * 2, "exact"]


def test_answers_in_a_set_form_go_on_too(family: Family) -> None:
    schema = {"type": "object", "properties": {"say": {"enum": ["hello  ", "é\\n"]}}, "required": ["say"]}
    form = {"type": "json_schema", "json_schema": {"name": "said", "schema": schema}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
    for number in range(4):
        messages.append(ask(family.on.url, "form", messages, response_format=form, seed=number, stream=number == 2))
        messages.append({"role": "user", "content": "again"})
        assert family.thought or messages[-2]["content"].startswith("{")
    goes_on_exactly(family.on.url, "form")


def test_anthropics_protocol_is_continued_as_well(family: Family) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
    for number in range(4):
        asked = {"model": "tiny", "messages": messages, "max_tokens": 12, "stream": False, "temperature": 1.0}
        answer = asyncio.run(wire.send(f"{family.on.url}/e/messages/v1/messages", body=asked)).json()
        messages += [
            {"role": "assistant", "content": answer["content"]},
            {"role": "user", "content": [{"type": "text", "text": WORDS[number] or "more"}]},
        ]
    goes_on_exactly(family.on.url, "messages")


def test_not_one_response_drifts_with_it_and_some_do_without(family: Family) -> None:
    items = talk_in_items(family, family.on.url, "items")
    assert any(item.get("type") == "reasoning" for item in items) or not family.thought
    goes_on_exactly(family.on.url, "items")

    talk_in_items(family, family.off.url, "items", limit=5)
    _, drift = sealed(family.off.url, "items")
    assert drifted(drift) > 0


def test_a_response_that_names_the_one_before_goes_on_from_it(family: Family) -> None:
    before = None
    for number in range(4):
        asked = forced(family, re.escape(FORCED[number]))
        asked |= {"input": WORDS[number] or "more", "previous_response_id": before, "stream": number == 2}
        before = respond(family.on.url, "named", instructions="Guess.", **asked)["id"]
    goes_on_exactly(family.on.url, "named")

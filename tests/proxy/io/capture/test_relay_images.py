"""Images on their way: the agent sees what the engine would have sent it, and no call is made of ids that hide one.

The ids of such a prompt hold placeholders where the model reads an image. Neither the wire nor a trainer has the image,
so what was sampled behind it is kept as lost, with the reason, and trains nothing; nor is its history ever continued.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.kit.engine_stub import EngineStub
from tests.kit.tapes import steady
from tests.kit.wire import Answer, send
from tests.proxy.io.front import CHAT, MESSAGES, RESPONSES, Front

DATA = "iVBORw0KGgo="
URL = f"data:image/png;base64,{DATA}"
QUESTION = "What is this?"
TYPED = {"type": "image_url", "image_url": {"url": URL}}
SOURCE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}}


def chat(*parts: Any, **more: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": QUESTION}, *parts]
    return {"model": "stub", "max_tokens": 12, "seed": 7, "messages": [{"role": "user", "content": content}], **more}


ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, chat(TYPED)),
    "chat-by-key": (CHAT, chat({"image_url": URL})),
    "chat-named": (CHAT, chat({"type": "text", "text": "", "image_url": URL, "uuid": "u"})),
    "chat-of-a-tool": (CHAT, chat() | {"messages": [
        *chat()["messages"], {"role": "tool", "tool_call_id": "c", "content": [TYPED]},
    ]}),
    "chat-in-the-past": (CHAT, chat() | {"messages": [
        *chat(TYPED)["messages"], {"role": "assistant", "content": "A dot."}, {"role": "user", "content": "Sure?"},
    ]}),
    "responses": (RESPONSES, {"model": "stub", "max_output_tokens": 12, "input": [{"role": "user", "content": [
        {"type": "input_text", "text": QUESTION}, {"type": "input_image", "image_url": URL},
    ]}]}),
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ASKED)
async def test_a_turn_with_an_image_passes_byte_for_byte_and_trains_nothing(name: str, stream: bool) -> None:
    path, asked = ASKED[name]
    body = json.dumps(asked | {"stream": stream}, indent=1).encode()
    async with EngineStub(split_seed=2) as stub, Front(stub.url) as front:
        direct = await send(stub.url + path, body=body)
        answer = await send(f"{front.url}/e/ep{path}", body=body)
        assert (answer.status, steady(answer.body)) == (direct.status, steady(direct.body))
        first, second = stub.llm_requests()
        assert first.body == second.body == json.loads(body)
        check_refused(front, answer, on_responses=path == RESPONSES)


def check_refused(front: Front, answer: Answer, *, on_responses: bool = False) -> None:
    """The call is known, with the reason for which it cannot train; so is the episode, when it is rewarded."""
    assert answer.headers["x-ajet-episode"] == "ep" and answer.headers["x-ajet-call"]
    assert (front.lost, front.calls, front.running) == (["multimodal"], [], 0)
    words = set(re.findall(r'ajet_continuity_total\{outcome="(\w+)"\}', front.metrics.render()))
    assert words == {"unsupported"} or (on_responses and not words)
    front.reward("ep")
    record = front.store.state.episodes.find("ep")
    assert record is not None and (record.state, record.reason) == ("discarded", "incomplete_call")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("block", [
    SOURCE, {"type": "image", "source": {"type": "url", "url": URL}},
    {"type": "tool_result", "tool_use_id": "c", "content": [SOURCE]},
], ids=["data", "url", "result"])  # fmt: skip
async def test_an_image_of_anthropics_api_reaches_the_engine_as_the_data_that_it_is(
    stub: EngineStub, front: Front, block: dict[str, Any], stream: bool
) -> None:
    said = [{"role": "user", "content": [{"type": "text", "text": QUESTION}, block]}]
    body = {"model": "stub", "max_tokens": 12, "stream": stream, "messages": said}
    answer = await send(f"{front.url}/e/ep{MESSAGES}", body=body)
    assert answer.status == 200 and (b"message_stop" in answer.body) == stream
    [asked] = stub.llm_requests()
    parts = [part for message in asked.body["messages"] for part in message["content"] if isinstance(part, dict)]
    assert TYPED in parts
    assert not {"return_token_ids", "logprobs"} & set(asked.body)
    check_refused(front, answer)

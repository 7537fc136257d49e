"""Answers on ``/v1/responses`` as vLLM 0.31 writes them: generations in, the exact JSON body and stream events out.

A request is first brought into the form of a chat (`as_chat`), from which the scripted model generates. Logprobs stand
beside text only, raw messages with ids in the last word only, and the ids of items in a stream are not those of the
final response: so does vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tests.kit.engine_dialect import Reply, dumps, joined, parse_tools, tool_deltas
from tests.kit.engine_tokens import Output, decode

LOGPROBS = "message.output_text.logprobs"
Event = tuple[str, dict[str, Any]]


def as_chat(body: dict[str, Any], history: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """`body` as a chat request after `history`, the messages of the responses before it; it stands in there as well."""
    head = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
    given = body["input"]
    new = [{"role": "user", "content": given}] if isinstance(given, str) else _messages(given)
    names = ("model", "stop", "seed", "tool_choice", "kv_transfer_params")
    rest: dict[str, Any] = {name: body[name] for name in names if name in body}
    rest |= {"max_tokens": body.get("max_output_tokens"), "tools": _functions(body.get("tools") or ())}
    return rest | {"messages": [*head, *history, *new], "responses": body}


def _messages(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for item in items:
        kind = item.get("type", "message")
        if kind == "function_call":
            call = {"id": item["call_id"], "function": {"name": item["name"], "arguments": item["arguments"]}}
            if not out or out[-1]["role"] != "assistant":
                out.append({"role": "assistant"})
            out[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            out.append({"role": "tool", "content": item["output"]})
        elif kind == "message":
            out.append({"role": item["role"], "content": item["content"]})
    return out


def _functions(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    out = []
    for tool in tools:
        if tool["type"] == "function":
            told = {key: tool.get(key) for key in ("name", "description", "parameters")}
            out.append({"type": "function", "function": told})
        elif tool["type"] == "namespace":
            out += _functions([inner | {"name": f"{tool['name']}__{inner['name']}"} for inner in tool["tools"]])
    return out


def kept(reply: Reply) -> list[dict[str, Any]]:
    """The messages before those of a response that names this one: of an answer vLLM keeps the text alone."""
    asked = [message for message in reply.body["messages"] if message["role"] != "system"]
    texts = [item["content"][0]["text"] for item in response(reply)["output"] if item["type"] == "message"]
    return [*asked, *({"role": "assistant", "content": text} for text in texts)]


def body(reply: Reply) -> bytes:
    return dumps(response(reply))


def response(reply: Reply, *, done: bool = True) -> dict[str, Any]:
    """The response object as it ends or (not `done`) as it begins."""
    body, [prompt], [[output]] = reply.body["responses"], reply.prompts, reply.outputs
    length = done and output.finish_reason == "length"
    messages = bool(body.get("enable_response_messages")) and done
    limit = body.get("max_output_tokens") or 100_000
    return {
        "id": reply.id, "created_at": reply.created,
        "incomplete_details": {"reason": "max_output_tokens"} if length else None,
        "instructions": body.get("instructions"), "metadata": body.get("metadata"), "model": body.get("model", "stub"),
        "object": "response", "output": _items(reply, body, output) if done else [],
        "parallel_tool_calls": body.get("parallel_tool_calls", True), "temperature": body.get("temperature", 1.0),
        "tool_choice": body.get("tool_choice", "auto") if body.get("tools") else "none",
        "tools": body.get("tools") or [], "top_p": body.get("top_p", 1.0), "background": False,
        "max_output_tokens": limit, "max_tool_calls": None, "previous_response_id": body.get("previous_response_id"),
        "prompt": None, "reasoning": body.get("reasoning"), "service_tier": "auto",
        "status": ("incomplete" if length else "completed") if done else "in_progress", "text": body.get("text"),
        "top_logprobs": body.get("top_logprobs", 0) if _logprobs_asked(body) else None, "truncation": "disabled",
        "usage": _usage(len(prompt), len(output.token_ids)) if done else None, "user": body.get("user"),
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "kv_transfer_params": None, "ec_transfer_params": None,
        "input_messages": [_raw(prompt)] if messages else None,
        "output_messages": [_raw(output.token_ids)] if messages else None,
    }  # fmt: skip


def events(reply: Reply, group: int = 1) -> Iterator[bytes]:
    """The stream of a response; up to `group` tokens share an event."""
    for number, (kind, fields) in enumerate(_events(reply, group)):
        told = fields | {"sequence_number": number, "type": kind}
        head = "response" in told
        ordered = told if head else {name: told[name] for name in sorted(told)}
        yield f"event: {kind}\n".encode() + b"data: " + dumps(ordered) + b"\n\n"


def _events(reply: Reply, group: int) -> Iterator[Event]:
    [[output]] = reply.outputs
    begun = response(reply, done=False)
    yield "response.created", {"response": begun}
    yield "response.in_progress", {"response": begun}
    _, deltas = tool_deltas(reply, 0, output)
    stream = _Stream(reply)
    for start in range(0, len(deltas), group):
        delta = joined(deltas[start : start + group])
        if delta.get("content"):
            yield from stream.text(delta["content"], output, start, min(start + group, len(deltas)))
        for call in delta.get("tool_calls", ()):
            yield from stream.call(call["function"])
    yield from stream.close()
    yield "response.completed", {"response": response(reply)}


class _Stream:
    """The items of one stream: which is open, and what it said so far."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._body = reply.body["responses"]
        self._place = -1
        self._said = ""
        self._item: dict[str, Any] = {}

    @property
    def _where(self) -> dict[str, Any]:
        return {"output_index": self._place}

    def _open(self, item: dict[str, Any]) -> Iterator[Event]:
        yield from self.close()
        self._place, self._said = self._place + 1, ""
        self._item = item | {"id": f"{self._reply.created + self._place:016x}"}
        yield "response.output_item.added", {"item": self._item, **self._where}

    def text(self, text: str, output: Output, start: int, end: int) -> Iterator[Event]:
        if self._item.get("type") != "message":
            empty = {"id": "", "content": [], "role": "assistant", "status": "in_progress", "type": "message"}
            yield from self._open(empty | {"phase": None})
            part: dict[str, Any] = {"annotations": [], "text": "", "type": "output_text", "logprobs": []}
            yield "response.content_part.added", self._content | {"part": part}
        self._said += text
        rows = _rows(output, start, end, with_bytes=False) if _logprobs_asked(self._body) else []
        yield "response.output_text.delta", self._content | {"delta": text, "logprobs": rows}

    def call(self, function: dict[str, str]) -> Iterator[Event]:
        if "name" in function:
            call_id = f"call_{self._reply.id[-15:]}{self._place + 1}"
            item = {"arguments": "", "call_id": call_id, "type": "function_call"}
            yield from self._open(item | _named(self._body, function["name"]) | {"id": "", "status": "in_progress"})
        if arguments := function.get("arguments"):
            self._said += arguments
            about = {"item_id": self._item["id"], **self._where}
            yield "response.function_call_arguments.delta", about | {"delta": arguments}

    def close(self) -> Iterator[Event]:
        item, self._item = self._item, {}
        about = {"item_id": item.get("id"), **self._where}
        if item.get("type") == "message":
            content = about | {"content_index": 0}
            part: dict[str, Any] = {"annotations": [], "text": self._said, "type": "output_text", "logprobs": None}
            yield "response.output_text.done", content | {"text": self._said, "logprobs": []}
            yield "response.content_part.done", content | {"part": part}
            done = item | {"content": [part], "status": "completed", "summary": []}
            yield "response.output_item.done", {"item": done, **self._where}
        elif item:
            told = {"arguments": self._said, "name": item["name"]}
            yield "response.function_call_arguments.done", about | told
            done = item | {"arguments": self._said, "status": "completed"}
            yield "response.output_item.done", {"item": done, **self._where}

    @property
    def _content(self) -> dict[str, Any]:
        return {"content_index": 0, "item_id": self._item["id"], **self._where}


def _items(reply: Reply, body: dict[str, Any], output: Output) -> list[dict[str, Any]]:
    content, calls = parse_tools(reply, 0, output)
    items: list[dict[str, Any]] = []
    if content:
        rows = _rows(output, 0, len(output.token_ids), with_bytes=True) if _logprobs_asked(body) else None
        part = {"annotations": [], "text": content, "type": "output_text", "logprobs": rows}
        message = {"id": f"msg_{reply.id[-16:]}", "content": [part], "role": "assistant", "status": "completed"}
        items.append(message | {"type": "message", "phase": None})
    for place, call in enumerate(calls):
        head = {"arguments": call["function"]["arguments"], "call_id": call["id"], "type": "function_call"}
        tail = {"id": f"fc_{reply.id[-15:]}{place}", "status": "completed"}
        items.append(head | _named(body, call["function"]["name"]) | tail)
    return items


def _named(body: dict[str, Any], name: str) -> dict[str, Any]:
    """A function's name, and the namespace it comes from."""
    for tool in body.get("tools") or ():
        if tool["type"] == "namespace" and name.startswith(tool["name"] + "__"):
            return {"name": name.removeprefix(tool["name"] + "__"), "namespace": tool["name"]}
    return {"name": name, "namespace": None}


def _logprobs_asked(body: dict[str, Any]) -> bool:
    return LOGPROBS in (body.get("include") or ())


def _rows(output: Output, start: int, end: int, *, with_bytes: bool) -> list[dict[str, Any]]:
    rows = []
    for token_id, logprob in zip(output.token_ids[start:end], output.logprobs[start:end], strict=True):
        token = decode([token_id], skip_chat_marks=False).replace("�", "")
        told = {"token": token} | ({"bytes": list(token.encode())} if with_bytes else {})
        rows.append(told | {"logprob": logprob, "top_logprobs": []})
    return rows


def _raw(ids: Sequence[int]) -> dict[str, Any]:
    return {"message": decode(ids, skip_chat_marks=False), "tokens": list(ids), "type": "raw_message_tokens"}


def _usage(prompt: int, sampled: int) -> dict[str, Any]:
    details = {"cached_tokens": 0, "cache_write_tokens": 0, "input_tokens_per_turn": [], "cached_tokens_per_turn": []}
    made = {"reasoning_tokens": 0, "tool_output_tokens": 0, "output_tokens_per_turn": []}
    return {
        "input_tokens": prompt, "input_tokens_details": details, "output_tokens": sampled,
        "output_tokens_details": made | {"tool_output_tokens_per_turn": []}, "total_tokens": prompt + sampled,
    }  # fmt: skip

"""Answers as vLLM 0.31 writes them: generations in, the exact JSON bodies and stream events out (compare the tapes).

What it does that others do not, and that a proxy must put back: nulls for what was not asked (`token_ids`,
`prompt_token_ids`, `prompt_text`, …), extra events with an empty delta for tokens that show no text when ids or
logprobs are asked, and a fingerprint on the last event of a choice.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from tests.kit.engine_tokens import TOOL_END, TOOL_START, Output, decode, logprob_of

FINGERPRINT = "vllm-0.31.0-5eedbeef"
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Reply:
    """Everything that an answer is written from. `outputs[p]` are the choices of prompt p."""

    id: str
    created: int
    body: dict[str, Any]
    prompts: Sequence[Sequence[int]]
    outputs: Sequence[Sequence[Output]]
    label: Callable[[], str | None] = lambda: None
    """The label of the weights at this moment; an engine without one is vLLM before 0.33."""

    @property
    def ids(self) -> bool:
        return bool(self.body.get("return_token_ids"))

    def choices(self) -> Iterator[tuple[int, Sequence[int], Output]]:
        """``(choice index, prompt ids, output)``, numbered over prompts and choices as vLLM does."""
        index = 0
        for prompt, outputs in zip(self.prompts, self.outputs, strict=True):
            for output in outputs:
                yield index, prompt, output
                index += 1

    def usage(self, sampled: int | None = None) -> dict[str, Any]:
        prompt = sum(len(ids) for ids in self.prompts)
        done = sum(len(output.token_ids) for _, _, output in self.choices()) if sampled is None else sampled
        return {"prompt_tokens": prompt, "total_tokens": prompt + done, "completion_tokens": done}


class Weights:
    """Which weights sampled the tokens of one choice, as vLLM 0.33 says it."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._spans: list[dict[str, Any]] = []

    def sampled(self, end: int) -> None:
        """Tokens up to `end` were sampled by now."""
        label = self._reply.label()
        if self._spans and self._spans[-1]["version"] == label:
            self._spans[-1]["end"] = end
        else:
            start = self._spans[-1]["end"] if self._spans else 0
            self._spans.append({"version": label, "start": start, "end": end})

    def told(self) -> dict[str, Any]:
        """The field of a choice that is finished; null for who did not ask."""
        if self._reply.label() is None:
            return {}
        return {"weight_versions": self._spans if self._reply.body.get("return_weight_versions") else None}

    @classmethod
    def of(cls, reply: Reply, output: Output) -> dict[str, Any]:
        """`told` of an answer in one piece."""
        weights = cls(reply)
        weights.sampled(len(output.token_ids))
        return weights.told()


def dumps(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def event(value: Any) -> bytes:
    return b"data: " + dumps(value) + b"\n\n"


def error(status: int, message: str, kind: str = "BadRequestError", param: str | None = None) -> bytes:
    return dumps({"error": {"message": message, "type": kind, "param": param, "code": status}})


def chat_body(reply: Reply) -> bytes:
    choices = []
    for index, _, output in reply.choices():
        content, calls = parse_tools(reply, index, output)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        message |= {"refusal": None, "annotations": None, "audio": None, "function_call": None}
        if calls:
            message["tool_calls"] = calls
        choices.append(
            {
                "index": index,
                "message": message | {"reasoning": None},
                "logprobs": _chat_logprobs(reply, output, 0, len(output.token_ids)),
                "finish_reason": "tool_calls" if calls else output.finish_reason,
                "stop_reason": output.stop_reason,
                "token_ids": list(output.token_ids) if reply.ids else None,
                "routed_experts": None,
                **Weights.of(reply, output),
            }
        )
    details = {"prompt_tokens_details": None, "completion_tokens_details": None}
    tail: dict[str, Any] = {"prompt_logprobs": None, "prompt_token_ids": list(reply.prompts[0]) if reply.ids else None}
    tail |= {"prompt_text": None, "kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}
    head = _head(reply, "chat.completion") | {"choices": choices, "service_tier": None}
    return dumps(head | {"system_fingerprint": FINGERPRINT, "usage": reply.usage() | details} | tail)


def chat_events(reply: Reply, group: int = 1) -> Iterator[bytes]:
    """The stream of a chat answer; each event carries up to `group` tokens, choices take turns."""
    for index, prompt, _ in reply.choices():
        first = {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        asked = {"prompt_token_ids": list(prompt) if reply.ids else None, "prompt_text": None}
        yield event(_stamp(reply, {"choices": [first]} | _continuous(reply, 0), "chat.completion.chunk") | asked)
    turns = zip_longest(*(_chat_choice(reply, index, output, group) for index, _, output in reply.choices()))
    for parts in turns:
        yield from (part for part in parts if part is not None)
    yield from _stream_end(reply, "chat.completion.chunk")


def _chat_choice(reply: Reply, index: int, output: Output, group: int) -> Iterator[bytes]:
    asked = reply.ids or bool(reply.body.get("logprobs"))
    tools, deltas = tool_deltas(reply, index, output)
    weights = Weights(reply)
    for start in range(0, len(output.token_ids), group):
        end = min(start + group, len(output.token_ids))
        weights.sampled(end)
        last = end == len(output.token_ids)
        delta = joined(deltas[start:end])
        if not delta and not last and not asked:
            continue
        choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": _chat_logprobs(reply, output, start, end)}
        called = tools and output.finish_reason == "stop"  # an answer that was cut at its limit says so
        choice["finish_reason"] = ("tool_calls" if called else output.finish_reason) if last else None
        if last:
            choice["stop_reason"] = output.stop_reason
        choice["token_ids"] = list(output.token_ids[start:end]) if reply.ids else None
        choice |= weights.told() if last else {}
        yield event(_finished(reply, {"choices": [choice]} | _continuous(reply, end), "chat.completion.chunk", last))


def tool_deltas(reply: Reply, index: int, output: Output) -> tuple[bool, list[dict[str, Any]]]:
    """One delta a token, empty where the token shows nothing; a tool call is its name, then pieces of arguments."""
    if TOOL_START not in output.token_ids or not reply.body.get("tools"):
        return False, [{"content": piece} if piece else {} for piece in output.pieces]
    deltas: list[dict[str, Any]] = []
    inside, seen, place = False, "", -1
    for token, piece in zip(output.token_ids, output.pieces, strict=True):
        delta: dict[str, Any] = {}
        if token == TOOL_START:
            inside, seen, place = True, "", place + 1
        elif token == TOOL_END:
            inside = False
        elif not inside:
            delta = {"content": piece} if piece else {}
        else:
            seen += piece
            delta = _tool_delta(reply, index, place, seen, piece)
        deltas.append(delta)
    return True, deltas


def _tool_delta(reply: Reply, index: int, place: int, seen: str, piece: str) -> dict[str, Any]:
    if seen.endswith(', "arguments": '):
        name = json.loads(seen.removesuffix(', "arguments": ') + "}")["name"]
        call = {"id": _tool_id(reply, index, place), "type": "function", "index": place, "function": {"name": name}}
        return {"content": None, "tool_calls": [call]}
    if ', "arguments": ' in seen and piece and not _closed(seen):
        return {"content": None, "tool_calls": [{"index": place, "function": {"arguments": piece}}]}
    return {}


def _closed(seen: str) -> bool:
    """Tell whether the last character only closes the call, after its arguments."""
    try:
        json.loads(seen)
    except ValueError:
        return False
    return True


def joined(deltas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One delta for several tokens: texts are joined, and so are pieces of one call's arguments."""
    content = "".join(delta["content"] for delta in deltas if delta.get("content"))
    calls: dict[int, dict[str, Any]] = {}
    for call in (call for delta in deltas for call in delta.get("tool_calls", ())):
        known = calls.setdefault(call["index"], {key: value for key, value in call.items() if key != "function"})
        function = known.setdefault("function", {})
        for key, value in call["function"].items():
            function[key] = function.get(key, "") + value
    if calls:
        return {"content": content or None, "tool_calls": list(calls.values())}
    return {"content": content} if content else {}


def parse_tools(reply: Reply, index: int, output: Output) -> tuple[str | None, list[dict[str, Any]]]:
    if TOOL_END not in output.token_ids or not reply.body.get("tools"):
        return output.text, []
    content, *rest = output.text.split("<tool_call>")
    calls = []
    for place, text in enumerate(rest):
        inner = text.split("</tool_call>")[0]
        arguments = inner.split('"arguments": ', 1)[1].rstrip()[:-1]
        function = {"name": json.loads(inner)["name"], "arguments": arguments}
        calls.append({"id": _tool_id(reply, index, place), "type": "function", "function": function})
    return content or None, calls


def _tool_id(reply: Reply, index: int, place: int) -> str:
    return f"chatcmpl-tool-{reply.id[-12:]}{index:02x}{place:02x}"


def _chat_logprobs(reply: Reply, output: Output, start: int, end: int) -> dict[str, Any] | None:
    if not reply.body.get("logprobs"):
        return None
    rows = []
    for token_id, logprob in zip(output.token_ids[start:end], output.logprobs[start:end], strict=True):
        token = decode([token_id], skip_chat_marks=False).replace("�", "")
        row: dict[str, Any] = {"token": token, "logprob": logprob, "bytes": list(token.encode())}
        others = [row] * min(1, reply.body.get("top_logprobs") or 0)
        rows.append(row | {"top_logprobs": others})
    return {"content": rows}


def completion_body(reply: Reply) -> bytes:
    choices = []
    for index, prompt, output in reply.choices():
        choice = _completion_choice(reply, index, prompt, output, 0, len(output.token_ids))
        choice |= {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
        choice["token_ids"] = list(output.token_ids) if reply.ids else None
        choice |= {"prompt_logprobs": _prompt_logprobs(reply, prompt)}
        choice |= {"prompt_token_ids": list(prompt) if reply.ids else None}
        choices.append(choice | {"routed_experts": None} | Weights.of(reply, output))
    head = _head(reply, "text_completion") | {"choices": choices, "service_tier": None}
    usage = reply.usage() | {"prompt_tokens_details": None, "completion_tokens_details": None}
    tail = {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}
    return dumps(head | {"system_fingerprint": FINGERPRINT, "usage": usage} | tail)


def _prompt_logprobs(reply: Reply, prompt: Sequence[int]) -> list[dict[str, Any] | None] | None:
    echoed = reply.body.get("echo") and reply.body.get("logprobs") is not None
    if reply.body.get("prompt_logprobs") is None and not echoed:
        return None
    rows: list[dict[str, Any] | None] = [None]
    for place, token in list(enumerate(prompt))[1:]:
        about = {"logprob": _logprob_in(prompt, place), "rank": 1}
        rows.append({str(token): about | {"decoded_token": decode([token], skip_chat_marks=False).replace("�", "")}})
    return rows


def _logprob_in(prompt: Sequence[int], place: int) -> float | None:
    """That of the prompt's token at `place`; the first has none."""
    return logprob_of(prompt[max(0, place - 16) : place], prompt[place]) if place else None


def completion_events(reply: Reply, group: int = 1) -> Iterator[bytes]:
    turns = zip_longest(*(_completion_stream(reply, *choice, group) for choice in reply.choices()))
    for parts in turns:
        yield from (part for part in parts if part is not None)
    yield from _stream_end(reply, "text_completion")


def _completion_stream(reply: Reply, index: int, prompt: Sequence[int], output: Output, group: int) -> Iterator[bytes]:
    weights = Weights(reply)
    for start in range(0, len(output.token_ids), group):
        end = min(start + group, len(output.token_ids))
        weights.sampled(end)
        last = end == len(output.token_ids)
        choice = _completion_choice(reply, index, prompt, output, start, end)
        choice["finish_reason"] = output.finish_reason if last else None
        choice["stop_reason"] = output.stop_reason if last else None
        told = reply.ids or reply.body.get("echo")
        choice["prompt_token_ids"] = list(prompt) if told and start == 0 else None
        choice["token_ids"] = list(output.token_ids[start:end]) if reply.ids else None
        choice |= {name: told if last else None for name, told in weights.told().items()}
        yield event(_finished(reply, {"choices": [choice]} | _continuous(reply, end), "text_completion", last))


def _completion_choice(
    reply: Reply, index: int, prompt: Sequence[int], output: Output, start: int, end: int
) -> dict[str, Any]:
    shown = "".join(output.pieces[start:end])
    if reply.body.get("echo") and start == 0 and not reply.ids:
        shown = decode(prompt) + shown
    logprobs = None
    if reply.body.get("logprobs") is not None:
        echoed = prompt if reply.body.get("echo") and start == 0 else ()
        ids = [*echoed, *output.token_ids[start:end]]
        tokens = [decode([token], skip_chat_marks=False).replace("�", "") for token in ids]
        values = [_logprob_in(prompt, place) for place in range(len(echoed))] + list(output.logprobs[start:end])
        before = output.pieces[:start] if reply.ids or not reply.body.get("echo") or start == 0 else (
            decode(prompt), *output.pieces[:start]
        )
        offset = sum(map(len, before))
        offsets = [offset + sum(map(len, tokens[:place])) for place in range(len(tokens))]
        tops = [None if value is None else {token: value} for token, value in zip(tokens, values, strict=True)]
        if wanted := reply.body.get("logprob_token_ids"):
            tops[:1] = [{f"token_id:{token}": logprob_of(prompt[-16:], token) for token in wanted}]
        logprobs = {"text_offset": offsets, "token_logprobs": values, "tokens": tokens, "top_logprobs": tops}
    return {"index": index, "text": shown, "logprobs": logprobs}


def _head(reply: Reply, kind: str) -> dict[str, Any]:
    return {"id": reply.id, "object": kind, "created": reply.created, "model": reply.body.get("model") or "stub"}


def _stamp(reply: Reply, rest: dict[str, Any], kind: str) -> dict[str, Any]:
    return _head(reply, kind) | rest


def _finished(reply: Reply, rest: dict[str, Any], kind: str, last: bool) -> dict[str, Any]:
    """An event; the last one of a choice carries the fingerprint unless a usage event will."""
    fingerprint = {"system_fingerprint": FINGERPRINT} if last and not _options(reply).get("include_usage") else {}
    return _stamp(reply, rest | fingerprint, kind)


def _options(reply: Reply) -> dict[str, Any]:
    return reply.body.get("stream_options") or {}


def _continuous(reply: Reply, sampled: int) -> dict[str, Any]:
    options = _options(reply)
    if not (options.get("include_usage") and options.get("continuous_usage_stats")):
        return {}
    return {"usage": reply.usage(sampled) | {"completion_tokens_details": None}}


def _stream_end(reply: Reply, kind: str) -> Iterator[bytes]:
    if _options(reply).get("include_usage"):
        yield event(_stamp(reply, {"choices": [], "usage": reply.usage(), "system_fingerprint": FINGERPRINT}, kind))
    yield DONE

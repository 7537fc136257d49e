"""Chat answers to ``include_reasoning: false``, made from answers with the reasoning.

vLLM withholds ids and logprobs from an agent that wants no reasoning, since they would tell it. The engine is therefore
asked for everything, and what the agent must not see is taken out here, as vLLM itself does it: the reasoning becomes
null and goes out with an event that would have held nothing else, the end of a choice with an empty ``delta``.

vLLM does so where a parser (of reasoning or of tool calls) is configured; without any it ignores the field, and so
does the proxy. Which it is cannot be told from an answer with the reasoning: a `trial` shows it, whose one token the
engine withholds or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ajet_proxy.core.protocol.json_edits import Edits, Spanned, scan_at
from ajet_proxy.core.protocol.reading import UNREADABLE, Reading

_BEFORE = ("role", "content")
"""What stands before ``reasoning`` in a message."""


def trial(model: str) -> list[tuple[str, dict[str, Any]]]:
    """What to ask the engine about `model`: a route and a body."""
    hello = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 1}
    return [("/v1/chat/completions", {"model": model, **hello, "include_reasoning": False, "return_token_ids": True})]


def withholds(answers: Sequence[Any]) -> bool | None:
    """Whether the engine withholds ids from agents that want no reasoning, by its answer to `trial`; None if it does
    not tell."""
    try:
        return answers[0]["choices"][0]["token_ids"] is None
    except UNREADABLE:
        return None


class HiddenReasoning(Reading):
    """Reads an answer with reasoning and shows it without."""

    _puts_back = True

    def _put_back(self, text: str, choice: Spanned, edits: Edits) -> None:
        values, spans = choice.values, choice.spans
        if "token_ids" not in values:
            return
        if "message" in values:
            message = scan_at(text, spans["message"][0])
            if "reasoning" in message.spans:
                edits[message.spans["reasoning"]] = "null"
        elif not _says_something(values["delta"]):
            edits[spans["delta"]] = "{}"
        else:
            _silence(scan_at(text, spans["delta"][0]), spans["delta"][0] + 1, edits)

    def _is_filler(self, choices: list[Spanned]) -> bool:
        return all(map(_is_filler, choices))


def _is_filler(choice: Spanned) -> bool:
    values = choice.values
    told = "token_ids" in values and not values.get("finish_reason") and isinstance(values.get("delta"), dict)
    return told and not _says_something(values["delta"])


def _says_something(delta: Any) -> bool:
    """Whether words are left without the reasoning. Null content alone is a tool call that was one too many for
    ``parallel_tool_calls: false``, whose event is sent in either case."""
    is_void = delta.get("content", "") is None and "reasoning" not in delta
    return bool(delta.get("content") or delta.get("tool_calls")) or is_void


def _silence(delta: Spanned, start: int, edits: Edits) -> None:
    """Null for the reasoning of `delta`, whose first member begins at `start`, also where it had none."""
    if "reasoning" in delta.spans:
        edits[delta.spans["reasoning"]] = "null"
        return
    after = max((delta.spans[name][1] for name in _BEFORE if name in delta.spans), default=None)
    if after is not None:
        edits[after, after] = ',"reasoning":null'
    else:
        edits[start, start] = '"reasoning":null' + ("," if delta.values else "")

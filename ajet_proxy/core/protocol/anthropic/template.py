"""Questions on what an engine decides by the model's chat template when it answers ``/v1/messages``.

vLLM moves system messages from the middle of a conversation to its front if the template takes them nowhere else. It
does so for ``count_tokens`` too, so its counts tell. A conversation with such a message counts the same, to the token,
as one with the message at its front already, only if vLLM makes them the same.

For disabled thinking vLLM asks the template for the effort ``none``. If the template does not know it (refuses it, or
renders it like another effort), vLLM asks for a low one. ``/tokenize`` shows what it renders. An operator who has set
the effort by hand (``--anthropic-disabled-thinking-effort``) has set it for vLLM's own route alone; nothing tells it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ajet_proxy.core.protocol.dialect import Questions

EFFORTS = ("low", "medium", "high", "xhigh", "max")
COUNT, TOKENIZE = "/v1/messages/count_tokens", "/tokenize"
_RULE, _MORE = "Be brief.", "Answer in English."
_HELLO = {"role": "user", "content": "Hi"}
_TURNS = (_HELLO, {"role": "assistant", "content": "Hello."})
_LAST = {"role": "user", "content": "Bye"}


@dataclass(frozen=True, slots=True)
class Template:
    """Tells whether system messages in the middle are moved to the front, and which effort stands for no thinking."""

    merges_system: bool = False
    disabled_effort: str = "none"


def depends_on_template(asked: Mapping[str, Any]) -> bool:
    """Tell whether a `Template` makes a difference to the request `asked`."""
    messages, thinking = asked.get("messages"), asked.get("thinking")
    inline = isinstance(messages, list) and any(isinstance(m, dict) and m.get("role") == "system" for m in messages)
    return inline or (isinstance(thinking, dict) and thinking.get("type") == "disabled")


def questions(model: str) -> Questions:
    """Asks the engine for the tokens of `model` in conversations that show its template."""
    inline = [*_TURNS, {"role": "system", "content": _MORE}, _LAST]
    asked: Questions = [
        (COUNT, {"model": model, "system": _RULE, "messages": inline}),
        (COUNT, {"model": model, "system": _RULE + _MORE, "messages": [*_TURNS, _LAST]}),
    ]
    for effort in ("none", *EFFORTS):
        rendered = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        asked.append((TOKENIZE, {"model": model, "messages": [_HELLO], "chat_template_kwargs": rendered}))
    return asked


def template_of(answers: Sequence[Any]) -> Template | None:
    """Read the engine's answers to `questions`. Each is decoded JSON, or None for a refusal. Returns None if the
    engine said nothing at all, as for a model that it does not know."""
    counts = [_in(answer, "input_tokens") for answer in answers[:2]]
    none, *others = [_in(answer, "tokens") for answer in answers[2:]]
    if all(told is None for told in (*counts, none, *others)):
        return None
    knows_no_none = any(others) if none is None else none in others
    return Template(counts[0] is not None and counts[0] == counts[1], "low" if knows_no_none else "none")


def _in(answer: Any, name: str) -> Any:
    return answer.get(name) if isinstance(answer, dict) else None

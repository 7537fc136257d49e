"""``POST /v1/chat/completions`` as vLLM speaks it.

Asked with ``return_token_ids`` and ``logprobs``, vLLM reports the prompt's ids once: at the top of the answer, or in a
stream in the first event of each choice. With each piece of text it reports the ids and logprobs of the tokens that
made it. A stream then differs in two more things. An event whose text a tool or reasoning parser still holds back is
sent nevertheless, with an empty ``delta``. An agent that asked for neither ids nor logprobs would not have got it, so
it is taken out. And the first event of a choice, which only names the role, has no ``token_ids`` at all.

``top_logprobs: null`` switches vLLM's logprobs off although ``logprobs`` is true, so it is replaced by 0. A request
that vLLM refuses for its logprobs (``top_logprobs`` without ``logprobs``) keeps them as they are, and is refused.
Prompts that are more than text, and requests for beam search, go out as they are, uncaptured.

With ``include_reasoning: false``, a vLLM that has a parser (of reasoning or of tool calls) withholds even ids that are
asked for, since they would tell the reasoning. So the engine is asked with it true, and `HiddenReasoning` takes out
what the agent must not see, as vLLM itself does. Without any parser vLLM ignores the field, and so does the proxy. An
answer with the reasoning does not show which it is. A trial does: the engine withholds its one token's id, or not.

Next: ajet_proxy/io/ledger_port/local.py
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ajet_proxy.core.continuity import memory
from ajet_proxy.core.conversation.history import ChatHistory, History
from ajet_proxy.core.protocol.dialect import Ask, Doubt, Echo, OpenAIDialect, Questions
from ajet_proxy.core.protocol.json_edits import ID, IDS, INDEX, NUMBER, STRING, WHOLE, Edits, Spanned, scan_at
from ajet_proxy.core.protocol.reading import UNREADABLE, Reading
from ajet_proxy.core.protocol.request import beyond_text, choices_of, flag, unread

_ROW = (
    rb'\{"token":' + STRING + rb',"logprob":(' + NUMBER + rb'),"bytes":(?:' + IDS + rb'|\[\]|null)'
    rb',"top_logprobs":\[\]\}'
)
"""A chat answer's word on one token; its group is the logprob."""
_SMALL = rb'"[a-z_]++":(?:' + WHOLE + rb"|null)"
_COUNT = rb"(?:" + _SMALL + rb'|"[a-z_]++":\{(?:' + _SMALL + rb"(?:," + _SMALL + rb")*+)?\})"
_BEFORE = ("role", "content")
"""Fields that stand before ``reasoning`` in a message."""


class Chat(OpenAIDialect):
    """The `Dialect` of chat completions, for an engine that `withholds` ids if no reasoning is wanted, or not."""

    name = "chat"
    path = "/v1/chat/completions"
    target = path
    usual = re.compile(
        rb'(data: \{"id":' + STRING + rb',"object":"chat\.completion\.chunk","created":' + WHOLE + rb',"model":'
        + STRING + rb',"choices":\[\{"index":(' + INDEX + rb'),"delta":\{("(?:content|reasoning)":' + STRING
        + rb')?\},"logprobs":)\{"content":\[' + _ROW + rb'\]\}(,"finish_reason":null,"token_ids":)\[('
        + ID + rb')\](\}\](?:,"usage":\{' + _COUNT + rb"(?:," + _COUNT + rb')*+\})?\}\n\n)'
    )
    silence = '"delta":{}'
    limits = ("max_completion_tokens", "max_tokens")
    words, entries = ("messages",), "messages"
    past, takes_ids = ChatHistory, True

    def __init__(self, *, withholds: bool = True) -> None:
        self._withholds = withholds

    def reader(self, ask: Ask) -> Reading:
        return (HiddenReasoning if ask.hide_reasoning else Reading)(self, ask)

    def doubt(self, request: Mapping[str, Any]) -> Doubt | None:
        return _WITHHOLDING if _wants_no_reasoning(request) else None

    def outline(self, request: Mapping[str, Any], history: History, **whose: str) -> memory.Outline | None:
        return memory.outline(request, history, **whose) if isinstance(history, ChatHistory) else None

    def choices(self, request: Mapping[str, Any]) -> int:
        return choices_of(request)

    def ask(self, request: Mapping[str, Any]) -> Ask:
        if flag(request, "use_beam_search"):
            return Ask(skip="beam_search")
        if beyond_text(request.get("messages"), "content"):
            return Ask(skip="multimodal")
        wants_ids = flag(request, "return_token_ids") is True
        hides_reasoning = self._withholds and _wants_no_reasoning(request)
        wants_no_logprobs, fields = _logprobs(request)
        if not wants_ids:
            fields = {"return_token_ids": "true", **fields}
        if hides_reasoning:
            fields["include_reasoning"] = "true"
        fields = {name: value for name, value in fields.items() if not unread(request, name) or name == "top_logprobs"}
        return Ask(
            fields=fields, choices=self.choices(request), hide_ids=hides_reasoning or not wants_ids,
            hide_logprobs=hides_reasoning or wants_no_logprobs, hide_reasoning=hides_reasoning, show_prompt=wants_ids,
            echo=Echo() if flag(request, "echo") else None,
        )

    def logprobs(self, value: Any) -> list[Any]:
        return [token.get("logprob") for token in value.get("content") or ()]

    def said(self, choice: Spanned) -> Any:
        return choice.values.get("delta") or choice.values.get("message") or {}

    def wordless(self, choice: Spanned) -> bool:
        delta = choice.values.get("delta")
        return isinstance(delta, dict) and "role" in delta and not choice.values.get("finish_reason")

    def is_filler(self, choice: Spanned) -> bool:
        values = choice.values
        asked_for = values.get("token_ids") or values.get("logprobs")
        return values.get("delta") == {} and values.get("finish_reason") in (None, "") and bool(asked_for)


def _wants_no_reasoning(request: Mapping[str, Any]) -> bool:
    return flag(request, "include_reasoning") is False


def _logprobs(request: Mapping[str, Any]) -> tuple[bool, dict[str, str]]:
    """Tell whether the agent will get no logprobs, and what to ask for so that the proxy gets them."""
    chosen, top = request.get("logprob_token_ids"), request.get("top_logprobs", 0)
    wants = flag(request, "logprobs") is True
    if not wants and not request.get("logprobs") and (chosen or top):
        return False, {}
    fields = {} if wants else {"logprobs": "true"}
    if top is None and not chosen:
        return True, {**fields, "top_logprobs": "0"}
    return not wants, fields


CHAT = Chat()


# --- answers without the reasoning


def _trial(model: str) -> Questions:
    """Asks the engine for one token of `model`, and for no reasoning."""
    hello = {"messages": [{"role": "user", "content": "?"}], "max_tokens": 1}
    return [("/v1/chat/completions", {"model": model, **hello, "include_reasoning": False, "return_token_ids": True})]


def _settled(answers: Sequence[Any]) -> Chat | None:
    """The dialect of an engine that withholds ids from agents that want no reasoning, or does not, by its answer to
    `_trial`."""
    try:
        return Chat(withholds=answers[0]["choices"][0]["token_ids"] is None)
    except UNREADABLE:
        return None


_WITHHOLDING = Doubt(_trial, _settled)


class HiddenReasoning(Reading):
    """Reads an answer with reasoning and shows it without: the reasoning becomes null. An event that would have held
    nothing else is taken out. If it ends its choice, it stays, with an empty ``delta``."""

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
    told = "token_ids" in values and values.get("finish_reason") in (None, "") and isinstance(values.get("delta"), dict)
    return told and not _says_something(values["delta"])


def _says_something(delta: Any) -> bool:
    """Tell whether words are left without the reasoning. Null content alone is a tool call that was one too many for
    ``parallel_tool_calls: false``; its event is sent in either case."""
    is_void = delta.get("content", "") is None and "reasoning" not in delta
    return bool(delta.get("content") or delta.get("tool_calls")) or is_void


def _silence(delta: Spanned, start: int, edits: Edits) -> None:
    """Makes the reasoning of `delta`, whose first member begins at `start`, null, even if it had none."""
    if "reasoning" in delta.spans:
        edits[delta.spans["reasoning"]] = "null"
        return
    after = max((delta.spans[name][1] for name in _BEFORE if name in delta.spans), default=None)
    if after is not None:
        edits[after, after] = ',"reasoning":null'
    else:
        edits[start, start] = '"reasoning":null' + ("," if delta.values else "")

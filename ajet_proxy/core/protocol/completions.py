"""``POST /v1/completions`` as vLLM speaks it.

Several prompts may stand in one request. Choice number ``prompt x n + i`` is the i-th answer to that prompt, and each
choice carries its own ``prompt_token_ids``. ``logprobs: 0`` gives the sampled token's logprob and no others.

With ``echo`` the text begins with the prompt, but vLLM leaves it out if it is asked for ids. So it is put back where
the answer's text begins (`EchoReading`), if the prompt is text and thus the agent's own. Logprobs, which begin with the
prompt's in either case, are read from their end. In a stream their offsets count from the beginning of the text, so
those of later events are moved on. With ``echo`` the engine tells the agent the prompt's ids in a stream, and not in a
document. To report the sampled tokens' logprobs it has to report the prompt's, too; they are put back to null.

Prompts that are embeddings, and requests for beam search, go out as they are, uncaptured. With ``echo``, so do prompts
of token ids (only the engine can turn them into text) and requests that score a prompt and generate nothing
(``max_tokens: 0``). So do streams of several choices: vLLM 0.31 fails on some of them when asked for logprobs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ajet_proxy.core.conversation.history import PromptHistory
from ajet_proxy.core.protocol.dialect import Ask, Echo, OpenAIDialect
from ajet_proxy.core.protocol.json_edits import ID, INDEX, NUMBER, STRING, WHOLE, Edits, Spanned, scan_at
from ajet_proxy.core.protocol.reading import Reading
from ajet_proxy.core.protocol.request import choices_of, flag, integer, unread


class Completions(OpenAIDialect):
    """The `Dialect` of text completions."""

    name = "completions"
    path = "/v1/completions"
    target = path
    usual = re.compile(
        rb'(data: \{"id":' + STRING + rb',"object":"text_completion","created":' + WHOLE + rb',"model":' + STRING
        + rb',"choices":\[\{"index":(' + INDEX + rb'),("text":' + STRING
        + rb'),"logprobs":)\{"text_offset":\[' + WHOLE + rb'\],"token_logprobs":\[(' + NUMBER
        + rb')\],"tokens":\[' + STRING + rb'\],"top_logprobs":\[\{' + STRING + b":" + NUMBER + rb'\}\]\}'
        + rb'(,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":)'
        + rb'\[(' + ID + rb')\]((?:,"weight_versions":null)?\}\]\}\n\n)'
    )
    silence = '"text":""'
    limits, words, ignores = ("max_tokens",), ("prompt",), ("tools",)
    past = PromptHistory.of

    def reader(self, ask: Ask) -> Reading:
        return Reading(self, ask) if ask.echo is None else EchoReading(self, ask, ask.echo)

    def choices(self, request: Mapping[str, Any]) -> int:
        return choices_of(request) * len(_prompts(request.get("prompt")))

    def ask(self, request: Mapping[str, Any]) -> Ask:
        prompts = _prompts(request.get("prompt"))
        n = choices_of(request)
        if request.get("prompt_embeds"):
            return Ask(skip="prompt_embeds")
        if flag(request, "use_beam_search"):
            return Ask(skip="beam_search")
        hide_ids = flag(request, "return_token_ids") is not True
        hide_logprobs = request.get("logprobs") is None and not request.get("logprob_token_ids")
        streamed = flag(request, "stream") is True
        echo = None
        if flag(request, "echo"):
            spoils = streamed and n > 1 and hide_logprobs
            if integer(request, "max_tokens") == 0 or spoils or (hide_ids and not _can_be_echoed(request, prompts)):
                return Ask(skip="echo")
            texts = tuple(prompt if hide_ids else "" for prompt in prompts for _ in range(n))
            echo = Echo(texts, request.get("prompt_logprobs") is not None)
        return Ask(
            fields=({"return_token_ids": "true"} if hide_ids and not unread(request, "return_token_ids") else {})
            | ({"logprobs": "0"} if hide_logprobs else {}),
            choices=n * len(prompts), prompts=len(prompts), hide_ids=hide_ids, hide_logprobs=hide_logprobs,
            show_prompt=echo is not None and streamed, echo=echo,
        )

    def logprobs(self, value: Any) -> list[Any]:
        logprobs = value.get("token_logprobs")
        return logprobs if isinstance(logprobs, list) else []

    def said(self, choice: Spanned) -> Any:
        return {"text": choice.values.get("text")}


def _prompts(prompt: Any) -> list[Any]:
    """The prompts that ``prompt`` holds: a text or a list of token ids is one."""
    if not isinstance(prompt, list) or not prompt or isinstance(prompt[0], int | float):
        return [prompt]
    return prompt


def _can_be_echoed(request: Mapping[str, Any], prompts: list[Any]) -> bool:
    """Tell whether the engine's text of each prompt is the agent's own."""
    return all(isinstance(prompt, str) for prompt in prompts) and request.get("truncate_prompt_tokens") is None


COMPLETIONS = Completions()


class EchoReading(Reading):
    """Reads an answer to `echo` and shows it with the prompt."""

    _puts_back = True

    def __init__(self, dialect: OpenAIDialect, ask: Ask, echo: Echo) -> None:
        super().__init__(dialect, ask)
        self._echo = echo
        self._begun: set[int] = set()

    def _put_back(self, text: str, choice: Spanned, edits: Edits) -> None:
        values, spans = choice.values, choice.spans
        if values.get("prompt_logprobs") is not None and self._ask.hide_logprobs and not self._echo.prompt_logprobs:
            edits[spans["prompt_logprobs"]] = "null"
        index = values["index"]
        words = self._echo.texts[index] if type(index) is int and 0 <= index < len(self._echo.texts) else ""
        if not words or values.get("token_ids") is None or not isinstance(values["text"], str):
            return
        if index not in self._begun:
            self._begun.add(index)
            start = spans["text"][0] + 1
            edits[start, start] = json.dumps(words, ensure_ascii=False)[1:-1]
        elif values.get("logprobs") is not None and not self._ask.hide_logprobs:
            logprobs = scan_at(text, spans["logprobs"][0])
            moved = [offset + len(words) for offset in logprobs.values["text_offset"]]
            edits[logprobs.spans["text_offset"]] = json.dumps(moved, separators=(",", ":"))

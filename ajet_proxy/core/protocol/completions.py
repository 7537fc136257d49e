"""``POST /v1/completions`` as vLLM speaks it.

Several prompts may stand in one request; choice number ``prompt x n + i`` is the i-th answer to that prompt, and each
choice carries its own ``prompt_token_ids``. ``logprobs: 0`` gives the sampled token's logprob and no others.

With ``echo``, asking for ids changes the text that vLLM returns, which is put right again (see `echo`) where the text
is known: where the prompt is text. These go out as they are, uncaptured: with ``echo``, prompts of token ids (only the
engine can turn them into text), requests that score a prompt and generate nothing (``max_tokens: 0``), and streams of
several choices (vLLM 0.31 fails on some of them when asked for logprobs); prompts that are embeddings; beam search.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ajet_proxy.core.protocol.coercion import flag, integer, unread
from ajet_proxy.core.protocol.echo import EchoReading
from ajet_proxy.core.protocol.event_patterns import ID, INDEX, NUMBER, STRING, WHOLE
from ajet_proxy.core.protocol.json_edits import Spanned
from ajet_proxy.core.protocol.reading import (
    KEEP_ALIVE,
    Ask,
    Echo,
    Reading,
    choices_of,
)
from ajet_proxy.core.protocol.request import Request


class Completions:
    """The `Dialect` of text completions."""

    name = "completions"
    path = "/v1/completions"
    target = path
    keep_alive = KEEP_ALIVE
    usual = re.compile(
        rb'(data: \{"id":' + STRING + rb',"object":"text_completion","created":' + WHOLE + rb',"model":' + STRING
        + rb',"choices":\[\{"index":(' + INDEX + rb'),("text":' + STRING
        + rb'),"logprobs":)\{"text_offset":\[' + WHOLE + rb'\],"token_logprobs":\[(' + NUMBER
        + rb')\],"tokens":\[' + STRING + rb'\],"top_logprobs":\[\{' + STRING + b":" + NUMBER + rb'\}\]\}'
        + rb'(,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":)'
        + rb'\[(' + ID + rb')\]((?:,"weight_versions":null)?\}\]\}\n\n)'
    )

    bulky = False

    def translate(self, request: Request) -> Request:
        return request

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

    def wordless(self, choice: Spanned) -> bool:
        return False

    def is_filler(self, choice: Spanned) -> bool:
        return False


def _prompts(prompt: Any) -> list[Any]:
    """The prompts that ``prompt`` holds: a text or a list of token ids is one."""
    if not isinstance(prompt, list) or not prompt or isinstance(prompt[0], int | float):
        return [prompt]
    return prompt


def _can_be_echoed(request: Mapping[str, Any], prompts: list[Any]) -> bool:
    """Whether the engine's text of each prompt is the agent's own."""
    return all(isinstance(prompt, str) for prompt in prompts) and request.get("truncate_prompt_tokens") is None


COMPLETIONS = Completions()

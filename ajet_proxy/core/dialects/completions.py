"""``POST /v1/completions`` as vLLM speaks it.

Several prompts may stand in one request; choice number ``prompt x n + i`` is the i-th answer to that prompt, and each
choice carries its own ``prompt_token_ids``. ``logprobs: 0`` gives the sampled token's logprob and no others.

With ``echo``, asking for ids changes the text that vLLM returns (it leaves the prompt out), so such requests go out as
they are and are not captured; neither are prompts that are embeddings and not tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ajet_proxy.core.dialects.reading import (
    ID,
    KEEP_ALIVE,
    MAX_CHOICES,
    NUMBER,
    STRING,
    Ask,
    Reading,
    asked,
    choices_of,
)
from ajet_proxy.core.dialects.request import Request
from ajet_proxy.core.dialects.spans import Spanned


class Completions:
    """The `Dialect` of text completions."""

    name = "completions"
    path = "/v1/completions"
    target = path
    keep_alive = KEEP_ALIVE
    usual = re.compile(
        rb'(data: \{"id":' + STRING + rb',"object":"text_completion","created":\d+,"model":' + STRING
        + rb',"choices":\[\{"index":(\d{1,6}),("text":' + STRING
        + rb'),"logprobs":)\{"text_offset":\[\d+\],"token_logprobs":\[(' + NUMBER
        + rb')\],"tokens":\[' + STRING + rb'\],"top_logprobs":\[\{' + STRING + b":" + NUMBER + rb'\}\]\}'
        + rb'(,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":)'
        + rb'\[(' + ID + rb')\](\}\]\}\n\n)'
    )

    def translate(self, request: Request) -> Request:
        return request

    def reader(self, ask: Ask) -> Reading:
        return Reading(self, ask)

    def ask(self, request: Mapping[str, Any]) -> Ask:
        choices = choices_of(request) * _prompts(request.get("prompt"))
        for field, reason in (("echo", "echo"), ("prompt_embeds", "prompt_embeds"), ("use_beam_search", "beam_search")):
            if request.get(field):
                return Ask(skip=reason)
        if choices > MAX_CHOICES:
            return Ask(skip="too_many_choices")
        fields = {}
        hide_ids = not asked(request, "return_token_ids")
        if hide_ids:
            fields["return_token_ids"] = "true"
        hide_logprobs = request.get("logprobs") is None and not request.get("logprob_token_ids")
        if hide_logprobs:
            fields["logprobs"] = "0"
        return Ask(fields=fields, choices=choices, hide_ids=hide_ids, hide_logprobs=hide_logprobs)

    def prompt_owner(self, answer: Spanned, choice: Spanned) -> Spanned:
        return choice

    def logprobs(self, value: Any) -> list[Any]:
        logprobs = value.get("token_logprobs")
        return logprobs if isinstance(logprobs, list) else []

    def said(self, choice: Spanned) -> Any:
        return {"text": choice.values.get("text")}

    def wordless(self, choice: Spanned) -> bool:
        return False

    def is_filler(self, choice: Spanned) -> bool:
        return False


def _prompts(prompt: Any) -> int:
    """How many prompts ``prompt`` is: a text or a list of token ids is one."""
    if not isinstance(prompt, list) or not prompt or type(prompt[0]) is int:
        return 1
    return len(prompt)


COMPLETIONS = Completions()

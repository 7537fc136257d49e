"""The logprobs of tokens that were sampled without any: the model that sampled them looks at them once more.

If an engine reports ids and no logprobs (vLLM's ``/v1/responses`` for all but text), it is asked once more, on
``/v1/completions``, with the exact ids as the prompt. It then tells how likely each of them was. Under the same weights
these are the numbers of the first time, except for the rounding of another batch. The last token is not part of the
prompt: one token must be generated after the prompt, and there the last one is asked for by name. So a sequence that
fills the model's context still fits.

Two things differ from logprobs reported at once. A prompt that is scored is computed without the prefix cache. And the
numbers are those of the model itself, while a grammar (a required tool, a JSON schema) may have narrowed the choice. In
an engine that reports processed logprobs, so may the sampling parameters.
"""

from __future__ import annotations

import json
from typing import Any

from msgspec.structs import asdict

from ajet_proxy.core.protocol.reading import logprobs_of
from ajet_proxy.core.trajectory.call import NOT_SCORED, Captured, Lost, Unscored

TARGET = "/v1/completions"
"""The engine's route that scores."""
UNSHAPED = {"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
"""In place of the defaults that the model came with, under which an engine may report a token."""


def question(choice: Unscored, *, model: str, salt: Any) -> dict[str, Any]:
    """The body that asks for the logprobs of `choice`. With a `salt` (``cache_salt``) its prompt is as private as the
    request's was."""
    *head, last = choice.token_ids
    body: dict[str, Any] = {
        "model": model,
        "prompt": [*choice.prompt_token_ids, *head],
        "prompt_logprobs": 0,
        "max_tokens": 1,
        "logprobs": 0,
        "logprob_token_ids": [last],
        "return_tokens_as_token_ids": True,
        **UNSHAPED,
    }
    if salt is not None:
        body["cache_salt"] = salt
    return body


def answered(choice: Unscored, body: bytes) -> Captured | Lost:
    """`choice` with the logprobs that the engine's answer `body` tells; lost if it does not tell them all."""
    try:
        logprobs = _logprobs(choice, json.loads(body)["choices"][0])
    except (ValueError, TypeError, LookupError, RecursionError):
        return Lost(choice.index, NOT_SCORED)
    return Captured(**asdict(choice), logprobs=logprobs, scored=True)


def _logprobs(choice: Unscored, told: Any) -> tuple[float, ...]:
    """One logprob for each sampled token, or one of the errors that `answered` expects."""
    *head, last = choice.token_ids
    rows = told["prompt_logprobs"]
    if len(rows) != len(choice.prompt_token_ids) + len(head):
        raise ValueError("not as many rows as tokens")
    sampled = rows[len(choice.prompt_token_ids) :]
    values = [row[str(token)]["logprob"] for row, token in zip(sampled, head, strict=True)]
    values.append(told["logprobs"]["top_logprobs"][0][f"token_id:{last}"])
    if (logprobs := logprobs_of(values)) is None:
        raise ValueError("not one logprob for each token")
    return logprobs

"""Why calls cannot be trained although a model answered: their engine does not tell what it sampled; and what helps."""

from __future__ import annotations

GIVES_TOKEN_IDS = "use vLLM ≥ 0.10.2, which knows return_token_ids"
GIVES_LOGPROBS = "start vLLM without --max-logprobs 0"
REMEDY = f"{GIVES_TOKEN_IDS}, and {GIVES_LOGPROBS}; 'ajet-proxy doctor' says what an engine lacks"
UNTOLD = {
    "no_token_ids": "gives no token ids",
    "no_logprobs": "does not give a logprob for each token",
    "unaskable": "refuses to be asked for token ids and logprobs",
    "no_chat_route": "has no chat route, on which it would be asked for token ids",
}
"""The reasons for which such calls are lost, and what each says of the engine."""


def told(reasons: str | None) -> str | None:
    """The first of `reasons`, separated by commas as in an episode's ``detail``, that is one of `UNTOLD`."""
    return next((reason for reason in (reasons or "").split(", ") if reason in UNTOLD), None)

"""Reasons why nothing can be learned although a model answered, and the remedies."""

from __future__ import annotations

from typing import NamedTuple

GIVES_TOKEN_IDS = "use vLLM ≥ 0.10.2, which knows return_token_ids"
GIVES_LOGPROBS = "start vLLM without --max-logprobs 0"


SIGNAL = "choose tasks that the model solves now and then, or reward parts of a solution"
"""The remedy if all rewards that are compared are equal."""


class Untrainable(NamedTuple):
    """A fault of an engine that is such a reason, and its remedy."""

    fault: str
    remedy: str


UNTRAINABLE = {
    "no_token_ids": Untrainable("gives no token ids", GIVES_TOKEN_IDS),
    "no_logprobs": Untrainable("does not give a logprob for each token", GIVES_LOGPROBS),
    "unaskable": Untrainable(
        "refuses requests for token ids and logprobs",
        f"{GIVES_TOKEN_IDS}, or {GIVES_LOGPROBS}: 'ajet-proxy doctor' says which it refuses",
    ),
    "no_chat_route": Untrainable(
        "has no chat route, so it cannot be asked for token ids", "use vLLM ≥ 0.10.2, which has one"
    ),
}
"""The reasons for which such calls are lost."""


def untrainable_in(reasons: str | None) -> str | None:
    """The first of `reasons`, separated by commas as in an episode's ``detail``, that is one of `UNTRAINABLE`."""
    return next((reason for reason in (reasons or "").split(", ") if reason in UNTRAINABLE), None)

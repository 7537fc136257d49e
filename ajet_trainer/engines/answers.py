"""Answers of engines, which tell whether they compute what the trainer does (see `ajet_trainer.agreement`)."""

from __future__ import annotations

from collections.abc import Sequence

import httpx

from ajet_trainer.agreement import Answer, difference, name_of, shown_by, tolerance
from ajet_trainer.engines import EngineLost, each
from ajet_trainer.engines.vllm import Vllm, words

PROMPT = "In the beginning there were seven rivers, and the longest of them was called"
TOKENS = 32
"""Of an answer. Longer ones would tell little more."""
LOOK_S = 120.0
"""The time for an answer: an engine that has just been started compiles."""


def answers(urls: Sequence[str], model: str, prompt: Sequence[int], key: str) -> list[Answer]:
    """Asks each engine to go on from `prompt`, as `model`. Raises `EngineLost`."""
    found: dict[str, Answer] = {}

    def tell(url: str) -> None:
        try:
            with Vllm(url, LOOK_S, key) as engine:
                found[url] = engine.answer(model, prompt, TOKENS)
        except (httpx.HTTPError, ValueError) as error:
            said = f"does not answer as {model!r}, and so cannot be compared with the trainer"
            raise EngineLost(f"the engine at {url} {said}: {words(error)}") from error

    each(urls, tell)
    return [found[url] for url in urls]


def check(url: str, answer: Answer, own: Sequence[float], served: str | None, trained: str | None) -> None:
    """Raises `EngineLost` if the engine's logprobs are further from the trainer's `own` than the dtypes explain, in
    which it is `served` and `trained`."""
    dtypes = (served or shown_by(answer), trained)
    apart, most = difference(answer.logprobs, own), tolerance(dtypes, answer)
    if apart > most:
        shown = " and ".join(dict.fromkeys(map(name_of, dtypes)))
        raise EngineLost(
            f"the engine at {url} does not compute what was pushed to it: its logprobs of {len(answer.ids)} tokens of "
            f"its own are {apart:.2g} nats from the trainer's, and {shown} explains {most:.2g}. Either it serves "
            "another model, or it cannot take new weights of this one while it runs (vLLM's log names weights that "
            "were not loaded). Nothing was trained"
        )

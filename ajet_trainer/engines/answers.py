"""Answers of engines, which tell whether they compute what the trainer does (see `ajet_trainer.agreement`)."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from contextlib import suppress

import httpx

from ajet_trainer.agreement import Answer, difference, name_of, shown_by, tolerance
from ajet_trainer.engines import http
from ajet_trainer.engines.http import EngineLost

PROMPT = "In the beginning there were seven rivers, and the longest of them was called"
TOKENS = 32
"""Of an answer. Longer ones would tell little more."""
LOOK_S = 120.0
"""The time for an answer: an engine that has just been started compiles."""

NEUTRAL = {
    "temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0,
    "frequency_penalty": 0,
}  # fmt: skip
"""So that no default of the engine counts."""


def answer(engine: httpx.Client, model: str, prompt: Sequence[int], tokens: int) -> Answer:
    """Has the engine go on greedily from the token ids `prompt`, for so many `tokens`. Nothing that it has computed
    before is used for it. Raises `httpx.HTTPError`, and `ValueError` if it does not tell tokens and logprobs."""
    salt = uuid.uuid4().hex
    body = {"model": model, "return_token_ids": True, "cache_salt": salt, **NEUTRAL}
    asked = {"prompt": list(prompt), "max_tokens": tokens, "ignore_eos": True, "logprobs": 5}
    try:
        choice = http.ask(engine, "/v1/completions", body | asked).json()["choices"][0]
        told = choice["logprobs"]
        made = Answer(
            tuple(choice["token_ids"]), tuple(map(float, told["token_logprobs"])),
            tuple(tuple(map(float, place.values())) for place in told.get("top_logprobs") or ()),
        )
    except (LookupError, TypeError, ValueError, AttributeError):
        raise ValueError("/v1/completions does not tell token ids and logprobs") from None
    if not made.ids or len(made.ids) != len(made.logprobs):
        raise ValueError(f"/v1/completions tells {len(made.logprobs)} logprobs of {len(made.ids)} tokens")
    whole = {"prompt": [*prompt, *made.ids], "max_tokens": 1, "prompt_logprobs": 0, "cache_salt": f"{salt}-again"}
    with suppress(httpx.HTTPStatusError, LookupError, TypeError, ValueError):
        found = http.ask(engine, "/v1/completions", body | whole).json()["choices"][0]["prompt_logprobs"][len(prompt) :]
        made = made._replace(again=tuple(
            float(place[str(token)]["logprob"]) for place, token in zip(found, made.ids, strict=True)
        ))  # fmt: skip
    return made


def answers(urls: Sequence[str], model: str, prompt: Sequence[int], key: str) -> list[Answer]:
    """Asks each engine to go on from `prompt`, as `model`. Raises `EngineLost`."""
    found: dict[str, Answer] = {}

    def tell(url: str) -> None:
        try:
            with http.asking(url, LOOK_S, key) as engine:
                found[url] = answer(engine, model, prompt, TOKENS)
        except (httpx.HTTPError, ValueError) as error:
            said = f"does not answer as {model!r}, and so cannot be compared with the trainer"
            raise EngineLost(f"the engine at {url} {said}: {http.words(error)}") from error

    http.each(urls, tell)
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

"""Compares what engine and trainer compute: in an answer of the engine after the first push, and in every step.

*An answer.* The engine answers greedily, and the trainer computes the logprobs of the same tokens. The mean of their
absolute differences is at most what rounding explains (`tolerance`). A push can be answered with a 200 and still leave
weights behind, or go to an engine of another model. Then the answer shows it, whatever the engine held before.

*A step.* Tokens that were sampled by the very weights that a step begins with are *fresh*. Over them the engine's
distribution is the trainer's but for rounding. So their KL divergence says whether the engine serves what was pushed.
It is estimated by k3 = r - 1 - log r, with r the trainer's probability over the engine's (Schulman 2020,
http://joschu.net/blog/kl-approx.html). The tokens are the engine's, so the mean of k3 is KL(engine || trainer) without
a bias. k3 is never negative, and varies less than k1 = -log r. A difference of probabilities says less: it is small
wherever many tokens are possible.
"""

from __future__ import annotations

from collections.abc import Sequence

import httpx
import numpy as np
from numpy.typing import NDArray

from ajet_sdk.errors import AjetError
from ajet_trainer.batch import Row
from ajet_trainer.engines import EngineLost, each
from ajet_trainer.engines.vllm import Answer, Vllm, words

PROMPT = "In the beginning there were seven rivers, and the longest of them was called"
TOKENS = 32
"""Of an answer. Longer ones would tell little more."""
LOOK_S = 120.0
"""The time for an answer: an engine that has just been started compiles."""
EXPLAINED = {"float32": 0.002, "float16": 0.05, "bfloat16": 0.25}
"""Nats that the mean difference of logprobs may be, by the coarser dtype of engine and trainer. Logits of 16 to 32 are
rounded to 1/8 in bfloat16, and to 1/64 in float16. In float32 measured differences are below 1e-5."""
OTHERWISE = 0.5
"""The same for quantized weights, whose rounding is coarser than any of these; and the most for whatever reason."""
LONG = {"fp32": "float32", "float": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}
ASSUMED = "bfloat16"
"""The dtype that is assumed where nobody tells and nothing shows."""
NOISE = 20.0
"""Engine and trainer may be so many times as far apart as the engine is from itself, if it computes the same tokens as
an answer and as a prompt."""
STILL, GRID = 1e-4, 2.0**-13
"""An engine that computes in float32 is closer to itself than this, in nats. And its logits do not stand on a grid of
this width, as those do that are rounded to half precision."""
ENOUGH = 1000
"""Fresh tokens that a step must have for its KL to mean anything."""
LIMIT = 20.0
"""Of a log ratio, as verl limits it: e to this power is still a number."""


class OtherWeights(AjetError):
    """Fresh tokens of a step were not sampled by the weights that it begins with. That may be the engine, or these
    episodes alone: one that was started again has sampled them before it had the weights. So it counts as a step that
    failed (`ajet_trainer.attempts`), or the same batch would end every run that comes."""

    type = "other_weights"


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


def name_of(dtype: str | None) -> str:
    """The usual name of a `dtype` that verl, torch or vLLM names: ``bf16``, ``torch.float16``."""
    said = (dtype or ASSUMED).removeprefix("torch.")
    return LONG.get(said, said)


def shown_by(answer: Answer) -> str | None:
    """The dtype of an engine that does not tell it, if its `answer` shows float32."""
    steps = np.asarray([one - place[0] for place in answer.likeliest for one in place[1:]], dtype=np.float64) / GRID
    if not answer.again or difference(answer.logprobs, answer.again) > STILL or not len(steps):
        return None
    return None if np.abs(steps - steps.round()).max() < 0.03 else "float32"


def tolerance(dtypes: Sequence[str | None], answer: Answer) -> float:
    """The nats that the logprobs of two may be apart that compute with `dtypes`, in the mean over an `answer`."""
    noise = NOISE * difference(answer.logprobs, answer.again) if answer.again else 0.0
    most = max(EXPLAINED.get(name_of(dtype), OTHERWISE) for dtype in dtypes)
    return max(most, min(noise, OTHERWISE))


def difference(engine: Sequence[float], trainer: Sequence[float]) -> float:
    """The mean absolute difference of two lists of logprobs [T], in nats; infinite if one is no number."""
    apart = float(np.abs(np.asarray(engine, dtype=np.float64) - np.asarray(trainer, dtype=np.float64)).mean())
    return apart if np.isfinite(apart) else float("inf")


def fresh_kl(
    rows: Sequence[Row], logprobs: Sequence[NDArray[np.float32]], version: int
) -> tuple[float, int]:
    """KL(engine || trainer) in nats a token over what `version` sampled, by k3, and the number of these tokens.
    `logprobs` are the trainer's of each row's response [R]. Tokens whose shaped distribution the trainer corrects for
    are left out: there the two are meant to differ."""
    ratios = [
        (np.asarray(own, dtype=np.float64) - row.logprobs)[row.versions == version]
        for row, own in zip(rows, logprobs, strict=True) if row.versions is not None
    ]
    found = np.clip(np.concatenate([np.zeros(0), *ratios]), -LIMIT, LIMIT)
    if not len(found):
        return 0.0, 0
    return float((np.expm1(found) - found).mean()), len(found)

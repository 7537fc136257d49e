"""Samples as other trainers want them: rows for supervised fine-tuning, and pairs for preference learning.

Both hold token ids, because ids are what was sampled; text would need to be tokenized again. The names are those that
Hugging Face's trainers read: ``input_ids`` and ``labels``, where `NO_LABEL` stands for tokens that are not learnt;
``prompt_ids``, ``chosen_ids`` and ``rejected_ids``.

A pair is two samples of one task, model and agent that begin with the same prompt and earned different rewards, by more
than the rounding of sums (`ajet_sdk.rounding`). The best is paired with the worst, the next best with the next worst,
and so on inwards. Two that say the same are no pair. Planning needs only each sample's `Place`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from ajet_proxy.core.trajectory.call import prompt_hash
from ajet_sdk.rounding import differ, magnitude, slack
from ajet_sdk.sample import Sample

NO_LABEL = -100


class Place(NamedTuple):
    """A sample's name, and all that decides with which others it can be paired. ``size`` is how large the numbers are
    that its reward was added up from."""

    episode: str
    number: int
    reward: float
    kind: tuple[str, str, str, str]
    answer: str
    size: float = 0.0


def place(sample: Sample, number: int, given: Iterable[float] = ()) -> Place | None:
    """The `Place` of `sample`, whose number within its episode is `number`; None if nobody rewarded it. Its episode was
    `given` these rewards."""
    if sample.reward is None:
        return None
    start = prompt_length(sample)
    kind = (sample.task, sample.model, sample.agent, prompt_hash(sample.token_ids[:start]))
    return Place(sample.episode, number, sample.reward, kind, prompt_hash(sample.token_ids[start:]), magnitude(given))


def prompt_length(sample: Sample) -> int:
    """The number of tokens stand before the first sampled one."""
    return sample.loss_mask.index(1) if 1 in sample.loss_mask else len(sample.loss_mask)


def sft_row(sample: Sample) -> dict[str, Any]:
    """A row that teaches what was sampled."""
    labels = [
        token if learnt else NO_LABEL for token, learnt in zip(sample.token_ids, sample.loss_mask, strict=True)
    ]
    return _named(sample) | {"reward": sample.reward, "input_ids": list(sample.token_ids), "labels": labels}


def pairs(places: Iterable[Place]) -> Iterator[tuple[Place, Place]]:
    """The better and the worse of each pair."""
    kinds: dict[tuple[str, ...], list[Place]] = {}
    for known in places:
        kinds.setdefault(known.kind, []).append(known)
    for group in kinds.values():
        ordered = deque(sorted(group, key=lambda known: -known.reward))
        while len(ordered) > 1 and _differ(ordered[0], ordered[-1]):
            better = ordered.popleft()
            if better.answer != ordered[-1].answer:
                yield better, ordered.pop()


def _differ(one: Place, other: Place) -> bool:
    return differ((one.reward, other.reward), slack((one.size, other.size)))


def preference_row(chosen: Sample, rejected: Sample) -> dict[str, Any]:
    """One pair. The masks are 1 where a token was sampled: an answer of several turns holds what came between."""
    start = prompt_length(chosen)
    return _named(chosen) | {
        "rejected_sample": rejected.sample,
        "prompt_ids": list(chosen.token_ids[:start]),
        "chosen_ids": list(chosen.token_ids[start:]),
        "chosen_mask": list(chosen.loss_mask[start:]),
        "chosen_reward": chosen.reward,
        "rejected_ids": list(rejected.token_ids[start:]),
        "rejected_mask": list(rejected.loss_mask[start:]),
        "rejected_reward": rejected.reward,
    }


def _named(sample: Sample) -> dict[str, Any]:
    return {"sample": sample.sample, "task": sample.task, "model": sample.model, "agent": sample.agent}

"""Admitted episodes as rows: the arrays that a trainer needs of each sample, and nothing it could get wrong by itself.

A row splits a sample at its first sampled token: before it is the prompt, and from there on the response. In the
response, the mask tells sampled tokens from what the environment or a template put between them. The row ends with the
last sampled token: what follows that one teaches nothing, and estimators that go by tokens find the reward at the end.
Token ids, logprobs and mask are the engine's own, copied and never recomputed. Every row carries the reward of its
session; how an estimator turns rewards into advantages is `ajet_trainer.advantage`'s and verl's business. With credit
by turn (`ajet_trainer.turns`) rows bring their advantages along.

If nothing of a session is trained and its reward counts, it has one row: two tokens without a mask.

Next: ajet_trainer/backends/verl/trainer.py
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ajet_sdk.sample import Group, Sample
from ajet_trainer.advantage import Masked, Session, compared
from ajet_trainer.sampling import computed, runs_of, temperature_of
from ajet_trainer.turns import ByTurn, credit, spread, turn_sessions


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One sample. ``P`` prompt tokens and ``R`` response tokens; arrays over the response are aligned with it.

    `group` is a name without ``_``, equal for the rows whose rewards are compared. `session` counts the sessions of a
    group (see `advantage.Session`), and `index` the samples of a session, each from 0. The trainer's logprobs are those
    at `temperature`. `spans` gives the tokens of the response that each call sampled, as ``(call, start, end)``.
    `advantages` are those of the response's tokens, if it is not verl that computes them. `versions` has the policy
    version that sampled each token, and -1 where that is not certain, or the trainer computes another distribution.
    """

    group: str
    session: int
    index: int
    prompt: NDArray[np.int64]  # [P]
    response: NDArray[np.int64]  # [R]
    mask: NDArray[np.int64]  # [R], 1 where the policy sampled the token
    logprobs: NDArray[np.float32]  # [R], the engine's; 0.0 where the mask is 0
    reward: float
    turns: int
    min_version: int
    max_version: int
    temperature: float = 1.0
    spans: tuple[tuple[str, int, int], ...] = ()
    advantages: NDArray[np.float32] | None = None
    episode: str = ""
    task: str = ""
    versions: NDArray[np.int64] | None = None

    @property
    def key(self) -> str:
        """``GROUP_SESSION_INDEX``, by which verl finds the trajectories of a session and the sessions of a group."""
        return f"{self.group}_{self.session}_{self.index}"

    @property
    def tokens(self) -> int:
        return len(self.prompt) + len(self.response)

    @property
    def sampled(self) -> int:
        return int(self.mask.sum())


def to_rows(
    batch: str, groups: Sequence[Group], assumed: float = 1.0, by_turn: ByTurn | None = None
) -> list[Row]:
    """The rows of `groups`, in their order; names depend on nothing but the batch's id. `assumed` is the temperature of
    calls that do not tell theirs; `by_turn` gives each call an advantage of its own. A set of
    sessions without a token to train has no rows."""
    return [
        to_row(group_name(batch, place, part), number, index, reward, sample, assumed, calls)
        for place, group in enumerate(groups)
        for part, sessions in enumerate(_sets(group, by_turn))
        if any(not isinstance(sample, Masked) for session, _, _ in sessions for sample in session.samples)
        for number, (session, reward, calls) in enumerate(sessions)
        for index, sample in enumerate(_shown(session))
    ]


Credited = tuple[Session, float, Mapping[str, float] | None]
"""A session, all that it got, and the advantages of its calls."""


def _sets(group: Group, by_turn: ByTurn | None) -> list[list[Credited]]:
    if by_turn is None:
        return [[(session, session.reward, None) for session in sessions] for sessions in compared(group)]
    return [
        [(session, session.total, calls) for session, calls in zip(mine, credit(mine, by_turn), strict=True)]
        for mine in turn_sessions(group)
    ]


def _shown(session: Session) -> Sequence[Sample]:
    """The samples of `session` that become rows: those with tokens to train, or one that stands for its reward."""
    return [sample for sample in session.samples if not isinstance(sample, Masked)] or session.samples[:1]


def group_name(batch: str, place: int, part: int = 0) -> str:
    """A unique name for the `part` of the group at `place`: a set of sessions that are compared. It is stable over
    restarts, and free of the ``_`` that separates keys."""
    return hashlib.sha256(f"{batch}/{place}/{part}".encode()).hexdigest()[:32]


def to_row(
    group: str, session: int, index: int, reward: float, sample: Sample, assumed: float = 1.0,
    calls: Mapping[str, float] | None = None,
) -> Row:
    """One sample with a sampled token as a row, or one that is masked; `calls` have the advantages of its calls."""
    first, end = 1, 2
    if not isinstance(sample, Masked):
        first, end = sample.loss_mask.index(1), len(sample.loss_mask) - sample.loss_mask[::-1].index(1)
    token_ids = np.asarray(sample.token_ids, dtype=np.int64)
    versions = [version for version, _ in sample.policy_versions]
    spans = tuple((call, start - first, stop - first) for call, start, stop in sample.spans if start < stop)
    return Row(
        group=group,
        session=session,
        index=index,
        prompt=token_ids[:first],
        response=token_ids[first:end],
        mask=np.asarray(sample.loss_mask[first:end], dtype=np.int64),
        logprobs=np.asarray(sample.logprobs[first:end], dtype=np.float32),
        reward=reward,
        turns=len(sample.spans),
        min_version=min(versions),
        max_version=max(versions),
        temperature=temperature_of(sample, assumed),
        spans=spans,
        advantages=None if calls is None else spread(calls, spans, end - first),
        episode=sample.episode,
        task=sample.task,
        versions=_versions(sample)[first:end],
    )


def _versions(sample: Sample) -> NDArray[np.int64]:
    """`Row.versions`, over all tokens of `sample`."""
    sampled = np.asarray(sample.loss_mask, dtype=bool)
    found = np.full(len(sampled), -1, dtype=np.int64)
    if sample.uncertain_tokens or not sampled.any():
        return found
    versions = [np.full(count, version) for version, count in sample.policy_versions]
    meant = [np.full(count, computed(facts)) for facts, count in runs_of(sample)]
    found[sampled] = np.where(np.concatenate(meant), np.concatenate(versions), -1)
    return found

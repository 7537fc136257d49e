"""Group-relative advantage is a matter of episodes: one that splits into more timelines weighs no more.

*The session.* The samples of an episode that were rewarded together are one session, with one row each and one reward.
That is the whole episode, unless a reward was given to an agent or a call alone. Then an agent's samples are one, but
for those that hold rewarded calls: samples with the same rewarded calls are one. What a reward is worth does not matter
here, only what it was given for. `compared` says which sessions are compared with each other. (`ajet_trainer.turns`
has other sessions, in the same sets.)

Two places would break this, and this file holds the arithmetic that mends both.

*The baseline.* Most of verl's group-relative estimators see all rows, so an episode with three rows would count three
times in the mean of its group. They are given `one_row_a_session`, and the result is spread over the session's rows.
Rows with which verl fills up a batch are no session, and are shown to none of them.

*The denominator.* A loss that is a mean over tokens does not see how tokens are arranged in rows. A loss that is a mean
over sequences does: `row_weights` are the factors with which it becomes a mean over sessions, in each of its terms.

Next: ajet_trainer/batch.py
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ajet_sdk.rounding import leveled, magnitude, slack
from ajet_sdk.sample import BatchEpisode, Group, Sample
from ajet_trainer.overlong import PENALTY


@dataclass(frozen=True, slots=True)
class Session:
    """The part of an episode that has one ``reward``: samples that have sampled tokens, at least one."""

    reward: float
    samples: tuple[Sample, ...]


S = TypeVar("S", bound=Session)


@dataclass(frozen=True, slots=True)
class Masked(Sample):
    """A sample whose calls were all left out, with its first two tokens and no mask. Nothing of it is trained, but its
    reward counts in the baseline: calls of it were overlong, or credit goes by turn. ``policy_versions`` are those of
    what was sampled."""


def compared(group: Group) -> tuple[tuple[Session, ...], ...]:
    """The sessions of `group` in sets; a session's baseline is that of its set.

    Where rewards have a scope, the sessions of each agent are a set, if each was rewarded in more than one episode.
    What a proposer gets says nothing of what a critic may expect. Otherwise all are one set. What nobody has rewarded
    is in none. Rewards of a set that are equal up to the rounding of sums are the same number.
    """
    by = slack(magnitude(float(item["value"]) for item in episode.rewards) for episode in group.compared)
    return tuple(_leveled(sessions, by) for sessions in _sets(group))


def _leveled(sessions: Sequence[Session], by: float) -> tuple[Session, ...]:
    rewards = leveled([session.reward for session in sessions], by)
    return tuple(replace(session, reward=reward) for session, reward in zip(sessions, rewards, strict=True))


def _sets(group: Group) -> tuple[tuple[Session, ...], ...]:
    if not any(map(rewarded_apart, group.compared)):
        return (tuple(Session(episode.reward, counted(episode)) for episode in group.compared),)
    by_agent: dict[str, list[Session]] = {}
    for episode in group.compared:
        rewarded = totals(episode.rewards)
        parts: dict[tuple[str, frozenset[str]], list[tuple[Sample, float]]] = {}
        for sample, reward in _rewarded(episode):
            calls = frozenset(call for call in sample.calls if call in rewarded)
            parts.setdefault((sample.agent, calls), []).append((sample, reward))
        for (agent, _), together in parts.items():
            by_agent.setdefault(agent, []).append(Session(together[0][1], tuple(sample for sample, _ in together)))
    return sets_of(group, by_agent)


def sets_of(group: Group, by_agent: Mapping[str, Sequence[S]]) -> tuple[tuple[S, ...], ...]:
    """The sessions of each agent of `group` as a set, or all sessions as one."""
    seen = Counter(agent for episode in group.compared for agent in {one.agent for one in counted(episode)})
    if all(episodes > 1 for episodes in seen.values()):
        return tuple(map(tuple, by_agent.values()))
    return (tuple(session for sessions in by_agent.values() for session in sessions),)


def trainable(episode: BatchEpisode) -> tuple[Sample, ...]:
    """The samples of `episode` that hold a sampled token and that a reward concerns."""
    return tuple(sample for sample in counted(episode) if not isinstance(sample, Masked))


def counted(episode: BatchEpisode) -> tuple[Sample, ...]:
    """The `trainable` samples, and those whose reward counts although nothing of them is trained."""
    return tuple(sample for sample, _ in _rewarded(episode))


def rewarded_apart(episode: BatchEpisode) -> bool:
    """True if a reward of `episode` was given to an agent or a call alone. Punishments do not count: they are ours."""
    given = (item for item in episode.rewards if not item.get(PENALTY))
    return any(item.get("agent") is not None or item.get("call") is not None for item in given)


def totals(rewards: Iterable[Mapping[str, Any]]) -> dict[str | None, float]:
    """The reward of each call, and under None what was given to no call. Final rewards replace earlier ones as contract
    §5.2 says: those of their scope, or all if they are the whole episode's."""
    finals: dict[tuple[str | None, ...], float] = {}
    held = defaultdict[str | None, list[float]](list)
    for item in rewards:
        call, value = item.get("call"), float(item["value"])
        scope = (call,) if call is not None else (None, item.get("agent"), item.get("model"))
        if not item.get("final"):
            held[call].append(value)
            continue
        if scope == (None, None, None):
            finals.clear()
        finals[scope] = value
    for (call, *_), value in finals.items():
        held[call].append(value)
    return {call: math.fsum(values) for call, values in held.items()}


def _rewarded(episode: BatchEpisode) -> list[tuple[Sample, float]]:
    """The `counted` samples, each with its reward."""
    scoped = rewarded_apart(episode)
    rewards = [(sample, sample.reward if scoped else episode.reward) for sample in episode.samples]
    return [
        (sample, reward) for sample, reward in rewards
        if reward is not None and (1 in sample.loss_mask or isinstance(sample, Masked))
    ]  # fmt: skip


def session_of(key: str) -> str:
    """The session part of a row's key ``GROUP_SESSION_INDEX``."""
    return key.rsplit("_", 1)[0]


def group_of(key: str) -> str:
    """The group part of a row's key, which has no ``_``."""
    return key.split("_", 1)[0]


def one_row_a_session(keys: Sequence[str]) -> tuple[list[int], list[int]]:
    """``(rows, place)``: the last row of each session, and for every row the place of its session in `rows`."""
    last: dict[str, int] = {}
    for position, key in enumerate(keys):
        best = last.get(session_of(key))
        if best is None or _index(keys[best]) < _index(key):
            last[session_of(key)] = position
    places = {session: place for place, session in enumerate(last)}
    return list(last.values()), [places[session_of(key)] for key in keys]


def row_weights(
    mode: str, keys: Sequence[str], sampled: Sequence[int], kept: Sequence[int]
) -> NDArray[np.float32] | None:
    """Factors on what each row adds to a loss, float32 ``[B]``, or None where nothing is to change.

    `mode` is verl's ``loss_agg_mode``; `sampled` counts each row's sampled tokens (0 for a row of padding), and `kept`
    those that no rejection took away. With these factors a mean over rows equals the mean over sessions of what the
    rows of a session hold together. A session that was rejected as a whole still counts: no other weighs more.
    """
    sessions = [session_of(key) for key in keys]
    number = len({session for session, count in zip(sessions, sampled, strict=True) if count})
    if not mode.startswith("seq-mean") or number == len(keys) or number == 0:
        return None
    weights = np.full(len(keys), len(keys) / number)
    if mode == "seq-mean-token-mean":
        totals: dict[str, float] = {}
        for session, count in zip(sessions, kept, strict=True):
            totals[session] = totals.get(session, 0.0) + count
        weights *= [count / (totals[session] or 1.0) for session, count in zip(sessions, kept, strict=True)]
    return weights.astype(np.float32)


def _index(key: str) -> int:
    return int(key.rsplit("_", 1)[1])

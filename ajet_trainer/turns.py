"""Credit by turn: an advantage for each call, from the rewards of that call and of those that began after it.

This is `algorithm.adv_estimator = "ajet_turn"`. A session is what one agent did in one episode, and its calls stand in
the order in which they began. Where no reward of a group was given to an agent or a call alone, a session is the whole
episode, and all of this equals verl's `grpo`. Punishments of length (`ajet_trainer.overlong`) are an exception: they
are of calls there, too. The calls of several agents then stand by their numbers, those of one number by the agents'
names: samples tell no other order.

- `R` is what the session got as a whole: the rewards without a scope, and those of the agent.
- `r(k)` is what call k got, and ``G(t) = sum of gamma^(k - t) * r(k) over k >= t`` its return-to-go.
- The advantage of call t is ``A(t) = R - mean R + G(t) - b(t)``, with the mean over the sessions of a set.
- The baseline ``b(t)`` is the mean of G over the calls of the set that were made in the same state: the anchors of
  GiGPO (arXiv:2505.10978). The agent must have named the state, and two episodes at least must have been in it.
- Otherwise ``b(t)`` is the mean over the calls with the same number. A number that only one episode reached has the
  baseline of the last one before it that several reached: nothing else tells what may be expected so late.
- Scaled (verl's ``norm_adv_by_std_in_grpo``), all advantages of a set of E sessions are divided by
  ``sqrt(sum over sessions of mean over calls of A(t)^2 / (E - 1)) + 1e-6``. With R alone that is GRPO's standard
  deviation. An episode that is alone has nothing to be compared with: its advantages are 0, or those that
  `ajet_trainer.running` tells.

Invariant: calls count that are known, trained or not. So a call that is left out of an episode that is trained
changes no other call's credit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ajet_sdk.rounding import magnitude, slack
from ajet_sdk.sample import BatchEpisode, Group, Sample
from ajet_trainer.advantage import Session, compared, counted, rewarded_apart, sets_of, totals
from ajet_trainer.overlong import PENALTY

EPSILON = 1e-6
"""The number that GRPO adds to the standard deviation."""


@dataclass(frozen=True, slots=True)
class ByTurn:
    """The credit of turns: the discount of a turn, and whether advantages are scaled by their deviation. `alone` is of
    `ajet_running`: advantages of calls, which count if their episode is alone."""

    gamma: float = 1.0
    scaled: bool = True
    alone: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class TurnReward:
    """A call of a session: what it got, and the state in which it was made, if that is known."""

    call: str
    reward: float
    state: str | None = None


@dataclass(frozen=True, slots=True)
class TurnSession(Session):
    """A session with its calls in the order in which they began; `reward` is what it got as a whole."""

    episode: str
    turns: tuple[TurnReward, ...]

    @property
    def total(self) -> float:
        """The reward of the session, its calls included."""
        return self.reward + math.fsum(turn.reward for turn in self.turns)


def turn_sessions(group: Group) -> tuple[tuple[TurnSession, ...], ...]:
    """The sessions of `group` in sets, which are those of `advantage.compared`."""
    if not any(map(rewarded_apart, group.compared)):
        (wholes,), sessions = compared(group), list[TurnSession]()
        for one, episode in zip(wholes, group.compared, strict=True):
            punishments = totals(item for item in episode.rewards if item.get(PENALTY))
            turns = _turns(episode, episode.samples, punishments)
            sessions.append(TurnSession(one.reward, one.samples, episode.episode, turns))
        return (tuple(sessions),)
    by_agent: dict[str, list[TurnSession]] = {}
    for episode in group.compared:
        for agent in dict.fromkeys(sample.agent for sample in counted(episode)):
            by_agent.setdefault(agent, []).append(_session(episode, agent))
    return sets_of(group, by_agent)


def widened(episode: BatchEpisode) -> BatchEpisode:
    """`episode` with a reward on every sample of an agent that has one: all its calls are trained, since the rewards of
    later ones are also theirs."""
    agents = {sample.agent for sample in episode.samples if sample.reward is not None}
    samples = (
        replace(sample, reward=0.0) if sample.reward is None and sample.agent in agents else sample
        for sample in episode.samples
    )
    return replace(episode, samples=tuple(samples))


def unjudged(episode: BatchEpisode, gamma: float) -> frozenset[str]:
    """The calls of `episode` that no reward reaches: none that their agent or the episode got as a whole, none of their
    own, and with a `gamma` above 0 none of a later call."""
    if not rewarded_apart(episode):
        return frozenset()
    given = replace(episode, rewards=tuple(item for item in episode.rewards if not item.get(PENALTY)))
    out = set[str]()
    for agent in dict.fromkeys(sample.agent for sample in counted(given)):
        rewarded = totals(_given(given, agent))
        calls = [turn.call for turn in _session(given, agent).turns]
        reached = returns_to_go([float(call in rewarded) for call in calls], gamma)
        if None not in rewarded:
            out.update(call for call, share in zip(calls, reached, strict=True) if not share)
    return frozenset(out)


def credit(sessions: Sequence[TurnSession], how: ByTurn) -> list[dict[str, float]]:
    """The advantage of each call, by its id, for each session of a set."""
    if len({session.episode for session in sessions}) < 2:
        told = how.alone or {}
        return [{turn.call: told.get(turn.call, 0.0) for turn in session.turns} for session in sessions]
    returns = [returns_to_go([turn.reward for turn in session.turns], how.gamma) for session in sessions]
    expected = _mean(session.reward for session in sessions)
    found = [
        [session.reward - expected + gain - base for gain, base in zip(gains, bases, strict=True)]
        for session, gains, bases in zip(sessions, returns, _baselines(sessions, returns), strict=True)
    ]
    by = slack(magnitude((session.reward, *(turn.reward for turn in session.turns))) for session in sessions)
    found = [[0.0 if abs(value) <= by else value for value in values] for values in found]
    if how.scaled:
        squares = math.fsum(_mean(value * value for value in values) for values in found if values)
        scale = math.sqrt(squares / (len(sessions) - 1)) + EPSILON
        found = [[value / scale for value in values] for values in found]
    return [
        {turn.call: value for turn, value in zip(session.turns, values, strict=True)}
        for session, values in zip(sessions, found, strict=True)
    ]


def has_signal(group: Group, how: ByTurn) -> bool:
    """True if a call of `group` has an advantage."""
    found = (calls for sessions in turn_sessions(group) for calls in credit(sessions, how))
    return any(value for calls in found for value in calls.values())


def returns_to_go(rewards: Sequence[float], gamma: float) -> list[float]:
    """The reward of each call and those after it, discounted."""
    gains, ahead = list[float](), 0.0
    for reward in reversed(rewards):
        ahead = reward + gamma * ahead
        gains.append(ahead)
    return gains[::-1]


def spread(
    calls: Mapping[str, float], spans: Iterable[tuple[str, int, int]], length: int
) -> NDArray[np.float32]:
    """The advantages of `calls` on the tokens that each sampled, and 0 on all others: float32 ``[length]``. A span is a
    call with its first token and the one behind its last."""
    tokens = np.zeros(length, dtype=np.float32)
    for call, start, end in spans:
        tokens[start:end] = calls[call]
    return tokens


def _baselines(sessions: Sequence[TurnSession], returns: Sequence[Sequence[float]]) -> Iterator[list[float]]:
    """For each session those of its calls."""
    states = _Means()
    numbers = _Means()
    for session, gains in zip(sessions, returns, strict=True):
        for number, (turn, gain) in enumerate(zip(session.turns, gains, strict=True)):
            numbers.add(number, session.episode, gain)
            if turn.state is not None:
                states.add(turn.state, session.episode, gain)
    by_number = numbers.shared()
    for number in range(max((len(session.turns) for session in sessions), default=0)):
        by_number.setdefault(number, by_number.get(number - 1, 0.0))
    by_state = states.shared()
    for session in sessions:
        yield [by_state.get(turn.state, by_number[number]) for number, turn in enumerate(session.turns)]


class _Means:
    """Means of what calls of a name got."""

    def __init__(self) -> None:
        self.found: dict[Any, list[tuple[str, float]]] = {}

    def add(self, name: Any, episode: str, gain: float) -> None:
        self.found.setdefault(name, []).append((episode, gain))

    def shared(self) -> dict[Any, float]:
        """The means of those names that calls of at least two episodes have."""
        return {
            name: _mean(gain for _, gain in calls)
            for name, calls in self.found.items() if len({episode for episode, _ in calls}) > 1
        }  # fmt: skip


def _session(episode: BatchEpisode, agent: str) -> TurnSession:
    samples = tuple(sample for sample in counted(episode) if sample.agent == agent)
    given = totals(_given(episode, agent))
    turns = _turns(episode, [sample for sample in episode.samples if sample.agent == agent], given)
    return TurnSession(given.get(None, 0.0), samples, episode.episode, turns)


def _given(episode: BatchEpisode, agent: str) -> list[Mapping[str, Any]]:
    return [item for item in episode.rewards if item.get("agent") in (None, agent)]


def _turns(
    episode: BatchEpisode, samples: Sequence[Sample], given: Mapping[str | None, float]
) -> tuple[TurnReward, ...]:
    """The calls of `samples` in the order in which they began."""
    states = {item.get("call"): item["state"] for item in episode.rewards if item.get("state") is not None}
    placed = {call: (turn, one.agent) for one in samples for call, turn in zip(one.calls, one.turns, strict=True)}
    calls = sorted(placed, key=placed.__getitem__)
    return tuple(TurnReward(call, given.get(call, 0.0), states.get(call)) for call in calls)


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return math.fsum(numbers) / len(numbers)

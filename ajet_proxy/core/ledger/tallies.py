"""Counts over the whole life of the journal: episodes by their state, calls, tokens, drift and rewards.

Invariant: after every event, ``opened = open + sealed + ready + leased + trained + recorded + discarded``. All counters
are kept as the events come, so that reading them costs nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from statistics import fmean

from ajet_proxy.core.ledger import events as ev
from ajet_proxy.core.ledger.episode import Episode, to_judge
from ajet_proxy.core.ledger.holdouts import Holdouts
from ajet_proxy.core.ledger.reward_curves import RewardCurves
from ajet_proxy.core.ledger.weights import Weights
from ajet_proxy.core.trajectory.drift_rate import Drift, by_model
from ajet_proxy.core.trajectory.rewards import standing
from ajet_proxy.core.trajectory.timeline import Chain
from ajet_sdk.routes import EPISODE_STATES

FEW_CALLS, MANY_CALLS = 50, 1000
"""Of so few judged calls nothing is said. Of so many, older ones count half."""
UNJUDGED = 0.2
MOST_JUDGES = 1000
"""Names of judges, the latest of a day."""


def day_of(at: float) -> int:
    """The day (UTC) of a time, counted from 1970."""
    return int(at // 86400)


class Tallies:
    """The counters. Episodes of all models are counted together."""

    KEPT = (
        "opened", "counts", "discarded", "tokens", "drift", "drifts", "calls", "captures", "reward_curves", "judging",
        "judged_calls", "unjudged_calls", "judged_at", "holdouts", "spent", "spent_on",
    )

    def __init__(self) -> None:
        self.opened = 0
        self.counts: Counter[str] = Counter(dict.fromkeys(EPISODE_STATES, 0))
        self.discarded: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter(prompt=0, sampled=0, merged=0, generated=0)
        """Of settled episodes, and ``generated``: what calls sampled that ended at all, as they ended."""
        self.drift: Counter[str] = Counter()
        self.drifts: dict[str, Drift] = {}
        self.calls: Counter[str] = Counter(running=0, complete=0, lost=0)
        self.captures: Counter[str] = Counter()
        """The ends of calls: ``complete``, or why they were lost first. A whole one that is lost later counts as
        both."""
        self.reward_curves = RewardCurves()
        self.judging: Counter[str] = Counter()
        """The outcomes of the ``sealed`` episodes to be judged (`core.ledger.episode.judging`)."""
        self.judged_calls: Counter[str] = Counter()
        self.unjudged_calls: Counter[str] = Counter()
        """Calls that a judge has scored, and those that it left out, by their finish reason. The latest count most."""
        self.judged_at = 0.0
        self.holdouts = Holdouts()
        self.spent: Counter[str] = Counter()
        self.spent_on = 0
        """The tokens that judges have used on a day, the latest, by their names. Days of UTC are counted from 1970."""

    def alerts(self) -> dict[str, str]:
        """The lines for an operator about models whose turns drift, by subject."""
        lines = {f"drift of model {model!r}": drift.alert(model) for model, drift in self.drifts.items()}
        known = {about: line for about, line in lines.items() if line is not None}
        return known | self.holdouts.alerts() | {
            f"unjudged {reason!r}": f"{left} of {left + self.judged_calls[reason]} calls with finish reason {reason!r} "
            "got no score of a judge: what is never scored is a way out, so have the judge score them too"
            for reason, left in self.unjudged_calls.items()
            if left + self.judged_calls[reason] >= FEW_CALLS and left > UNJUDGED * (left + self.judged_calls[reason])
        }

    def moved(self, before: str | None, state: str, reason: str | None = None) -> None:
        """An episode came from the state `before` (None: it is new) to `state`; `reason` is why it is discarded."""
        if before is None:
            self.opened += 1
        else:
            self.counts[before] -= 1
        self.counts[state] += 1
        if reason is not None:
            self.discarded[reason] += 1

    def judging_moved(self, before: str | None, now: str | None) -> None:
        """The outcome of an episode to be judged was `before`, and is `now` another (None: it is open)."""
        if before is not None:
            self.judging[before] -= 1
        if now is not None:
            self.judging.update([now, *(["sealed"] if before is None else [])])

    def judged(self, episode: Episode, judgement: ev.EpisodeJudged) -> None:
        """An episode is judged, and has rewards of that."""
        self.judged_at = judgement.at
        self.scored(episode, [(call, agent) for call, agent, _, _ in judgement.scores])

    def scored(self, episode: Episode, scopes: Collection[tuple[str | None, str | None]]) -> None:
        """A judge has scored the calls of an episode that are of these `scopes`, and left out the others."""
        scoped = {*scopes}
        for turn in to_judge(episode):
            scored = not scoped.isdisjoint({(turn.call, None), (None, turn.agent), (None, None)})
            (self.judged_calls if scored else self.unjudged_calls)[turn.finish_reason] += 1
            if self.judged_calls[turn.finish_reason] + self.unjudged_calls[turn.finish_reason] >= MANY_CALLS:
                self.judged_calls[turn.finish_reason] //= 2
                self.unjudged_calls[turn.finish_reason] //= 2

    def call_ended(self, before: str, reason: str | None) -> None:
        """A call came from the state `before` to its end; `reason` is why it is lost, if it is."""
        state = "lost" if reason else "complete"
        if before != state:
            self.captures[reason or state] += 1
        self.calls[before] -= 1
        self.calls[state] += 1

    def merged(self, chains: Sequence[Chain]) -> None:
        """An episode has settled with these timelines."""
        for chain in chains:
            whole = sum(turn.end for turn in chain.turns)
            sampled = sum(turn.sampled for turn in chain.turns)
            self.tokens.update(prompt=whole - sampled, sampled=sampled, merged=whole - chain.turns[-1].end)
            if chain.broken_by is not None:
                self.drift[chain.broken_by] += 1
        for model, (turns, broken) in by_model(chains).items():
            self.drifts.setdefault(model, Drift()).add(turns, broken)

    def rewarded(self, episode: Episode, reward: float, before: float | None, at: float, weights: Weights) -> None:
        """A settled episode earned `reward`. It counts once; if it had earned something `before`, that is corrected.
        Held-out traffic tells of the `weights` that serve: not of another run's, nor of versions that were taken back.
        """
        kind = "eval" if episode.opening.eval else "train"
        if episode.reward_number is None or before is None:
            turns = list(episode.transcript.turns())
            version = max((version for turn in turns for version, _ in turn.policy_versions), default=0)
            episode.count_reward(self.reward_curves.add(
                kind, episode.id, episode.group_key.task, reward, at=at, version=version
            ))
            if turns and episode.opening.eval and episode.opening.traffic:
                calls = episode.transcript.sampled_by(model := turns[0].model).values()
                if weights.born(model).own(calls) and version <= weights.policy_version(model):
                    self.holdouts.add(model, version, fmean(standing(episode.rewards.values())))
        else:
            self.reward_curves.correct(kind, episode.reward_number, episode.id, episode.group_key.task, reward, before)

    def _started(self, event: ev.ProxyStarted) -> None:
        self.judged_at += event.back

    def _spent(self, event: ev.JudgeSpent) -> None:
        if (day := day_of(event.at)) != self.spent_on:
            self.spent, self.spent_on = Counter(), day
        self.spent[event.judge] += event.tokens
        if len(self.spent) > MOST_JUDGES:
            del self.spent[next(iter(self.spent))]

    def _announced(self, event: ev.PolicyAnnounced) -> None:
        self.holdouts.serves(event.model, event.version)

    def _call_started(self, event: ev.CallStarted) -> None:
        self.calls["running"] += len(event.calls)

    def _call_finished(self, event: ev.CallFinished) -> None:
        self.tokens["generated"] += event.call.turn.sampled

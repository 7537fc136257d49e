"""Counts over the whole life of the journal: episodes by their state, calls, tokens, drift and rewards.

Invariant: after every event, ``opened = open + sealed + ready + leased + trained + recorded + discarded``. All counters
are kept as the events come, so that reading them costs nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ajet_proxy.core.ledger import events as ev
from ajet_proxy.core.ledger.episode import Episode
from ajet_proxy.core.ledger.reward_curves import RewardCurves
from ajet_proxy.core.trajectory.drift_rate import Drift, by_model
from ajet_proxy.core.trajectory.timeline import Timeline
from ajet_sdk.routes import EPISODE_STATES


class Tallies:
    """The counters. Episodes of all models are counted together."""

    KEPT = (
        "opened", "counts", "discarded", "tokens", "drift", "drifts", "calls", "captures", "reward_curves"
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
        """How calls ended: ``complete``, or why they were lost first. A whole one that is lost later counts as both."""
        self.reward_curves = RewardCurves()

    def alerts(self) -> dict[str, str]:
        """The lines for an operator about models whose turns drift, by subject."""
        lines = {f"drift of model {model!r}": drift.alert(model) for model, drift in self.drifts.items()}
        return {about: line for about, line in lines.items() if line is not None}

    def moved(self, before: str | None, state: str, reason: str | None = None) -> None:
        """An episode came from the state `before` (None: it is new) to `state`; `reason` is why it is discarded."""
        if before is None:
            self.opened += 1
        else:
            self.counts[before] -= 1
        self.counts[state] += 1
        if reason is not None:
            self.discarded[reason] += 1

    def call_ended(self, before: str, reason: str | None) -> None:
        """A call came from the state `before` to its end; `reason` is why it is lost, if it is."""
        state = "lost" if reason else "complete"
        if before != state:
            self.captures[reason or state] += 1
        self.calls[before] -= 1
        self.calls[state] += 1

    def merged(self, timelines: Sequence[Timeline]) -> None:
        """An episode has settled with these timelines."""
        for timeline in timelines:
            whole = sum(turn.end for turn in timeline.turns)
            sampled = sum(turn.sampled for turn in timeline.turns)
            self.tokens.update(prompt=whole - sampled, sampled=sampled, merged=whole - len(timeline))
            if timeline.broken_by is not None:
                self.drift[timeline.broken_by] += 1
        for model, (turns, broken) in by_model(timelines).items():
            self.drifts.setdefault(model, Drift()).add(turns, broken)

    def rewarded(self, episode: Episode, reward: float, before: float | None, at: float) -> None:
        """A settled episode earned `reward`. It counts once; if it had earned something `before`, that is corrected."""
        kind = "eval" if episode.opening.eval else "train"
        if episode.reward_number is None or before is None:
            versions = (version for turn in episode.transcript.turns() for version, _ in turn.policy_versions)
            episode.count_reward(self.reward_curves.add(
                kind, episode.id, episode.group_key.task, reward, at=at, version=max(versions, default=0)
            ))
        else:
            self.reward_curves.correct(kind, episode.reward_number, episode.id, episode.group_key.task, reward, before)

    def _call_started(self, event: ev.CallStarted) -> None:
        self.calls["running"] += len(event.calls)

    def _call_finished(self, event: ev.CallFinished) -> None:
        self.tokens["generated"] += event.call.turn.sampled

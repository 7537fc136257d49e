"""The life of episodes: each event, and what follows of it by itself.

Idea: every change of an episode's state goes through `Life.move`, which tells whoever counts by states. A sealed
episode with nothing in flight settles: its calls are merged, and it is ready, recorded or discarded. The shares of an
episode add up to its state.
"""

from __future__ import annotations

from collections.abc import Callable

from ajet_proxy.core.ledger import events as ev
from ajet_proxy.core.ledger.clients import Clients
from ajet_proxy.core.ledger.episode import Episode, awaits, judging
from ajet_proxy.core.ledger.episodes import Episodes
from ajet_proxy.core.ledger.mixes import Mixes
from ajet_proxy.core.ledger.plays import Plays
from ajet_proxy.core.ledger.seats import Seats
from ajet_proxy.core.ledger.tallies import Tallies
from ajet_proxy.core.ledger.teams import join
from ajet_proxy.core.ledger.weights import Weights
from ajet_proxy.core.trajectory.rewards import EpisodeReward

OTHER_RUN = "another run of the model has sampled some of it"
STALE, NO_SIGNAL = "stale", "no_signal: all rewards of its group are equal"
"""Why a ready episode is discarded with which the others of its group are compared all the same."""
BY_JUDGE = "by judge "
"""The beginning of the detail of an episode that a judge has given no reward."""


class Life:
    """The events of episodes. It keeps nothing itself."""

    def __init__(
        self, episodes: Episodes, seats: Seats, *, weights: Weights, mixes: Mixes, plays: Plays, tallies: Tallies,
        clients: Clients,
    ) -> None:
        self._episodes, self._seats, self._weights, self._mixes = episodes, seats, weights, mixes
        self._plays, self._tallies, self._clients = plays, tallies, clients

    def move(self, episode: Episode, state: str, at: float, *why: str | None) -> None:
        """`episode` comes to another state, and the counters with it; `why`: the reason, the detail and the cause."""
        before, awaited, waited = episode.state, judging(episode), episode.id in self._episodes.awaiting
        if not episode.opening.eval and before in ("open", "sealed") and state not in ("open", "sealed"):
            self._seats.closes(episode, but=episode.shares.by_model)
            for model in episode.shares.by_model if state == "ready" else ():
                self._mixes.ready_anew(model, episode.group_key.lane, at)
        episode.move(state, at, *why)
        self._tallies.moved(before, state, episode.reason)
        if episode.opening.judged:
            self._tallies.judging_moved(awaited, judging(episode))
        self._episodes.moved(episode, before)
        self._clients.moved(episode, before, at)
        self._plays.moved(episode, "awaiting" if waited else before)
        if episode.ended_at is not None:
            for model in episode.shares.by_model:
                self._seats.queues.forget(model, episode.id)

    def settle(self, episode: Episode, at: float) -> None:
        """A sealed episode with nothing in flight takes its next state by itself."""
        if episode.state != "sealed" or episode.transcript.running:
            return
        if awaits(episode):
            if episode.id not in self._episodes.awaiting:
                self._episodes.wait(episode)
                self._plays.moved(episode, "sealed", "awaiting")
            return
        self._tallies.merged(episode.transcript.keep_timelines(self._weights.merge_policy))
        state, reason = episode.outcome()
        detail = episode.transcript.losses() if reason == "incomplete_call" else None
        if state == "ready":
            models, sampled_by = episode.trains(), episode.transcript.sampled_by
            own = [model for model in models if self._weights.born(model).own(sampled_by(model).values())]
            episode.shares.share_among(own, {model: f"other_run: {OTHER_RUN}" for model in models if model not in own})
            for model in own:
                self._seats.ready(episode, model, at)
            join(self._weights.teams, own)
            if not own:
                state, reason, detail = "discarded", "other_run", OTHER_RUN
        episode.attempts.settle()
        failed = reason == "incomplete_call" and episode.attempts.unanswered()
        self.move(episode, state, at, reason, detail, "infra" if failed else None)
        if state != "discarded":
            self._count(episode, None, at)

    def add_up(self, episode: Episode, at: float) -> None:
        """The shares of an episode have changed, and so may its state."""
        if (state := episode.shares.state) != episode.state:
            self.move(episode, state, at)

    def drop(self, episode: Episode, model: str, why: str, at: float, *, cut: bool = False) -> None:
        """`model` learns nothing from the episode, for the reason `why`; it is discarded if no other model does. If it
        was ready, others may still be compared with it (`cut`)."""
        if episode.shares.by_model[model] is None:
            self._unready(episode, model, why, at, cut)
        episode.shares.drop(model)
        self._seats.queues.forget(model, episode.id)
        if episode.shares.by_model:
            self.add_up(episode, at)
        else:
            self.move(episode, "discarded", at, "withdrawn" if episode.withdrawn else "filtered", why)

    def _unready(self, episode: Episode, model: str, why: str, at: float, cut: bool) -> None:
        """The ready share of `model` is discarded, for the reason `why`."""
        self._seats.leave(episode, model, cut)
        self._mixes.discarded(model, episode.group_key.lane, at, why)

    def _count(self, episode: Episode, before: float | None, at: float) -> None:
        """A settled episode has earned something, if it is rewarded, and `before` that another sum."""
        if (reward := episode.reward()) is not None:
            self._clients.rewarded(episode, reward, before)
            self._tallies.rewarded(episode, reward, before, at, self._weights)

    # -- events

    def _opened(self, event: ev.EpisodeOpened) -> None:
        play = self._plays.of(event)
        episode = Episode(
            event, active_at=event.at, number=self._tallies.opened, play_number=None if play is None else play.number,
            may_train=self._weights.may_train(event.to_train, event.teaching),
        )
        if not event.eval:
            self._seats.opens(episode, event.at)
        self._episodes.open(episode)
        if event.client is not None:
            self._clients.live[event.client].opened(event)
        self._tallies.moved(None, "open")

    def _task_named(self, event: ev.TaskNamed) -> None:
        episode = self._episodes[event.episode]
        if not event.derived or episode.opening.task is None:
            self.become(episode, lambda: episode.name_task(event.task, event.derived), event.at)

    def become(self, episode: Episode, change: Callable[[], None], at: float) -> None:
        """An open episode turns out to be of another task, or to train another model: it takes other seats. When its
        group key had its latest episode is not forgotten in between."""
        if episode.opening.eval:
            change()
            return
        group_key, progress = episode.group_key, self._seats.progress
        progress.change(group_key, open=1, at=episode.opening.at)
        self._seats.closes(episode)
        change()
        self._seats.opens(episode, at)
        progress.change(group_key, open=-1)

    def _late(self, event: ev.EpisodesLate) -> None:
        for episode in map(self._episodes.__getitem__, event.episodes):
            self._seats.late(episode)
            episode.give_up_waiting()

    def _rewarded(self, event: ev.RewardGiven) -> None:
        episode = self._episodes[event.episode]
        before, awaited = episode.reward(), judging(episode)
        self._mixes.stirs(episode)
        episode.earn(EpisodeReward(
            event.id, event.value, event.call, event.agent, event.final, event.note, event.at, event.state,
            event.model,
        ))
        if episode.opening.judged:
            self._tallies.judging_moved(awaited, judging(episode))
        if episode.state in ("ready", "recorded"):
            self._count(episode, before, event.at)
            self._plays.rewarded(episode)
        else:
            self.settle(episode, event.at)

    def _judged(self, event: ev.EpisodeJudged) -> None:
        episode = self._episodes[event.episode]
        episode.judge(event)
        self._tallies.judged(episode, event)
        self.settle(episode, event.at)

    def _sealed(self, event: ev.EpisodeSealed) -> None:
        episode = self._episodes[event.episode]
        self.move(episode, "sealed", event.at)
        self.settle(episode, event.at)

    def _discarded(self, event: ev.EpisodeDiscarded) -> None:
        episode, cut = self._episodes[event.episode], event.reason == STALE or event.detail == NO_SIGNAL
        for model in event.models:
            episode.shares.learn(model, f"{event.reason}: {event.detail}")
            self.drop(episode, model, event.reason, event.at, cut=cut)
        if not event.models:
            for model in [model for model, share in episode.shares.by_model.items() if share is None]:
                self._unready(episode, model, event.reason, event.at, cut)
            episode.transcript.keep_timelines(self._weights.merge_policy)
            episode.attempts.settle()
            if event.reason == "not_judged" and (event.detail or "").startswith(BY_JUDGE):
                self._tallies.scored(episode, ())
            self.move(episode, "discarded", event.at, event.reason, event.detail, event.cause)

    def _withdrawn(self, event: ev.EpisodeWithdrawn) -> None:
        episode = self._episodes.get(event.episode)
        if episode is None:
            return
        for model in [model for model, share in episode.shares.by_model.items() if share is None]:
            if episode.ended_at is None:
                self.drop(episode, model, "withdrawn", event.at)
        self.settle(episode, event.at)

    def _touched(self, event: ev.EpisodeTouched) -> None:
        episode = self._episodes[event.episode]
        self._mixes.stirs(episode)
        episode.touch(event.at)

    def _archived(self, event: ev.EpisodesArchived) -> None:
        for name in event.episodes:
            self._episodes.leave(name).archive()

    def _started(self, event: ev.ProxyStarted) -> None:
        """Clocks begin anew, since nobody could show a sign of life during the stop."""
        for episode in self._episodes.unsettled.values():
            episode.restart(event.at, event.back, event.stopped_at)
        for episode in self._episodes.awaited():
            episode.wait_through(event.away, event.back)

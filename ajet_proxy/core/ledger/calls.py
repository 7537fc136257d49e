"""The events of calls: they begin, they end, and their clients are sent the end of the answers.

Idea: a call ends once, complete or lost. One that is complete is lost after all if its client was not sent the end. The
attempt that it belongs to ends with it (`ajet_proxy.core.ledger.attempts`).
"""

from __future__ import annotations

from collections.abc import Iterable

from ajet_proxy.core.ledger import events as ev
from ajet_proxy.core.ledger.attempts import NOT_SENT, Attempt, Fate, fate
from ajet_proxy.core.ledger.births import Births
from ajet_proxy.core.ledger.episode import Episode
from ajet_proxy.core.ledger.episodes import Episodes
from ajet_proxy.core.ledger.gates import Gates
from ajet_proxy.core.ledger.life import Life
from ajet_proxy.core.ledger.mixes import Mixes
from ajet_proxy.core.ledger.tallies import Tallies
from ajet_proxy.core.ledger.transcript import Asked, CallEntry
from ajet_proxy.core.ledger.weights import Weights


class Calls:
    """The events of calls. It keeps nothing itself."""

    def __init__(
        self, episodes: Episodes, life: Life, weights: Weights, gates: Gates, mixes: Mixes, tallies: Tallies
    ) -> None:
        self._episodes, self._life, self._weights, self._gates = episodes, life, weights, gates
        self._mixes, self._tallies = mixes, tallies

    def _started(self, event: ev.CallStarted) -> None:
        episode = self._episodes[event.episode]
        self._mixes.stirs(episode)
        known = episode.named_to_train()
        number = episode.attempts.begin(event.said, event.agent, event.model, len(event.calls), event.at)
        episode.touch(event.at)
        episode.transcript.begin(event.calls, Asked(
            event.at, event.model, event.agent, event.identified_by, event.body_hash, event.idempotency_key,
            event.retries, event.said, number, self._weights.policy_updates,
        ))
        self._episodes.by_call.update(dict.fromkeys(event.calls, event.episode))
        if not known and (models := episode.named_to_train()) and models != episode.may_train:
            self._life.become(episode, lambda: episode.train_else(models), event.at)
        if event.identified_by == "lineage":
            self._episodes.lineage.add_request(event.episode, event.body_hash, event.idempotency_key)
        self._gates.running[event.model] += len(event.calls)

    def _finished(self, event: ev.CallFinished) -> None:
        episode, turn = self._episodes[event.episode], event.call.turn
        entry = episode.transcript.calls[turn.call]
        self._mixes.stirs(episode)
        born, shut = self._weights.births.setdefault(turn.model, Births()), self._gates.of(turn.model).shut
        self._episodes.answered(turn)
        episode.transcript.finish(entry, event.call, *born.sampled(turn, entry.asked.updates, shut=shut))
        if episode.state == "open":
            self._episodes.lineage.add(event.episode, event.marks)
        self._attempt_ended(episode, entry, "answered", event)
        self._episodes.unsent.add(turn.call)
        self._ended(episode, entry, None, event.at)

    def _lost(self, event: ev.CallLost) -> None:
        episode = self._episodes[event.episode]
        entry = episode.transcript.calls[event.call]
        self._episodes.unsent.discard(event.call)
        self._episodes.forget_answer(entry.turn)
        came = fate(event.reason, status=event.status, told=bool(event.marks))
        self._attempt_ended(episode, entry, came, event)
        if episode.state == "open":
            self._episodes.lineage.add(event.episode, event.marks)
        self._ended(episode, entry, event.reason, event.at)

    def _attempt_ended(
        self, episode: Episode, entry: CallEntry, came: Fate, end: ev.CallFinished | ev.CallLost
    ) -> None:
        """Note what became of a call that was in flight, or complete and its client was not sent the end after all."""
        attempts, asked, known = episode.attempts, entry.asked, None
        if episode.state not in ("open", "sealed"):
            return
        if entry.state == "running":
            known = attempts.end(asked.number)
        elif isinstance(end, ev.CallLost) and end.reason in NOT_SENT[entry.state]:
            attempts.take_back(asked.number)
        else:
            return
        if came == "answered":
            attempts.answer(asked.number, asked.agent, end.begins)
        elif came == "world" and isinstance(end, ev.CallLost):
            attempts.lose(Attempt(
                asked.agent, asked.said, asked.number, end.at, asked.model, reason=end.reason, call=end.call,
                detail=f"the engine answered {end.status}" if end.status else None,
                answered_by=[] if known is None else [*known.answered_by],
            ))

    def _ended(self, episode: Episode, entry: CallEntry, reason: str | None, at: float) -> None:
        """A call is complete, or lost for a `reason`."""
        self._tallies.call_ended(entry.state, reason)
        if entry.state == "running":
            self._gates.running[entry.asked.model] -= 1
            if not self._gates.running[entry.asked.model]:
                del self._gates.running[entry.asked.model]
        episode.transcript.end(entry, reason)
        episode.touch(at)
        self._life.settle(episode, at)

    def _request_lost(self, event: ev.RequestLost) -> None:
        attempts = self._episodes[event.episode].attempts
        attempts.lose(Attempt(
            event.agent, event.said, attempts.begun, event.at, event.model, reason=event.reason, detail=event.detail
        ))

    def _answers_sent(self, event: ev.AnswersSent) -> None:
        self._episodes.unsent.difference_update(event.calls)
        self._doubt(self._episodes.unsent.intersection(event.unknown))

    def _proxy_started(self, event: ev.ProxyStarted) -> None:
        self._doubt(tuple(self._episodes.unsent))

    def _doubt(self, calls: Iterable[str]) -> None:
        for call in calls:
            self._episodes[self._episodes.by_call[call]].transcript.doubt(call)
            self._episodes.unsent.discard(call)

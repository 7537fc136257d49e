"""The commands of episodes, calls, plays and time. They decide, over a state that only events change.

Idea: a command checks what is asked against the state and returns the events that make it true, or raises an error of
`ajet_sdk.errors`; it changes nothing. `State.apply` (`ajet_proxy.core.ledger.state`) takes events as facts and refuses
none that a command returned. The store applies and journals the events of one command before it asks the next.

Invariant: a replay of the events is the live state. No clock and no randomness: times and ids come in as arguments.
Commands see time never running backwards, whatever the caller's clock does.

Next: ajet_proxy/core/ledger/episode.py
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from itertools import islice
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ajet_proxy.core.conversation.history import Mark
from ajet_proxy.core.ledger import events as ev
from ajet_proxy.core.ledger.attempts import Attempt, fate
from ajet_proxy.core.ledger.client_commands import ClientCommands, Played
from ajet_proxy.core.ledger.episode import Episode, fitting, has_room, takes, timeouts
from ajet_proxy.core.ledger.events import Event, Events
from ajet_proxy.core.ledger.judging import JudgingCommands, is_void
from ajet_proxy.core.ledger.lease_commands import LeaseCommands
from ajet_proxy.core.ledger.parts import AT_ONCE, parted
from ajet_proxy.core.ledger.plays import Evaluation
from ajet_proxy.core.ledger.presence import Presence
from ajet_proxy.core.ledger.progress import GroupKey
from ajet_proxy.core.ledger.retries import repeats
from ajet_proxy.core.ledger.state import State
from ajet_proxy.core.ledger.trainer_commands import TrainerCommands
from ajet_proxy.core.ledger.transcript import CallEntry
from ajet_proxy.core.trajectory.call import RESTARTED, prompt_hash
from ajet_proxy.core.trajectory.timeline import Packed
from ajet_sdk.errors import BadRequest, Conflict, Forbidden, NotFound
from ajet_sdk.routes import Abort, OpenEpisode, Play, Reward

MAX_PLAYS = 1000
"""Plays of a tenant. Beyond it, the one that began first has been left, and ends."""
LEAST_WAIT_S = 60.0
"""A group waits for its members for so long at least, however quick the others were."""


class CallAsked(Struct, frozen=True):
    """A request on its way to the engine, and what it says of its episode. If that opens with it, it has the
    ``metadata``, and ``client`` plays it. Without a task it gets one of the ``prompt``. ``unseen`` says that the
    request may be a retry of one that never got this far. What opens is users' ``traffic`` of that lane, if it names
    one, and a later part of the episode ``first``, if that does. It is judged only if it is ``judged``, and
    withdrawn at once unless the request ``consents``. One that ``withdraws`` takes all parts out. Its key was
    ``issued`` then."""

    started: ev.CallStarted
    tenant: str
    task: str | None = None
    eval: bool = False
    client: str | None = None
    prompt: str = ""
    metadata: Mapping[str, Any] = {}
    unseen: bool = False
    traffic: str = ""
    first: str = ""
    judged: bool = True
    consents: bool = True
    withdraws: bool = False
    issued: float = 0.0


class Commands:
    """The daemon's decisions over `state`, and over the `presence` that is noted beside it: those about ``clients``,
    ``trainers``, ``leases`` and ``judging``, and all others. Every command returns the events to apply; none if nothing
    must change."""

    def __init__(self, state: State, presence: Presence) -> None:
        self.state = state
        self.clients = ClientCommands(state, presence)
        self.trainers = TrainerCommands(state, presence)
        self.leases = LeaseCommands(state)
        self.judging = JudgingCommands(state, presence)

    # -- episodes

    def open_episode(
        self, body: OpenEpisode, *, episode: str, at: float, tenant: str, identified_by: str = "key",
        plays: str | None = None, traffic: str = "", first: str = "", issued: float = 0.0,
    ) -> Events:
        """`plays` is the model of its first call, if it opens with one. It tells the evaluation, and no more. An
        episode that was opened by this very request before, and is open, stays as it is. Users' `traffic` is that of a
        lane, and may be a later part of the episode `first`. The key that opens it was `issued` then."""
        if (known := self.state.episodes.find(episode)) is not None:
            was = known.opening
            same = (was.tenant, was.task, was.play) == (tenant, body.task or None, body.play)
            if body.id == episode and known.state == "open" and same and body.place in (None, was.place):
                return ()
            raise Conflict(f"episode {episode} exists already", code="episode_exists")
        evaluation = self._evaluation(body, plays) if body.play is None else None
        if body.play is not None:
            self._check_place(body, tenant)
        idle, wall = timeouts(body, self.state.settings.idle_timeout, self.state.settings.wall_timeout)
        played = Played(revision=body.revision or None)
        if body.client:
            played = self.clients.plays(body.client, played.revision, tenant=tenant, at=self.state.time(at))
        opened = ev.EpisodeOpened(
            at=self.state.time(at), episode=episode, task=body.task or None, model=body.model or None, agent=body.agent,
            eval=body.eval or body.trial, idle_timeout=idle, wall_timeout=wall, tenant=tenant,
            metadata=body.metadata, identified_by=identified_by, members=body.members,
            evaluation=None if evaluation is None else evaluation.name, client=played.client,
            revision=played.revision, lane=traffic or played.lane, play=body.play,
            place=body.place if evaluation is None else evaluation.due, teachers=body.teachers, judged=body.judged,
            traffic=bool(traffic), first=first if traffic else "", issued=issued if traffic else 0.0,
            graded=body.graded,
        )
        return parted(played.older, opened)

    def _evaluation(self, body: OpenEpisode, plays: str | None) -> Evaluation | None:
        """The evaluation that an episode belongs to which opens so, if there is one."""
        model = body.model or plays or self.state.weights.only_model()
        found = None
        if body.eval and not body.trial and (body.model or not body.members) and model in self.state.plays.wanted():
            found = self.state.plays.evaluations[model]
        if body.place is not None and (found is None or found.due != body.place):
            message = f"place {body.place} is not the next one of an evaluation: ask again what is wanted"
            raise Conflict(message, code="place_taken", param="place")
        return found

    def _check_place(self, body: OpenEpisode, tenant: str) -> None:
        """Raises an error unless the place can be opened in the play."""
        if body.place is None:
            raise BadRequest("an episode of a play needs a place in it", param="place")
        if not self.state.plays.play(tenant, body.play or "").has_free(body.place):
            message = f"place {body.place} of play {body.play} is not free: ask again what is missing"
            raise Conflict(message, code="place_taken", param="place")

    def open_on_sight(self, asked: CallAsked) -> Events:
        """A request is the first of its episode. Users' traffic lives as such from here on."""
        started, first = asked.started, asked.first or asked.started.episode
        at, episode = self.state.time(started.at), started.episode
        body = OpenEpisode(task=asked.task, eval=asked.eval, metadata=asked.metadata, client=asked.client)
        if asked.traffic:
            body = self.judging.opens(body, first, judged=asked.judged)
        opened = self.open_episode(
            body, episode=episode, at=at, tenant=asked.tenant, identified_by=started.identified_by,
            plays=started.model or None, traffic=asked.traffic, first=asked.first, issued=asked.issued,
        )
        before = self.state.episodes.of_chat(first) if asked.first else None
        gone = asked.traffic and (
            not asked.consents or self.state.episodes.is_withdrawn(first)
            or is_void(self.judging.presence.void, asked.tenant, asked.issued, at)
            or (before is not None and (before.withdrawn or self.judging.is_revoked(before)))
        )
        if asked.withdraws or gone:
            was = asked.withdraws or (before is not None and before.opening.traffic)
            others = self.judging.withdraw(asked.first, at) if was else ()
            return (*opened, ev.EpisodeWithdrawn(at, episode), *others)
        return opened

    def begin_call(self, asked: CallAsked, known: Episode | None) -> Events:
        """A request goes to the engine. `known` is its episode, which opens on first sight."""
        at, episode = self.state.time(asked.started.at), asked.started.episode
        started = asked.started if asked.started.at == at else replace(asked.started, at=at)
        titled = (ev.TaskNamed(at, episode, f"prompt-{asked.prompt}"),) if asked.prompt and asked.task is None else ()
        if known is None:
            return (*self.open_on_sight(asked), *titled, started)
        if known.opening.tenant != asked.tenant:
            raise Forbidden(f"episode {episode} belongs to another tenant", code="foreign_episode")
        takes("call", known)
        again: tuple[str, ...] = ()
        if started.idempotency_key is not None or started.retries:
            again = repeats(
                known.transcript, started.body_hash, started.idempotency_key, started.retries, agent=started.agent,
                unseen=asked.unseen,
            )
        labels = self.label(known, task=asked.task, eval=asked.eval, at=at)
        titles = titled if known.opening.task is None else ()
        if asked.withdraws:
            labels = (*labels, *self.judging.withdraw(known.opening.whole, at))
        return (*labels, *titles, *(ev.CallLost(at, episode, call, "retried") for call in again), started)

    def label(self, known: Episode, *, task: str | None, eval: bool, at: float) -> Events:
        """A request names the task, which holds for the whole of an open episode. Or it says that this is an
        evaluation: that cannot come after the opening, which gives evaluations their places."""
        if eval and not known.opening.eval:
            message = f"episode {known.id} was opened as no evaluation: say so with the request that opens it"
            raise Conflict(message, code="no_evaluation", param="X-AJet-Eval")
        if known.state == "open" and task is not None and (known.opening.task is None or known.task_derived):
            return (ev.TaskNamed(self.state.time(at), known.id, task, derived=False),)
        return ()

    def finish_call(
        self, episode: str, call: Packed, *, at: float, marks: tuple[Mark, ...] = (), begins: tuple[str, ...] = ()
    ) -> Events:
        """`call` is whole, and its client's history ends in `marks`. Its request begins with what earlier ones said
        that `begins` has. Nothing happens if it was lost or finished before. If its episode has ended, it is lost."""
        turn = call.turn
        known, entry, at = self.state.episodes.known(episode), self._entry(episode, turn.call), self.state.time(at)
        if entry.state != "running":
            return _late(known, turn.call, entry, marks, at)
        if known.state not in ("open", "sealed"):
            return (ev.CallLost(at, episode, turn.call, f"episode_{known.state}"),)
        named = self._named(known, call, at) if known.state == "sealed" else ()
        return (*named, ev.CallFinished(at, episode, call, marks, begins))

    def _named(self, known: Episode, call: Packed | None, at: float) -> Events:
        """An episode that is sealed, and whose requests name no task, is named by the prompt of its first call."""
        if known.opening.task is not None or call is None:
            return ()
        return (ev.TaskNamed(at, known.id, prompt_hash(call.prompt_token_ids)),)

    def lose_call(
        self, episode: str, call: str, reason: str, *, at: float, marks: tuple[Mark, ...] = (),
        taken_back: bool = False, begins: tuple[str, ...] = (), status: int = 0,
    ) -> Events:
        """`call` will never be trained, for `reason`, or because its episode has ended. `status` is that with which the
        engine refused it, and `begins` is as of `finish_call`. A call that ended before stays as it is, unless its
        client was answered and it is `taken_back`: the client was not sent the end, or the engine contradicted itself.
        A settled episode keeps even such a call: what may be delivered, or was, does not change."""
        known, entry, at = self.state.episodes.known(episode), self._entry(episode, call), self.state.time(at)
        unsettled = known.state in ("open", "sealed")
        answered = entry.state == "complete" or (entry.reason is not None and fate(entry.reason) == "answered")
        if entry.state != "running" and not (taken_back and answered and unsettled):
            return _late(known, call, entry, marks, at)
        if not unsettled:
            reason = f"episode_{known.state}"
        return (ev.CallLost(at, episode, call, reason, marks, begins, status),)

    def lose_request(
        self, episode: str, reason: str, *, at: float, agent: str | None = None, said: str = "", model: str = "",
        detail: str | None = None,
    ) -> Events:
        """A request of an open `episode` became no call, and the world failed it. Nothing happens if that tells nothing
        new."""
        known, at = self.state.episodes.get(episode), self.state.time(at)
        if known is None or known.state != "open" or not known.attempts.adds(Attempt(agent, said, 0, at)):
            return ()
        return (ev.RequestLost(at, episode, reason, agent, said, model, detail),)

    def answers_sent(self, calls: Collection[str], unknown: Collection[str] = (), *, at: float) -> Events:
        """The clients of `calls` have been sent the end of their answers; for `unknown` calls nobody will know."""
        sent, doubtful = (tuple(sorted(self.state.episodes.unsent.intersection(some))) for some in (calls, unknown))
        return (ev.AnswersSent(self.state.time(at), sent, doubtful),) if sent or doubtful else ()

    def reward(self, episode: str, body: Reward, *, reward_id: str, at: float) -> Events:
        """A final reward seals an open episode that is not to be graded. `reward_id` is `body.id`, or a new one if that
        is None."""
        known, at = self.state.episodes.known(episode), self.state.time(at)
        recorded = known.rewards.get(reward_id)
        if recorded is not None:
            if recorded.value != body.value:
                message = f"reward {reward_id} has another value already: a correction is a reward with another id"
                raise Conflict(message, code="reward_exists", param="id")
            return ()
        takes("reward", known)
        has_room(known)
        call = body.call
        if body.response is not None:
            _, call = self.state.episodes.part_of(body.response, call, lambda one: one.id == episode)
        elif call is not None and call not in known.transcript.calls:
            raise NotFound(f"episode {episode} has no call {call}", code="unknown_call", param="call")
        if call is not None and body.agent not in (None, asker := known.transcript.calls[call].asked.agent):
            message = f"call {call} is of agent {asker!r}, not of {body.agent!r}"
            raise NotFound(message, code="unknown_call", param="agent")
        (note,) = fitting([body.note], known)
        rewarded = ev.RewardGiven(
            at, episode, reward_id, body.value, call, body.agent, body.final, note, body.state, body.model
        )
        seals = body.final and known.state == "open" and not known.opening.graded
        return (rewarded, *(self._sealed(known, at) if seals else ()))

    def seal(self, episode: str, *, at: float) -> Events:
        known = self.state.episodes.known(episode)
        at = self.state.time(at)
        return (*self._sealed(known, at), *self.judging.expire(at, (known,))) if takes("seal", known) else ()

    def _sealed(self, known: Episode, at: float) -> Events:
        """`known` takes no more calls. If no request named its task, its first whole call does."""
        first = next(iter(known.transcript.turns()), None)
        named = () if first is None else self._named(known, known.transcript.packed(first.call), at)
        return (*named, ev.EpisodeSealed(at, known.id))

    def abort(self, episode: str, body: Abort, *, at: float) -> Events:
        if not takes("abort", self.state.episodes.known(episode)):
            return ()
        return (ev.EpisodeDiscarded(self.state.time(at), episode, "aborted", body.reason, cause=body.cause),)

    def heartbeat(self, episode: str, *, at: float) -> Events:
        touches = takes("heartbeat", self.state.episodes.known(episode))
        return (ev.EpisodeTouched(self.state.time(at), episode),) if touches else ()

    # -- plays

    def play(self, body: Play, *, tenant: str, at: float) -> Events:
        """A data set is played. One that is being played goes on where it is."""
        if (known := self.state.plays.table.get((tenant, body.name))) is not None:
            if known.episodes != body.episodes:
                message = f"play {body.name} has {known.episodes} episodes, not {body.episodes}: end it, or name one"
                raise Conflict(message, code="play_exists", param="episodes")
            return ()
        at = self.state.time(at)
        own = [name for owner, name in self.state.plays.table if owner == tenant]
        left = (ev.PlayEnded(at, name, tenant) for name in own[: max(0, len(own) + 1 - MAX_PLAYS)])
        return (*left, ev.PlayBegun(at, body.name, tenant, body.episodes))

    def end_play(self, play: str, *, tenant: str, at: float) -> Events:
        """It is whole, or given up."""
        return (ev.PlayEnded(self.state.time(at), self.state.plays.play(tenant, play).name, tenant),)

    # -- time

    def expire(self, at: float, held: Container[str] = (), *, tight: bool = False) -> Events:
        """Decide what time alone makes true, for one batch or at most `AT_ONCE` episodes: the caller asks again. An
        episode is idle only while none of its calls is in flight and no gate holds it. A gate is known to hold those
        that are `held`. While memory is `tight`, what awaits a judgement goes first."""
        at = self.state.time(at)
        expired = next((batch for batch in self.state.batches.leased.values() if batch.lease_until <= at), None)
        if expired is not None:
            return (ev.BatchReturned(at, expired.id, "expired"),)
        out = self.clients.expire(at, AT_ONCE)
        ended = {event.episode for event in out if isinstance(event, ev.EpisodeDiscarded)}
        for name, episode in self.state.episodes.unsettled.items():
            if len(out) >= AT_ONCE:
                break
            if name in ended:
                continue
            idle = episode.state == "open" and self._is_idle(episode, at) and name not in held
            if episode.opening.traffic:
                out += self._sealed(episode, at) if self.judging.is_over(episode, at, idle) else ()
            elif at - episode.opening.at >= episode.opening.wall_timeout:
                out.append(ev.EpisodeDiscarded(at, name, "wall_timeout"))
            elif idle:
                out.append(ev.EpisodeDiscarded(at, name, "idle_timeout"))
        sealed = [self.state.episodes[event.episode] for event in out if isinstance(event, ev.EpisodeSealed)]
        if sealed or self.state.episodes.awaiting:
            out += self.judging.expire(at, sealed, tight=tight)
        late = self._late(at, {
            event.episode for event in out if isinstance(event, (ev.EpisodeDiscarded, ev.EpisodeSealed))
        })
        return (*out, ev.EpisodesLate(at, late)) if late else tuple(out)

    def _late(self, at: float, ended: Container[str]) -> tuple[str, ...]:
        """Open episodes that hold up a group for too long, and are not `ended` now. Nobody is late while the gate is
        shut."""
        state, factor = self.state, self.state.settings.member_wait
        found = dict[str, None]()
        for model, queue in state.seats.queues.table.items():
            if queue.begun and not state.gates.of(model).shut:
                late = queue.overdue(
                    lambda slowest: max(LEAST_WAIT_S, factor * slowest),
                    lambda name: state.seats.played(state.episodes[name], model, at),  # noqa: B023
                )
                found |= dict.fromkeys(islice((name for name in late if name not in ended), AT_ONCE))
        return tuple(found)

    def _is_idle(self, episode: Episode, at: float) -> bool:
        """Tell whether an open episode has been silent for too long. It is never while one of its calls is in flight,
        or a gate may hold it."""
        if episode.transcript.running or at - episode.active_at < episode.opening.idle_timeout:
            return False
        gate = self.state.gates.over(episode)
        return not gate.shut and at - gate.since >= episode.opening.idle_timeout

    def restarted(self, at: float) -> Events:
        """At start, after the replay: calls in flight are gone."""
        running = [
            (episode.id, call)
            for episode in self.state.episodes.values() if episode.transcript.running
            for call, entry in episode.transcript.calls.items() if entry.state == "running"
        ]
        lost = (ev.CallLost(at, episode, call, RESTARTED) for episode, call in running)
        settings = self.state.settings
        return (ev.ProxyStarted(at, settings.merge_policy, settings.group_size, self.state.now), *lost)

    def _entry(self, episode: str, call: str) -> CallEntry:
        entry = self.state.episodes.known(episode).transcript.calls.get(call)
        if entry is None:
            raise NotFound(f"episode {episode} has no call {call}", code="unknown_call")
        return entry


def paced(state: State, events: Sequence[Event]) -> tuple[GroupKey, tuple[str, ...]] | None:
    """The group key in which `events` open an episode that needs room in its lane, and the models that it may train;
    None if they open none, or an evaluation."""
    opened = (event for event in events if isinstance(event, ev.EpisodeOpened) and not event.eval)
    return next(((GroupKey.of(one), state.weights.may_train(one.to_train, one.teaching)) for one in opened), None)


def _late(episode: Episode, call: str, entry: CallEntry, marks: tuple[Mark, ...], at: float) -> Events:
    """The marks of a call that a retry has replaced: it was answered too, and its client may continue from there."""
    goes_on = marks and entry.reason == "retried" and episode.stored is None
    return (ev.CallLost(at, episode.id, call, "retried", marks),) if goes_on else ()


"""All episodes, groups and leases: commands that decide, over a state that only events change.

Idea: a command checks what is asked against the state and returns the events that make it true, or raises an error of
`ajet_sdk.errors`; it changes nothing. `apply` (see `ajet_proxy.core.ledger.state`) takes events as facts and refuses
none that a command returned. Whoever runs the ledger applies and journals the events of one command before asking the
next.

Invariant: a replay of the events is the live state. No clock and no randomness: times and ids come in as arguments.
Commands see time never running backwards, whatever the caller's clock does.

Next: ajet_proxy/core/ledger/episode.py
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ajet_proxy.core.conversation.history import Beginnings, Mark
from ajet_proxy.core.ledger import events as ev
from ajet_proxy.core.ledger import views
from ajet_proxy.core.ledger.delivery import delivered
from ajet_proxy.core.ledger.episode import CallEntry, Episode, has_room, repeats, takes, timeouts
from ajet_proxy.core.ledger.events import Event
from ajet_proxy.core.ledger.gate import GateState, check_version
from ajet_proxy.core.ledger.leases import choose
from ajet_proxy.core.ledger.queues import LeasedBatch
from ajet_proxy.core.ledger.settings import LedgerSettings
from ajet_proxy.core.ledger.state import State
from ajet_proxy.core.trajectory.call import RESTARTED, prompt_hash
from ajet_proxy.core.trajectory.timeline import Packed, Turn
from ajet_sdk.address import server
from ajet_sdk.errors import BadRequest, Conflict, Forbidden, NotFound
from ajet_sdk.routes import MAX_REWARD, Abort, Ack, Extend, GateClose, GateOpen, Lease, OpenEpisode, Policy, Reward
from ajet_sdk.sample import Batch, BatchEpisode, Group

__all__ = ["Ledger", "LedgerSettings"]

Events = tuple[Event, ...]
EXPIRED_AT_ONCE = 1000
"""So many episodes end of themselves in one turn: some 50 ms, while which everybody else waits."""


class Ledger(State):
    """The daemon's decisions. Every command returns the events to apply; none means that nothing has to change."""

    # -- episodes

    def open_episode(
        self, body: OpenEpisode, *, episode: str, at: float, tenant: str, identified_by: str = "key"
    ) -> Events:
        if self.find(episode) is not None:
            raise Conflict(f"episode {episode} exists already", code="episode_exists")
        idle, wall = timeouts(body, self.settings.idle_timeout, self.settings.wall_timeout)
        return (
            ev.EpisodeOpened(
                at=self._time(at), episode=episode, task=body.task or None, model=body.model or None, agent=body.agent,
                eval=body.eval, idle_timeout=idle, wall_timeout=wall, tenant=tenant, metadata=body.metadata,
                identified_by=identified_by, members=body.members,
            ),
        )

    def begin_call(
        self, *, episode: str, calls: tuple[str, ...], at: float, model: str, agent: str, task: str | None, eval: bool,
        identified_by: str, tenant: str, body_hash: str, idempotency_key: str | None, retries: int,
        missed: bool = False, metadata: Mapping[str, Any] | None = None, route: str = "",
    ) -> Events:
        """A request goes to the engine; `calls` has one id for each choice. The episode opens on first sight, then with
        `metadata`. `missed` says that its first attempt may be one that never got so far."""
        at = self._time(at)
        started = ev.CallStarted(
            at, episode, calls, model, agent, identified_by, body_hash, idempotency_key, route, retries
        )
        known = self.find(episode)
        if known is None:
            body = OpenEpisode(task=task, eval=eval, metadata=metadata or {})
            opened = self.open_episode(body, episode=episode, at=at, tenant=tenant, identified_by=identified_by)
            return (*opened, started)
        if known.tenant != tenant:
            raise Forbidden(f"episode {episode} belongs to another tenant", code="foreign_episode")
        takes("call", known)
        again = repeats(known, body_hash, idempotency_key, retries, agent=agent, missed=missed)
        labels = self.label(episode, task=task, eval=eval, at=at)
        return (*labels, *(ev.CallLost(at, episode, call, "retried") for call in again), started)

    def label(self, episode: str, *, task: str | None, eval: bool, at: float) -> Events:
        """A request names the task, or says that this is an evaluation: that holds for the whole of an open episode."""
        known, at, out = self._episode(episode), self._time(at), list[Event]()
        if known.state == "open" and task is not None and (known.task is None or known.task_derived):
            out.append(ev.TaskNamed(at, episode, task, derived=False))
        if known.state == "open" and eval and not known.eval:
            out.append(ev.EpisodeMarkedEval(at, episode))
        return tuple(out)

    def finish_call(self, episode: str, call: Packed, *, at: float, marks: tuple[Mark, ...] = ()) -> Events:
        """`call` is whole, and its client's history ends in `marks`. Nothing happens if it was lost or finished before;
        in an episode that ended it is lost."""
        turn = call.turn
        known, entry, at = self._episode(episode), self._entry(episode, turn.call), self._time(at)
        if entry.state != "running":
            return _late(known, turn.call, entry, marks, at)
        if known.state not in ("open", "sealed"):
            return (ev.CallLost(at, episode, turn.call, f"episode_{known.state}"),)
        named: Events = ()
        if known.task is None or (known.task_derived and _is_first(known, turn)):
            named = (ev.TaskNamed(at, episode, prompt_hash(call.prompt_token_ids)),)
        return (*named, ev.CallFinished(at, episode, call, marks))

    def lose_call(
        self, episode: str, call: str, reason: str, *, at: float, marks: tuple[Mark, ...] = (),
        taken_back: bool = False,
    ) -> Events:
        """`call` will never be trained, for `reason`, or for its episode's end. Nothing happens if it ended before; but
        one that is complete is so no longer if it is `taken_back`: its client was not sent the end, or the engine
        contradicted what it had told. An episode that has settled keeps it all the same: what may be delivered, or was,
        does not change."""
        known, entry, at = self._episode(episode), self._entry(episode, call), self._time(at)
        unsettled = known.state in ("open", "sealed")
        if entry.state != "running" and not (taken_back and entry.state == "complete" and unsettled):
            return _late(known, call, entry, marks, at)
        if not unsettled:
            reason = f"episode_{known.state}"
        return (ev.CallLost(at, episode, call, reason, marks),)

    def answers_sent(self, calls: Collection[str], unknown: Collection[str] = (), *, at: float) -> Events:
        """The clients of `calls` have been sent the end of their answers; of those of `unknown` nobody will know."""
        sent, doubtful = (tuple(sorted(self.unsent.intersection(some))) for some in (calls, unknown))
        return (ev.AnswersSent(self._time(at), sent, doubtful),) if sent or doubtful else ()

    def reward(self, episode: str, body: Reward, *, reward_id: str, at: float) -> Events:
        """A final reward seals an open episode. `reward_id` is `body.id`, or a new one where that is None."""
        known, at = self._episode(episode), self._time(at)
        if not abs(body.value) <= MAX_REWARD:
            raise BadRequest(f"value must be a finite number of at most {MAX_REWARD:g}", param="value")
        given = known.rewards.get(reward_id)
        if given is not None:
            if given.value != body.value:
                raise Conflict(f"reward {reward_id} has another value already", code="reward_exists", param="id")
            return ()
        takes("reward", known)
        has_room(known, body.note)
        if body.call is not None and body.call not in known.calls:
            raise NotFound(f"episode {episode} has no call {body.call}", code="unknown_call", param="call")
        rewarded = ev.RewardGiven(at, episode, reward_id, body.value, body.call, body.agent, body.final, body.note)
        if body.final and known.state == "open":
            return (rewarded, ev.EpisodeSealed(at, episode))
        return (rewarded,)

    def seal(self, episode: str, *, at: float) -> Events:
        return (ev.EpisodeSealed(self._time(at), episode),) if takes("seal", self._episode(episode)) else ()

    def abort(self, episode: str, body: Abort, *, at: float) -> Events:
        if not takes("abort", self._episode(episode)):
            return ()
        return (ev.EpisodeDiscarded(self._time(at), episode, "aborted", body.reason),)

    def heartbeat(self, episode: str, *, at: float) -> Events:
        return (ev.EpisodeTouched(self._time(at), episode),) if takes("heartbeat", self._episode(episode)) else ()

    # -- batches

    def lease(self, body: Lease, *, batch: str, at: float) -> Events:
        """The groups that were complete first, as `batch`: all that are asked for if they fit into one frame. Without
        enough of them, only what is dropped (`ajet_proxy.core.ledger.leases`)."""
        at = self._time(at)
        for name, value, least in (
            ("groups", body.groups, 1), ("group_size", body.group_size, 1), ("max_staleness", body.max_staleness, 0),
        ):
            if value is not None and value < least:
                raise BadRequest(f"{name} must be at least {least}", param=name)
        _check_lease(body.lease_s)
        dropped, chosen = choose(self, body, at=at, version=self.policy_version)
        if chosen is None:
            return tuple(dropped)
        model, groups = chosen
        return (*dropped, ev.BatchLeased(at, batch, at + body.lease_s, self.policy_version(model), groups, model))

    def leasable(self) -> object:
        """Equal while no lease can find anything else than it found before."""
        return self.queues.changes, self.moves, self.updates

    def ack(self, batch: str, body: Ack, *, at: float) -> Events:
        """The batch is trained. A returned one is acknowledged all the same while its episodes are as it had them."""
        known = self._batch(batch)
        check_version(body.policy_version, "policy_version")
        if not body.filtered.keys() <= set(known.episodes()):
            raise BadRequest(f"filtered names an episode that batch {batch} does not have", param="filtered")
        if known.state == "trained":
            return ()
        if known.state == "returned" and any(
            one is None or one.state == "discarded" or one.shares.get(known.model, "") is not None
            or len(one.rewards) != known.given[one.id] for one in map(self.find, known.episodes())
        ):
            raise Conflict(f"batch {batch} was returned and its episodes went elsewhere", code="lease_expired")
        return (ev.BatchTrained(self._time(at), batch, body.policy_version, body.filtered),)

    def nack(self, batch: str, *, at: float) -> Events:
        """The batch comes back untrained."""
        known = self._batch(batch)
        if known.state == "trained":
            raise Conflict(f"batch {batch} is trained", code="batch_trained")
        return (ev.BatchReturned(self._time(at), batch, "nack"),) if known.state == "leased" else ()

    def extend(self, batch: str, body: Extend, *, at: float) -> Events:
        known, at = self._batch(batch), self._time(at)
        _check_lease(body.lease_s)
        if known.state != "leased":
            raise Conflict(f"batch {batch} is {known.state}: there is no lease to extend", code=f"batch_{known.state}")
        return (ev.LeaseExtended(at, batch, at + body.lease_s),)

    # -- weights

    def announce(self, body: Policy, *, at: float) -> Events:
        if not body.model:
            raise BadRequest("a policy needs a model", param="model")
        check_version(body.version, "version")
        for url in body.upstreams or ():
            if server(url) is None or "@" in url:
                raise BadRequest(f"upstream {url.rpartition('@')[2][:200]!r} is no http://HOST:PORT", param="upstreams")
        known = self.served.get(body.model)
        if known is not None and known.version == body.version and body.upstreams in (None, known.upstreams):
            return ()
        return (ev.PolicyAnnounced(self._time(at), body.model, body.version, body.upstreams),)

    def gate_close(self, body: GateClose, *, at: float) -> Events:
        return () if self.gate_now.shut else (ev.GateClosed(self._time(at), body.reason),)

    def gate_open(self, body: GateOpen, *, at: float) -> Events:
        check_version(body.policy_version, "policy_version")
        if not self.gate_now.shut and self.default_version == body.policy_version:
            return ()
        return (ev.GateOpened(self._time(at), body.policy_version),)

    # -- time

    def expire(self, at: float) -> Events:
        """What time alone makes true, of episodes `EXPIRED_AT_ONCE` at most: whoever asks asks again. An episode is
        idle only while nothing of it is in flight and the gate is open."""
        at = self._time(at)
        out: list[Event] = [
            ev.BatchReturned(at, batch.id, "expired") for batch in self.leased.values() if batch.lease_until <= at
        ]
        for episode in self.unsettled.values():
            if len(out) >= EXPIRED_AT_ONCE:
                break
            quiet = episode.state == "open" and not episode.running and not self.gate_now.shut
            if at - episode.opened_at >= episode.wall_timeout:
                out.append(ev.EpisodeDiscarded(at, episode.id, "wall_timeout"))
            elif quiet and at - max(episode.active_at, self.gate_now.since) >= episode.idle_timeout:
                out.append(ev.EpisodeDiscarded(at, episode.id, "idle_timeout"))
        return tuple(out)

    def restarted(self, at: float) -> Events:
        """At start, after the replay: calls in flight are gone."""
        running = [
            (episode.id, call)
            for episode in self.episodes.values() if episode.running
            for call, entry in episode.calls.items() if entry.state == "running"
        ]
        lost = (ev.CallLost(at, episode, call, RESTARTED) for episode, call in running)
        return (ev.ProxyStarted(at, self.settings.merge_policy), *lost)

    # -- queries

    def continued(
        self, history: Beginnings | None, *, body_hash: str, idempotency_key: str | None, retries: int
    ) -> tuple[str, ...]:
        """The open episode that a request continues which nothing names, if there is one; several if nobody can say
        which of them."""
        again = self.lineage.repeated(body_hash if retries else None, idempotency_key, self.all_lost)
        if again is not None:
            return (again,)
        return () if history is None else self.lineage.continued(history)

    @property
    def gate(self) -> GateState:
        return self.gate_now.state(self.in_flight())

    def in_flight(self) -> int:
        """Calls that the engine has not ended."""
        return self.calls["running"]

    def policy_version(self, model: str) -> int:
        """The version that serves `model`; for a model nobody announced, the one that the gate was last opened with."""
        served = self.served.get(model)
        return self.default_version if served is None else served.version

    def upstreams(self, model: str) -> tuple[str, ...]:
        """The engines announced for `model`."""
        served = self.served.get(model)
        return () if served is None else served.upstreams

    def models(self) -> tuple[str, ...]:
        """Every model that was announced."""
        return tuple(self.served)

    def only_model(self) -> str:
        """The one that a request means which names none, if a single one was announced; else ""."""
        return next(iter(self.served)) if len(self.served) == 1 else ""

    def has_ended(self, episode: str) -> bool:
        """Whether `episode` is known and takes no more calls."""
        known = self.find(episode)
        return known is not None and known.state != "open"

    def tenant_of(self, episode: str) -> str | None:
        known = self.find(episode)
        return None if known is None else known.tenant

    def agent_of(self, episode: str) -> str | None:
        known = self.find(episode)
        return None if known is None else known.agent

    def model_of(self, episode: str, agent: str, asked: str, served: Collection[str]) -> str | None:
        """The model that this agent of the episode was given when it opened. One that was not given its own may ask for
        any that is `served` by name, such as a judge."""
        known = self.find(episode)
        member = None if known is None else (known.members or {}).get(agent)
        return member if known is None or member is not None or (asked and asked in served) else known.model

    def episode_of_call(self, call: str) -> str | None:
        return self.episode_by_call.get(call)

    def wanted(self, episode: str, call: str) -> bool:
        """Whether `call` would be trained if it were whole, as far as is known by now."""
        known = self.episodes.get(episode)
        return known is not None and known.wants(call)

    def packed(self, episode: str, call: str) -> Packed | None:
        """A complete call with its text, while its episode takes calls."""
        known = self.episodes.get(episode)
        return None if known is None else known.packed(call)

    def status(self) -> dict[str, Any]:
        """`GET status`, without what only the shell knows."""
        return views.status(self)

    def alerts(self) -> dict[str, str]:
        """What an operator should look at, by what it is about."""
        limit = self.settings.drift_limit
        lines = {f"drift of model {model!r}": drift.alert(model, limit) for model, drift in self.drifts.items()}
        return {about: line for about, line in lines.items() if line is not None}

    def record(self, episode: str, *, tokens: views.Tokens = "none") -> dict[str, Any]:
        """`GET episodes/ID`."""
        return views.record(self._episode(episode), self.merge_policy, tokens=tokens)

    def batch(self, batch: str) -> Batch:
        """What a lease delivers: a function of the state when it was leased. Episodes that retention has removed since
        are left out."""
        known = self._batch(batch)
        groups = tuple(
            Group(task, tuple(
                delivered(one, known.model, known.given[one.id]) for one in map(self.find, names) if one is not None
            ))
            for task, names in known.groups
        )  # fmt: skip
        return Batch(batch, known.lease_until, known.policy_version, groups)

    def ready_episodes(self) -> Iterator[BatchEpisode]:
        """What the ready episodes would deliver, the longest ready of each task first."""
        for model, episode in self.queues.ready():
            yield delivered(self._episode(episode), model, None)

    def _time(self, at: float) -> float:
        return max(at, self.now)

    def _episode(self, episode: str) -> Episode:
        known = self.find(episode)
        if known is None:
            raise NotFound(f"no episode {episode}", code="unknown_episode")
        return known

    def _entry(self, episode: str, call: str) -> CallEntry:
        entry = self._episode(episode).calls.get(call)
        if entry is None:
            raise NotFound(f"episode {episode} has no call {call}", code="unknown_call")
        return entry

    def _batch(self, batch: str) -> LeasedBatch:
        known = self.find_batch(batch)
        if known is None:
            raise NotFound(f"no batch {batch}", code="unknown_batch")
        return known


def _is_first(episode: Episode, turn: Turn) -> bool:
    """Whether the call of `turn` started before every call that is complete."""
    rank = turn.rank
    return all(entry.turn is None or rank < entry.turn.rank for entry in episode.calls.values())


def _late(episode: Episode, call: str, entry: CallEntry, marks: tuple[Mark, ...], at: float) -> Events:
    """A call that a retry has replaced is answered all the same, and its client may go on from there."""
    goes_on = marks and entry.reason == "retried" and episode.stored is None
    return (ev.CallLost(at, episode.id, call, "retried", marks),) if goes_on else ()


def _check_lease(lease_s: float) -> None:
    if lease_s <= 0:
        raise BadRequest("lease_s must be positive", param="lease_s")

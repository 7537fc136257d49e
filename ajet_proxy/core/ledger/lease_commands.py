"""The commands of leases: a trainer takes groups in the proportions of a mix, and acknowledges or returns them.

Idea: which groups a lease takes is chosen in `ajet_proxy.core.ledger.leases`. A lease that finds too few waits, until
something becomes ready, or until time alone may have changed what it finds.
"""

from __future__ import annotations

import math

from msgspec.structs import asdict, replace

from ajet_proxy.core.ledger import events as ev
from ajet_proxy.core.ledger.events import Events
from ajet_proxy.core.ledger.leases import choose, lacking
from ajet_proxy.core.ledger.mix import Mix
from ajet_proxy.core.ledger.state import State
from ajet_proxy.core.ledger.teams import slowest
from ajet_sdk.errors import BadRequest, Conflict
from ajet_sdk.routes import Ack, Extend, Flush, Lease, SetMix


class LeaseCommands:
    """The decisions about leases, over `state`. They return events, as all commands do."""

    def __init__(self, state: State) -> None:
        self.state = state

    def lease(self, body: Lease, *, batch: str, at: float) -> Events:
        """The groups that were complete first, as `batch`: all that are asked for, if they fit into one frame. If there
        are too few, only the events of what is dropped, or of lanes that may be played further
        (`ajet_proxy.core.ledger.leases`)."""
        at = self.state.time(at)
        if (body.min_group_size or 0) > (body.group_size or self.state.settings.group_size):
            raise BadRequest("min_group_size may be at most group_size", param="min_group_size")
        if body.max_lead is not None and slowest(self.state.weights.teams, body.model or "")[1] > body.max_lead:
            return ()
        dropped, chosen = choose(self.state, body, at=at)
        if chosen is None:
            return tuple(dropped or lacking(self.state, body, at=at))
        model, groups = chosen
        size, version = body.group_size or self.state.settings.group_size, self.state.weights.policy_version(model)
        return (*dropped, ev.BatchLeased(at, batch, at + body.lease_s, version, groups, model, size))

    def ack(self, batch: str, body: Ack, *, at: float) -> Events:
        """The batch is trained. A returned one can be acknowledged too, while its episodes are as it had them."""
        known = self.state.batches.known(batch)
        if not body.filtered.keys() <= set(known.episodes()):
            raise BadRequest(f"filtered names an episode that batch {batch} does not have", param="filtered")
        if known.state == "trained":
            return ()
        born = self.state.weights.born(known.model)
        if born.branches[known.branch].run != born.run:
            raise Conflict(f"batch {batch} was leased to another run, which has ended: it is void", code="batch_void")
        if known.state == "returned" and any(
            one is None or one.state == "discarded" or one.shares.by_model.get(known.model, "") is not None
            or len(one.rewards) != known.rewards_at_lease[one.id]
            for one in map(self.state.episodes.find, known.episodes())
        ):
            raise Conflict(f"batch {batch} was returned and its episodes went elsewhere", code="lease_expired")
        return (ev.BatchTrained(self.state.time(at), batch, body.policy_version, body.filtered),)

    def nack(self, batch: str, *, at: float) -> Events:
        """The batch comes back untrained."""
        known = self.state.batches.known(batch)
        if known.state == "trained":
            raise Conflict(f"batch {batch} is trained", code="batch_trained")
        return (ev.BatchReturned(self.state.time(at), batch, "nack"),) if known.state == "leased" else ()

    def extend(self, batch: str, body: Extend, *, at: float) -> Events:
        known, at = self.state.batches.known(batch), self.state.time(at)
        if known.state != "leased":
            raise Conflict(f"batch {batch} is {known.state}: there is no lease to extend", code=f"batch_{known.state}")
        return (ev.LeaseExtended(at, batch, at + body.lease_s),)

    def next_end(self, body: Lease, *, at: float) -> float:
        """In how many seconds a lease may find more though nothing happens: a group key ends, or a lane lends its
        turns."""
        at, state = self.state.time(at), self.state
        quiet = None if body.min_group_size is None else state.seats.progress.next_end(at - body.group_wait_s)
        models = state.seats.queues.models() if body.model is None else (body.model,)
        lending = [
            since + one.mix.lane_wait_s for one in map(state.mixes.of, models) for lane in one.mix.shares
            for since in one.credit.since(lane, one.since)
        ]
        ends = [] if quiet is None else [quiet + body.group_wait_s]
        mixes = [state.mixes.table[name].mix for name in state.mixes.waited_for(body.model)]
        if any(mix.ahead is not None for mix in mixes):  # agents may hang, or have died
            ends.append(at + body.group_wait_s)
        return min((end - at for end in (*ends, *lending) if end > at), default=math.inf)

    def flush(self, body: Flush, *, at: float) -> Events:
        progress = self.state.seats.progress.unended(body.lane, body.task)
        return (ev.GroupsFlushed(self.state.time(at), body.lane, body.task),) if progress else ()

    def set_mix(self, body: SetMix, *, at: float) -> Events:
        """Change what is given; the same again changes nothing."""
        model = self.state.weights.meant(body.model)
        known = self.state.mixes.of(model).mix
        mix = Mix(
            known.shares if body.shares is None else body.shares,
            known.ahead if body.ahead is None else body.ahead or None,
            known.group_size if body.group_size is None else body.group_size or None,
            known.lane_wait_s if body.lane_wait_s is None else body.lane_wait_s,
        )
        same = mix == known and (not model or model in self.state.mixes.table)
        return () if same else (ev.MixSet(self.state.time(at), model=model, **asdict(mix)),)

    def drop_mix(self, model: str | None = None, *, at: float) -> Events:
        """No lane has a share any more: groups are leased as they were complete."""
        model = self.state.weights.meant(model)
        known = self.state.mixes.of(model).mix
        mix = replace(known, shares={})
        return () if mix == known else (ev.MixSet(self.state.time(at), model=model, **asdict(mix)),)

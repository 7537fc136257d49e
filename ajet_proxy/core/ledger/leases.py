"""Choosing the ready groups that a lease takes, and dropping episodes because no lease will ever take it.

Idea: the groups that were complete first are looked at. What is in the way is left out, until the first groups fit:
shares that are stale, too large for a lease, or without a reward. So are groups that teach nothing, if the trainer
wants none. Until then a reward can be corrected. With a ``max_staleness``, groups that are more than half of it behind
come last, freshest first (`ajet_proxy.core.ledger.looks`). With a ``min_group_size``, a task that nobody plays any more
gives what is left of it as a group, or it is dropped.

How large a frame becomes is told before it is made: a bound from lengths of texts, turns and names costs next to
nothing. What the timelines of an episode share counts once, as it is sent once. A lease takes groups until the next one
would go beyond `LEASE_BYTES` or `LEASE_EPISODES`; the trainer asks again for more. A group that alone has more bytes
would come back with every lease, so its episodes that take more than their part are discarded.

Invariant: no lease takes what is dropped, not even this one. While a trainer has another model's share of an episode,
the episode is left alone. One look costs what it looks at. It ends without a lease when it has dropped `AT_ONCE`, and
the caller looks again after others have had their turn. A frame is never longer than its episodes' `most_bytes` are
together.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice

from ajet_proxy.core.ledger import events as ev
from ajet_proxy.core.ledger import looks
from ajet_proxy.core.ledger.episode import Episode
from ajet_proxy.core.ledger.groups import Share
from ajet_proxy.core.ledger.life import NO_SIGNAL
from ajet_proxy.core.ledger.mix import Turns
from ajet_proxy.core.ledger.model_queue import Demand
from ajet_proxy.core.ledger.parts import AT_ONCE
from ajet_proxy.core.ledger.queues import Groups
from ajet_proxy.core.ledger.state import State
from ajet_proxy.core.trajectory.rewards import EpisodeReward, total
from ajet_sdk.rounding import differ, magnitude, slack
from ajet_sdk.routes import DiscardReason, Lease

NAMED = 5
"""Scopes of rewards that a reason names; each may have a thousand characters."""
LEASE_EPISODES = 1000
"""A lease takes groups of so many together, or one that is larger; the trainer asks again for more. Everybody else
waits some 30 ms while they are chosen and leased."""
LEASE_BYTES = 256 << 20
"""Some 30 million sampled tokens, more than one step is made of. Such a frame is made in up to ten seconds, which
trainers wait (`ajet_sdk.frame.MAX_FRAME_BYTES` is what they read). Meanwhile it takes up to eighteen times as much
memory."""
_TOKEN, _LOGPROB = 4, 4
_LAID_OUT = 2
"""A token counts for this much in each timeline, since daemon and trainer lay the shared ones out. So no lease has more
tokens than a trainer reads (`ajet_sdk.frame.MAX_TOKENS`)."""
_EPISODE, _REWARD, _SAMPLE, _TURN, _SPAN = 434, 121, 357, 55, 20
"""The names of the fields, all numbers, and the lengths that stand before texts and lists; the frame's own, and a
group's, are counted with each episode. A sample has a run of the tree. A turn has two runs of its mask, and each
version that sampled it a span."""
_VALUE = 3
"""The most that a value takes in a frame, as a multiple of its JSON: 0.5 and its comma take nine bytes there."""
_CHARACTER = 4
"""Of UTF-8, at most."""


def choose(state: State, body: Lease, *, at: float) -> tuple[list[ev.EpisodeDiscarded], tuple[str, Groups] | None]:
    """Choose what is dropped at `at`; and a model and its first groups. These are all that are asked for, if one lease
    takes so many. None if there are fewer, or if `AT_ONCE` were dropped."""
    demand, episodes = _demand(state, body, at), state.episodes
    behind = f"more than {body.max_staleness} versions behind"
    few = f"nobody plays its task any more, and {body.min_group_size or 1} make a group"
    large = f"a group of {demand.size} like it is too large for a lease"
    half = (body.max_staleness or 0) // 2
    fresh = None if body.max_staleness is None else lambda model: state.weights.policy_version(model) - half
    order = partial(_turns, state, demand, at)
    unusable, stale = set[Share](), set[Share]()
    for share in _stale(state, body):
        (stale if episodes[share[1]].state == "ready" else unusable).add(share)
        if len(stale) == AT_ONCE:
            return list(_dropped(episodes, stale, "stale", lambda _: behind, at)), None
    dropped = list(_dropped(episodes, stale, "stale", lambda _: behind, at))
    unusable |= stale
    while len(dropped) < AT_ONCE:
        gone = {event.episode for event in dropped if not event.models}
        unusable.update((model, name) for name in gone for model in episodes[name].shares.by_model)
        idle, flat, most = set[Share](), set[Share](), AT_ONCE - len(dropped)
        fits = partial(_fits, episodes, idle, most)
        teaches = partial(_teaches, state, demand.size, flat, most if body.signal else 0)
        short = _short(state, body.model, demand, fits, unusable, most)
        chosen = None if short else looks.choose(
            state.seats.queues, demand, body.model, fits, teaches, out=unusable, fresh=fresh, order=order
        )
        if idle:
            dropped += _dropped(episodes, idle, "no_reward", _named, at, apart=_rewarded)
            unusable |= idle
            continue
        if short:
            dropped += _dropped(episodes, short, "incomplete_group", lambda _: few, at, apart=lambda _: True)
            unusable |= short
            continue
        dropped += _dropped(episodes, flat, "filtered", lambda _: NO_SIGNAL, at, apart=lambda _: True)
        unusable |= flat
        if len(flat) >= most:
            continue
        if chosen is None:
            break
        model, groups = chosen
        sizes = {name: most_bytes(episodes[name], model) for _, names in groups for name in names}
        for _, names in groups:
            earlier = state.seats.earlier(model, names, demand.size)
            sizes[names[0]] += sum(most_bytes(episodes[name], model) for name in earlier)
        if taken := leading(groups, sizes):
            return dropped, (model, taken)
        shares = {(model, name) for name in too_large(groups[0][1], sizes)}
        dropped += _dropped(episodes, shares, "filtered", lambda _: large, at)
        unusable |= shares
    return dropped, None


def _demand(state: State, body: Lease, at: float) -> Demand:
    """Return what a lease asks of the queues. Without a ``min_group_size`` only what is flushed has ended."""
    size = body.group_size or state.settings.group_size
    before = -math.inf if body.min_group_size is None else at - body.group_wait_s
    early = body.min_group_size is not None
    by_episode = body.unit == "episodes"
    most = max(LEASE_EPISODES // (1 if by_episode else size), 1)
    ended = state.seats.progress.ended(before)
    return Demand(body.groups, size, by_episode, body.min_group_size or 1, ended, early, most)


def _turns(state: State, demand: Demand, at: float, model: str) -> Turns | None:
    """The turns of the lanes, from now on; None if they have no shares."""
    known = state.mixes.of(model)
    if not known.mix.shares:
        return None
    groups = -(-demand.groups // demand.size) if demand.by_episode else demand.groups
    return Turns(known.mix.shares, known.credit.copy(), groups, lambda lane: known.lends(lane, at))


def lacking(state: State, body: Lease, *, at: float) -> list[ev.LanesLacking]:
    """The lanes that a lease waits for and cannot get, once it has found too little: full, and nobody plays in them.
    A trainer may want more groups than may be ahead, or larger ones. Or agents have died, or hang, without a client
    that would show it."""
    found = ((name, _lanes_lacking(state, body, name, at)) for name in state.mixes.waited_for(body.model))
    return [ev.LanesLacking(at, lanes, name) for name, lanes in found if lanes]


def _lanes_lacking(state: State, body: Lease, name: str, at: float) -> tuple[str, ...]:
    """The lanes, of the mix of that name."""
    lane_mix = state.mixes.table[name]
    counts = lane_mix.counts
    full = [lane for lane in sorted(counts.playing | counts.waiting) if counts.of(lane) and lane_mix.room(lane) == 0]
    active = _active(state, name, at - body.group_wait_s) if full else frozenset[str]()
    idle = tuple(lane for lane in full if lane not in active)
    if not idle or not lane_mix.mix.shares:
        return idle
    lacks = set[str]()
    demand = _demand(state, body, at)
    for model in state.seats.queues.models() if body.model is None else (body.model,):
        if state.mixes.name(model) == name:
            turns, left = _turns(state, demand, at, model), looks.count(state.seats.queues.of(model), model, demand)
            assert turns is not None
            while (lane := turns.next(lambda lane: left[lane] > 0)) is not None:  # noqa: B023
                turns.take(lane)
                left[lane] -= 1
            lacks.update(turns.lacks())
    return tuple(lane for lane in idle if lane in lacks)


def _active(state: State, name: str, since: float) -> Collection[str]:
    """The lanes in which an agent has done something since then, or cannot because of a gate, with an episode that
    counts for the mix of that name. Who is held at the gate of another model alone does not count."""
    elsewhere = state.gates.shut() - {"", name} if name else set[str]()

    def active(episode: Episode) -> bool:
        gate = state.gates.of(name) if name else state.gates.over(episode)
        if gate.shut or max(episode.active_at, gate.since) > since:
            return True
        return bool(episode.transcript.running) and elsewhere.isdisjoint(episode.may_train)

    trained = (one for one in state.episodes.unsettled.values() if not one.opening.eval)
    return {one.group_key.lane for one in trained if state.mixes.counts_for(name, one) and active(one)}


def _short(
    state: State, model: str | None, demand: Demand, fits: Callable[[Share], bool], out: Collection[Share], most: int
) -> set[Share]:
    """Find at most so many shares that are left of group keys that have ended, and are too few for a group."""
    queues = state.seats.queues
    left = (
        (name, episode) for name in (queues.models() if model is None else (model,))
        for episode in queues.of(name).left_over(demand, {episode for of, episode in out if of == name})
    )
    return {share for share in islice(left, most) if fits(share)}


def _fits(episodes: Mapping[str, Episode], idle: set[Share], most: int, share: Share) -> bool:
    """Tell whether anything in `share` is rewarded, so that a lease can take it. Otherwise it goes into `idle`, if it
    can be dropped now. Once `idle` holds `most`, all others fit, since this look ends without a lease."""
    model, name = share
    if len(idle) >= most or episodes[name].rewarded(model):
        return True
    if episodes[name].state == "ready":
        idle.add(share)
    return False


def _rewarded(episode: Episode) -> bool:
    """Tell whether any of its models may learn from it."""
    return any(episode.rewarded(model) for model in episode.shares.by_model)


def _named(episode: Episode) -> str:
    """The scopes of the rewards of an episode in which no whole call is rewarded; they may be misspelt."""
    several = list(dict.fromkeys(_scope(one) for one in episode.rewards.values()))
    more = f" and {len(several) - NAMED} more" if len(several) > NAMED else ""
    return f"no whole call is of what was rewarded: {', '.join(several[:NAMED])}{more}"


def _scope(reward: EpisodeReward) -> str:
    """Name the limits of a reward."""
    if reward.call is not None:
        return f"call {reward.call}"
    limits = {"agent": reward.agent, "model": reward.model}
    return " and ".join(f"{name} {value!r}" for name, value in limits.items() if value is not None)


def _teaches(
    state: State, size: int, flat: set[Share], most: int, model: str, names: tuple[str, ...]
) -> bool:
    """Tell whether rewards differ in a group of at most `size`, so that a lease with `signal` can take it. Otherwise it
    goes into `flat`. Once that holds `most`, all others do, since this look ends without a lease.

    A trainer compares rewards of whole episodes. Where agents have rewards of their own, it compares each agent's with
    those of the same agent, or all of them if an agent is alone. It compares rewards of single calls in several ways,
    so groups that have some are left to it.
    """
    if len(flat) >= most:
        return True
    members = [state.episodes[name] for name in (*names, *state.seats.earlier(model, names, size))]
    rewards = [one for member in members for one in member.rewards_of(model)]
    if len(members) == 1 or any(one.call is not None for one in rewards):
        return True
    if any(one.agent is not None for one in rewards):
        earned = [member.earned(model) for member in members]
    else:
        earned = [{"": total(member.rewards_of(model)) or 0.0} for member in members]
    alone = 1 in Counter(agent for given in earned for agent in given).values()
    compared = defaultdict[str, list[float]](list)
    for agent, reward in ((agent, reward) for given in earned for agent, reward in given.items()):
        compared["" if alone else agent].append(reward)
    by = slack(magnitude(one.value for one in member.rewards_of(model)) for member in members)
    if any(differ(values, by) for values in compared.values()):
        return True
    flat.update((model, name) for name in names)
    return False


def _stale(state: State, body: Lease) -> Iterator[Share]:
    """Ready shares with a token that was sampled more than ``max_staleness`` versions ago."""
    if body.max_staleness is None:
        return
    for model in state.seats.queues.models() if body.model is None else (body.model,):
        last = state.weights.policy_version(model) - body.max_staleness
        yield from ((model, episode) for episode in state.seats.queues.of(model).older(last))


def _dropped(
    episodes: Mapping[str, Episode], shares: set[Share], reason: DiscardReason, why: Callable[[Episode], str],
    at: float, *, apart: Callable[[Episode], bool] = lambda _: False,
) -> Iterator[ev.EpisodeDiscarded]:
    """Ready episodes are dropped whole. If a model has trained its share of one, or each of its models has its share
    `apart`, only these `shares` are."""
    for name in sorted({name for _, name in shares}):
        episode = episodes[name]
        if episode.state == "ready":
            own = episode.shares.by_model
            mine = sorted(model for model in own if (model, name) in shares)
            some = "" in own.values() or (len(mine) < len(own) and apart(episode))
            yield ev.EpisodeDiscarded(at, name, reason, why(episode), tuple(mine if some else ()))


def most_bytes(episode: Episode, model: str) -> int:
    """The most bytes that what `model` learns from a merged episode can take in a frame; more if that is little for all
    the tokens that are laid out."""
    chains = [chain for chain in episode.transcript.chains if chain.model == model]
    turns = [turn for chain in chains for turn in chain.turns]
    sent = (
        _EPISODE + _text(episode.id, episode.group_key.task, episode.group_key.task, model)
        + sum(
            _REWARD + _text(one.id, one.call, one.agent, one.note, one.state, one.model)
            for one in episode.rewards_of(model)
        )
        + _TOKEN * episode.transcript.distinct(chains) + _LOGPROB * sum(turn.sampled for turn in turns)
        + sum(_SAMPLE + _text(episode.id, chain.turns[0].agent) for chain in chains)
        + sum(_TURN + _SPAN * len(turn.policy_versions) + _text(turn.call, turn.call) for turn in turns)
        + sum(_text(turn.finish_reason) + _VALUE * _text(turn.sampling) for turn in turns)
    )
    return max(sent, _LAID_OUT * sum(chain.turns[-1].end for chain in chains))


def leading(groups: Groups, sizes: Mapping[str, int]) -> Groups:
    """As many of the first `groups` as one lease takes; none if it does not take even the first."""
    total, taken = 0, 0
    for _, names in groups:
        total += sum(sizes[name] for name in names)
        if total > LEASE_BYTES:
            break
        taken += 1
    return groups[:taken]


def too_large(names: Sequence[str], sizes: Mapping[str, int]) -> list[str]:
    """The episodes of a group that take more than their part of a lease. Whatever group of this size the others come
    into, a lease takes it."""
    return [name for name in names if sizes[name] > LEASE_BYTES // len(names)]


def _text(*texts: str | None) -> int:
    return sum(len(text) * (1 if text.isascii() else _CHARACTER) for text in texts if text is not None)

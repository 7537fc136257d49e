"""What a lease takes of the ready groups, and what is dropped because no lease will ever take it.

Idea: the groups that were complete first are looked at. What is in the way (shares that are stale, in which nothing is
rewarded, or too large for a lease, see `ajet_proxy.core.ledger.lease_size`) is left out, until the first groups fit.
Until then a reward can be corrected.

Invariant: what is dropped is taken by no lease, this one included. An episode of which another model's trainer has its
share just now is left alone until that is over. One look costs what it looks at: it ends without a lease when it has
dropped `MOST`, and whoever asked looks again, after others have had their turn.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from functools import partial

from ajet_proxy.core.ledger import events as ev
from ajet_proxy.core.ledger.episode import Episode
from ajet_proxy.core.ledger.lease_size import leading, most_bytes, too_large
from ajet_proxy.core.ledger.queues import Groups, ReadyQueues, Share
from ajet_proxy.core.ledger.state import State
from ajet_sdk.routes import Lease

MOST = 250
"""So many episodes are dropped in one look: some 10 ms, while which everybody else waits."""
NAMED = 5
"""Scopes of rewards that a reason names; each may have a thousand characters."""


def choose(
    state: State, body: Lease, *, at: float, version: Callable[[str], int]
) -> tuple[list[ev.EpisodeDiscarded], tuple[str, Groups] | None]:
    """What is dropped at `at`; and the model and the groups that were complete first, all that are asked for if they
    fit into one frame, or None where there are fewer, or where `MOST` were dropped. `version` says which one serves a
    model."""
    size, episodes = body.group_size or state.settings.group_size, state.episodes
    behind = f"more than {body.max_staleness} versions behind"
    large = f"a group of {size} like it is too large for a lease"
    unusable, stale = set[Share](), set[Share]()
    for share in _stale(state.queues, body, version):
        (stale if episodes[share[1]].state == "ready" else unusable).add(share)
        if len(stale) == MOST:
            return list(_dropped(episodes, stale, "stale", lambda _: behind, at)), None
    dropped = list(_dropped(episodes, stale, "stale", lambda _: behind, at))
    unusable |= stale
    while len(dropped) < MOST:
        gone = {event.episode for event in dropped if not event.models}
        unusable.update((model, name) for name in gone for model in episodes[name].shares)
        idle = set[Share]()
        fits = partial(_fits, episodes, unusable, idle, MOST - len(dropped))
        chosen = state.queues.choose(body.groups, size, body.model, fits)
        if idle:
            dropped += _dropped(episodes, idle, "no_reward", _named, at)
            unusable |= idle
            continue
        if chosen is None:
            break
        model, groups = chosen
        sizes = {name: most_bytes(episodes[name], model) for _, names in groups for name in names}
        if taken := leading(groups, sizes):
            return dropped, (model, taken)
        shares = {(model, name) for name in too_large(groups[0][1], sizes)}
        dropped += _dropped(episodes, shares, "filtered", lambda _: large, at)
        unusable |= shares
    return dropped, None


def _fits(
    episodes: Mapping[str, Episode], unusable: Container[Share], idle: set[Share], most: int, share: Share
) -> bool:
    """Whether a lease can take `share`. One in which nothing is rewarded is `idle`, if it can be dropped now. Beside
    `most` of them all others fit: no lease comes of this look any more."""
    if share in unusable:
        return False
    model, name = share
    if len(idle) >= most or episodes[name].rewarded(model):
        return True
    if episodes[name].state == "ready":
        idle.add(share)
    return False


def _named(episode: Episode) -> str:
    """Of an episode in which nothing that was sampled is rewarded: what its rewards name, which may be misspelt."""
    scopes = [f"agent {one.agent!r}" if one.call is None else f"call {one.call}" for one in episode.rewards.values()]
    several = list(dict.fromkeys(scopes))
    more = f" and {len(several) - NAMED} more" if len(several) > NAMED else ""
    return f"no whole call is of what was rewarded: {', '.join(several[:NAMED])}{more}"


def _stale(queues: ReadyQueues, body: Lease, version: Callable[[str], int]) -> Iterator[Share]:
    """Ready shares of which some token was sampled more than ``max_staleness`` versions ago."""
    if body.max_staleness is None:
        return
    for model in queues.models() if body.model is None else (body.model,):
        last = version(model) - body.max_staleness
        yield from ((model, episode) for episode in queues.older(model, last))


def _dropped(
    episodes: Mapping[str, Episode], shares: set[Share], reason: str, why: Callable[[Episode], str], at: float
) -> Iterator[ev.EpisodeDiscarded]:
    """The whole episodes that are ready, but `shares` alone of those of which a model has trained its own."""
    for name in sorted({name for _, name in shares}):
        episode = episodes[name]
        if episode.state == "ready":
            trained = "" in episode.shares.values()
            models = sorted(model for model in episode.shares if (model, name) in shares) if trained else ()
            yield ev.EpisodeDiscarded(at, name, reason, why(episode), tuple(models))

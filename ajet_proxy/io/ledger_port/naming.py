"""Which episode a request belongs to: the names of sessions, the history that it goes on from, and who may act on it.

A name is looked up in the archive too (`Store.decide`), so the first call of an episode may wait for the disk. A name
that is found in memory waits for nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from msgspec.structs import replace

from ajet_proxy.core.conversation.history import Beginnings
from ajet_proxy.core.identity.headers import is_text
from ajet_proxy.core.identity.ladder import Identity
from ajet_proxy.core.ledger import events as ev
from ajet_proxy.core.ledger.episode import Episode
from ajet_proxy.core.ledger.session_names import RUNGS, SessionNames, base_of, has_parts
from ajet_proxy.core.ledger.shared_names import SharedNames
from ajet_proxy.io.ledger_port.port import CallRequest
from ajet_proxy.io.runtime.clock import Clock
from ajet_proxy.io.runtime.metrics import Metrics
from ajet_proxy.io.storage.store import Store
from ajet_sdk.errors import Forbidden, NotFound
from ajet_sdk.limits import MAX_LABEL

logger = logging.getLogger(__name__)

UNSURE = (*RUNGS, "lineage")
"""Ways whose names may come to stand for another episode: while a request waits for the gate, one may end
and the next begin."""
SOON_S = 0.25
"""Within this time it is known of a client that it has gone away, also by another worker."""
MAX_NOTED = 10
"""An episode notes at most so many others that its first call may have continued."""
NOTHING: Mapping[str, Any] = MappingProxyType({})


class Naming:
    """The episodes that names stand for, over `store`."""

    def __init__(self, store: Store, clock: Clock, metrics: Metrics) -> None:
        self._store, self._state, self._clock, self._metrics = store, store.state, clock, metrics
        self._names = names = SessionNames(store.state.episodes.values(), store.state.episodes.sealed_lineage)
        self._shared = SharedNames(names, store.state.episodes.lineage.continued, store.trouble, logger.warning)

    async def find(self, episode: str | None) -> Episode | None:
        """The episode, wherever it is."""
        if episode is None:
            return None
        known = self._state.episodes
        return known.get(episode) or await self._store.decide(partial(known.find, episode))

    async def meant(self, identity: Identity, history: Beginnings | None, sent: Mapping[str, Any]) -> Identity:
        """`identity` with the episode that a request means which makes no call, or which it rewards before its call."""
        current, _, before = await self._store.decide(partial(self._found, identity))
        if self.is_anothers(identity, before, history):
            current = self._apart(identity, current)
        return (await self._continues(current, history, sent))[0]

    async def whose(self, request: CallRequest) -> tuple[Identity, Mapping[str, Any], Episode | None]:
        """The identity of a request with the episode that it belongs to, what to note on one that it opens, and that
        episode if there is one. It is so as this returns: whoever began meanwhile is seen."""
        named = request.identity
        if named.labels.reward is not None:  # so its episode was found before
            known, before = await self._store.decide(partial(self._chat_of, named))
            if self.is_anothers(named, before, request.history):  # who came meanwhile
                return unnamed(named), NOTHING, None
            return named, NOTHING, known
        identity, known, before = await self._store.decide(partial(self._found, named))
        if identity.may_be_shared and identity.episode is not None and request.history is not None:
            if self._shared.may_be_again(known, request):
                await asyncio.sleep(SOON_S)
                identity, known, before = await self._store.decide(partial(self._found, named))
            if identity.episode is not None:
                identity = self._told_apart(named, identity, known, before, request)
        if identity.episode is not None:
            return identity, NOTHING, known
        identity, metadata = await self._continues(identity, request.history, request.sent)
        return identity, metadata, self._state.episodes.get(identity.episode or "")

    def _found(self, named: Identity) -> tuple[Identity, Episode | None, Episode | None]:
        """The identity of a request that is `named` so, as it is now; and what `_chat_of` tells of that."""
        current = self.current(named)
        return (current, *self._chat_of(current))

    def _chat_of(self, current: Identity) -> tuple[Episode | None, Episode | None]:
        """The episode of a request; and that, or what is known of the chat of which it opens a part."""
        episodes = self._state.episodes
        known = None if current.episode is None else episodes.find(current.episode)
        return known, known or (episodes.of_chat(current.first) if current.first else None)

    def current(self, identity: Identity) -> Identity:
        """`identity` with the episode that a session's name stands for now; with none, if the name is that of several
        runs."""
        if identity.episode is None:
            return identity
        if identity.identified_by not in RUNGS:
            return self._later_part(identity, identity.episode)
        find, tenant = self._state.episodes.find, identity.claims.tenant
        name, agent = self._names.root(identity.episode, identity.parent, tenant), identity.labels.agent
        if name != identity.episode:
            own = identity.episode if is_text(identity.episode) else base_of(identity.episode, tenant)
            identity = replace(identity, labels=replace(identity.labels, agent=agent or own[:MAX_LABEL]))
        if identity.may_be_shared and base_of(name, tenant) in self._state.episodes.shared_names:
            return unnamed(identity)
        found = self._names.current(name, tenant, find, for_reward=identity.labels.reward is not None)
        is_meant = bool(identity.claims.lanes) or identity.labels.traffic is False
        first = base_of(name, tenant) if is_meant else found
        return self._part_of(replace(identity, episode=found), first)

    def _part_of(self, identity: Identity, first: str) -> Identity:
        """`identity`, whose episode is a later part of the `first` if it is another, and as much traffic as that."""
        if first in ("", identity.episode):
            return identity
        known = self._state.episodes.of_chat(first)
        lane = known.opening.lane if known is not None and known.opening.traffic else None
        return replace(identity, first=first, lane=lane or "")

    def _later_part(self, identity: Identity, name: str) -> Identity:
        """`identity` with the latest part of users' traffic that a path or a header names, or the next one, if the
        first is over."""
        find, tenant = self._state.episodes.find, identity.claims.tenant
        known = self._state.episodes.of_chat(name)
        if known is None or not known.opening.traffic or known.opening.tenant != tenant:
            return identity
        if known.id == name and known.state == "open":
            return identity
        rewards = identity.labels.reward is not None
        found = self._names.latest(name, tenant, find, for_reward=rewards, parts=True)
        return self._part_of(replace(identity, episode=found), name)

    def _told_apart(
        self, named: Identity, current: Identity, known: Episode | None, before: Episode | None, request: CallRequest
    ) -> Identity:
        """`current`, without its episode if the request shows that the name is that of several runs. `before` is the
        chat that it would be in."""
        assert current.episode is not None
        agent = current.labels.agent or ""
        agent = agent if known is None else known.opening.agent_of(agent, request.model)
        shown = self._shared.shows(named.identified_by, known, current.episode, agent, request)
        return self._apart(named, current) if shown or self.is_anothers(named, before, request.history) else current

    def _apart(self, named: Identity, current: Identity) -> Identity:
        self._store.post([self.shared(named)])
        return unnamed(current)

    def shared(self, named: Identity) -> ev.NameShared:
        """The name in `named` turns out to be that of several runs."""
        root = self._names.root(named.episode or "", None, named.claims.tenant)
        return ev.NameShared(self._clock.now(), base_of(root, named.claims.tenant))

    def is_anothers(self, named: Identity, chat: Episode | None, history: Beginnings | None) -> bool:
        """Tell whether a request under a name that may be that of several goes on from nothing of the `chat` that it
        would be in, and consents otherwise: then it may be somebody else's. The consent of a key is not that of who
        refused. One that takes back what was said takes back all of the name."""
        if chat is None or not chat.opening.traffic or not named.may_be_shared or history is None:
            return False
        episodes, whole = self._state.episodes, chat.opening.whole
        withdrawn, said = chat.withdrawn or episodes.is_withdrawn(whole), named.labels.traffic
        if said is False or (said is True if withdrawn else unnamed(named).consents) is not withdrawn:
            return False
        return whole not in episodes.chats(history)

    async def _continues(
        self, identity: Identity, history: Beginnings | None, sent: Mapping[str, Any]
    ) -> tuple[Identity, Mapping[str, Any]]:
        """`identity` with the episode that the request continues, if none is named; and what to note on a new one."""
        if identity.episode is not None:
            return identity, NOTHING
        identity, found = await self._store.decide(partial(self._continued, identity, history, sent))
        self._metrics.inc("ajet_lineage_total", found=("new", "continued", "ambiguous")[min(len(found), 2)])
        noted = {"may_continue": found[:MAX_NOTED]} if found and identity.episode is None else NOTHING
        return identity, noted

    def _continued(
        self, identity: Identity, history: Beginnings | None, sent: Mapping[str, Any]
    ) -> tuple[Identity, Sequence[str]]:
        """`identity` with the episode that the request continues, or as part of the chat that it goes on from; and the
        open episodes that it may continue."""
        found = self._state.episodes.continued(history, consents=identity.consents, **sent)
        episodes, chats = self._state.episodes, tuple[str, ...]()
        if history is not None and (identity.claims.lanes or identity.labels.traffic is False):
            chats = episodes.chats(history)
        refused = [*filter(episodes.is_withdrawn, chats)]
        others = [one for one in chats if one not in refused]
        if identity.labels.traffic and others:  # it is rather of one of these
            refused = []
        if len(found) == 1 and (not chats or episodes[found[0]].opening.whole in (refused or others)):
            return replace(identity, episode=found[0]), found
        first = refused[0] if refused else others[0] if len(others) == 1 else ""
        return self._part_of(identity, first), found

    async def takes_back(
        self, identity: Identity, known: Episode | None, history: Beginnings | None
    ) -> Sequence[ev.Event]:
        """Events that withdraw the chats that a request takes back. It is in the episode `known` if there is one."""
        take_back, now = self._store.commands.judging.take_back, self._clock.now()
        return await self._store.decide(lambda: take_back(self._chats(identity, known, history), now))

    def _chats(self, identity: Identity, known: Episode | None, history: Beginnings | None) -> Sequence[str]:
        """The first parts of these chats. Where nobody can say of which a request is, these are all, open and sealed,
        unless one of them is withdrawn: then it is taken for one of that, whose user may refuse with each call."""
        own = identity.first if known is None else known.opening.whole
        if identity.identified_by != "lineage" or history is None:
            return (own,)
        found = self._state.episodes.chats(history)
        return (own, *(() if any(map(self._state.episodes.is_withdrawn, found)) else found))

    def comes(self, known: Episode | None, request: CallRequest) -> None:
        """A request comes in `known`, whose task may stand for several."""
        self._shared.derived(known, request)

    def heard(self, event: ev.Event) -> None:
        """Names of sessions follow what is in memory."""
        if isinstance(event, ev.EpisodeOpened):
            if (event.first or event.identified_by in RUNGS) and has_parts(event):
                self._names.opened(event.episode)
        elif isinstance(event, ev.EpisodesArchived):
            for episode in event.episodes:
                self._names.left(episode)
        elif isinstance(event, (ev.EpisodeSealed, ev.EpisodeDiscarded)):
            self._shared.ended(event.episode)


def unnamed(identity: Identity) -> Identity:
    """`identity` by nothing but its history."""
    return replace(identity, episode=None, identified_by="lineage", first="", lane="")


def tenant_of(identity: Identity, episode: str, known: Episode | None) -> str:
    """The tenant as which the caller acts on `episode`; `known` is its record. Raises `NotFound` for a key whose
    episode is gone, and `Forbidden` for another tenant's episode."""
    if known is None and identity.issued:
        raise NotFound(f"no episode {episode!r}, although its key is good", param="episode")
    if known is not None and identity.claims.scope == "admin":
        return known.opening.tenant
    if known is not None and known.opening.tenant != identity.claims.tenant:
        raise Forbidden(f"episode {episode!r} is another tenant's", code="wrong_episode")
    return identity.claims.tenant

"""Who plays: the clients that have joined, the episodes that each has open, and what came of the others.

Idea: a client is a process that runs agents. What it does is counted as its episodes move, so that to show a client, or
to end what it has open, costs no look at all episodes.

Invariant: ``open`` has exactly the open episodes of a client, and ``counts`` adds up to what it opened. A client that
is gone stays so. It is kept while it has anything open, and afterwards while it is one of the latest `KEPT_GONE`.

Signs of life are not kept here, since the state is a function of events and nobody journals a beat
(`ajet_proxy.core.ledger.client_commands`).
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from ajet_proxy.core.ledger import events as ev
from ajet_proxy.core.ledger.episode import Episode
from ajet_sdk.routes import EPISODE_STATES

KEPT_GONE = 1000
"""So many clients that are gone are remembered."""
KEPT_REVISIONS = 10
"""So many of its latest revisions a client is shown with."""
RATE_S, RATE_EPISODES = 300.0, 100
"""The pace of a client is that of its last five minutes, or of its last hundred episodes if that is less."""


@dataclass(slots=True)
class Client:
    """One that joined. Times are Unix seconds; ``heard_at`` is when it joined, or when the proxy started again; of one
    that is gone, when it gave its last sign of life.
    ``latest`` is the revision of its latest episode, or that with which it joined."""

    id: str
    name: str
    tenant: str
    ttl_s: float
    revision: str | None
    lane: str | None
    replaces_older: bool
    joined_at: float
    heard_at: float
    latest: str | None = None
    reason: str | None = None
    """Why it is gone."""
    gone_at: float | None = None
    open: dict[str, None] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    discarded: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    revisions: dict[str, int] = field(default_factory=dict)
    """The number of episodes that it opened under each, the latest last."""
    rewarded: int = 0
    reward_sum: float = 0.0
    played: deque[float] = field(default_factory=lambda: deque(maxlen=RATE_EPISODES))
    """When it sealed its latest episodes."""

    def per_minute(self, at: float) -> float:
        """The number of episodes that it seals in a minute, as it was shortly before `at`."""
        since = max(self.joined_at, at - RATE_S)
        if len(self.played) == RATE_EPISODES:
            since = max(since, self.played[0])
        return 60.0 * sum(one >= since for one in self.played) / max(at - since, 1.0)

    def opened(self, opening: ev.EpisodeOpened) -> None:
        """It has opened this episode."""
        self.open[opening.episode] = None
        self.counts["open"] += 1
        if opening.revision is not None:
            self.latest = opening.revision
            self.revisions[opening.revision] = self.revisions.pop(opening.revision, 0) + 1
            if len(self.revisions) > KEPT_REVISIONS:
                del self.revisions[next(iter(self.revisions))]

    def to_json(self, at: float, heard_at: float) -> dict[str, Any]:
        """The client as it is shown at the time `at`; it last gave a sign of life at `heard_at`."""
        out: dict[str, Any] = {
            "client": self.id, "name": self.name, "state": "joined" if self.reason is None else "gone",
            "lane": self.lane, "revision": self.latest, "revisions": dict(self.revisions), "ttl_s": self.ttl_s,
            "joined_at": self.joined_at, "heard_at": heard_at,
            "episodes": {"opened": self.counts.total(), **{name: self.counts[name] for name in EPISODE_STATES}},
            "discarded": dict(self.discarded), "failures": dict(self.failures),
            "per_minute": self.per_minute(at if self.gone_at is None else self.gone_at),
            "mean_reward": self.reward_sum / self.rewarded if self.rewarded else None,
        }
        extra = {"reason": self.reason, "gone_at": self.gone_at, "tenant": self.tenant or None}
        return out | {name: value for name, value in extra.items() if value is not None}


class Clients:
    """All of them, by their ids. Only `State.apply` changes anything here."""

    KEPT = ("live", "gone")

    def __init__(self) -> None:
        self.live: dict[str, Client] = {}
        self.gone: dict[str, Client] = {}
        """In the order in which they went."""

    def find(self, client: str | None) -> Client | None:
        """The client with this id, as long as it is known."""
        return self.live.get(client or "") or self.gone.get(client or "")

    def _joined(self, event: ev.ClientJoined) -> None:
        self.live[event.client] = Client(
            id=event.client, name=event.name, tenant=event.tenant, ttl_s=event.ttl_s, revision=event.revision,
            lane=event.lane, replaces_older=event.replaces_older, joined_at=event.at, heard_at=event.at,
            latest=event.revision,
        )

    def _left(self, event: ev.ClientGone) -> None:
        client = self.gone[event.client] = self.live.pop(event.client)
        client.reason, client.gone_at, client.heard_at = event.reason, event.at, event.heard_at
        surplus = len(self.gone) - KEPT_GONE
        for name in [one.id for one in self.gone.values() if not one.open][: max(surplus, 0)]:
            del self.gone[name]

    def moved(self, episode: Episode, before: str, at: float) -> None:
        """An episode, perhaps a client's, came from the state `before` to the one that it is in."""
        if (client := self.find(episode.opening.client)) is None:
            return
        client.counts.update({before: -1, episode.state: 1})
        if before == "open":
            del client.open[episode.id]
        if episode.state == "sealed":
            client.played.append(at)
        if episode.reason is not None:
            client.discarded[episode.reason] += 1
        if episode.cause is not None:
            client.failures[episode.cause] += 1

    def rewarded(self, episode: Episode, reward: float, before: float | None) -> None:
        """A settled episode earned `reward`, and `before` that another one, if it had one."""
        if (client := self.find(episode.opening.client)) is None:
            return
        client.rewarded += before is None
        client.reward_sum += reward - (before or 0.0)

    def _restarted(self, event: ev.ProxyStarted) -> None:
        """Each has its whole time again."""
        for client in self.live.values():
            client.heard_at = event.at
            client.joined_at += event.back
            client.played = deque((one + event.back for one in client.played), client.played.maxlen)

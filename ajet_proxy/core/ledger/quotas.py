"""Quotas: how much one tenant may ask, so that it cannot take the engine from the others.

Idea: whatever a tenant does is an event first, so quotas look at events alone. These are an episode that opens, a call
that starts, and the tokens of a call that ended. A request is a call, or an episode that opens without one. Requests
and tokens are buckets that hold one minute's worth and refill all the time: a burst is fine, a rate above the quota is
not. Tokens are known at a call's end only, so a bucket may go below zero, and the next call waits until it is above it.
What passes through uncaptured is no event; it takes from the same buckets by `pass_one` and `use`.

Invariant: `check` changes nothing; `spend` counts what it let pass. Tenants without a quota cost nothing. Quotas refuse
only new work: what is under way is rewarded, sealed and trained.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ajet_proxy.core.ledger import events as ev
from ajet_proxy.core.ledger.episode import Episode
from ajet_proxy.core.ledger.state import State
from ajet_sdk.errors import OverQuota
from ajet_sdk.settings import FILE, ConfigError, Settings, option

ALL_OTHERS = "*"
MINUTE_S = 60.0
EPISODES_RETRY_S = 10.0
"""When to come back for what no clock frees."""
BYTES_FRESH_S = 1.0
"""The bytes of all tenants are added up no more often."""


@dataclass(frozen=True, slots=True)
class Quota:
    """One tenant's limits; 0 is none. ``bytes`` are what the daemon must keep until somebody trains or aborts it."""

    episodes: int = option(0, "Those that are open at a time.", zero=True)
    requests_per_minute: int = option(0, "Calls, and episodes that open without one.", zero=True)
    tokens_per_minute: int = option(0, "The prompt's and the sampled ones.", zero=True)
    bytes: int = option(
        0, "Token ids, logprobs, metadata and notes of episodes that have not ended, from open to leased.", zero=True
    )


_LIMITS = Settings(Quota, prefix="")


@dataclass(slots=True)
class _Bucket:
    """``left`` of a `limit` per minute, as it was at the time ``at``; a `limit` of 0 means none."""

    limit: int
    left: float
    at: float

    def fill(self, at: float) -> float:
        """Return what is left at the time `at`."""
        self.left = min(self.limit, self.left + max(0.0, at - self.at) * self.limit / MINUTE_S)
        self.at = max(self.at, at)
        return self.left

    def wait(self) -> float:
        """Seconds until there is at least one."""
        return max(0.0, 1.0 - self.left) * MINUTE_S / self.limit


class Quotas:
    """The `quotas` of tenants, over what `state` knows; ``*`` is for each tenant that is not named."""

    def __init__(
        self, quotas: Mapping[str, Quota], state: State, refused: Callable[[OverQuota], None] = lambda refusal: None
    ) -> None:
        """`refused` gets each refusal, to count it."""
        self._quotas = quotas
        self._state = state
        self._refused = refused
        self._buckets: dict[tuple[str, str], _Bucket] = {}
        self._kept, self._kept_at = Counter[str](), -math.inf
        """The bytes that each tenant kept then."""
        self._metadata: dict[str, int] = {}
        """The bytes of episodes' metadata, which never change: writing them out again for every look would cost more
        than all the rest."""

    def check(self, events: Sequence[ev.Event]) -> None:
        """`OverQuota` if the tenant of one of `events` has used up a quota; the error's ``code`` names the quota."""
        for event in events:
            if isinstance(event, ev.EpisodeOpened):
                self._may_open(event.tenant, event.at)
        for tenant, request in self._requests(events):
            self._may_take(tenant, "requests_per_minute", request.at)
            if isinstance(request, ev.CallStarted):
                self._may_take(tenant, "tokens_per_minute", request.at)

    def spend(self, events: Sequence[ev.Event]) -> None:
        """`events` have happened."""
        for tenant, request in self._requests(events):
            self._take(tenant, "requests_per_minute", 1, request.at)
        for event in events:
            if isinstance(event, ev.CallFinished):
                self._take(self._tenant(event.episode), "tokens_per_minute", event.call.turn.end, event.at)

    def pass_one(self, tenant: str, at: float) -> None:
        """Count a request that makes no call; `OverQuota` if its tenant has used up a quota."""
        self._may_take(tenant, "requests_per_minute", at)
        self._may_take(tenant, "tokens_per_minute", at)
        self._take(tenant, "requests_per_minute", 1, at)

    def use(self, tenant: str, tokens: int, at: float) -> None:
        """Count the tokens of a request that made no call."""
        self._take(tenant, "tokens_per_minute", tokens, at)

    def of(self, tenant: str) -> Quota | None:
        """The quota of `tenant`, if it has one."""
        return self._quotas.get(tenant) or self._quotas.get(ALL_OTHERS)

    def _may_open(self, tenant: str, at: float) -> None:
        quota = self.of(tenant)
        if quota is None:
            return
        if quota.episodes and self._state.episodes.open_of[tenant] >= quota.episodes:
            raise self._refusal(f"has {quota.episodes} open episodes, as many as it may", "episodes", EPISODES_RETRY_S)
        if quota.bytes and self._keeps(tenant, at) >= quota.bytes:
            raise self._refusal(
                f"keeps its {quota.bytes} bytes: come back when some of its episodes are trained, or abort some",
                "bytes", EPISODES_RETRY_S,
            )

    def _requests(self, events: Sequence[ev.Event]) -> Iterator[tuple[str, ev.CallStarted | ev.EpisodeOpened]]:
        """The requests among `events`, which may or may not have happened yet, each with its tenant."""
        opened = {event.episode: event for event in events if isinstance(event, ev.EpisodeOpened)}
        calls = [event for event in events if isinstance(event, ev.CallStarted)]
        for call in calls:
            yield opened[call.episode].tenant if call.episode in opened else self._tenant(call.episode), call
        called = {call.episode for call in calls}
        yield from ((event.tenant, event) for name, event in opened.items() if name not in called)

    def _may_take(self, tenant: str, name: str, at: float) -> None:
        bucket = self._bucket(tenant, name, at)
        if bucket is not None and bucket.fill(at) < 1.0:
            raise self._refusal(
                f"has used its {bucket.limit} {name.replace('_', ' ')}", name.partition("_")[0], bucket.wait()
            )

    def _take(self, tenant: str, name: str, amount: float, at: float) -> None:
        bucket = self._bucket(tenant, name, at)
        if bucket is not None:
            bucket.fill(at)
            bucket.left -= amount

    def _bucket(self, tenant: str, name: str, at: float) -> _Bucket | None:
        quota = self.of(tenant)
        limit = 0 if quota is None else getattr(quota, name)
        if not limit:
            return None
        return self._buckets.setdefault((tenant, name), _Bucket(limit, limit, at))

    def _tenant(self, episode: str) -> str:
        known = self._state.episodes.get(episode)
        return "" if known is None else known.opening.tenant

    def _keeps(self, tenant: str, at: float) -> int:
        """The bytes that `tenant` keeps. They are added up for all tenants at once."""
        if at - self._kept_at >= BYTES_FRESH_S:
            known, self._kept, self._kept_at, self._metadata = self._metadata, Counter(), at, {}
            for one in self._state.episodes.values():
                if _counts(one) and (quota := self.of(one.opening.tenant)) is not None and quota.bytes:
                    self._metadata[one.id] = known[one.id] if one.id in known else _written(one)
                    self._kept[one.opening.tenant] += size_of(one) + self._metadata[one.id]
        return self._kept[tenant]

    def _refusal(self, what: str, name: str, wait_s: float) -> OverQuota:
        refusal = OverQuota(f"this tenant {what}", code=f"{name}_quota", retry_after=wait_s)
        self._refused(refusal)
        return refusal


def parse(table: Any) -> dict[str, Quota]:
    """TOML's ``[tenants.NAME]`` tables as quotas; `ValueError` says what is wrong with them."""
    if not isinstance(table, Mapping) or not all(isinstance(row, Mapping) for row in table.values()):
        raise ValueError("must be tables: [tenants.NAME]")
    try:
        return {tenant: Quota(**_LIMITS.read(row, FILE, f"of {tenant!r}: ")) for tenant, row in table.items()}
    except ConfigError as error:
        raise ValueError(error.message) from None


def _counts(episode: Episode) -> bool:
    """Tell whether its bytes count. Those of a user's chat do as long as it is open: then `traffic_backlog` limits it,
    since the next user waits for no judge."""
    return episode.ended_at is None and (episode.state == "open" or not episode.opening.traffic)


def size_of(episode: Episode) -> int:
    """Bytes of token ids, logprobs and notes."""
    notes = sum(len(one.note.encode("utf-8", "surrogatepass")) for one in episode.rewards.values() if one.note)
    return notes + episode.transcript.size()


def _written(episode: Episode) -> int:
    """Bytes of its metadata as JSON."""
    return len(json.dumps(episode.opening.metadata)) if episode.opening.metadata else 0

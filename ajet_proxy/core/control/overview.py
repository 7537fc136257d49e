"""What an owner asks beyond the status: rewards of the whole run and by task, who is slow, what is leased.

Invariant: it costs the same after ten episodes as after ten thousand; only the episodes open now are looked through.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any

from ajet_proxy.core.ledger.episode import Episode

if TYPE_CHECKING:
    from ajet_proxy.core.ledger.commands import Ledger

SHOWN = 50
"""So many tasks, leases and slow episodes are shown."""


def overview(ledger: Ledger, at: float) -> dict[str, Any]:
    """`GET overview` at time `at`."""
    at = max(at, ledger.now)
    quiet = heapq.nsmallest(SHOWN, ledger.unsettled.values(), key=lambda episode: episode.active_at)
    return {
        "now": at,
        "rewards": {
            kind: {"episodes": curve.count, "points": [point.to_json() for point in curve.points]}
            for kind, curve in ledger.tally.curves.items()
        },
        "tasks": list(ledger.tally.tasks(SHOWN)),
        "quiet": [_quiet(episode, at) for episode in quiet],
        "leases": [
            {
                "batch": batch.id, "model": batch.model, "policy_version": batch.policy_version,
                "groups": len(batch.groups), "episodes": sum(len(episodes) for _, episodes in batch.groups),
                "lease_until": batch.lease_until,
            }
            for batch in list(ledger.leased.values())[:SHOWN]
        ],
    }


def _quiet(episode: Episode, at: float) -> dict[str, Any]:
    """An open episode by how long nothing was heard of it; ``in_flight`` tells whether the model has the word."""
    return {
        "episode": episode.id, "task": episode.task, "agent": episode.agent, "state": episode.state,
        "age_s": at - episode.opened_at, "quiet_s": at - episode.active_at, "in_flight": episode.running,
        "calls": len(episode.calls), "idle_timeout": episode.idle_timeout,
    }

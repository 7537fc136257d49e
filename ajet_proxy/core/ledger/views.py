"""What the control plane shows: the status page and episode records, as JSON-ready values.

Reading changes nothing. `status` costs the same with ten episodes as with ten thousand.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from itertools import chain, dropwhile, islice
from typing import TYPE_CHECKING, Any, Literal

from ajet_proxy.core.ledger.episode import CallEntry, Episode
from ajet_proxy.core.trajectory.drift_rate import by_model
from ajet_proxy.core.trajectory.repair import join
from ajet_proxy.core.trajectory.samples import each_sample
from ajet_proxy.core.trajectory.timeline import Policy, Timeline
from ajet_sdk import __version__
from ajet_sdk.errors import BadRequest
from ajet_sdk.routes import EPISODE_STATES

if TYPE_CHECKING:
    from ajet_proxy.core.ledger.commands import Ledger
    from ajet_proxy.core.ledger.state import State


Tokens = Literal["none", "timelines", "all"]


def status(ledger: Ledger) -> dict[str, Any]:
    """The terms of the ledger identity, and what else costs nothing to know."""
    gate = ledger.gate
    return {
        "version": __version__,
        "now": ledger.now,
        "gate": {"state": gate, "since": ledger.gate_now.since or None, "reason": ledger.gate_now.reason},
        "models": {
            model: {"policy_version": served.version, "gate": gate, "upstreams": list(served.upstreams)}
            for model, served in ledger.served.items()
        },
        "episodes": {"opened": ledger.opened, **{state: ledger.counts[state] for state in EPISODE_STATES}},
        "archived": sum(ledger.archived.values()),
        "discarded": dict(ledger.discarded),
        "groups": {
            "waiting": ledger.queues.waiting,
            "ready": ledger.queues.complete,
            "leased": sum(len(batch.groups) for batch in ledger.leased.values()),
        },
        "batches": {"leased": len(ledger.leased), "total": ledger.leases},
        "calls": dict(ledger.calls),
        "captures": dict(ledger.captures),
        "tokens": dict(ledger.tokens),
        "drift": dict(ledger.drift),
        "drift_by_model": {model: drift.to_json() for model, drift in ledger.drifts.items()},
        "alerts": list(ledger.alerts().values()),
    }


def record(episode: Episode, policy: Policy, *, tokens: Tokens) -> dict[str, Any]:
    """One episode with its calls and timelines, as `tokens` says with ids, masks and logprobs: of all, of timelines
    alone (in which every token stands once, where calls repeat their history), or of none."""
    shown = parts(episode, policy, tokens=tokens)
    return {name: list(value) if isinstance(value, Iterator) else value for name, value in shown.items()}


def parts(episode: Episode, policy: Policy, *, tokens: Tokens) -> dict[str, Any]:
    """`record` as it is now, with iterators in the place of its lists of calls and timelines. Each item is made when it
    is asked for, in any thread, since together they may have many times the tokens that the episode has."""
    timelines = episode.merged(policy)
    text = {turn.call: timeline.tokens for timeline in timelines for turn in timeline.turns if tokens == "all"}
    rewards, entries = tuple(episode.rewards.values()), [(name, copy(entry)) for name, entry in episode.calls.items()]
    out = summary(episode)
    out["rewards"] = [given.to_json() for given in rewards]
    out["calls"] = (_call(name, entry, episode.id, text.get(name)) for name, entry in entries)
    out["drift"] = {
        model: {"turns": turns, "broken_by": dict(broken)} for model, (turns, broken) in by_model(timelines).items()
    }
    if tokens != "none":
        samples = each_sample(timelines, episode=episode.id, task=episode.named_task, rewards=rewards)
        out["timelines"] = (sample.to_json() for sample in samples)
    else:
        out["timelines"] = (_timeline(f"{episode.id}/{index}", item) for index, item in enumerate(join(timelines)))
    return out


def summary(episode: Episode) -> dict[str, Any]:
    """One episode without its calls."""
    out: dict[str, Any] = {
        "episode": episode.id,
        "task": episode.task,
        "state": episode.state,
        "model": episode.model or next((entry.asked.model for entry in episode.calls.values()), None),
        "agent": episode.agent,
        "eval": episode.eval,
        "reward": episode.reward(),
        "identified_by": episode.identified_by,
        "opened_at": episode.opened_at,
        "active_at": episode.active_at,
        "in_flight": episode.running,
    }
    extra = {
        "reason": episode.reason, "detail": episode.detail, "sealed_at": episode.sealed_at,
        "ended_at": episode.ended_at, "members": episode.members, "metadata": episode.metadata or None,
        "tenant": episode.tenant or None, "shares": _shares(episode), "stored": episode.stored,
    }
    return out | {name: value for name, value in extra.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which episodes to list: `limit` of them, in `state`, of `task`, opened before the episode `before`."""

    limit: int = 100
    state: str | None = None
    task: str | None = None
    before: str | None = None


def records(ledger: State, wanted: Wanted) -> dict[str, Any]:
    """``{"episodes": […], "next"?}``: newest first, those in memory before the archived; where there are more,
    ``next`` is what `Wanted.before` must be for them."""
    if wanted.state is not None and wanted.state not in EPISODE_STATES:
        raise BadRequest(f"state must be one of {', '.join(EPISODE_STATES)}", param="state")
    if wanted.before is not None and ledger.find(wanted.before) is None:
        raise BadRequest(f"no episode {wanted.before}", param="before")
    fitting = (
        episode for episode in _newest_first(ledger, wanted)
        if wanted.state in (None, episode.state) and wanted.task in (None, episode.task)
    )
    shown = [summary(episode) for episode in islice(fitting, wanted.limit)]
    more = next(fitting, None) is not None
    return {"episodes": shown} | ({"next": shown[-1]["episode"]} if more else {})


def _newest_first(ledger: State, wanted: Wanted) -> Iterator[Episode]:
    """Those in memory, then the archived, from where they were listed last."""
    before, after = wanted.before, None
    known: Iterator[Episode] = chain(reversed(ledger.episodes.values()), reversed(ledger.leaving.values()))
    if before in ledger.episodes or before in ledger.leaving:
        known = islice(dropwhile(lambda episode: episode.id != before, known), 1, None)
    elif before is not None:
        known, after = iter(()), before
    yield from known
    archived = ledger.archive.latest(wanted.state, wanted.task, after, wanted.limit + 1 + len(ledger.leaving))
    yield from (episode for episode in archived if episode.id not in ledger.leaving)


def _shares(episode: Episode) -> dict[str, str] | None:
    """Which of several models took their part."""
    if not episode.members:
        return None
    return {
        model: "ready" if share is None else "leased" if share else "trained" for model, share in episode.shares.items()
    }


def _call(name: str, entry: CallEntry, episode: str, text: bytes | None) -> dict[str, Any]:
    """A call as in contract §6.1, with ``complete``; lost and running calls have what is known of them."""
    out: dict[str, Any]
    turn = entry.turn
    if turn is None:
        out = {
            "call": name, "episode": episode, "model": entry.asked.model, "agent": entry.asked.agent,
            "started_at": entry.asked.started_at, "identified_by": entry.asked.identified_by,
        }
    elif text is not None:
        out = turn.to_call(text, episode).to_json()
    else:
        out = turn.summary(episode)
    out["complete"] = entry.state == "complete"
    if entry.state == "running":
        out["in_flight"] = True
    if entry.reason is not None:
        out["reason"] = entry.reason
    return out


def _timeline(name: str, timeline: Timeline) -> dict[str, Any]:
    out: dict[str, Any] = {
        "sample": name,
        "model": timeline.model,
        "agent": timeline.agent,
        "calls": [turn.call for turn in timeline.turns],
        "tokens": len(timeline),
        "sampled_tokens": sum(turn.sampled for turn in timeline.turns),
    }
    extra = {"broken_by": timeline.broken_by, "repaired_tokens": timeline.repaired_tokens or None}
    return out | {name: value for name, value in extra.items() if value is not None}

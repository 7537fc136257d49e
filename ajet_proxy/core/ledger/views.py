"""Views of the state: the status page, the overview, episode records, and what a lease delivers.

Reading changes nothing. `status` and `overview` cost the same after ten episodes as after ten thousand; only the
episodes open now are looked through.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain, dropwhile, islice
from typing import Any, Literal

from ajet_proxy.core.ledger.episode import Episode
from ajet_proxy.core.ledger.mixes import LaneMix
from ajet_proxy.core.ledger.state import State
from ajet_proxy.core.ledger.teams import slowest
from ajet_proxy.core.ledger.transcript import CallEntry, Shown, Transcript
from ajet_proxy.core.trajectory.drift_rate import by_model
from ajet_proxy.core.trajectory.repair import join
from ajet_proxy.core.trajectory.rewards import total
from ajet_proxy.core.trajectory.samples import samples_of
from ajet_proxy.core.trajectory.timeline import Policy, Timeline
from ajet_sdk import __version__
from ajet_sdk.errors import BadRequest
from ajet_sdk.routes import DEFAULT_LANE, EPISODE_STATES
from ajet_sdk.sample import Batch, BatchEpisode, Group

Tokens = Literal["none", "timelines", "all"]
SHOWN = 50
"""The overview shows so many tasks, leases and episodes that were not heard of for longest."""


def status(state: State, leads: Mapping[str, int] | None = None) -> dict[str, Any]:
    """The terms of the ledger identity, and what else costs nothing to know. `leads` is how many updates models may be
    ahead of their teams."""
    gate = state.gates.any()
    candidates = {
        name: {"of": one.of, "policy_version": one.version, "upstreams": list(one.upstreams)}
        for name, one in state.weights.candidates.items()
    }
    teams = [
        {name: {"updates": team[name], **_waits(state, name, leads or {})} for name in sorted(team)}
        for team in state.weights.teams
    ]
    return {
        "version": __version__,
        "now": state.now,
        "gate": {"state": state.gates.overall(), "since": gate.since or None, "reason": gate.reason},
        "models": {
            model: {
                "policy_version": served.version, "gate": state.gates.state(model), "upstreams": list(served.upstreams)
            }
            for model, served in state.weights.served.items()
        },
        **({"candidates": candidates} if candidates else {}),
        "episodes": {"opened": state.tallies.opened, **{name: state.tallies.counts[name] for name in EPISODE_STATES}},
        "archived": sum(state.episodes.archived.values()),
        "discarded": dict(state.tallies.discarded),
        "groups": {
            "waiting": state.seats.queues.waiting,
            "ready": state.seats.queues.complete,
            "leased": sum(len(batch.groups) for batch in state.batches.leased.values()),
        },
        "batches": {"leased": len(state.batches.leased), "total": state.batches.leases},
        "calls": dict(state.tallies.calls),
        "captures": dict(state.tallies.captures),
        "tokens": dict(state.tallies.tokens),
        "drift": dict(state.tallies.drift),
        "drift_by_model": {model: drift.to_json() for model, drift in state.tallies.drifts.items()},
        **({"teams": teams} if teams else {}),
    }


def _waits(state: State, model: str, leads: Mapping[str, int]) -> dict[str, str]:
    """For which model of its team a trainer waits, if it does."""
    least, behind = slowest(state.weights.teams, model)
    return {"waits_for": least} if behind > leads.get(model, behind) else {}


def wanted(state: State) -> dict[str, Any]:
    """Count the episodes that each lane with a share wants now, or any ``other`` lane. Without shares, those are named
    in which most is open or ready. Nothing where no lane is held back. Of several models, the one that wants most
    counts."""
    models = state.weights.may_train()
    other = state.mixes.room("", models)
    if other is None:
        return {}
    named = {
        lane for known in state.mixes.several(models)
        for lane in known.mix.shares or [row["lane"] for row in lanes(known)]
    }
    return {"lanes": {lane: state.mixes.room(lane, models) for lane in sorted(named)}, "other": other}


def mix(state: State, model: str | None = None) -> dict[str, Any]:
    """The mix that holds for a model, with how each lane stands that has a share, and those of the others in which most
    is open or ready."""
    known = state.mixes.of(state.weights.meant(model))
    return {
        "shares": dict(known.mix.shares), "ahead": known.mix.ahead or 0, "lane_wait_s": known.mix.lane_wait_s,
        "group_size": known.counts.size, "lanes": {lane.pop("lane"): lane for lane in lanes(known)},
    }


def lanes(known: LaneMix) -> list[dict[str, Any]]:
    """Show how the lanes of a mix stand. ``leased`` are groups since the shares were set, ``owed`` those that a lane
    has lent, or borrowed if below 0. ``open`` and ``ready`` are episodes."""
    shares, counts, credit = known.mix.shares, known.counts, known.credit
    others = (counts.playing.keys() | counts.waiting.keys()) - shares.keys()
    most = heapq.nsmallest(SHOWN, others, key=lambda lane: (-counts.playing[lane] - counts.waiting[lane], lane))
    return [
        {
            "lane": lane, "share": shares.get(lane, 0.0), "leased": credit.leased.get(lane, 0),
            "owed": credit.owed.get(lane, 0), "open": counts.playing[lane], "ready": counts.waiting[lane],
        }
        for lane in (*sorted(shares), *most)
    ]


def _all_lanes(state: State) -> list[dict[str, Any]]:
    """The lanes of each mix, with its ``model`` if several are in use."""
    used = {name: rows for name, known in state.mixes.table.items() if (rows := lanes(known))}
    if len(used) < 2:
        return [row for rows in used.values() for row in rows]
    return [row | ({"model": name} if name else {}) for name, rows in used.items() for row in rows]


def overview(state: State, at: float) -> dict[str, Any]:
    """Show what an owner asks at time `at` beyond the status: rewards of the whole run and by task, which episodes are
    quiet, and what is leased."""
    at = state.time(at)
    idle = heapq.nsmallest(SHOWN, state.episodes.unsettled.values(), key=lambda episode: episode.active_at)
    return {
        "now": at,
        "rewards": {
            kind: {"episodes": curve.count, "points": [point.to_json() for point in curve.points]}
            for kind, curve in state.tallies.reward_curves.curves.items()
        },
        "tasks": list(state.tallies.reward_curves.tasks(SHOWN)),
        "lanes": _all_lanes(state)[:SHOWN],
        "quiet": [_idle(episode, at) for episode in idle],
        "leases": [
            {
                "batch": batch.id, "model": batch.model, "policy_version": batch.policy_version,
                "groups": len(batch.groups), "episodes": sum(len(episodes) for _, episodes in batch.groups),
                "lease_until": batch.lease_until,
            }
            for batch in list(state.batches.leased.values())[:SHOWN]
        ],
    }


def _idle(episode: Episode, at: float) -> dict[str, Any]:
    """An open or sealed episode, with how long nothing was heard of it. While the model is at work, ``in_flight`` is
    not 0."""
    return {
        "episode": episode.id, "task": episode.opening.task, "agent": episode.opening.agent, "state": episode.state,
        "age_s": at - episode.opening.at, "quiet_s": at - episode.active_at, "in_flight": episode.transcript.running,
        "calls": len(episode.transcript.calls), "idle_timeout": episode.opening.idle_timeout,
    }


def record(state: State, name: str, *, tokens: Tokens = "none") -> dict[str, Any]:
    """One episode with its calls and timelines. `tokens` says which of them have ids, masks and logprobs: all, none, or
    the timelines alone. In timelines every token stands once, while calls repeat their history."""
    return {name: made(value) for name, value in parts(state, name, tokens=tokens).items()}


def made(part: Any) -> Any:
    """Return what one of `parts` stands for."""
    return list(part) if isinstance(part, Iterator) else part() if callable(part) else part


def parts(state: State, name: str, *, tokens: Tokens) -> dict[str, Any]:
    """`record` as it is now, with iterators in place of its lists of calls and timelines, and a function in place of
    ``drift``. Each item is made when it is asked for, in any thread, and timelines are merged only then. Together the
    items may have many times the tokens that the episode has."""
    episode = state.episodes.known(name)
    rewards = tuple(episode.rewards.values())
    entries = [(call, replace(entry)) for call, entry in episode.transcript.calls.items()]
    text: Callable[[], Mapping[str, bytes]] = dict
    if tokens == "none":
        shown = _shown(name, episode.transcript, state.weights.merge_policy)
        drift, timelines = lambda: shown().drift, _later(lambda: shown().timelines)
    else:
        merged = cache(episode.transcript.merging(state.weights.merge_policy))
        told = partial(samples_of, episode=episode.id, task=episode.group_key.task, rewards=rewards)
        drift, timelines = lambda: _drift(merged()), _later(lambda: (one.to_json() for one in told(merged())))
        if tokens == "all":
            text = cache(lambda: {turn.call: timeline.tokens for timeline in merged() for turn in timeline.turns})
    return {
        **summary(episode), "rewards": [reward.to_json() for reward in rewards], "models": _models(episode),
        "unanswered": episode.attempts.unanswered(),
        **({"feedback": [said.to_json() for said in episode.feedback.values()]} if episode.feedback else {}),
        "calls": (_call(call, entry, episode.id, text().get(call)) for call, entry in entries), "drift": drift,
        "timelines": timelines,
    }


def _later(items: Callable[[], Iterable[Any]]) -> Iterator[Any]:
    """The `items`, which are made when the first is asked for."""
    yield from items()


def _shown(name: str, known: Transcript, policy: Policy) -> Callable[[], Shown]:
    """Show the timelines of an episode as they are now. They are merged only if a call has come or gone since."""
    turns, before, merged = [entry.turn for entry in known.calls.values()], known.shown, known.merging(policy)
    if before is not None and before.turns == turns:
        return lambda: before

    @cache
    def show() -> Shown:
        timelines = merged()
        rows = [_timeline(f"{name}/{index}", item) for index, item in enumerate(join(timelines))]
        known.shown = shown = Shown(turns, _drift(timelines), rows)
        return shown

    return show


def _drift(timelines: Sequence[Timeline]) -> dict[str, Any]:
    return {
        model: {"turns": turns, "broken_by": dict(broken)} for model, (turns, broken) in by_model(timelines).items()
    }


def summary(episode: Episode) -> dict[str, Any]:
    """One episode without its calls."""
    opening = episode.opening
    out: dict[str, Any] = {
        "episode": episode.id,
        "task": opening.task,
        "state": episode.state,
        "model": opening.model or episode.transcript.first_model(),
        "agent": opening.agent,
        "lane": episode.group_key.lane,
        "eval": opening.eval,
        "reward": episode.reward(),
        "identified_by": opening.identified_by,
        "opened_at": opening.at,
        "active_at": episode.active_at,
        "in_flight": episode.transcript.running,
    }
    extra = {
        "reason": episode.reason, "detail": episode.detail, "sealed_at": episode.sealed_at,
        "ended_at": episode.ended_at, "reward_by_agent": episode.reward_by_agent() or None,
        "members": opening.members, "teachers": opening.teachers,
        "metadata": opening.metadata or None, "tenant": opening.tenant or None, "shares": _shares(episode),
        "stored": episode.stored, "evaluation": opening.evaluation, "cause": episode.cause, "client": opening.client,
        "revision": opening.revision, "play": opening.play, "place": None if opening.play is None else opening.place,
        "traffic": opening.traffic or None, "first": opening.first or None, "withdrawn": episode.withdrawn or None,
        "judged_by": None if episode.judgement is None else episode.judgement.judge,
    }
    return out | {name: value for name, value in extra.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which episodes to list: at most `limit`, in `state`, of `task`, and listed after the episode `before`."""

    limit: int = 100
    state: str | None = None
    task: str | None = None
    before: str | None = None


def records(state: State, wanted: Wanted) -> dict[str, Any]:
    """``{"episodes": […], "next"?}``: newest first, those in memory before the archived. If there are more, ``next`` is
    the `Wanted.before` to ask for them with."""
    if wanted.state is not None and wanted.state not in EPISODE_STATES:
        raise BadRequest(f"state must be one of {', '.join(EPISODE_STATES)}", param="state")
    if wanted.before is not None and state.episodes.find(wanted.before) is None:
        raise BadRequest(f"no episode {wanted.before}", param="before")
    fitting = (
        episode for episode in _newest_first(state, wanted)
        if wanted.state in (None, episode.state) and wanted.task in (None, episode.opening.task)
    )
    shown = [summary(episode) for episode in islice(fitting, wanted.limit)]
    more = next(fitting, None) is not None
    return {"episodes": shown} | ({"next": shown[-1]["episode"]} if more else {})


def _newest_first(state: State, wanted: Wanted) -> Iterator[Episode]:
    """The episodes in memory, then the archived, going on from the last one that was listed."""
    before, after = wanted.before, None
    known: Iterator[Episode] = chain(reversed(state.episodes.values()), reversed(state.episodes.leaving.values()))
    if before in state.episodes or before in state.episodes.leaving:
        known = islice(dropwhile(lambda episode: episode.id != before, known), 1, None)
    elif before is not None:
        known, after = iter(()), before
    yield from known
    if state.episodes.archive is None:
        return
    leaving = state.episodes.leaving
    archived = state.episodes.archive.latest(wanted.state, wanted.task, after, wanted.limit + 1 + len(leaving))
    yield from (episode for episode in archived if episode.id not in leaving)


def _shares(episode: Episode) -> dict[str, str] | None:
    """For each of several models, the state of its share; None for an episode without members."""
    if not episode.opening.members:
        return None
    return {model: _share(share) for model, share in episode.shares.by_model.items()}


def _share(share: str | None) -> str:
    return "ready" if share is None else "leased" if share else "trained"


def _models(episode: Episode) -> dict[str, dict[str, Any]]:
    """For each model, what it sampled in the episode, and what came of that: the sum of who learned what from it."""
    turns = episode.transcript.turns()
    asked = (*(entry.asked.model for entry in episode.transcript.calls.values()), *(turn.model for turn in turns))
    out: dict[str, dict[str, Any]] = {
        model: {"calls": 0, "sampled_tokens": 0, "reward": total(episode.rewards_of(model))}
        for model in dict.fromkeys((*asked, *episode.shares.by_model, *episode.shares.learned))
    }
    for turn in turns:
        out[turn.model]["calls"] += 1
        out[turn.model]["sampled_tokens"] += turn.sampled
    for model, share in episode.shares.by_model.items() if episode.state != "discarded" else ():
        out[model]["share"] = _share(share)
    for model, came in episode.shares.learned.items():
        if isinstance(came, str):
            out[model].update(share="filtered", reason=came)
        else:
            out[model]["policy_version"] = came
    return out


def _call(name: str, entry: CallEntry, episode: str, text: bytes | None) -> dict[str, Any]:
    """A call as in contract §6.1, with ``complete``. Lost and running calls have what is known of them."""
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


def batch(state: State, name: str) -> Batch:
    """Build what a lease delivers, as the state was when it was leased. Episodes that retention has removed since are
    left out."""
    known = state.batches.known(name)
    groups = tuple(
        Group(task, tuple(
            delivered(one, known.model, known.rewards_at_lease[one.id], _told(state, one, known.model, known.branch))
            for one in map(state.episodes.find, names) if one is not None
        ), tuple(
            delivered(one, known.model, None) for one in map(state.episodes.find, known.earlier.get(names[0], ()))
            if one is not None and one.transcript.chains
        ), next((one.group_key.lane for one in map(state.episodes.find, names) if one is not None), DEFAULT_LANE))
        for task, names in known.groups
    )  # fmt: skip
    return Batch(name, known.lease_until, known.policy_version, groups)


def ready_episodes(state: State) -> Iterator[BatchEpisode]:
    """Build what the ready episodes would deliver, for each task the longest ready first."""
    places: dict[tuple[str, str], int] = {}
    shares = [(model, state.episodes.known(name)) for model, name in state.seats.queues.ready()]
    shares.sort(key=lambda one: places.setdefault((one[0], one[1].group_key.task), len(places)))
    for model, known in shares:
        yield delivered(known, model, None, _told(state, known, model, state.weights.born(model).last))


def _told(state: State, episode: Episode, model: str, branch: int) -> tuple[Timeline, ...]:
    """The timelines of an episode, with the versions of `model` as they are told to who is on `branch`."""
    return state.weights.born(model).told(episode.transcript.timelines, episode.transcript.sampled_by(model), branch)


def delivered(
    episode: Episode, model: str, rewarded: int | None, timelines: tuple[Timeline, ...] | None = None
) -> BatchEpisode:
    """Build what `model` learns from the `timelines` (None: as they are) of an episode that had only its first
    `rewarded` rewards when it was leased. Rewards of other models are left out."""
    rewards, timelines = episode.rewards_of(model, rewarded), timelines or episode.transcript.timelines
    samples = samples_of(timelines, episode=episode.id, task=episode.group_key.task, rewards=rewards)
    return BatchEpisode(
        episode=episode.id,
        task=episode.group_key.task,
        model=model,
        reward=total(rewards) or 0.0,
        rewards=tuple(reward.to_json() for reward in rewards),
        samples=tuple(sample for sample in samples if sample.model == model),
    )

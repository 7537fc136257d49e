"""Status and episode records as text for a person; the JSON of contract §5.3 and §11.1 in, lines out."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from ajet_sdk.routes import EPISODE_STATES
from ajet_sdk.text import align, counted, plain

FIRST_TIME, LAST_TIME = 1.5e9, 5e9
"""Floats between these are taken for Unix times, 2017 to 2128."""
FAILED = ("aborted", "idle_timeout", "wall_timeout", "no_reward", "incomplete_call", "client_gone")
"""Reasons for which an episode was not played to its end."""
GONE_SHOWN = 10
_SHOWN_APART = ("episode", "state", "reason", "rewards", "models", "calls", "timelines", "samples")


def status_view(status: Mapping[str, Any]) -> str:
    """Models and their gates, episodes by state with the sum that must hold, and whatever else the proxy counts."""
    lines = [f"ajet proxy {status.get('version', '')}".rstrip()]
    models = engines_by_model(status)
    rows = [("model", "policy version", "gate", "in flight", "held", "upstreams")]
    for name, model in models.items():
        upstreams = ", ".join(map(str, model.get("upstreams") or ())) or "none"
        inside, held = str(model.get("in_flight", "-")), str(model.get("waiting", "-"))
        rows.append((str(name), str(model.get("policy_version")), str(model.get("gate")), inside, held, upstreams))
    lines += ["", align(rows) if models else "no models yet: requests wait until a trainer announces its engines"]
    episodes = status.get("episodes") or {}
    terms = [(state, int(episodes.get(state, 0))) for state in EPISODE_STATES]
    total = sum(count for _, count in terms)
    opened = int(episodes.get("opened", 0))
    sign = "=" if total == opened else "≠"
    lines += ["", f"opened {opened} {sign} " + " + ".join(f"{state} {count}" for state, count in terms)]
    for name, value in status.items():
        if name not in ("version", "models", "any_model", "episodes", "now", "teams"):
            lines.append(f"{name}: {_brief(value)}")
    return plain("\n".join([*lines, *team_lines(status)]))


def team_lines(status: Mapping[str, Any]) -> list[str]:
    """Models that learn from the same episodes: how many updates each has made, and which waits for another."""
    return [
        "team  " + ", ".join(
            f"{name} {one['updates']}" + (f" (waits for {one['waits_for']})" if "waits_for" in one else "")
            for name, one in team.items()
        )
        for team in status.get("teams") or ()
    ]


def mix_view(mix: Mapping[str, Any]) -> str:
    """The shares of the lanes, how each lane stands, and how far ahead agents may play."""
    rows = [("lane", "share", "leased", "lent", "open", "ready")]
    for name, lane in mix["lanes"].items():
        rows.append((name, *(f"{lane[what]:g}" for what in ("share", "leased", "owed", "open", "ready"))))
    lines = ["" if mix["shares"] else "no lane has a share: groups are leased in the order in which they were complete"]
    lines += [align(rows)] if mix["lanes"] else []
    if mix["shares"] and (left := [name for name, lane in mix["lanes"].items() if not lane["share"]]):
        lines.append(f"not leased, since without a share: {', '.join(left)}")
    ahead = f"{mix['ahead']} groups of {mix['group_size']} may" if mix["ahead"] else "any number of groups may"
    lines.append(f"{ahead} be open or ready; a lane with nothing for {mix['lane_wait_s']:g} s lends its turns")
    return plain("\n".join(filter(None, lines)))


def engines_by_model(status: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """The models of a status, and what serves all others, by the names under which they are shown."""
    models = dict(status.get("models") or {})
    others = status.get("any_model")
    return {**models, "any other model" if models else "any model": others} if others else models


def episode_view(record: Mapping[str, Any]) -> str:
    """One episode: what it is, its rewards, a line a call, a line a timeline."""
    state = str(record.get("state"))
    if record.get("reason"):
        state += f" ({record['reason']})"
    lines = [f"episode {record.get('episode')}: {state}"]
    for name, value in record.items():
        if name in _SHOWN_APART or value in (None, "", {}):
            continue
        lines.append(f"  {name}: {_brief(value)}")
    rewards = record.get("rewards") or []
    lines.append("\n" + counted(rewards, "reward"))
    lines += [f"  {_brief(item)}" for item in rewards]
    if models := record.get("models"):
        lines.append("\n" + counted(models, "model"))
        lines.append(align([("  model", "calls", "sampled", "reward", "learned"), *map(_model, models.items())]))
    calls = record.get("calls") or []
    lines.append("\n" + counted(calls, "call"))
    if calls:
        head = ("  call", "prompt", "sampled", "finish", "policy", "identified by", "sampling", "answer", "")
        lines.append(align([head, *map(_call, calls)]))
    timelines = record.get("timelines") or []
    if timelines:
        lines.append("\n" + counted(timelines, "timeline"))
        lines += [f"  {_timeline(item)}" for item in timelines]
    return plain("\n".join(lines))


def _model(item: tuple[str, Mapping[str, Any]]) -> tuple[str, ...]:
    """A model's work in an episode, and what became of its share."""
    name, one = item
    reward, share = one.get("reward"), one.get("share")
    came = share if share is None else one.get("reason") or share
    if (version := one.get("policy_version")) is not None:
        came = f"{came}, policy version {version}"
    return (
        f"  {name}", str(one.get("calls")), str(one.get("sampled_tokens")), "-" if reward is None else _brief(reward),
        str(came or "nothing"),
    )


def clients_view(answer: Mapping[str, Any]) -> str:
    """A line for each client that plays, and for the latest that are gone."""
    clients = list(answer.get("clients") or ())
    live = [one for one in clients if one.get("state") == "joined"]
    gone = [one for one in clients if one.get("state") != "joined"][:GONE_SHOWN]
    if not clients:
        return "no clients: agents play without having joined, or not at all"
    head = (
        "client", "lane", "revision", "state", "open", "waiting", "trained", "failed", "infra", "per minute", "reward",
        "heard",
    )
    return plain(align([head, *(_client(one, float(answer.get("now", 0.0))) for one in live + gone)]))


def _client(one: Mapping[str, Any], now: float) -> tuple[str, ...]:
    episodes, discarded = one.get("episodes") or {}, one.get("discarded") or {}
    infra, reward = (one.get("failures") or {}).get("infra", 0), one.get("mean_reward")
    failed = sum(discarded.get(reason, 0) for reason in FAILED) - infra
    waiting = sum(episodes.get(state, 0) for state in ("sealed", "ready", "leased"))
    done = episodes.get("trained", 0) + episodes.get("recorded", 0)
    return (
        str(one.get("name")), str(one.get("lane") or "-"), str(one.get("revision") or "-"),
        str(one.get("reason") or one.get("state")), *map(str, (episodes.get("open", 0), waiting, done, failed, infra)),
        f"{one.get('per_minute', 0.0):.1f}", "-" if reward is None else f"{reward:.3f}",
        f"{max(0.0, now - float(one.get('heard_at', now))):.0f} s ago",
    )


def _call(call: Mapping[str, Any]) -> tuple[str, ...]:
    prompt = call.get("prompt_tokens", len(call.get("prompt_token_ids") or ()))
    sampled = call.get("sampled_tokens", len(call.get("token_ids") or ()))
    lost = "" if call.get("complete", True) else f"lost: {call.get('reason') or 'not complete'}"
    return (
        f"  {call.get('call')}",
        str(prompt),
        str(sampled),
        str(call.get("finish_reason") or "-"),
        _brief(call.get("policy_version", "-")),
        str(call.get("identified_by") or "-"),
        sampling_text(call.get("sampling")),
        str(call.get("response") or "-"),
        lost,
    )


def sampling_text(sampling: Any) -> str:
    """The sampling of a call, in short: ``T=0.7 top_p=0.9, raw logprobs``."""
    if not isinstance(sampling, Mapping):
        return "-"
    named = {"T" if name == "temperature" else name: value for name, value in sampling.items() if name != "logprobs"}
    unknown = sum(value is None for value in named.values())
    given = " ".join(
        name if isinstance(value, (list, Mapping)) or str(value).startswith("sha256:") else f"{name}={_brief(value)}"
        for name, value in named.items() if value is not None
    )
    parts = (given, f"{unknown} unknown" if unknown else "", f"{sampling.get('logprobs', 'unknown')} logprobs")
    return ", ".join(part for part in parts if part)


def _timeline(timeline: Any) -> str:
    if not isinstance(timeline, Mapping):
        return _brief(timeline)
    parts = [" → ".join(map(str, timeline.get("calls") or ()))]
    parts += [f"{name} {_brief(value)}" for name, value in timeline.items() if name != "calls" and _short(value)]
    return ", ".join(parts)


def _short(value: Any) -> bool:
    return value not in (None, "") and not (isinstance(value, (list, Mapping)) and len(value) > 8)


def _brief(value: Any) -> str:
    """A value without the punctuation of JSON (``waiting 2, ready 1``); a float of today's size is a time."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_brief(item)}" for name, item in value.items() if item is not None) or "none"
    if isinstance(value, list):
        return ", ".join(map(_brief, value)) or "none"
    if isinstance(value, float) and FIRST_TIME <= value < LAST_TIME:
        return datetime.fromtimestamp(value, tz=timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    return f"{value:g}" if isinstance(value, float) else str(value)

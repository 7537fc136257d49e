"""``ajet top``: the run in a terminal, over HTTP alone.

Idea: a screenful is a function of what the proxy answered and of the terminal's size, so that it can be tested without
either. `watch` asks, draws and waits. In a terminal each screenful replaces the one before it, on a screen of its own,
and the old screen comes back at the end. Anywhere else they follow one another as plain text.

Invariant: no line is wider than the terminal and no screenful is higher. Nothing that an agent wrote can move the
cursor.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TextIO

from ajet_sdk.errors import AjetError, Forbidden, ProxyUnreachable, Unauthorized
from ajet_sdk.routes import DEFAULT_LANE, EPISODE_STATES
from ajet_sdk.text import align, columns, counted, plain
from ajet_sdk.views import engines_by_model, team_lines

if TYPE_CHECKING:
    from ajet_sdk.blocking import Client

BARS = "▁▂▃▄▅▆▇█"
RECENT = 64
"""A mean reward is that of so many of the latest episodes, or a few more."""
NAME, LEAST = 28, 8
"""A task, model or agent name is cut behind so many columns; in a table that would not fit, behind fewer."""
STYLES = {"head": "\033[1m", "alert": "\033[1;31m", "dim": "\033[2m", "": ""}
ENTER, LEAVE = "\033[?1049h\033[?25l", "\033[?25h\033[?1049l"
JUDGED = {
    "awaiting": "awaiting", "judged": "judged", "rewarded": "rewarded without", "not_judged": "not judged",
    "withdrawn": "withdrawn", "lost": "lost",
}
"""Words for what becomes of what is to be judged."""
Lines = list[tuple[str, str]]
"""Each with its style."""
Drawing = Callable[[int, int], Lines]
"""Draws a screen of so many columns and lines."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Per second, over the time between two answers."""

    tokens: float
    calls: float


def screenful(
    status: Mapping[str, Any], overview: Mapping[str, Any] | None, rates: Rates | None, width: int, height: int
) -> Lines:
    """The screen. `overview` is None if the key does not reach it."""
    lines: Lines = _top(status, rates)
    tables = (_lanes, _tasks, _quiet)
    rest: list[Lines] = [] if overview is None else [table(overview, width) for table in tables]
    if overview is None:
        lines.append(("dim", "rewards and agents need an admin's key"))
    else:
        lines += _rewards(overview, width) + _leases(overview)
    lines += _drift(status)
    for number, table in enumerate(rest):
        room = (height - len(lines)) // (len(rest) - number)
        lines += table[:room] if room > 2 else []
    return [(style, fit(plain(line).replace("\n", " "), width)) for style, line in lines[:height]]


def fit(line: str, width: int) -> str:
    """`line` as far as `width` columns reach; wide characters take two."""
    taken = 0
    for at, char in enumerate(line):
        taken += columns(char)
        if taken > width:
            return line[:at]
    return line


def sparkline(values: Sequence[float], width: int) -> str:
    """`values` as at most `width` bars, from the lowest to the highest; each is the mean of some neighbors."""
    if not values:
        return ""
    count = min(width, len(values))
    cuts = [index * len(values) // count for index in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = min(means), max(means)
    reach = high - low or 1.0
    return "".join(BARS[min(len(BARS) - 1, int((mean - low) / reach * len(BARS)))] for mean in means)


def recent_mean(points: Sequence[Mapping[str, Any]]) -> float | None:
    """The mean reward of the latest points that have `RECENT` episodes together."""
    count, total = 0, 0.0
    for point in reversed(points):
        count, total = count + point["episodes"], total + point["mean"] * point["episodes"]
        if count >= RECENT:
            break
    return total / count if count else None


def _top(status: Mapping[str, Any], rates: Rates | None) -> Lines:
    requests, gate = status.get("requests") or {}, status.get("gate") or {}
    head = [f"ajet {status.get('version', '')}".rstrip(), f"gate {gate.get('state', 'unknown')}"]
    head += [f"{requests[name]} {word}" for name, word in (("in_flight", "in flight"), ("waiting", "held"))
             if name in requests]
    if rates is not None:
        head.append(f"{rates.tokens:,.0f} tokens/s, {rates.calls:.1f} calls/s")
    lines: Lines = [("head", " · ".join(head))]
    lines += [("alert", alert) for alert in status.get("alerts") or ()]
    models = engines_by_model(status)
    for name, model in models.items():
        line = f"policy version {model.get('policy_version')}, {counted(model.get('upstreams') or (), 'engine')}"
        if len(models) > 1 and "in_flight" in model:
            line += f", gate {model.get('gate')}, {model['in_flight']} in flight, {model.get('waiting', 0)} held"
        lines.append(("", f"{_cut(name)}  {line}"))
    lines += [("", line) for line in team_lines(status)]
    episodes = status.get("episodes") or {}
    terms = " + ".join(f"{state} {episodes[state]}" for state in EPISODE_STATES if episodes.get(state))
    lines.append(("", f"opened {episodes.get('opened', 0)} = {terms or 0}"))
    groups = status.get("groups") or {}
    queue = ", ".join(f"{count} {state}" for state, count in groups.items())
    lines += [("", f"groups  {queue}")] if queue else []
    return [*lines, *_traffic(status.get("traffic") or {})]


def _traffic(traffic: Mapping[str, Any]) -> Lines:
    """Lines on what is to be judged and what became of it, if there is any; and on how good held-out chats were."""
    if not traffic.get("sealed"):
        return []
    line = ", ".join(f"{traffic[name]} {said}" for name, said in JUDGED.items() if traffic.get(name))
    oldest = f"; the oldest awaits one for {age(traffic['oldest_s'])}" if traffic.get("awaiting") else ""
    lines: Lines = [("", f"judgements  {line}{oldest}")]
    for model, spans in (traffic.get("holdout") or {}).items():
        means = [span["mean"] for span in spans]
        lines.append(("", f"held-out chats, {_cut(model)}  {means[-1]:.3f} at version {spans[-1]['policy_versions'][1]}"
                          f"  {sparkline(means, 16)}"))
    return lines


def _rewards(overview: Mapping[str, Any], width: int) -> Lines:
    lines: Lines = []
    for kind, curve in (overview.get("rewards") or {}).items():
        mean = recent_mean(curve["points"])
        if mean is not None:
            start = f"reward, {kind}  {mean:.3f} latest of {curve['episodes']:,}  "
            bars = sparkline([point["mean"] for point in curve["points"]], max(8, min(60, width - len(start))))
            lines.append(("", start + bars))
    return lines


def _leases(overview: Mapping[str, Any]) -> Lines:
    return [
        ("", f"leased  {lease['batch']}: {lease['episodes']} episodes of {_cut(lease['model'])}, runs out in "
             f"{age(lease['lease_until'] - overview['now'])}")
        for lease in (overview.get("leases") or ())[:3]
    ]


def _drift(status: Mapping[str, Any]) -> Lines:
    drift = sorted((status.get("drift") or {}).items(), key=lambda item: -item[1])
    lost = status.get("discarded") or {}
    return [
        ("", f"{name}  " + ", ".join(f"{reason} {count}" for reason, count in counts))
        for name, counts in (("broken chains", drift), ("discarded", list(lost.items()))) if counts
    ]


def _lanes(overview: Mapping[str, Any], width: int) -> Lines:
    """The lanes, if there is more than the one that everything is in."""
    lanes = overview.get("lanes") or ()
    if all(lane["lane"] == DEFAULT_LANE and not lane["share"] for lane in lanes):
        return []
    name = max(LEAST, min(NAME, width - 40))
    rows = [
        (_cut(_of(lane), name), f"{lane['share']:g}", str(lane["leased"]), str(lane["owed"]), str(lane["open"]),
         str(lane["ready"])) for lane in lanes
    ]
    return _table(("lane", "share", "leased", "lent", "open", "ready"), rows)


def _of(lane: Mapping[str, Any]) -> str:
    """A lane, with its model where several have a mix of their own."""
    return f"{lane['lane']} ({lane['model']})" if "model" in lane else str(lane["lane"])


def _tasks(overview: Mapping[str, Any], width: int) -> Lines:
    name = max(LEAST, min(NAME, width - 44))  # which leaves the figures their room
    rows = [
        (_cut(task["task"], name) + (" (eval)" if task["eval"] else ""), f"{task['episodes']:,}", f"{task['mean']:.3f}",
         f"{task['recent_mean']:.3f}", sparkline(task["recent"], 8))
        for task in overview.get("tasks") or ()
    ]
    return _table(("task", "episodes", "mean", "latest", ""), rows)


def _quiet(overview: Mapping[str, Any], width: int) -> Lines:
    name = max(LEAST, min(NAME, (width - 52) // 2))
    rows = [
        (age(one["quiet_s"]), "the model" if one["in_flight"] else "the agent", _cut(one["task"] or "-", name),
         _cut(one["agent"] or "-", name), str(one["calls"]), one["episode"])
        for one in overview.get("quiet") or ()
    ]
    return _table(("quiet for", "waits for", "task", "agent", "calls", "episode"), rows)


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Lines:
    """An empty line, the head and the rows; nothing if there are none."""
    if not rows:
        return []
    first, *lines = align([head, *rows]).split("\n")
    return [("", ""), ("head", first), *(("", line) for line in lines)]


def _cut(name: str, most: int = NAME) -> str:
    name = plain(str(name)).replace("\n", " ")
    return name if columns(name) <= most else fit(name, most - 1) + "…"


def age(seconds: float) -> str:
    """A span of time in one unit."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


class Poll:
    """Asks the proxy from time to time, and computes the rates per second."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._before: tuple[float, int, int] | None = None

    def ask(self) -> tuple[dict[str, Any], dict[str, Any] | None, Rates | None]:
        status = self._client.ask("status").json()
        try:
            overview = self._client.ask("overview").json()
        except (Forbidden, Unauthorized):
            overview = None
        tokens, calls = status.get("tokens") or {}, status.get("calls") or {}
        now = (time.monotonic(), tokens.get("generated", 0), calls.get("complete", 0))
        before, self._before = self._before, now
        if before is None or now[0] <= before[0] or "generated" not in tokens:
            return status, overview, None
        span = now[0] - before[0]
        return status, overview, Rates(max(0, now[1] - before[1]) / span, max(0, now[2] - before[2]) / span)


def watch(client: Client, every: float, out: TextIO, look: Callable[[], Drawing] | None = None) -> None:
    """Draw again and again what `look` finds, the run if there is none. A proxy that is away at first is an error;
    later it is waited for."""
    poll = Poll(client)
    look = look or (lambda: partial(screenful, *poll.ask()))
    drawing = look()
    trouble: str | None = None
    with _screen(out):
        while True:
            _draw(out, drawing, trouble)
            time.sleep(every)
            try:
                drawing, trouble = look(), None
            except ProxyUnreachable:
                trouble = f"no answer, trying again: is ajet-proxy at {client.target.url} running?"
            except AjetError as error:
                trouble = f"no answer, trying again: {error.message}"


def table(text: str, width: int, height: int) -> Lines:
    """As much of `text` as a screen holds."""
    return [("" if number else "head", fit(line, width)) for number, line in enumerate(text.splitlines()[:height])]


def _draw(out: TextIO, drawing: Drawing, trouble: str | None) -> None:
    if not out.isatty():
        lines = drawing(10_000, 10_000)
        out.write("\n".join([line for _, line in lines] + ([plain(trouble)] if trouble else [])) + "\n\n")
        out.flush()
        return
    width, height = shutil.get_terminal_size()
    lines = drawing(width, height - 1 if trouble else height)
    if trouble is not None:
        lines.insert(0, ("alert", fit(plain(trouble).replace("\n", " "), width)))
    styles = dict.fromkeys(STYLES, "") if "NO_COLOR" in os.environ else STYLES
    shown = [f"{styles[style]}{line}\033[0m\033[K" for style, line in lines]
    out.write("\033[H" + "\r\n".join(shown) + "\033[J")
    out.flush()


@contextmanager
def _screen(out: TextIO) -> Iterator[None]:
    """A terminal's second screen, without a cursor; afterwards the first one again, as it was."""
    if not out.isatty():
        yield
        return
    out.write(ENTER)
    try:
        yield
    finally:
        out.write(LEAVE)
        out.flush()

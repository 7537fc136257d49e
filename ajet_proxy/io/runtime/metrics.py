"""Counters and histograms, rendered as Prometheus text (https://prometheus.io/docs/instrumenting/exposition_formats/).

Names and their labels are declared in one table: an operator can read what exists, and a typing error cannot make a new
series. Label values are bounded: after `MAX_SERIES` combinations of one metric, further ones count as ``other``. So a
client cannot fill the memory by inventing names. What the ledger already counts is read from it at render time
(`ajet_proxy.io.control.gauges`) and not counted twice.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

MAX_SERIES = 200
Values = Mapping[tuple[str, ...], float]
"""One metric's values, each for its label values."""
Figures = Mapping[str, Mapping[tuple[str, ...], tuple[Sequence[int], float]]]
"""The sum of each metric's values, behind how many of a histogram's lie in each interval."""
SECONDS = (0.005, 0.02, 0.05, 0.2, 0.5, 1.0, 2.0, 5.0, 20.0, 60.0, 300.0, 1800.0)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, slots=True)
class Metric:
    """One declared metric. ``kind`` is counter, gauge or histogram."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()


METRICS: tuple[Metric, ...] = (
    Metric(
        "ajet_requests_total", "counter", "Agents' requests answered, by route (refused: not open) and status.",
        ("route", "status"),
    ),
    Metric("ajet_request_seconds", "histogram", "From a request's first byte to its answer's last.", ("route",)),
    Metric("ajet_first_byte_seconds", "histogram", "From a request to its answer's first byte.", ("route",)),
    Metric("ajet_gate_wait_seconds", "histogram", "Time a request was held at the gate."),
    Metric("ajet_lineage_total", "counter", "Calls that nothing names: continued, new or ambiguous.", ("found",)),
    Metric("ajet_scored_calls_total", "counter", "Choices whose logprobs were asked for after they were sampled."),
    Metric("ajet_continuity_total", "counter", "Turns sent as exact ids, or why not.", ("outcome",)),
    Metric("ajet_upstream_errors_total", "counter", "Engine requests that failed, by kind.", ("kind",)),
    Metric("ajet_upstream_retries_total", "counter", "Engine requests repeated on a fresh connection."),
    Metric("ajet_commit_seconds", "histogram", "Time until events were on disk."),
    Metric("ajet_refused_total", "counter", "Requests told to come back later, by the limit that is reached.",
           ("reason",)),
    Metric("ajet_compactions_total", "counter", "Compactions of the journal.", ("outcome",)),
    Metric("ajet_removed_episodes_total", "counter", "Archived episodes that retention removed."),
    Metric("ajet_worker_restarts_total", "counter", "Worker processes that ended and were replaced."),
    Metric("ajet_intercepted_connections_total", "counter", "Connections to the HTTPS proxy.", ("kind",)),
)


class Metrics:
    """The daemon's own counters. One thread, the event loop's, uses it."""

    def __init__(self) -> None:
        self._declared = {metric.name: metric for metric in METRICS}
        self._series: dict[str, dict[tuple[str, ...], _Series]] = {
            metric.name: {} if metric.labels else {(): _Series(metric)} for metric in METRICS
        }  # what has no labels is there from the start, so that its first increase is seen
        self._found: dict[tuple[object, ...], _Series] = {}
        """The series that there are, by how they are asked for."""

    def inc(self, name: str, value: float = 1, **labels: object) -> None:
        """Add `value` to a counter."""
        self._of(name, labels).total += value

    def observe(self, name: str, value: float, **labels: object) -> None:
        """Count `value` (seconds) in a histogram."""
        series = self._of(name, labels)
        series.counts[bisect_left(SECONDS, value)] += 1
        series.total += value

    def figures(self) -> Figures:
        """All values, for `add` of another `Metrics`."""
        return {
            name: {key: (tuple(one.counts), one.total) for key, one in series.items()}
            for name, series in self._series.items()
        }

    def add(self, figures: Figures) -> None:
        """Add the `figures` of another `Metrics`."""
        for name, found in figures.items():
            for key, (counts, total) in found.items():
                series = self._of(name, dict(zip(self._declared[name].labels, key, strict=True)))
                series.counts = [mine + more for mine, more in zip(series.counts, counts, strict=True)]
                series.total += total

    def render(self, read: Iterable[tuple[Metric, Values]] = ()) -> str:
        """Everything as Prometheus text; what is `read` comes from elsewhere (see `ajet_proxy.io.control.gauges`)."""
        lines: list[str] = []
        for metric in METRICS:
            series = self._series[metric.name]
            if metric.kind != "histogram":
                _plain(metric, {key: one.total for key, one in series.items()}, lines)
                continue
            _head(metric, lines)
            for key, one in series.items():
                below = 0
                for bound, count in zip((*map(_number, SECONDS), "+Inf"), one.counts, strict=True):
                    below += count
                    lines.append(f"{metric.name}_bucket{_labels((*metric.labels, 'le'), (*key, bound))} {below}")
                lines.append(f"{metric.name}_sum{_labels(metric.labels, key)} {_number(one.total)}")
                lines.append(f"{metric.name}_count{_labels(metric.labels, key)} {below}")
        for metric, values in read:
            _plain(metric, values, lines)
        return "\n".join(lines) + "\n"

    def _of(self, name: str, labels: Mapping[str, object]) -> _Series:
        """The series of a metric with these labels, or the one that stands for all others."""
        asked = (name, *labels.items())
        if (found := self._found.get(asked)) is not None:
            return found
        metric, series = self._declared[name], self._series[name]
        if labels.keys() != set(metric.labels):
            raise ValueError(f"{name} has labels {metric.labels}, not {tuple(labels)}")
        key = tuple(str(labels[label]) for label in metric.labels)
        if key not in series and len(series) >= MAX_SERIES:
            return series.setdefault(("other",) * len(key), _Series(metric))
        return self._found.setdefault(asked, series.setdefault(key, _Series(metric)))


class _Series:
    """The sum of a metric's values; a histogram also counts how many lie in each interval."""

    __slots__ = ("counts", "total")

    def __init__(self, metric: Metric) -> None:
        self.counts = [0] * (len(SECONDS) + 1) if metric.kind == "histogram" else []
        self.total = 0.0


def _head(metric: Metric, lines: list[str]) -> None:
    lines.append(f"# HELP {metric.name} {metric.help}")
    lines.append(f"# TYPE {metric.name} {metric.kind}")


def _plain(metric: Metric, values: Values, lines: list[str]) -> None:
    _head(metric, lines)
    for key, value in islice(values.items(), MAX_SERIES + 1):
        lines.append(f"{metric.name}{_labels(metric.labels, key)} {_number(value)}")


def _labels(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    pairs = [f'{name}="{_escape(value)}"' for name, value in zip(names, values, strict=True)]
    return "{" + ",".join(pairs) + "}" if pairs else ""


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(value)

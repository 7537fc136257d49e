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
Figures = tuple[Mapping[str, Values], Mapping[str, Mapping[tuple[str, ...], tuple[Sequence[int], float]]]]
"""Counters, and histograms as how many values lie in each interval, with their sum."""
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
        self._values: dict[str, dict[tuple[str, ...], float]] = {
            m.name: {} if m.labels else {(): 0} for m in METRICS if m.kind != "histogram"
        }  # what has no labels is there from the start, so that its first increase is seen
        self._histograms: dict[str, dict[tuple[str, ...], _Histogram]] = {
            m.name: {} if m.labels else {(): _Histogram()} for m in METRICS if m.kind == "histogram"
        }
        self._observed: dict[object, _Histogram] = {}
        """The histograms that there are, by how they are asked for."""
        self._keys: dict[tuple[object, ...], tuple[str, ...]] = {}
        """The keys of series that there are, by how they are asked for."""

    def inc(self, name: str, value: float = 1, **labels: object) -> None:
        """Add `value` to a counter."""
        series = self._values[name]
        key = self._key(name, labels, series)
        series[key] = series.get(key, 0) + value

    def observe(self, name: str, value: float, **labels: object) -> None:
        """Count `value` (seconds) in a histogram."""
        asked = (name, *labels.items()) if labels else name
        found = self._observed.get(asked)
        if found is None:
            found = self._observed[asked] = self._histogram(name, labels)
        found.observe(value)

    def figures(self) -> Figures:
        """All values, for `add` of another `Metrics`."""
        histograms = {
            name: {key: (tuple(found.counts), found.total) for key, found in series.items()}
            for name, series in self._histograms.items() if series
        }
        return {name: dict(series) for name, series in self._values.items() if series}, histograms

    def add(self, figures: Figures) -> None:
        """Add the `figures` of another `Metrics`."""
        counters, histograms = figures
        for name, values in counters.items():
            for key, value in values.items():
                self.inc(name, value, **dict(zip(self._declared[name].labels, key, strict=True)))
        for name, found in histograms.items():
            for key, (counts, total) in found.items():
                self._histogram(name, dict(zip(self._declared[name].labels, key, strict=True))).add(counts, total)

    def _key(
        self, name: str, labels: Mapping[str, object], series: Mapping[tuple[str, ...], object]
    ) -> tuple[str, ...]:
        asked = (name, *labels.items())
        key = self._keys.get(asked)
        if key is None:
            declared = self._declared[name].labels
            if labels.keys() != set(declared):
                raise ValueError(f"{name} has labels {declared}, not {tuple(labels)}")
            key = tuple(str(labels[label]) for label in declared)
            if key not in series and len(series) >= MAX_SERIES:
                key = ("other",) * len(key)
            if key in series:
                self._keys[asked] = key
        return key

    def render(self, read: Iterable[tuple[Metric, Values]] = ()) -> str:
        """Everything as Prometheus text; what is `read` comes from elsewhere (see `ajet_proxy.io.control.gauges`)."""
        lines: list[str] = []
        for metric in METRICS:
            if metric.kind == "histogram":
                _head(metric, lines)
                for key, histogram in self._histograms[metric.name].items():
                    histogram.render(metric, key, lines)
            else:
                _plain(metric, self._values[metric.name], lines)
        for metric, values in read:
            _plain(metric, values, lines)
        return "\n".join(lines) + "\n"

    def _histogram(self, name: str, labels: Mapping[str, object]) -> _Histogram:
        series = self._histograms[name]
        key = self._key(name, labels, series)
        if key not in series:
            series[key] = _Histogram()
        return series[key]


class _Histogram:
    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(SECONDS) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(SECONDS, value)] += 1
        self.total += value

    def add(self, counts: Sequence[int], total: float) -> None:
        self.counts = [mine + more for mine, more in zip(self.counts, counts, strict=True)]
        self.total += total

    def render(self, metric: Metric, key: tuple[str, ...], lines: list[str]) -> None:
        below = 0
        for bound, count in zip((*map(_number, SECONDS), "+Inf"), self.counts, strict=True):
            below += count
            lines.append(f"{metric.name}_bucket{_labels((*metric.labels, 'le'), (*key, bound))} {below}")
        lines.append(f"{metric.name}_sum{_labels(metric.labels, key)} {_number(self.total)}")
        lines.append(f"{metric.name}_count{_labels(metric.labels, key)} {below}")


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

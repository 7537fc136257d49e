"""Prometheus text: the format, the declared names, the bound on series."""

from __future__ import annotations

import math
import re

import pytest

from ajet_proxy.io.runtime.metrics import MAX_SERIES, METRICS, Metric, Metrics

GAUGE = Metric("ajet_gate_open", "gauge", "Open.")
LINE = re.compile(r'[a-z_]+(\{[a-z_]+="(?:[^"\\\n]|\\.)*"(,[a-z_]+="(?:[^"\\\n]|\\.)*")*\})? -?[0-9.e+-]+')


def test_counters_add_up_and_label_values_are_escaped() -> None:
    metrics = Metrics()
    metrics.inc("ajet_requests_total", route='a"b\\c\nd', status=200)
    metrics.inc("ajet_requests_total", 2, route='a"b\\c\nd', status=200)
    assert r'ajet_requests_total{route="a\"b\\c\nd",status="200"} 3' in metrics.render().splitlines()


def test_a_histogram_counts_at_and_below_each_bound() -> None:
    metrics = Metrics()
    for value in (0.005, 0.0051, 9999.0):
        metrics.observe("ajet_request_seconds", value, route="chat")
    lines = metrics.render().splitlines()
    assert 'ajet_request_seconds_bucket{route="chat",le="0.005"} 1' in lines
    assert 'ajet_request_seconds_bucket{route="chat",le="0.02"} 2' in lines
    assert 'ajet_request_seconds_bucket{route="chat",le="1800"} 2' in lines
    assert 'ajet_request_seconds_bucket{route="chat",le="+Inf"} 3' in lines
    assert 'ajet_request_seconds_count{route="chat"} 3' in lines
    assert 'ajet_request_seconds_sum{route="chat"} 9999.0101' in lines


def test_what_has_no_labels_is_there_from_the_start() -> None:
    lines = Metrics().render().splitlines()
    assert "ajet_worker_restarts_total 0" in lines
    assert 'ajet_commit_seconds_bucket{le="+Inf"} 0' in lines
    assert not [line for line in lines if line.startswith("ajet_requests_total")]


@pytest.mark.parametrize(("value", "shown"), [(2.0, "2"), (0.5, "0.5"), (math.inf, "inf"), (math.nan, "nan")])
def test_any_number_can_be_shown(value: float, shown: str) -> None:
    assert Metrics().render([(GAUGE, {(): value})]).splitlines()[-1] == f"ajet_gate_open {shown}"


def test_what_several_processes_counted_adds_up() -> None:
    one, other, total = Metrics(), Metrics(), Metrics()
    for metrics, route in ((one, "chat"), (other, "chat"), (other, "messages")):
        metrics.inc("ajet_requests_total", route=route, status=200)
        metrics.observe("ajet_request_seconds", 0.01, route=route)
    for metrics in (one, other):
        total.add(metrics.figures())
    lines = total.render().splitlines()
    assert 'ajet_requests_total{route="chat",status="200"} 2' in lines
    assert 'ajet_requests_total{route="messages",status="200"} 1' in lines
    assert 'ajet_request_seconds_count{route="chat"} 2' in lines
    assert 'ajet_request_seconds_sum{route="chat"} 0.02' in lines


def test_undeclared_names_and_labels_are_refused() -> None:
    metrics = Metrics()
    with pytest.raises(KeyError):
        metrics.inc("ajet_nothing_total")
    with pytest.raises(ValueError, match="labels"):
        metrics.inc("ajet_requests_total", route="x")


def test_a_client_cannot_make_series_without_end() -> None:
    metrics = Metrics()
    for number in range(MAX_SERIES + 50):
        metrics.inc("ajet_upstream_errors_total", kind=number)
    series = [line for line in metrics.render().splitlines() if line.startswith("ajet_upstream_errors_total{")]
    assert len(series) == MAX_SERIES + 1
    assert 'ajet_upstream_errors_total{kind="other"} 50' in series


def test_every_line_is_well_formed_and_every_metric_has_help_and_type() -> None:
    metrics = Metrics()
    for metric in METRICS:
        labels = dict.fromkeys(metric.labels, "x")
        if metric.kind == "histogram":
            metrics.observe(metric.name, 0.1, **labels)
        else:
            metrics.inc(metric.name, **labels)
    lines = metrics.render([(GAUGE, {(): True})]).splitlines()
    names = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    assert names == {line.split()[2] for line in lines if line.startswith("# HELP")}
    for line in lines:
        assert line.startswith("# ") or LINE.fullmatch(line), line
    assert "ajet_gate_open 1" in lines

"""The figures read at a scrape, their names by Prometheus' rules, and what shows them: documentation and dashboard."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ajet_proxy.io.control.gauges import READ, read, worker_figures
from ajet_proxy.io.engines.upstream import Engines
from ajet_proxy.io.ledger_port.gatekeeper import Gatekeeper
from ajet_proxy.io.runtime.metrics import MAX_SERIES, METRICS, Metric, Metrics
from tests.kit.ledger_rig import LedgerRig
from tests.kit.pages import metrics_table
from tests.kit.steps import steps

DOCS = Path(__file__).parents[4] / "docs" / "reference"
ALL = (*METRICS, *READ)
LINE = re.compile(r'[a-z_]+(\{[a-z_]+="(?:[^"\\\n]|\\.)*"(,[a-z_]+="(?:[^"\\\n]|\\.)*")*\})? -?[0-9.e+-]+')


def rendered(rig: LedgerRig, **upstreams: tuple[str, ...]) -> list[str]:
    """The answer to a scrape; `upstreams` are the configured engines by model, ``any`` for any."""
    gate = Gatekeeper(is_open=lambda model: True, hold_s=1.0)
    fixed = {model.replace("any", ""): urls for model, urls in upstreams.items()}
    engines = Engines(fixed, rig.state.weights.upstreams, rig.state.weights.models)
    store: Any = SimpleNamespace(state=rig.state, healthy=True, limits=None)
    return Metrics().render(read(store, gate, engines, {}, 0)).splitlines()


def test_what_the_ledger_knows() -> None:
    rig = LedgerRig()
    for state in ("ready", "discarded", "open"):
        rig.in_state(state)
    rig.begin(rig.open())
    rig.restart()
    rig.announce("m", 3, ("http://a", "http://b"))
    lines = rendered(rig)
    for line in (
        'ajet_episodes{state="ready"} 1', "ajet_episodes_opened_total 4", 'ajet_policy_version{model="m"} 3',
        'ajet_episodes_discarded_total{reason="aborted"} 1', 'ajet_engines{model="m"} 2', "ajet_gate_open 1",
        'ajet_tokens_total{kind="generated"} 1', 'ajet_recent_reward_mean{kind="train"} 1', "ajet_journal_healthy 1",
        'ajet_captures_total{outcome="complete"} 1', 'ajet_captures_total{outcome="restarted"} 1',
        'ajet_episodes_rewarded_total{kind="eval"} 0', 'ajet_groups{state="waiting"} 1', "ajet_batches_leased 0",
    ):
        assert line in lines
    assert not [line for line in lines if line.startswith('ajet_recent_reward_mean{kind="eval"}')]


def test_engines_that_are_configured_count_as_those_that_were_announced() -> None:
    rig = LedgerRig()
    rig.announce("m", 3)
    lines = rendered(rig, m=("http://a",), n=("http://b", "http://c"), any=("http://d",))
    for model, version, count in (("m", 3, 1), ("n", 0, 2), ("*", 0, 1)):
        assert f'ajet_policy_version{{model="{model}"}} {version}' in lines
        assert f'ajet_engines{{model="{model}"}} {count}' in lines


def test_drift_by_model_and_the_alerts_it_raises() -> None:
    rig = LedgerRig()
    for model, turns in (("m", 61), ("n", 9)):
        episode = rig.open(task="t", model=model)
        for number in range(turns):
            rig.call(episode, (1, 2, 10 + number), (3,), model=model)
        rig.reward(episode)
    lines = rendered(rig)
    assert 'ajet_turns_total{model="m"} 60' in lines
    assert [line for line in lines if line.startswith("ajet_broken_timelines_total{")] == [
        'ajet_broken_timelines_total{model="m",broken_by="new_chain"} 60',
        'ajet_broken_timelines_total{model="n",broken_by="new_chain"} 8',
    ]
    assert 'ajet_drift_ratio{model="m"} 0' in lines
    assert not [line for line in lines if line.startswith('ajet_drift_ratio{model="n"')]
    assert "ajet_alerts 0" in lines


def test_every_declared_figure_is_shown_and_every_line_is_well_formed() -> None:
    rig = LedgerRig()
    rig.in_state("trained")
    lines = rendered(rig)
    assert {line.split()[2] for line in lines if line.startswith("# TYPE")} == {metric.name for metric in ALL}
    for line in lines:
        assert line.startswith("# ") or LINE.fullmatch(line), line


def test_the_process_says_how_it_is() -> None:
    values = {line.split()[0]: float(line.split()[1]) for line in rendered(LedgerRig()) if line.startswith("process_")}
    assert abs(values["process_start_time_seconds"] - time.time()) < 3600
    assert 1e6 < values["process_resident_memory_bytes"] < 1e10
    assert 3 <= values["process_open_fds"] <= values["process_max_fds"]
    assert values["process_cpu_seconds_total"] > 0


def test_each_worker_says_how_it_is() -> None:
    figures = worker_figures({1: os.getpid(), 2: 2**22 + 1})  # the second is no process
    assert list(figures["ajet_worker_cpu_seconds_total"]) == [("1",)]
    assert 1e6 < figures["ajet_worker_resident_memory_bytes"][("1",)] < 1e10


def test_models_without_end_make_no_series_without_end() -> None:
    rig = LedgerRig()
    for number in range(2 * MAX_SERIES):
        rig.announce(f"m{number}", 1)
    assert sum(line.startswith("ajet_policy_version{") for line in rendered(rig)) == MAX_SERIES + 1


@pytest.mark.parametrize("metric", ALL, ids=lambda metric: metric.name)
def test_names_follow_the_rules_of_prometheus(metric: Metric) -> None:
    """https://prometheus.io/docs/practices/naming/ and what ``promtool check metrics`` complains about."""
    assert re.fullmatch(r"(ajet|process)(_[a-z]+)+", metric.name)
    assert metric.kind in ("counter", "gauge", "histogram")
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert not metric.name.endswith(("_count", "_sum", "_bucket"))
    assert not re.search(r"_(counter|gauge|histogram)$|(?<!_)_(ms|milliseconds|minutes|hours|kb|mb|percent)(_|$)",
                         metric.name)
    if metric.kind == "histogram":
        assert metric.name.endswith("_seconds")
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", label) and label not in ("le", "job", "instance")
               for label in metric.labels)
    assert metric.help.endswith(".")


def test_no_name_is_declared_twice() -> None:
    assert len({metric.name for metric in ALL}) == len(ALL)


def test_the_documentation_lists_every_metric() -> None:
    assert metrics_table() in (DOCS / "metrics.md").read_text()


def test_the_dashboard_shows_metrics_and_labels_that_exist() -> None:
    dashboard = json.loads((DOCS / "grafana.json").read_text())
    known = {metric.name: set(metric.labels) for metric in ALL if metric.kind != "histogram"}
    for metric in ALL:
        if metric.kind == "histogram":
            known |= {f"{metric.name}_{part}": {*metric.labels, "le"} for part in ("bucket", "sum", "count")}
    targets = [target for panel in dashboard["panels"] for target in panel.get("targets", ())]
    seen: set[str] = set()
    for target in targets:
        names = set(re.findall(r"\b(?:ajet|process)_[a-z_]+\b", target["expr"]))
        assert names, target["expr"]
        assert names <= known.keys(), names - known.keys()
        seen |= names
        labels = set.union(*(known[name] for name in names)) | {"instance", "job"}
        used = re.findall(r"([a-z]+)=~?\"", target["expr"]) + re.findall(r"{{([a-z_]+)}}", target["legendFormat"])
        used += [word for group in re.findall(r"by \(([^)]*)\)", target["expr"]) for word in group.split(", ")]
        assert set(used) <= labels, (target["expr"], set(used) - labels)
    shown = {name.removesuffix("_bucket") for name in seen}
    special = {
        "ajet_intercepted_connections_total", "ajet_worker_restarts_total", "ajet_build_info", "ajet_turns_total",
        "process_start_time_seconds", "process_open_fds", "process_max_fds",
    }
    assert {metric.name for metric in ALL} - shown <= special


def test_the_panels_have_what_grafanas_schema_requires() -> None:
    """``VizLegendOptions``, ``VizTooltipOptions`` and ``ReduceDataOptions`` of its schema, from version 10 on."""
    for panel in json.loads((DOCS / "grafana.json").read_text())["panels"]:
        needs = {
            "row": set(),
            "timeseries": {("legend", "displayMode"), ("legend", "placement"), ("legend", "showLegend"),
                           ("legend", "calcs"), ("tooltip", "mode"), ("tooltip", "sort")},
            "stat": {("reduceOptions", "calcs")},
        }[panel["type"]]
        parts = {part: fields for part, fields in panel.get("options", {}).items() if isinstance(fields, dict)}
        assert {(part, name) for part, fields in parts.items() for name in fields} >= needs
        refs = [target["refId"] for target in panel.get("targets", ())]
        assert len(set(refs)) == len(refs)


def test_the_panels_of_the_dashboard_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads((DOCS / "grafana.json").read_text())["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24 and not cells & taken
        taken |= cells


def test_a_scrape_stays_as_cheap_as_it_was_after_thousands_of_episodes() -> None:
    rig = LedgerRig()
    rig.open(task="t")
    after_one = steps(lambda: rendered(rig))
    for _ in range(5_000):
        rig.open(task="t")
    assert steps(lambda: rendered(rig)) < after_one + 20, "some figures are a call shorter when they are whole numbers"

"""Figures that are read when somebody asks for the metrics: the ledger's own counters, the gate, the process.

Idea: what the ledger counts already is not counted twice, so these figures outlive a restart with the journal. They are
declared in one table, as counters are in `ajet_proxy.io.runtime.metrics.METRICS`. What no row declares is not shown.

Invariant: a scrape costs the same after ten episodes as after ten thousand.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from ajet_proxy.core.ledger.judging import COUNTED
from ajet_proxy.core.ledger.state import State
from ajet_proxy.io.engines.upstream import Engines
from ajet_proxy.io.ledger_port.gatekeeper import Gatekeeper
from ajet_proxy.io.runtime.metrics import Metric, Values
from ajet_proxy.io.storage.store import Store
from ajet_sdk import __version__

RECENT_EPISODES = 64
READ: tuple[Metric, ...] = (
    Metric("ajet_build_info", "gauge", "Always 1; the label tells which version runs.", ("version",)),
    Metric("ajet_episodes", "gauge", "Episodes by state.", ("state",)),
    Metric("ajet_episodes_opened_total", "counter", "Episodes ever opened; the sum of all states."),
    Metric("ajet_episodes_discarded_total", "counter", "Episodes that will not be trained, by reason.", ("reason",)),
    Metric("ajet_episodes_rewarded_total", "counter", "Settled episodes with a reward: train or eval.", ("kind",)),
    Metric(
        "ajet_recent_reward_mean", "gauge", f"Mean reward of the latest {RECENT_EPISODES} or more such episodes.",
        ("kind",),
    ),
    Metric(
        "ajet_judging", "gauge", "Sealed episodes that were to be judged, by what became of them: awaiting, judged, "
        "rewarded (without a judge), not_judged, withdrawn, lost.", ("outcome",),
    ),
    Metric("ajet_judging_oldest_seconds", "gauge", "For how long the oldest has awaited a judgement."),
    Metric("ajet_calls_in_flight", "gauge", "Calls that the engine has not ended."),
    Metric(
        "ajet_captures_total", "counter", "Choices by how they ended: complete, or why they were lost first. One that "
        "a retry replaced when it was complete counts as both.", ("outcome",),
    ),
    Metric("ajet_groups", "gauge", "Groups by state: waiting (incomplete), ready, leased.", ("state",)),
    Metric("ajet_batches_leased", "gauge", "Batches that a trainer holds."),
    Metric(
        "ajet_tokens_total", "counter", "Tokens by kind. generated: sampled by any call, as it ends. Of settled "
        "episodes: prompt and sampled as the calls had them, merged: prompt tokens that merging saved.", ("kind",),
    ),
    Metric("ajet_turns_total", "counter", "Settled calls that continue an earlier one.", ("model",)),
    Metric(
        "ajet_broken_timelines_total", "counter", "Timelines of settled episodes by what broke the one before.",
        ("model", "broken_by"),
    ),
    Metric("ajet_drift_ratio", "gauge", "Share of a model's latest turns that drifted.", ("model",)),
    Metric("ajet_alerts", "gauge", "Alerts that are on; GET status has their lines."),
    Metric("ajet_policy_version", "gauge", "Weights that serve a model; *: each that has no engines of its own.",
           ("model",)),
    Metric("ajet_engines", "gauge", "Engines known for a model; *: for each that has none of its own.", ("model",)),
    Metric("ajet_gate_open", "gauge", "1 while requests pass the gate; with several models, each its own."),
    Metric("ajet_requests_in_flight", "gauge", "Requests inside the gate."),
    Metric("ajet_requests_waiting", "gauge", "Requests held at the gate."),
    Metric("ajet_busy_seconds_total", "counter", "Seconds in which any request was inside the gate."),
    Metric("ajet_model_gate_open", "gauge", "1 while requests of a model pass; *: those of no such model.", ("model",)),
    Metric("ajet_model_requests_in_flight", "gauge", "Requests of a model inside its gate.", ("model",)),
    Metric("ajet_model_requests_waiting", "gauge", "Requests of a model held at its gate.", ("model",)),
    Metric("ajet_model_busy_seconds_total", "counter", "Seconds in which any request of a model was inside its gate.",
           ("model",)),
    Metric("ajet_journal_healthy", "gauge", "0 while the journal cannot write."),
    Metric("ajet_intake_open", "gauge", "0 while a limit keeps new work out."),
    Metric("ajet_disk_bytes", "gauge", "Size of journal and archive."),
    Metric("ajet_worker_cpu_seconds_total", "counter", "CPU time of each worker that runs.", ("worker",)),
    Metric("ajet_worker_resident_memory_bytes", "gauge", "Memory that each worker has in RAM.", ("worker",)),
    Metric("process_start_time_seconds", "gauge", "When the process started, in Unix time."),
    Metric("process_cpu_seconds_total", "counter", "CPU time of the process, user and system."),
    Metric("process_resident_memory_bytes", "gauge", "Memory that the process has in RAM."),
    Metric("process_open_fds", "gauge", "Open file descriptors."),
    Metric("process_max_fds", "gauge", "Limit of open file descriptors."),
)
_DECLARED = {metric.name: metric for metric in READ}


def read(
    store: Store, gate: Gatekeeper, engines: Engines, workers: Mapping[int, int], alerts: int
) -> Iterator[tuple[Metric, Values]]:
    """Every row of `READ` that has values now. `workers` gives the process of each worker by its number. So many
    `alerts` are on."""
    state, limits = store.state, store.limits
    requests = {name or "*": gate.of(name) for name in engines.names()}
    figures = {
        "ajet_build_info": _by_label({__version__: 1}),
        **ledger_figures(state),
        "ajet_policy_version": _by_label({name or "*": state.weights.policy_version(name) for name in engines.names()}),
        "ajet_engines": _by_label({name or "*": len(engines.of(name)) for name in engines.names()}),
        "ajet_gate_open": _one(not state.gates.any().shut),
        "ajet_requests_in_flight": _one(gate.in_flight),
        "ajet_requests_waiting": _one(gate.waiting),
        "ajet_busy_seconds_total": _one(gate.busy_s),
        "ajet_model_gate_open": _by_label({name or "*": gate.is_open(name) for name in engines.names()}),
        "ajet_model_requests_in_flight": _by_label({name: one.in_flight for name, one in requests.items()}),
        "ajet_model_requests_waiting": _by_label({name: one.waiting for name, one in requests.items()}),
        "ajet_model_busy_seconds_total": _by_label({name: one.busy_s for name, one in requests.items()}),
        "ajet_alerts": _one(alerts),
        "ajet_journal_healthy": _one(store.healthy),
        "ajet_intake_open": _one(limits is None or not limits.refused()),
        "ajet_disk_bytes": _one(0 if limits is None else limits.disk),
        **process_figures(),
        **worker_figures(workers),
    }
    return ((_DECLARED[name], values) for name, values in figures.items())


def ledger_figures(state: State) -> dict[str, Values]:
    """The figures of the ledger; `ajet_proxy.core.ledger.views.status` shows the same."""
    curves = state.tallies.reward_curves.curves
    recent = {kind: state.tallies.reward_curves.recent_mean(kind, RECENT_EPISODES) for kind in curves}
    drifts = state.tallies.drifts.items()
    groups = {
        "waiting": state.seats.queues.waiting, "ready": state.seats.queues.complete,
        "leased": sum(len(batch.groups) for batch in state.batches.leased.values()),
    }
    judging = {outcome: state.tallies.judging[outcome] for outcome in COUNTED if outcome != "sealed"}
    oldest = next((one.sealed_at for one in state.episodes.awaited()), None)
    return {
        "ajet_judging": _by_label(judging),
        "ajet_judging_oldest_seconds": _one(0.0 if oldest is None else max(0.0, time.time() - oldest)),
        "ajet_episodes": _by_label(state.tallies.counts),
        "ajet_episodes_opened_total": _one(sum(state.tallies.counts.values())),
        "ajet_episodes_discarded_total": _by_label(state.tallies.discarded),
        "ajet_episodes_rewarded_total": _by_label({kind: curve.count for kind, curve in curves.items()}),
        "ajet_recent_reward_mean": _by_label({kind: mean for kind, mean in recent.items() if mean is not None}),
        "ajet_calls_in_flight": _one(state.tallies.calls["running"]),
        "ajet_captures_total": _by_label(state.tallies.captures),
        "ajet_groups": _by_label(groups),
        "ajet_batches_leased": _one(len(state.batches.leased)),
        "ajet_tokens_total": _by_label(state.tallies.tokens),
        "ajet_turns_total": _by_label({model: drift.turns for model, drift in drifts}),
        "ajet_broken_timelines_total": {
            (model, why): count for model, drift in drifts for why, count in drift.broken.items()
        },
        "ajet_drift_ratio": _by_label({model: rate for model, drift in drifts if (rate := drift.rate) is not None}),
    }


def process_figures() -> dict[str, Values]:
    """Figures of this process, named as Prometheus' own client libraries do. Only Linux gives all of them."""
    times = os.times()
    figures = {
        "process_cpu_seconds_total": _one(times.user + times.system),
        "process_max_fds": _one(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
    }
    with suppress(OSError, ValueError, IndexError):
        _, started, memory = _process("self")
        since_boot = time.clock_gettime(time.CLOCK_BOOTTIME) - started
        figures |= {
            "process_start_time_seconds": _one(time.time() - since_boot),
            "process_resident_memory_bytes": _one(memory),
            "process_open_fds": _one(len(os.listdir("/proc/self/fd"))),
        }
    return figures


def worker_figures(workers: Mapping[int, int]) -> dict[str, Values]:
    """Figures of the workers' processes, by number. A process that ends at this moment is left out."""
    times, memory = {}, {}
    for number, process in workers.items():
        with suppress(OSError, ValueError, IndexError):
            times[str(number)], _, memory[str(number)] = _process(str(process))
    return {
        "ajet_worker_cpu_seconds_total": _by_label(times), "ajet_worker_resident_memory_bytes": _by_label(memory),
    }


def _process(pid: str) -> tuple[float, float, float]:
    """A process's CPU time in seconds, its start in seconds since the machine started, and its memory in bytes."""
    ticks, behind_name = os.sysconf("SC_CLK_TCK"), Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    used, memory = int(behind_name[11]) + int(behind_name[12]), int(behind_name[21]) * os.sysconf("SC_PAGE_SIZE")
    return used / ticks, int(behind_name[19]) / ticks, float(memory)


def _one(value: float) -> Values:
    return {(): value}


def _by_label(values: Mapping[str, float]) -> Values:
    return {(name,): value for name, value in values.items()}

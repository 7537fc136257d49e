"""Spans of calls, made with OpenTelemetry's own SDK and read from its in-memory exporter.

The SDK is in .venv-engine (vLLM brings it), where .ci/run plays this file: ``.venv-engine/bin/python -m pytest
tests/proxy/io/control/test_traces.py``. In .venv only what happens without it can be tested.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from ajet_proxy.core.ledger.events import CallLost
from ajet_proxy.io.control.traces import MISSING, PLACES, Traces, exporting
from ajet_sdk.settings import ConfigError
from tests.kit.engine_faults import Fault
from tests.kit.engine_stub import EngineStub
from tests.kit.ledger_rig import LedgerRig
from tests.proxy.serving import CHAT, serving

HERE = importlib.util.find_spec("opentelemetry") is not None
needs_library = pytest.mark.skipif(
    not HERE, reason="needs opentelemetry-sdk: .venv-engine/bin/python -m pytest tests/proxy/io/control/test_traces.py"
)


class Spans:
    """A provider whose spans stay here."""

    def __init__(self) -> None:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    @property
    def done(self) -> list[Any]:
        return list(self.exporter.get_finished_spans())


def played(traces: Traces) -> tuple[LedgerRig, str, list[str]]:
    """An episode of a whole call, a lost one and one under way; its events are given to `traces`."""
    rig = LedgerRig()
    episode = rig.open(task="t")
    (whole,) = rig.begin(episode, model="m", agent="solver", route="/v1/completions")
    rig.at = 1002.5
    rig.finish(episode, whole, (1, 2, 3), (4, 5), version=7)
    (lost,) = rig.begin(episode, model="m", route="/v1/messages")
    rig.at = 1003.0
    rig.lose(episode, lost, "truncated")
    rig.begin(episode, model="m")
    for event in rig.events:
        traces.take(event)
    return rig, episode, [whole, lost]


@needs_library
def test_each_ended_call_is_one_span() -> None:
    spans = Spans()
    _, episode, (first, second) = played(Traces(spans.provider))
    whole, lost = spans.done
    assert (whole.name, lost.name) == ("text_completion m", "chat m")
    assert dict(whole.attributes) == {
        "session.id": episode, "gen_ai.operation.name": "text_completion", "gen_ai.response.id": first,
        "gen_ai.request.model": "m", "gen_ai.agent.name": "solver",
        "gen_ai.usage.input_tokens": 3, "gen_ai.usage.output_tokens": 2, "gen_ai.response.finish_reasons": ("stop",),
        "ajet.policy_versions": (7,),
    }
    assert (whole.start_time, whole.end_time) == (1_000_000_000_000, 1_002_500_000_000)
    assert whole.status.is_ok
    assert dict(lost.attributes) == {
        "session.id": episode, "gen_ai.operation.name": "chat", "gen_ai.response.id": second,
        "gen_ai.request.model": "m", "error.type": "truncated",
    }
    assert (lost.status.is_ok, lost.status.description) == (False, "truncated")


@needs_library
def test_an_end_without_a_beginning_makes_none() -> None:
    spans = Spans()
    traces = Traces(spans.provider)
    rig, *_ = played(traces)
    before = len(spans.done)
    traces.take(CallLost(rig.at, "ep-x", "call-x", "restarted"))
    for event in rig.events[-2:-1]:  # its end once more
        traces.take(event)
    assert len(spans.done) == before


@needs_library
async def test_the_daemon_makes_spans_and_sends_the_last_one_when_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans = Spans()
    monkeypatch.setattr("ajet_proxy.daemon.exporting", lambda environ: spans.provider)
    async with EngineStub() as stub, serving(tmp_path, upstream=(f"stub={stub.url}",)) as client:
        stub.faults.append(Fault("status", status=500))
        assert (await client.chat("run-1")).status == 500
        assert (await client.chat("run-2")).status == 200
        text = {"model": CHAT["model"], "prompt": "Hello"}
        assert (await client.ask("POST", "/e/run-3/v1/completions", text)).status == 200
    bad, good, completed = spans.done
    assert [span.name.split()[0] for span in spans.done] == ["chat", "chat", "text_completion"]
    assert completed.attributes["session.id"] == "run-3"
    assert (bad.attributes["session.id"], bad.status.is_ok) == ("run-1", False)
    assert (good.attributes["session.id"], good.attributes["gen_ai.request.model"]) == ("run-2", CHAT["model"])
    assert good.attributes["gen_ai.usage.output_tokens"] > 0
    assert 0 < good.end_time - good.start_time < 60e9


@needs_library
@pytest.mark.parametrize(("variables", "name"), [
    ({}, "ajet-proxy"), ({"OTEL_SERVICE_NAME": ""}, "ajet-proxy"), ({"OTEL_RESOURCE_ATTRIBUTES": "a=b"}, "ajet-proxy"),
    ({"OTEL_RESOURCE_ATTRIBUTES": "a=b,service.name=theirs"}, "theirs"),
    ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=theirs", "OTEL_SERVICE_NAME": "mine"}, "mine"),
])  # fmt: skip
def test_the_services_name_is_the_variables(
    variables: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    provider = exporting({PLACES[0]: "http://127.0.0.1:9"} | variables)
    assert provider.resource.attributes["service.name"] == name
    provider.shutdown()


@needs_library
@pytest.mark.parametrize("name", PLACES)
def test_spans_go_where_opentelemetrys_own_variables_say(name: str) -> None:
    provider = exporting({name: "http://127.0.0.1:9", "OTEL_SERVICE_NAME": "mine"})
    assert provider.resource.attributes["service.name"] == "mine"
    provider.shutdown()


@needs_library
async def test_a_collector_that_takes_nothing_does_not_delay_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ajet_proxy.io.control.traces.SEND_S", 0.1)
    spans, taken = Spans(), Event()
    spans.provider.shutdown = taken.wait
    await Traces(spans.provider).close()
    assert not taken.is_set()
    taken.set()


@needs_library
def test_a_variable_that_opentelemetry_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "10")
    with pytest.raises(ConfigError, match=r"^OpenTelemetry cannot use .*: max_export_batch_size must be "):
        exporting({PLACES[0]: "http://127.0.0.1:9"})


def test_without_a_place_to_send_them_or_where_they_are_turned_off_there_are_none() -> None:
    assert exporting({}) is exporting({PLACES[0]: ""}) is None
    assert exporting({PLACES[0]: "http://127.0.0.1:9", "OTEL_SDK_DISABLED": "TRUE"}) is None


@pytest.mark.skipif(HERE, reason="the library is here: run tests/proxy/io/control/test_traces.py in .venv")
@pytest.mark.parametrize("name", PLACES)
async def test_without_the_library_a_line_says_what_to_install_and_the_daemon_works(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(name, "http://user:password@127.0.0.1:9")
    async with EngineStub() as stub, serving(tmp_path, upstream=(f"stub={stub.url}",)) as client:
        assert (await client.chat("run-1")).status == 200
    said = [record.getMessage() for record in caplog.records if "OpenTelemetry" in record.getMessage()]
    assert said == [MISSING.format(name)] and "in a clone of ajet" in MISSING

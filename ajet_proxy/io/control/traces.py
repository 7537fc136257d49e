"""One OpenTelemetry span for each captured call, where its variables name a collector and its library is installed.

Idea: spans are made from the same events that the journal keeps, by a reader like any other. So tracing adds nothing to
the path of a call, and a collector that is away delays nobody. Where spans go, and how they are sampled, is said in
OpenTelemetry's own variables (``OTEL_EXPORTER_OTLP_ENDPOINT``, ``OTEL_TRACES_SAMPLER``, …).

Names are those of the GenAI conventions where they have one. A span has no prompt, no answer and no key in it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from threading import Thread
from typing import Any

from ajet_proxy.core.ledger.events import CallFinished, CallLost, CallStarted, Event
from ajet_proxy.core.protocol.completions import COMPLETIONS
from ajet_proxy.io.runtime.process import end
from ajet_proxy.io.storage.store import Store
from ajet_sdk import __version__
from ajet_sdk.settings import ConfigError

logger = logging.getLogger(__name__)
SEND_S = 5.0
"""At the end a collector that is away delays nobody either."""
PLACES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
MISSING = "{} is set, and no span is sent without OpenTelemetry's libraries: pip install '.[traces]' in a clone of ajet"


def exporting(environ: Mapping[str, str]) -> Any:
    """A provider of tracers that sends spans over OTLP. None where `environ` names no collector or turns it off. None
    also where the libraries are missing, which is said once. `ConfigError` if they cannot use what `environ` says."""
    named = next((name for name in PLACES if environ.get(name)), None)
    if named is None or environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        logger.warning(MISSING.format(named))
        return None
    name, own = environ.get("OTEL_SERVICE_NAME"), {"service.version": __version__}
    if name or "service.name=" not in environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        own["service.name"] = name or "ajet-proxy"
    try:
        provider = TracerProvider(resource=Resource.create(own))
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    except ValueError as error:
        raise ConfigError(f"OpenTelemetry cannot use a variable of its own: {error}") from error
    return provider


class Traces:
    """The spans of a store's calls. `provider` is OpenTelemetry's (`exporting`)."""

    def __init__(self, provider: Any) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode

        self._provider = provider
        self._tracer = provider.get_tracer("ajet_proxy", __version__)
        self._kind = SpanKind.CLIENT
        self._failed: Callable[[str], Any] = lambda reason: Status(StatusCode.ERROR, reason)
        self._started: dict[str, CallStarted] = {}
        self._reader: asyncio.Task[None] | None = None

    def follow(self, store: Store) -> None:
        """Make spans of all that happens in `store` from now on."""
        self._reader = asyncio.get_running_loop().create_task(self._read(store))

    async def _read(self, store: Store) -> None:
        """Read events for as long as this runs. A reader that is too far behind is dropped, and begins anew."""
        while True:
            async for event in store.subscribe():
                self.take(event)
            self._started.clear()

    def take(self, event: Event) -> None:
        """Make the span of a call when it ends, from its start and its end."""
        match event:
            case CallStarted():
                self._started |= dict.fromkeys(event.calls, event)
            case CallFinished() if (started := self._started.pop(event.call.turn.call, None)) is not None:
                turn = event.call.turn
                span = self._span(started, turn.call, turn.model)
                span.set_attribute("gen_ai.usage.input_tokens", turn.start)
                span.set_attribute("gen_ai.usage.output_tokens", turn.sampled)
                span.set_attribute("gen_ai.response.finish_reasons", [turn.finish_reason])
                span.set_attribute("ajet.policy_versions", sorted({version for version, _ in turn.policy_versions}))
                span.end(_nanoseconds(event.at))
            case CallLost() if (started := self._started.pop(event.call, None)) is not None:
                span = self._span(started, event.call, started.model)
                span.set_attribute("error.type", event.reason)
                span.set_status(self._failed(event.reason))
                span.end(_nanoseconds(event.at))

    async def close(self) -> None:
        """Called after the store: take what happened last, and send what is left, but for no longer than `SEND_S`."""
        if self._reader is not None:
            await asyncio.sleep(0)  # in which it reads what the store had for it to the end
            await end(self._reader)
        sending = Thread(target=self._provider.shutdown, daemon=True)  # for whose end nobody waits
        sending.start()
        await asyncio.to_thread(sending.join, SEND_S)

    def _span(self, started: CallStarted, call: str, model: str) -> Any:
        operation = "text_completion" if started.route == COMPLETIONS.path else "chat"
        attributes = {
            "session.id": started.episode, "gen_ai.operation.name": operation, "gen_ai.response.id": call,
            "gen_ai.request.model": model, **({"gen_ai.agent.name": started.agent} if started.agent else {}),
        }
        return self._tracer.start_span(
            f"{operation} {model}".rstrip(), kind=self._kind, attributes=attributes,
            start_time=_nanoseconds(started.at),
        )


def _nanoseconds(at: float) -> int:
    return int(at * 1e9)

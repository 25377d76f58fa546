"""The set-up of OpenTelemetry's SDK by its standard variables: exporter, queue, sampler, resource."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Sequence
from importlib.metadata import entry_points, version

from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator

from miles_router.errors import ConfigError
from miles_router.middlewares import Statistics, counter

logger = logging.getLogger(__name__)

NAME = "miles-router"
#: Seconds that the router waits at its end until the last spans are sent.
LAST_SECONDS = 5.0
#: The entry points of the OTLP exporters, by protocol.
PROTOCOLS = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}


class SpanStatistics(Statistics, prefix="miles_router_trace"):
    """Counts of ended and exported spans."""

    ended_spans = counter(
        "Spans that ended. Spans that are neither exported nor waiting were dropped because the queue was full."
    )
    exported_spans = counter("Spans that the exporter sent or failed to send, by outcome.", by="outcome")


class CountingExporter(SpanExporter):
    """An exporter whose outcomes are counted."""

    def __init__(self, exporter: SpanExporter, counts: SpanStatistics) -> None:
        self._exporter = exporter
        self._counts = counts

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch."""
        result = SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        finally:  # exporters since 1.27 raise if the collector answers too late; the SDK logs it
            outcome = "sent" if result is SpanExportResult.SUCCESS else "failed"
            self._counts.exported_spans[outcome] += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


class CountingProcessor(BatchSpanProcessor):
    """The SDK's queue of spans, which counts the spans that enter."""

    def __init__(self, exporter: SpanExporter, counts: SpanStatistics) -> None:
        super().__init__(CountingExporter(exporter, counts))
        self._counts = counts

    def on_end(self, span: ReadableSpan) -> None:
        """Count a span and queue it for export."""
        self._counts.ended_spans += 1
        super().on_end(span)


def span_exporter() -> SpanExporter | None:
    """Return the exporter that the environment selects; None if the environment disables traces.

    Raises:
        ConfigError: the selected exporter is not installed.
    """
    given, name = os.environ.get, os.environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    if name == "none" or given("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    if name == "otlp":
        protocol = given("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or given("OTEL_EXPORTER_OTLP_PROTOCOL")
        name = PROTOCOLS.get(protocol or "http/protobuf", name)
    found = [*entry_points(group="opentelemetry_traces_exporter", name=name)]
    if not found:
        raise ConfigError(
            f"otel: no exporter {name!r} is installed (OTEL_TRACES_EXPORTER, OTEL_EXPORTER_OTLP_PROTOCOL)"
        )
    exporter: SpanExporter = found[0].load()()
    return exporter


def tracer_provider(exporter: SpanExporter, ids: IdGenerator, counts: SpanStatistics) -> TracerProvider:
    """Return the SDK's provider of tracers. Its thread sends spans from now on."""
    own = Resource({SERVICE_NAME: NAME, SERVICE_VERSION: version(NAME)})
    provider = TracerProvider(
        resource=own.merge(OTELResourceDetector().detect()),
        id_generator=ids,
        span_limits=SpanLimits(max_attribute_length=512),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(CountingProcessor(exporter, counts))
    return provider


async def shut_down(provider: TracerProvider) -> None:
    """Send the waiting spans, for at most `LAST_SECONDS`; the SDK alone may take 30 s."""
    thread = threading.Thread(target=provider.shutdown, name="traces", daemon=True)
    thread.start()
    await asyncio.to_thread(thread.join, LAST_SECONDS)
    if thread.is_alive():
        logger.warning("traces_not_sent", extra={"fields": {"reason": "the router ends"}})

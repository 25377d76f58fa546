"""OpenTelemetry's SDK: its settings from the environment, its sampler, and its exporter over OTLP/HTTP."""

from __future__ import annotations

import gzip
import logging
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, DEFAULT_ON
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

from miles_router.errors import ConfigError
from miles_router.traces.context import TraceContext
from miles_router.traces.encoding import SpanEnvelope
from miles_router.traces.plain import written
from miles_router.traces.queue import QueueBounds, SpanQueue
from miles_router.traces.traces import Traces
from miles_router.version import __version__

NAME = "miles-router"
PROTOCOL = "http/protobuf"
#: By the coding that the exporter announces. With `deflate` it means zlib's form, as HTTP does.
CODINGS: Mapping[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress}
#: The SDK's own are meant for a tenth of our turns: a batch of theirs would be 150.
DEFAULT_WAITING, DEFAULT_BATCH, DEFAULT_DELAY_MS = 16_384, 4_096, 5_000


def open_traces() -> Traces | None:
    """What the standard variables ask for; None where they switch traces off.

    Raises:
        ConfigError: they ask for something that is not there.
    """
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    exporter = os.environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    if exporter == "none":
        return None
    if exporter != "otlp":
        raise ConfigError(f"otel: OTEL_TRACES_EXPORTER is {exporter!r}, and must be otlp or none")
    name = next((each for each in _PROTOCOLS if os.environ.get(each)), None)
    if name is not None and os.environ[name] != PROTOCOL:
        raise ConfigError(f"otel: {name} is {os.environ[name]!r}, and must be {PROTOCOL}")
    # It says itself what fails, at each try: we say it once, and count.
    logging.getLogger("opentelemetry.exporter").setLevel(logging.CRITICAL)
    provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
    sender = _Sender(SpanEnvelope(dict(provider.resource.attributes), NAME, __version__))
    return Traces(_SdkSampling(provider.sampler), SpanQueue(written, sender.send, _bounds()), sender.close)


_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


def _resource() -> Resource:
    """This process, as `OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` describe it."""
    own = Resource({"service.name": NAME, "service.version": __version__})
    return own.merge(OTELResourceDetector().detect())


def _bounds() -> QueueBounds:
    waiting = _number("OTEL_BSP_MAX_QUEUE_SIZE", DEFAULT_WAITING)
    batch = _number("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", min(DEFAULT_BATCH, waiting))
    return QueueBounds(waiting, min(batch, waiting), _number("OTEL_BSP_SCHEDULE_DELAY", DEFAULT_DELAY_MS) / 1e3)


def _number(name: str, default: int) -> int:
    text = os.environ.get(name) or str(default)
    if not (text.isascii() and text.isdigit() and int(text)):
        raise ConfigError(f"otel: {name} is {text!r}, and must be a number above 0")
    return int(text)


class _SdkSampling:
    """The SDK's sampler (`OTEL_TRACES_SAMPLER`)."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.all_begin = sampler in (ALWAYS_ON, DEFAULT_ON)

    def begins(self, trace_id: bytes) -> bool:
        """Whether a trace is kept."""
        return self.all_begin or self._asked(None, trace_id)

    def follows(self, parent: TraceContext) -> bool:
        """Whether what is part of a client's span is kept."""
        number, span = int.from_bytes(parent.trace_id, "big"), int.from_bytes(parent.span_id, "big")
        context = SpanContext(number, span, is_remote=True, trace_flags=TraceFlags(parent.sampled))
        return self._asked(set_span_in_context(NonRecordingSpan(context)), parent.trace_id)

    def _asked(self, context: Any, trace_id: bytes) -> bool:
        result = self._sampler.should_sample(context, int.from_bytes(trace_id, "big"), "turn")
        return bool(result.decision.is_sampled())


class _Sender:
    """Sends spans by the SDK's exporter, which knows where to, with which headers, certificates and patience."""

    def __init__(self, envelope: SpanEnvelope) -> None:
        self._envelope = envelope
        self._session = _Session()
        try:
            self._exporter: Any = OTLPSpanExporter(session=self._session)
        except (ValueError, OSError) as error:
            raise ConfigError(f"otel: the exporter refuses its settings: {error}") from None

    def send(self, spans: Sequence[bytes]) -> str | None:
        """Send some; gives what is wrong, or None."""
        self._session.body = self._envelope.around(spans)
        self._session.problem = "no answer"
        try:
            # Of nothing, since what it would encode is encoded: the session has it.
            if self._exporter.export([]) is SpanExportResult.SUCCESS:
                return None
        except requests.RequestException:  # exporters as of 1.27 catch lost connections, and no answer that is late
            pass
        return self._session.problem

    def close(self) -> None:
        """Try no more."""
        self._exporter.shutdown()


class _Session(requests.Session):  # type: ignore[misc]
    """The exporter's connections. What it sends is our body in place of its own."""

    body = b""
    #: What the last answer was, should it be a refusal.
    problem = ""

    def send(self, request: Any, **options: Any) -> Any:
        """Send one request."""
        coding = CODINGS.get(request.headers.get("Content-Encoding", ""))
        request.prepare_body(self.body if coding is None else coding(self.body), None)
        try:
            response = super().send(request, **options)
        except requests.RequestException as error:
            self.problem = type(error).__name__  # its text has the address, which may have a key
            raise
        self.problem = f"status {response.status_code}"
        return response

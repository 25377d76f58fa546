"""Whoever collects traces over OTLP/HTTP: a server that keeps what it is sent, and reads it by the protocol's own
messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.scripted_worker import Received, ScriptedWorker
from tests.support.waiting import until

PATH = "/v1/traces"


@dataclass(frozen=True)
class CollectedSpan:
    """One span, its ids in hexadecimal and its times in Unix nanoseconds."""

    name: str
    trace: str
    id: str
    parent: str
    start: int
    end: int
    kind: int
    failed: bool
    flags: int
    first_byte: int
    attributes: dict[str, Any]


class Collector:
    """What has come to a server."""

    def __init__(self, server: ScriptedWorker, environment: pytest.MonkeyPatch) -> None:
        self.server = server
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")

    @property
    def requests(self) -> list[Received]:
        return [each for each in self.server.requests if each.path == PATH]

    def messages(self) -> list[Any]:
        return [ExportTraceServiceRequest.FromString(each.body) for each in self.requests]

    def spans(self, name: str | None = None) -> list[CollectedSpan]:
        parts = [part for message in self.messages() for part in message.resource_spans]
        found = [_read(span) for part in parts for scope in part.scope_spans for span in scope.spans]
        return [span for span in found if name in (None, span.name)]

    async def come(self, name: str, count: int) -> list[CollectedSpan]:
        await until(lambda: len(self.spans(name)) >= count, f"{count} spans {name}")
        return self.spans(name)

    def parts(self, turn: CollectedSpan) -> list[CollectedSpan]:
        """The spans within a turn, in the order in which they began."""
        return sorted((span for span in self.spans() if span.parent == turn.id), key=lambda span: span.start)


def _read(span: Any) -> CollectedSpan:
    return CollectedSpan(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.kind,
        span.status.code == 2,
        span.flags,
        next((each.time_unix_nano for each in span.events if each.name == "first_byte"), 0),
        {each.key: _value(each.value) for each in span.attributes},
    )


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)

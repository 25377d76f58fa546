"""Spans as OTLP's protobuf spells them (opentelemetry-proto 1.x, `trace/v1/trace.proto`, `common/v1/common.proto`).

Written by hand: a turn's spans cost a few microseconds so, and a hundred with the SDK's objects and its encoder.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

from miles_router.traces.context import TraceContext

#: Characters of one attribute's value.
MAX_VALUE = 512
REQUEST_ID = "miles_router.request_id"
INTERNAL, SERVER = 1, 2
ERROR = b"\x7a\x02\x18\x02"  # Span.status (15) {code (3): 2}
#: Span.flags (16), fixed32: sampled, and whether the parent is another process's (bits 8 and 9).
LOCAL_PARENT, _REMOTE_PARENT = b"\x85\x01\x01\x01\x00\x00", b"\x85\x01\x01\x03\x00\x00"
_MOMENT = struct.Struct("<Q")
_TIMES = struct.Struct("<cQcQ")  # Span.start_time_unix_nano (7), end_time_unix_nano (8)

Value = str | int | float | bool | Sequence[str]


def varint(number: int) -> bytes:
    """A number as protobuf writes it, seven bits a byte; a negative one as 64 bits."""
    if 0 <= number < 0x80:
        return number.to_bytes(1, "little")
    if 0 <= number < 0x4000:  # the length of a span
        return (number << 1 & 0x7F00 | number & 0x7F | 0x80).to_bytes(2, "little")
    number &= (1 << 64) - 1
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _part(tag: bytes, data: bytes) -> bytes:
    return b"%b%b%b" % (tag, varint(len(data)), data)


def attribute(key: str, value: Value) -> bytes:
    """A `KeyValue` as field 9 of a span."""
    return _part(b"\x4a", _key_value(key, value))


@lru_cache(maxsize=4096)
def repeated_attribute(key: str, value: str) -> bytes:
    """The same for a text that many spans have."""
    return attribute(key, value)


def event(name: bytes, at: int) -> bytes:
    """An `Event` as field 11 of a span. `at`: Unix nanoseconds."""
    return b"\x5a%c\x09%b\x12%c%b" % (len(name) + 11, _MOMENT.pack(at), len(name), name)


def _key_value(key: str, value: Value) -> bytes:
    return _part(b"\x0a", key.encode()) + _part(b"\x12", _any_value(value))


def _any_value(value: Value) -> bytes:
    if isinstance(value, str):
        return _part(b"\x0a", value[:MAX_VALUE].encode("utf-8", "replace"))
    if isinstance(value, bool):
        return b"\x10" + varint(value)
    if isinstance(value, int):
        return b"\x18" + varint(value)
    if isinstance(value, float):
        return b"\x21" + struct.pack("<d", value)
    return _part(b"\x2a", b"".join(_part(b"\x0a", _any_value(each)) for each in value))


def span(
    context: TraceContext,
    parent: bytes | None,
    name: bytes,
    start: int,
    end: int,
    rest: bytes = b"",
    *,
    kind: int = INTERNAL,
    remote: bool = False,
) -> bytes:
    """One span as field 2 of `ScopeSpans`.

    Args:
        parent: the id of the span that it is part of, which is another process's where it is `remote`.
        start, end: Unix nanoseconds.
        rest: attributes and status.
    """
    data = b"\x0a\x10%b\x12\x08%b%b\x2a%c%b\x30%c%b%b%b" % (
        context.trace_id,
        context.span_id,
        b"" if parent is None else b"\x22\x08" + parent,
        len(name),
        name,
        kind,
        _TIMES.pack(b"\x39", start, b"\x41", end),
        rest,
        _REMOTE_PARENT if remote else LOCAL_PARENT,
    )
    return _part(b"\x12", data)


class SpanEnvelope:
    """Around the spans of one request: who sends them. `resource`: what is known of this process."""

    def __init__(self, resource: Mapping[str, object], name: str, version: str) -> None:
        attributes = b"".join(_part(b"\x0a", _key_value(key, _value(each))) for key, each in resource.items())
        self._resource = _part(b"\x0a", attributes)
        scope = _part(b"\x0a", name.encode()) + _part(b"\x12", version.encode())
        self._scope = _part(b"\x0a", scope)

    def around(self, spans: Collection[bytes]) -> bytes:
        """An `ExportTraceServiceRequest`."""
        inner = len(self._scope) + sum(map(len, spans))
        head = b"\x12" + varint(inner)
        size = varint(len(self._resource) + len(head) + inner)
        return b"".join((b"\x0a", size, self._resource, head, self._scope, *spans))  # megabytes, copied once


def _value(given: object) -> Value:
    if isinstance(given, str | int | float):
        return given
    if isinstance(given, list | tuple):
        return [str(each) for each in given]
    return str(given)

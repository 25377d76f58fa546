"""W3C Trace Context: which trace a span belongs to, as the header `traceparent` carries it
(https://www.w3.org/TR/trace-context/).
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, repeat
from typing import NamedTuple

TRACEPARENT, TRACESTATE = b"traceparent", b"tracestate"
HEADERS = frozenset((TRACEPARENT, TRACESTATE))
TRACE_BYTES, SPAN_BYTES = 16, 8
_FORM = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1
_FIRST_VERSION, _NO_VERSION = b"00", b"ff"
_KEPT, _NOT_KEPT = b"00-%b-%b-01", b"00-%b-%b-00"
_MAX_LENGTH = 512

#: Traces whose names are made in a row: in the midst of a request each takes thrice the time.
_IN_A_ROW = 32
_IDS, _IDS_IN_HEX = struct.Struct(f"{TRACE_BYTES}s{SPAN_BYTES}s"), struct.Struct(f"{2 * TRACE_BYTES}s{2 * SPAN_BYTES}s")
_NO_SPAN = bytes(SPAN_BYTES)
#: A name and a value, as requests have them.
Header = tuple[bytes, bytes]


class TraceContext(NamedTuple):
    """A span: its trace (16 bytes), its own name (8 bytes), and whether it is kept."""

    trace_id: bytes
    span_id: bytes
    sampled: bool

    @classmethod
    def read(cls, header: bytes) -> TraceContext | None:
        """What a `traceparent` names; None where it is none. Of later versions the part of the first one is read."""
        found = _FORM.fullmatch(header) if len(header) <= _MAX_LENGTH else None
        if found is None or found[1] == _NO_VERSION or (found[1] == _FIRST_VERSION and found[5] is not None):
            return None
        trace_id, span_id = bytes.fromhex(found[2].decode()), bytes.fromhex(found[3].decode())
        if not any(trace_id) or not any(span_id):
            return None
        return cls(trace_id, span_id, bool(int(found[4], 16) & _SAMPLED))

    def header(self) -> Header:
        """What names it to an engine."""
        ids = self.trace_id.hex().encode(), self.span_id.hex().encode()
        return TRACEPARENT, (_KEPT if self.sampled else _NOT_KEPT) % ids


#: As its class does it, without a frame of the interpreter.
_context = partial(tuple.__new__, TraceContext)


def new_span_id() -> bytes:
    """A random one, which is not all zeros."""
    while (made := os.urandom(SPAN_BYTES)) == _NO_SPAN:
        pass
    return made


def new_traces(begins: Callable[[bytes], bool] | None) -> Iterator[tuple[TraceContext, Header]]:
    """First spans of traces that nobody has begun, each with what names it to an engine; there is no end of them.

    Args:
        begins: whether a trace of this name is kept; None where all are. It is asked once the trace is wanted, for it
            may go by the clock, and what it raises ends no more than that trace.
    """
    named = chain.from_iterable(map(_some, repeat(_IN_A_ROW)))
    return named if begins is None else map(partial(_decided, begins), named)


def _some(count: int) -> list[tuple[TraceContext, Header]]:
    while _NO_SPAN in (ids := os.urandom(count * _IDS.size)):  # zeros name nothing
        pass
    in_hex = _IDS_IN_HEX.iter_unpack(ids.hex().encode())
    return [
        (_context((trace_id, span_id, True)), (TRACEPARENT, _KEPT % written))
        for (trace_id, span_id), written in zip(_IDS.iter_unpack(ids), in_hex, strict=True)
    ]


def _decided(begins: Callable[[bytes], bool], named: tuple[TraceContext, Header]) -> tuple[TraceContext, Header]:
    (trace_id, span_id, _), (_, written) = named
    if begins(trace_id):
        return named
    return _context((trace_id, span_id, False)), (TRACEPARENT, written[:-1] + b"0")

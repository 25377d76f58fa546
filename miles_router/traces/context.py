"""W3C Trace Context: which trace a span belongs to, as the header `traceparent` carries it
(https://www.w3.org/TR/trace-context/).
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import NamedTuple

TRACEPARENT = b"traceparent"
TRACE_BYTES, SPAN_BYTES = 16, 8
_FORM = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1
_FIRST_VERSION, _NO_VERSION = b"00", b"ff"
_KEPT, _NOT_KEPT = b"00-%b-%b-01", b"00-%b-%b-00"
_MAX_LENGTH = 512
#: How a `traceparent` of ours ends whose span is kept, and how one whose is not.
SAMPLED, _NOT_SAMPLED = b"1", b"0"

#: Traces whose names are made in a row: in the midst of a request each takes thrice the time.
_IN_A_ROW = 32
_ID_BYTES = TRACE_BYTES + SPAN_BYTES
_IDS_IN_HEX = struct.Struct(f"{2 * TRACE_BYTES}s{2 * SPAN_BYTES}s" * _IN_A_ROW)
_ROW = _KEPT * _IN_A_ROW
_VALUES = struct.Struct(f"{len(_KEPT % (b'', b'')) + 2 * _ID_BYTES}s")
_NO_SPAN = bytes(SPAN_BYTES)


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

    def value(self) -> bytes:
        """The `traceparent` that names it to an engine."""
        ids = self.trace_id.hex().encode(), self.span_id.hex().encode()
        return (_KEPT if self.sampled else _NOT_KEPT) % ids


def new_span_id() -> bytes:
    """A random one, which is not all zeros."""
    while (made := os.urandom(SPAN_BYTES)) == _NO_SPAN:
        pass
    return made


def new_traces(begins: Callable[[bytes], bool] | None) -> Iterator[bytes]:
    """First spans of traces that nobody has begun, each as the `traceparent` that names it; there is no end of them.

    Args:
        begins: whether a trace of this name is kept; None where all are. It is asked once the trace is wanted, for it
            may go by the clock, and what it raises ends no more than that trace.
    """
    named = chain.from_iterable(chain.from_iterable(map(_VALUES.iter_unpack, iter(_some, b""))))
    return named if begins is None else map(partial(_decided, begins), named)


def _some() -> bytes:
    while _NO_SPAN in (ids := os.urandom(_IN_A_ROW * _ID_BYTES)):  # zeros name nothing
        pass
    return _ROW % _IDS_IN_HEX.unpack(ids.hex().encode())


def _decided(begins: Callable[[bytes], bool], value: bytes) -> bytes:
    trace_id = bytes.fromhex(value.split(b"-")[1].decode())
    return value if begins(trace_id) else value[:-1] + _NOT_SAMPLED

"""W3C Trace Context: which trace a span belongs to, as the header `traceparent` carries it
(https://www.w3.org/TR/trace-context/).
"""

from __future__ import annotations

import random
import re
import secrets
from typing import NamedTuple

TRACEPARENT, TRACESTATE = b"traceparent", b"tracestate"
TRACE_BYTES, SPAN_BYTES = 16, 8
_FORM = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1
_FIRST_VERSION, _NO_VERSION = b"00", b"ff"
_MAX_LENGTH = 512

#: The last bits of a span's id and of the trace's before it.
_NO_ZEROS = 1 << 8 * SPAN_BYTES | 1
_random = random.Random(secrets.randbits(256))


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

    def traceparent(self) -> bytes:
        """The header that names it."""
        return b"00-%b-%b-0%c" % (self.trace_id.hex().encode(), self.span_id.hex().encode(), 48 + self.sampled)


def new_id(nbytes: int) -> bytes:
    """Random ones: of a trace, of a span, or of both in a row. None is all zeros."""
    return (_random.getrandbits(8 * nbytes) | _NO_ZEROS & (1 << 8 * nbytes) - 1).to_bytes(nbytes, "big")

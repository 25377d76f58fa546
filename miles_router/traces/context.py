"""W3C Trace Context: which trace a span belongs to, as the header `traceparent` carries it
(https://www.w3.org/TR/trace-context/).
"""

from __future__ import annotations

import random
import re
import secrets
from typing import NamedTuple

from miles_router.asgi.headers import RawHeaders

TRACEPARENT, TRACESTATE = b"traceparent", b"tracestate"
TRACE_BYTES, SPAN_BYTES = 16, 8
_FORM = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1
_FIRST_VERSION, _NO_VERSION = b"00", b"ff"
_MAX_LENGTH = 512

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
        return f"00-{self.trace_id.hex()}-{self.span_id.hex()}-0{self.sampled:d}".encode("ascii")

    def written(self, headers: RawHeaders, *, follows: bool) -> RawHeaders:
        """Headers with this span in place of the client's. Unless it `follows` the client's own, the client's
        `tracestate` says nothing of it, and goes too."""
        kept = [pair for pair in headers if pair[0] != TRACEPARENT and (follows or pair[0] != TRACESTATE)]
        kept.append((TRACEPARENT, self.traceparent()))
        return kept


def new_id(nbytes: int) -> bytes:
    """A random one, and not all zeros."""
    return (_random.getrandbits(8 * nbytes) or 1).to_bytes(nbytes, "big")

"""Turns that are one span: no layer has read them, they have not waited, and a worker has answered them. Most turns of
texts are, and small ones are many; so they are kept as tuples, and written some in a row.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import itemgetter
from time import perf_counter

from miles_router.traces.context import SPAN_BYTES, TRACE_BYTES
from miles_router.traces.encoding import LOCAL_PARENT, REQUEST_ID, attribute, varint
from miles_router.traces.turn import PASSTHROUGH, common_attributes

#: The `traceparent` that names it, its path, worker, that one's weight version, status and request id, and when it
#: began, had its first byte, and ended, by `time.perf_counter()`.
PlainTurn = tuple[bytes, str, str | None, str | None, int, str, float, float, float]
#: Packs a span; what it begins with, and its last fields but for the request id.
_Form = tuple[Callable[..., bytes], bytes, bytes]
#: What stands before start, end, and the moment in the event.
_START, _END, _FIRST_BYTE = b"\x39", b"\x41", b"\x5a\x15\x09"
_SPAN_ID = b"\x12\x08"
_NAMES_SIZE = TRACE_BYTES + len(_SPAN_ID) + SPAN_BYTES
#: Of some `traceparent` of ours, with the tag of a span's id in place of each hyphen: version and flags are left out.
_NAMES = struct.Struct(f"3x{_NAMES_SIZE}s3x")
_traceparent = itemgetter(0)


def written(turns: Sequence[PlainTurn]) -> bytes:
    """The spans of some turns. In a row each takes a quarter of the time that it takes at the end of its request, where
    the processor's caches have other code."""
    zero = time.time_ns() - int(perf_counter() * 1e9)  # Unix nanoseconds when the other clock began
    values = b"".join(map(_traceparent, turns)).replace(b"-", _SPAN_ID.hex().encode())
    named = zip(_NAMES.iter_unpack(bytes.fromhex(values.decode())), turns, strict=True)
    spans = []
    for (names,), (_, path, worker, version, status, request_id, began_at, head_at, ended_at) in named:
        begin, first, end = zero + int(began_at * 1e9), zero + int(head_at * 1e9), zero + int(ended_at * 1e9)
        pack, head, about = _form(path, worker, version, status, len(request_id))
        own = request_id.encode("ascii")
        spans.append(pack(head, names, _START, begin, _END, end, _FIRST_BYTE, first, about, own))
    return b"".join(spans)


@lru_cache(maxsize=4096)
def _form(path: str, worker: str | None, version: str | None, status: int, id_size: int) -> _Form:
    """Of turns that share all but their names, moments and request ids, which have so many bytes."""
    own = attribute(REQUEST_ID, "?" * id_size)
    #: The rest of the event, name, kind, flags, attributes.
    about = b"\x12\x0afirst_byte\x2a\x04turn\x30\x02" + LOCAL_PARENT
    about += b"".join(common_attributes(path, PASSTHROUGH, worker, version, status)) + own[: len(own) - id_size]
    rest = struct.Struct(f"<{_NAMES_SIZE}scQcQ3sQ{len(about)}s{id_size}s")
    head = b"\x12" + varint(rest.size + 2) + b"\x0a\x10"
    return struct.Struct(f"<{len(head)}s{rest.format[1:]}").pack, head, about

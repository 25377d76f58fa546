"""Which headers a proxy passes on, decided on raw `(name, value)` byte pairs with lower-cased names. Pure.

Source: RFC 9110 section 7.6.1 (connection-specific fields) and RFC 9112 section 6 (framing).
"""

from __future__ import annotations

from collections.abc import Iterable

RawHeaders = list[tuple[bytes, bytes]]

#: Fields about one connection, which never cross a proxy, whether or not `Connection` names them.
HOP_BY_HOP = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"te", b"transfer-encoding", b"upgrade"})

#: Fields that the router makes anew for the worker: whom it asks, how long the buffered body is. `Expect` was
#: answered by the server in front of us when it read the body.
REQUEST_DROPPED = HOP_BY_HOP | {b"host", b"content-length", b"expect"}


#: Names the group that a generation is aborted with.
GROUP = b"x-group-id"
#: The usual values of `Connection`, which name no field that is not dropped anyway.
NAMES_NOTHING = frozenset({b"keep-alive", b"close"})


def connection_named(values: Iterable[bytes]) -> frozenset[bytes]:
    """The field names listed by the values of `Connection`, lower-cased."""
    return frozenset(token.strip().lower() for value in values for token in value.split(b",")) - {b""}


def end_to_end(headers: Iterable[tuple[bytes, bytes]], dropped: frozenset[bytes]) -> RawHeaders:
    """`headers` without the `dropped` ones and without those that `Connection` names; order and repeats kept."""
    kept = []
    named: list[bytes] = []
    for pair in headers:
        name = pair[0]
        if name not in dropped:
            kept.append(pair)
        elif name == b"connection" and pair[1].lower() not in NAMES_NOTHING:
            named.append(pair[1])
    if named:
        also_dropped = connection_named(named)
        kept = [pair for pair in kept if pair[0] not in also_dropped]
    return kept


def header_texts(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    """`headers` as text, as JSON can hold them."""
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]


def raw_headers(texts: Iterable[tuple[str, str]]) -> RawHeaders:
    """Headers that were given as text."""
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in texts]


def first_header(headers: Iterable[tuple[bytes, bytes]], wanted: bytes) -> bytes | None:
    """The value of the first header called `wanted` (lower-case), or None."""
    for name, value in headers:
        if name == wanted:
            return value
    return None

"""The header rules of a proxy, on raw `(name, value)` byte pairs with lower-case names. No I/O.

Source: RFC 9110 section 7.6.1 (connection-specific fields) and RFC 9112 section 6 (framing).
"""

from __future__ import annotations

from collections.abc import Iterable

RawHeaders = list[tuple[bytes, bytes]]

#: Fields about one connection, which never cross a proxy, whether or not `Connection` names them.
HOP_BY_HOP = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"te", b"transfer-encoding", b"upgrade"})

#: Fields that the router does not forward to workers. It writes its own Host and Content-Length, and has already
#: answered `Expect` when it read the body.
REQUEST_DROPPED = HOP_BY_HOP | {b"host", b"content-length", b"expect"}


#: The group of a request; requests of one group can be aborted together.
GROUP = b"x-group-id"
#: The usual values of `Connection`; they name only fields that are dropped anyway.
NAMES_NOTHING = frozenset({b"keep-alive", b"close"})


def connection_named(values: Iterable[bytes]) -> frozenset[bytes]:
    """Return the lower-case field names that the values of `Connection` list."""
    return frozenset(token.strip().lower() for value in values for token in value.split(b",")) - {b""}


def end_to_end(headers: Iterable[tuple[bytes, bytes]], dropped: frozenset[bytes]) -> RawHeaders:
    """Return `headers` without the `dropped` fields and the fields that `Connection` names, in the same order."""
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
    """Decode `headers` as Latin-1 for JSON."""
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]


def raw_headers(texts: Iterable[tuple[str, str]]) -> RawHeaders:
    """Encode text headers as raw headers with lower-case names."""
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in texts]


def first_header(headers: Iterable[tuple[bytes, bytes]], wanted: bytes) -> bytes | None:
    """Return the value of the first header named `wanted` (lower-case), or None."""
    for name, value in headers:
        if name == wanted:
            return value
    return None

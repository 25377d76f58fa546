"""Requests with fields of our own, written without parsing what may hold a long prompt. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson

_NEAR = 64  # bytes that are looked at first


def extended(body: bytes, fields: Mapping[str, object]) -> bytes:
    """A JSON object with these fields behind its own. Anything else stays as it is."""
    whole = body.rstrip()
    if not whole.endswith(b"}"):
        return body
    inside = whole[-_NEAR:-1].rstrip() or whole[:-1].rstrip()
    comma = b"" if inside.endswith(b"{") else b","
    return b"".join((memoryview(whole)[:-1], comma, memoryview(orjson.dumps(fields))[1:]))


def with_key(body: bytes, field: str, key: str, join: Callable[[str, str], str]) -> bytes:
    """Return a request whose `field` has this key, joined with its own. A body that cannot be read stays as it is: the
    engine says what is wrong with it."""
    if b'"%b"' % field.encode() not in body:
        return extended(body, {field: key})
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body
    if not isinstance(parsed, dict) or field not in parsed:  # it stands in a text
        return extended(body, {field: key})
    own = parsed[field]
    joined = [_joined(key, each, join) for each in own] if isinstance(own, list) else _joined(key, own, join)
    return orjson.dumps({**parsed, field: joined})


def _joined(key: str, own: Any, join: Callable[[str, str], str]) -> Any:
    """What is no text stays, and the engine refuses it."""
    if own is None or own == "":
        return key
    return join(key, own) if isinstance(own, str) else own

"""Functions that add fields to a JSON body without parsing it, since it may contain a long prompt. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson

_NEAR = 64  # number of bytes at the end to look at first


def extended(body: bytes, fields: Mapping[str, object]) -> bytes:
    """Return the JSON object with these fields appended. Anything else is returned unchanged."""
    whole = body.rstrip()
    if not whole.endswith(b"}"):
        return body
    inside = whole[-_NEAR:-1].rstrip() or whole[:-1].rstrip()
    comma = b"" if inside.endswith(b"{") else b","
    return b"".join((memoryview(whole)[:-1], comma, memoryview(orjson.dumps(fields))[1:]))


def with_key(body: bytes, field: str, key: str, join: Callable[[str, str], str]) -> bytes:
    """Return the request with `key` in `field`, joined with the client's own value by `join`. A body that cannot be
    read is returned unchanged: the engine reports what is wrong with it."""
    if b'"%b"' % field.encode() not in body:
        return extended(body, {field: key})
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body
    if not isinstance(parsed, dict) or field not in parsed:  # the name occurs inside a string
        return extended(body, {field: key})
    own = parsed[field]
    joined = [_joined(key, each, join) for each in own] if isinstance(own, list) else _joined(key, own, join)
    return orjson.dumps({**parsed, field: joined})


def _joined(key: str, own: Any, join: Callable[[str, str], str]) -> Any:
    """Return `key`, joined with the request's own key if it has one. An own key that is not a string is returned as it
    is, so that the engine refuses it."""
    if own is None or own == "":
        return key
    return join(key, own) if isinstance(own, str) else own

"""Requests with fields of our own, written without parsing what may hold a long prompt. Pure."""

from __future__ import annotations

_NEAR = 64  # bytes that are looked at first


def extended(body: bytes, fields: bytes) -> bytes:
    """A JSON object with these fields, as they are spelled, behind its own. Anything else stays as it is."""
    whole = body.rstrip()
    if not whole.endswith(b"}"):
        return body
    inside = whole[-_NEAR:-1].rstrip() or whole[:-1].rstrip()
    comma = b"" if inside.endswith(b"{") else b","
    return b"".join((memoryview(whole)[:-1], comma, fields, b"}"))

"""Requests with fields of our own, written without parsing what may hold a long prompt. Pure."""

from __future__ import annotations


def extended(body: bytes, fields: bytes) -> bytes:
    """A JSON object with these fields, as they are spelled, behind its own. Anything else stays as it is."""
    whole = body.rstrip()
    if not whole.endswith(b"}"):
        return body
    comma = b"" if whole[:-1].rstrip().endswith(b"{") else b","
    return b"".join((whole[:-1], comma, fields, b"}"))

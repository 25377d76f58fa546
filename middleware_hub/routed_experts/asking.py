"""The request for the engine: rows asked for from the first that nobody holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import orjson

from miles_router import Exchange

WANTED, START = "return_routed_experts", "routed_experts_start_len"
_NAMES = (b'"return_routed_experts"', b'"routed_experts_start_len"')


@dataclass(frozen=True)
class Asked:
    """A request with rows asked for from row `start` on; `wanted`: the client asked for them itself."""

    body: bytes
    start: int
    wanted: bool = False


def ask(exchange: Exchange, body: bytes, start: int, *, may_want: bool) -> Asked:
    """Ask for rows from `start` on. What a client asked for itself stays as it is where it `may_want` them.

    Raises:
        BadRequest: not JSON.
    """
    if not any(name in body for name in _NAMES):
        return Asked(_extended(body, start), start)
    parsed = exchange.loads(body)
    if not isinstance(parsed, Mapping):
        return Asked(body, start)  # the engine says what is wrong with it
    if may_want and parsed.get(WANTED):
        own = parsed.get(START)
        return Asked(body, own if isinstance(own, int) else 0, wanted=True)
    return Asked(orjson.dumps({**parsed, WANTED: True, START: start}), start)


def _extended(body: bytes, start: int) -> bytes:
    """A JSON object with our fields behind its own, without parsing it: it may hold a long prompt."""
    whole = body.rstrip()
    if not whole.endswith(b"}"):
        return body
    comma = b"" if whole[:-1].rstrip().endswith(b"{") else b","
    return b'%b%b"%b":true,"%b":%d}' % (whole[:-1], comma, WANTED.encode(), START.encode(), start)

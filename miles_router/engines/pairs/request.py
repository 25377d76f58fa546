"""The request that both halves of a pair receive. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from miles_router.engines.json_bytes import Field, Incomplete
from miles_router.engines.rows import RowFields

#: The number of bits of a room. A request with several prompts uses consecutive rooms, one for each prompt.
ROOM_BITS = 62


@dataclass(frozen=True)
class PairedRequest:
    """A request to both halves.

    Attributes:
        body: the body for both halves, without the room.
        rows: the kinds of rows that the client wants.
        prompt_logprobs: whether the client wants logprobs that only the prefill half has.
    """

    body: bytes
    rows: tuple[RowFields, ...] = ()
    prompt_logprobs: bool = False


def has_value(body: bytes, field: Field, wanted: Callable[[Any], bool]) -> bool:
    """Return True if `field` has a value that `wanted` accepts, at any depth of the body. False for unreadable JSON."""
    if field.quoted not in body:
        return False
    try:
        return any(map(wanted, field.values(body)))
    except Incomplete:
        return False  # the engine reports the error

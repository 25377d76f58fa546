"""What both halves of a pair are asked. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from miles_router.engines.rows import RowFields
from miles_router.engines.scan import Field, Incomplete

#: Rooms are numbers of at most so many bits; a list of prompts takes one for each, from its own on.
ROOM_BITS = 62


@dataclass(frozen=True)
class PairedRequest:
    """One request to both halves.

    Attributes:
        body: as both are sent it, but for the room.
        rows: the kinds of rows that are wanted.
        prompt_logprobs: whether logprobs are wanted that the prefill half alone has.
    """

    body: bytes
    rows: tuple[RowFields, ...] = ()
    prompt_logprobs: bool = False


def has_value(body: bytes, field: Field, wanted: Callable[[Any], bool]) -> bool:
    """Whether a field has a value of this kind somewhere in a request."""
    if field.quoted not in body:
        return False
    try:
        return any(map(wanted, field.values(body)))
    except Incomplete:
        return False  # the engine says what is wrong with it

"""Counts of tokens in an answer's `usage` that cannot be, such as more reasoning than answer. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Any

from miles_router.engines.answers import token_count

#: Fields of a usage that are parts of another, by the object that they stand in, if any.
PARTS = (
    ("prompt_tokens", "prompt_tokens_details", "cached_tokens"),
    ("completion_tokens", "completion_tokens_details", "reasoning_tokens"),
    ("completion_tokens", None, "reasoning_tokens"),
)
HOLDERS = frozenset(holder for _, holder, _ in PARTS if holder is not None)


def sound_usage(usage: Any) -> Any:
    """Return a usage without the counts that cannot be: what is no whole number from 0 is left out, and so is a part
    that is larger than its whole. The total is the sum. What should be an object and is none is left out."""
    if not isinstance(usage, Mapping):
        return None
    sound = {
        name: value for name, value in usage.items() if name not in HOLDERS or isinstance(value, Mapping | NoneType)
    }
    wholes: dict[str, int] = {}
    for name in ("prompt_tokens", "completion_tokens"):
        count = token_count(usage, name)
        if count is not None and count >= 0:
            wholes[name] = count
        elif name in sound:
            del sound[name]
    if "total_tokens" in sound:
        sound["total_tokens"] = sum(wholes.values())
    for whole, holder, part in PARTS:
        held = sound if holder is None else sound.get(holder)
        if not isinstance(held, Mapping) or part not in held:
            continue
        count = token_count(held, part)
        if count is None or not 0 <= count <= wholes.get(whole, 0):
            kept = {name: value for name, value in held.items() if name != part}
            sound = kept if holder is None else {**sound, holder: kept}
    return sound

"""Slots: the fixed parts into which sessions and texts are dealt, so that each part has one owner and one file."""

from __future__ import annotations

from hashlib import blake2b

#: Of one router, however many processes and machines it has: another count of them only deals the slots anew.
SLOTS = 64
#: A slot beside those that names are dealt into: what belongs to the router as a whole.
CONTROL = SLOTS
ALL_SLOTS = (*range(SLOTS), CONTROL)


def slot_of(name: str) -> int:
    """The slot of a session's id, or of whatever names a thing that has one owner."""
    return int.from_bytes(blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big") % SLOTS

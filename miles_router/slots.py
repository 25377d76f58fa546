"""Slots: the fixed number of groups into which sessions and texts are hashed; each has one owner and one file."""

from __future__ import annotations

from hashlib import blake2b

#: The same for any number of processes and machines: a new number of them only redistributes the slots.
SLOTS = 64
#: An additional slot for state of the router as a whole.
CONTROL = SLOTS
ALL_SLOTS = (*range(SLOTS), CONTROL)


def slot_of(name: str) -> int:
    """Return the slot of a session id or of another object's name."""
    return int.from_bytes(blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big") % SLOTS

"""Slots: a fixed number of partitions of sessions and texts. Each slot has one owning process and one state file."""

from __future__ import annotations

from hashlib import blake2b

#: The number of slots, whatever the number of processes and machines. Changing that number only reassigns slots.
SLOTS = 64
#: An additional slot for state of the whole router; `slot_of` never returns it.
CONTROL = SLOTS
ALL_SLOTS = (*range(SLOTS), CONTROL)


def slot_of(name: str) -> int:
    """Return the slot, from 0 to `SLOTS` - 1, of a session id or of another name that has one owner."""
    return int.from_bytes(blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big") % SLOTS

"""The shapes of what is held: rows of an owner, and what changes them."""

from __future__ import annotations

from typing import Literal, NamedTuple

#: When a commit is durable: once it outlives the loss of this process, or that of the machine.
Sync = Literal["process", "machine"]


class StateRow(NamedTuple):
    """One row of an owner. Rows of one kind are in the order of their keys, numbers before texts."""

    kind: str
    key: int | str
    value: bytes


class Change(NamedTuple):
    """What becomes of one row of an owner; a value of None deletes it. One commit has each key once."""

    kind: str
    key: int | str
    value: bytes | bytearray | memoryview | None

    @property
    def size(self) -> int:
        """Bytes it weighs while it waits."""
        return ROW + (len(self.value) if self.value is not None else 0)


#: Bytes that a row weighs beside its value.
ROW = 256

"""The shapes of what is held: rows of an owner, and what changes them."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

import orjson

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

_LENGTH = struct.Struct("<I")


def with_header(header: Mapping[str, Any], parts: Iterable[bytes]) -> bytes:
    """A row's value: the length of the header (4 bytes, little-endian), the header as JSON, then bytes."""
    written = orjson.dumps(header, default=dict)
    return b"".join((_LENGTH.pack(len(written)), written, *parts))


def header_of(value: bytes) -> tuple[dict[str, Any], int]:
    """The header of such a value, and where the bytes behind it begin.

    Raises:
        ValueError: it has none.
    """
    try:
        end = _LENGTH.size + _LENGTH.unpack_from(value)[0]
    except struct.error as error:
        raise ValueError(str(error)) from None
    header = orjson.loads(value[_LENGTH.size : end])
    if end > len(value) or not isinstance(header, dict):
        raise ValueError("it is cut, or its header is no object")
    return header, end

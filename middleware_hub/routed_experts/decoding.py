"""Decode base64 of int32 chunk by chunk, as it arrives, into the smallest integer type that holds the ids.

The whole string never exists in memory, and no id becomes a Python object. pybase64 and numpy decode and narrow a chunk
in the processor's cache, faster than the kernel delivers it.
"""

from __future__ import annotations

import binascii
from typing import Any

import numpy as np
import numpy.typing as npt
import pybase64

from miles_router.trajectory.rows import Blocks, RowArray, RowKind

QUANTUM = 16  # characters: 12 bytes, three int32
AT_ONCE = 1 << 18  # characters, a multiple of QUANTUM: stays in a core's cache
WIRE_TYPE = np.dtype("<i4")
UNSIGNED = np.dtype("<u4")  # a negative id appears as a very large one
QUOTE = b'"'
#: Bytes of a block of ids. The last block of an answer is shorter.
BLOCK = 1 << 18


class Decoder:
    """A decoder of one string of ids.

    Args:
        kind: the kind of the rows.
        limit: bytes of ids to keep. Of a longer string nothing is kept, and `finish` raises.
    """

    def __init__(self, kind: RowKind, limit: int) -> None:
        #: The largest id so far.
        self.largest = -1
        self._kind = kind
        self._limit = limit
        self._rest = b""
        self._wire_type: np.dtype[np.integer[Any]] = WIRE_TYPE if kind.least < 0 else UNSIGNED
        self._type = kind.types[0]
        self._largest_allowed = int(np.iinfo(self._type).max)
        self._full: list[RowArray] = []
        self._block: RowArray = np.empty(0, self._type)  # the block being filled
        self._filled = 0
        self._failure: tuple[str, str] | None = None  # not the exception: its traceback would reference this decoder

    def feed(self, data: memoryview) -> int:
        """Decode characters up to a quotation mark; return how many were consumed. `finish` reports invalid data.

        The mark is searched for only where decoding fails.
        """
        at = 0
        while at < len(data):
            block = data[at : at + self._next_length(len(data))]
            if self._failure is not None or not self._decode_block(block):
                end = bytes(block).find(QUOTE)
                if self._failure is None and not (end >= 0 and self._decode_block(block[:end])):
                    self._fail("are_rows", "they are not base64")
                if end >= 0:
                    return at + end
            at += len(block)
        return len(data)

    def _next_length(self, size: int) -> int:
        """Return how many characters to decode next: few behind a rest, which has to be joined with them in a copy."""
        return (QUANTUM if self._rest and size > AT_ONCE else AT_ONCE) - len(self._rest)

    def _decode_block(self, block: memoryview) -> bool:
        """Decode a block; return False if it is not base64."""
        characters = memoryview(b"".join((self._rest, block))) if self._rest else block
        whole = len(characters) - len(characters) % QUANTUM
        rest = bytes(characters[whole:])
        if QUOTE in rest or not self._decode(characters[:whole]):
            return False
        self._rest = rest
        return True

    def _decode(self, characters: memoryview) -> bool:
        try:
            raw = pybase64.b64decode(characters, validate=True)
        except (binascii.Error, ValueError):
            return False
        if len(raw) % WIRE_TYPE.itemsize:
            self._fail("are_rows", "their base64 has padding before its end, or ends within an id")
        elif raw:
            self._append(np.frombuffer(raw, self._wire_type))
        return True

    def _append(self, ids: npt.NDArray[np.integer[Any]]) -> None:
        self.largest = max(self.largest, int(ids.max()))
        if self.largest > self._largest_allowed:
            self._widen()
        if self._kind.least < 0 and int(ids.min()) < self._kind.least:
            self._fail("of_the_model", f"an id is below {self._kind.least}")
        if (self._count + len(ids)) * self._type.itemsize > self._limit:
            self._fail("fit", f"they take more than {self._limit} bytes (max_bytes, --max-answer-bytes)")
        while len(ids) and self._failure is None:
            if self._filled == len(self._block):
                self._next_block()
            part = ids[: len(self._block) - self._filled]
            self._block[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            ids = ids[len(part) :]

    @property
    def nbytes(self) -> int:
        return self._count * self._type.itemsize

    @property
    def _count(self) -> int:
        return sum(map(len, self._full)) + self._filled

    def _next_block(self) -> None:
        if self._filled:
            self._full.append(self._block)
        self._block, self._filled = np.empty(BLOCK // self._type.itemsize, self._type), 0

    def _widen(self) -> None:
        widest = self._kind.types[-1]
        self._largest_allowed = int(np.iinfo(widest).max)
        if self.largest > self._largest_allowed:
            self._fail("of_the_model", f"an id is below {self._kind.least} or above {self._largest_allowed}")
            return
        self._full = [block.astype(widest) for block in (*self._full, self._block[: self._filled])]
        self._type, self._block, self._filled = widest, np.empty(0, widest), 0

    def _fail(self, invariant: str, message: str) -> None:
        self._failure = self._failure or (invariant, message)
        self._full, self._block, self._filled, self._rest = [], np.empty(0, self._kind.types[0]), 0, b""

    def end(self) -> None:
        """Finish decoding, and free unused memory of the last block."""
        if self._rest and not self._decode(memoryview(self._rest)):
            self._fail("are_rows", "they are not base64")
        self._rest = b""
        if self._filled < len(self._block):
            self._block = self._block[: self._filled].copy()

    def finish(self) -> Blocks:
        """Return all ids as one flat sequence.

        Raises:
            InvalidTrajectory: `are_rows`, `of_the_model` or `fit`, prefixed with the kind's ids (`experts_fit`).
        """
        self.end()
        if self._failure is not None:
            raise self._kind.invalid(*self._failure)
        return Blocks(block for block in (*self._full, self._block) if len(block))


def encoded(rows: RowArray) -> bytes:
    """Return rows in SGLang's form: base64 of row-major int32."""
    return pybase64.b64encode(np.ascontiguousarray(rows, dtype="<i4").data)

"""Base64 of int32 decoded piece by piece, as it arrives, into the smallest type that holds the ids.

The whole string never exists here, and no id becomes a Python object: a piece is decoded and narrowed in the
processor's cache by pybase64 and numpy, which takes less time than the kernel needs to bring it in.
"""

from __future__ import annotations

import binascii
from typing import Any

import numpy as np
import numpy.typing as npt
import pybase64

from miles_router.trajectory import InvalidTrajectory
from miles_router.trajectory.experts import Rows

QUANTUM = 16  # characters: 12 bytes, three int32
AT_ONCE = 1 << 18  # characters, a multiple of QUANTUM: what stays in a core's cache
SENT = np.dtype("<u4")  # negative ids show as very large ones
NARROW: np.dtype[np.unsignedinteger[Any]] = np.dtype("u1")
WIDE: np.dtype[np.unsignedinteger[Any]] = np.dtype("<u2")
LEAST = 1 << 16  # ids that there is room for from the beginning
MOST = 1 << 28  # ids that room is made for on a worker's word alone
LARGEST = {NARROW: 0xFF, WIDE: 0xFFFF}


class Decoder:
    """Takes the characters of one string; gives the ids in it.

    Args:
        limit: bytes of ids that are kept; of what is longer, nothing is, and `finish` says so.
        expected: characters that may come, where that is known: room is made for them at once.
    """

    def __init__(self, limit: int, expected: int = 0) -> None:
        self.largest = -1
        self._limit = limit
        self._rest = b""
        self._kept: Rows = np.empty(max(min(expected // QUANTUM * 3, limit, MOST), LEAST), NARROW)
        self._count = 0
        self._failure: tuple[str, str] | None = None  # not the error: its traceback would lead back to here

    def feed(self, data: memoryview) -> None:
        """More characters. What is wrong with them is told at the end."""
        if self._failure is not None:
            return
        if self._rest:  # in front of no more than is decoded at once: a large piece is not copied for it
            first = AT_ONCE - len(self._rest)
            self._decode(memoryview(b"".join((self._rest, data[:first]))))
            data = data[first:]
            if not data:
                return
        self._decode(data)

    def _decode(self, data: memoryview) -> None:
        whole = len(data) - len(data) % QUANTUM
        for begin in range(0, whole, AT_ONCE):
            self._take(data[begin : min(begin + AT_ONCE, whole)])
        self._rest = bytes(data[whole:])

    def _take(self, characters: memoryview) -> None:
        try:
            raw = pybase64.b64decode(characters, validate=True)
        except (binascii.Error, ValueError):
            self._fail("experts_are_rows", "they are no base64")
            return
        if len(raw) % SENT.itemsize:
            self._fail("experts_are_rows", "their base64 ends before its end, or within an id")
        elif raw and self._failure is None:
            self._keep(np.frombuffer(raw, SENT))

    def _keep(self, ids: npt.NDArray[np.uint32]) -> None:
        self.largest = max(self.largest, int(ids.max()))
        if self.largest > LARGEST[self._kept.dtype]:
            self._widen()
        if self._failure is not None:
            return
        end = self._count + len(ids)
        if end * self._kept.itemsize > self._limit:
            self._fail("experts_fit", f"they take more than the {self._limit} bytes that may be held (max_bytes)")
            return
        if end > len(self._kept):
            self._move(max(end, 2 * len(self._kept)), self._kept.dtype)
        self._kept[self._count : end] = ids
        self._count = end

    def _widen(self) -> None:
        if self.largest > LARGEST[WIDE]:
            self._fail("experts_of_the_model", "an expert's id is below 0 or above 65535")
        else:
            self._move(len(self._kept), WIDE)

    def _move(self, capacity: int, dtype: np.dtype[np.unsignedinteger[Any]]) -> None:
        moved = np.empty(capacity, dtype)
        moved[: self._count] = self._kept[: self._count]
        self._kept = moved

    def _fail(self, invariant: str, message: str) -> None:
        self._failure = self._failure or (invariant, message)
        self._kept = self._kept[:0].copy()
        self._rest = b""

    def end(self) -> None:
        """No more characters come: room that was not needed is given back."""
        if self._rest:
            self._take(memoryview(self._rest))
            self._rest = b""
        if self._failure is None:
            self._kept.resize(self._count, refcheck=False)

    def finish(self) -> Rows:
        """All ids, flat.

        Raises:
            InvalidTrajectory: `experts_are_rows`, `experts_of_the_model` or `experts_fit`.
        """
        self.end()
        if self._failure is not None:
            raise InvalidTrajectory(*self._failure)
        return self._kept


def encoded(rows: Rows) -> bytes:
    """Rows in SGLang's own form: base64 of row-major int32."""
    return pybase64.b64encode(np.ascontiguousarray(rows, dtype="<i4").data)

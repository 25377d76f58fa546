"""The codec of blobs: a JSON header, then raw bytes. Arrays stay the bytes that they are in memory, so that neither
side copies or parses them; orjson, which the router has anyway, is the fastest reader for the rest."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import orjson

#: When a commit is durable: once it outlives the loss of this process, or that of the machine.
Sync = Literal["process", "machine"]
#: Blobs of one owner by their numbers.
Blobs = Mapping[int, bytes]
#: The same to be written; None deletes the blob of that number.
Changes = Mapping[int, bytes | None]

_LENGTH = struct.Struct("<I")


def with_header(header: Mapping[str, Any], parts: Iterable[bytes] = ()) -> bytes:
    """Return the length of the header (4 bytes, little-endian), the header as JSON, then the parts."""
    written = orjson.dumps(header, default=dict)
    return b"".join((_LENGTH.pack(len(written)), written, *parts))


def header_of(blob: bytes) -> tuple[dict[str, Any], int]:
    """Return the header of such a blob, and where the bytes behind it begin.

    Raises:
        ValueError: the blob has no header.
    """
    try:
        end = _LENGTH.size + _LENGTH.unpack_from(blob)[0]
    except struct.error as error:
        raise ValueError(str(error)) from None
    header = orjson.loads(blob[_LENGTH.size : end])
    if end > len(blob) or not isinstance(header, dict):
        raise ValueError("it is cut, or its header is no object")
    return header, end

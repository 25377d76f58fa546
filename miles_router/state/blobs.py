"""The codec of stored blobs: a JSON header, then raw bytes.

Arrays keep their bytes as they are in memory, so neither side copies or parses them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import orjson

#: When a commit counts as durable: when it survives the loss of this process, or the loss of the machine.
Sync = Literal["process", "machine"]
#: Blobs of one owner, by number.
Blobs = Mapping[int, bytes]
#: Blobs to write, by number; None deletes the blob.
Changes = Mapping[int, bytes | None]

_LENGTH = struct.Struct("<I")


def with_header(header: Mapping[str, Any], parts: Iterable[bytes] = ()) -> bytes:
    """Return the length of the header (4 bytes, little-endian), the header as JSON, then the parts."""
    written = orjson.dumps(header, default=dict)
    return b"".join((_LENGTH.pack(len(written)), written, *parts))


def header_of(blob: bytes) -> tuple[dict[str, Any], int]:
    """Return the header of a blob that `with_header` wrote, and the offset of the first byte after the header.

    Raises:
        ValueError: the blob has no header.
    """
    try:
        end = _LENGTH.size + _LENGTH.unpack_from(blob)[0]
    except struct.error as error:
        raise ValueError(str(error)) from None
    header = orjson.loads(blob[_LENGTH.size : end])
    if end > len(blob) or not isinstance(header, dict):
        raise ValueError("the blob is truncated, or its header is not a JSON object")
    return header, end

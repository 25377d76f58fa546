"""safetensors files, written and read.

The format (huggingface/safetensors, "Format"): 8 bytes little-endian header length, a JSON header of
`{name: {dtype, shape, data_offsets}}` with string-valued `__metadata__`, then the tensors' bytes. It takes a few lines
here, so that the core needs no further package; the tests hold it against the official one.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from miles_router.trajectory.pieces import Malformed

DTYPES: dict[str, np.dtype[Any]] = {
    "I16": np.dtype("<i2"),
    "I32": np.dtype("<i4"),
    "F32": np.dtype("<f4"),
    "U8": np.dtype("u1"),
    "U16": np.dtype("<u2"),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000
LENGTH = struct.Struct("<Q")
ALIGNMENT = 8


def pack(arrays: Mapping[str, npt.NDArray[Any]], metadata: Mapping[str, str]) -> bytes:
    """Write named arrays of any shape as one file. Their bytes are copied once, into the file.

    Raises:
        ValueError: an array is of another type than int16, int32, float32, uint8 and uint16.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    chunks = []
    offset = 0
    for name, array in sorted(
        arrays.items(), key=lambda item: -item[1].dtype.itemsize
    ):  # widest first: all stay aligned
        dtype = array.dtype.newbyteorder("<")
        if dtype not in NAMES:
            raise ValueError(f"{name} is of type {array.dtype}, which is none of {', '.join(map(str, NAMES))}")
        chunk = np.ascontiguousarray(array, dtype=dtype).reshape(-1).view(np.uint8).data
        header[name] = {
            "dtype": NAMES[dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + len(chunk)],
        }
        chunks.append(chunk)
        offset += len(chunk)
    head = orjson.dumps(header)
    head += b" " * (-len(head) % ALIGNMENT)
    return b"".join([LENGTH.pack(len(head)), head, *chunks])


def unpack(data: bytes) -> tuple[dict[str, npt.NDArray[Any]], dict[str, str]]:
    """The arrays (read-only views of `data`) and the metadata of a file.

    Raises:
        Malformed: it is cut, is no such file, or has a type that `pack` does not write.
    """
    try:
        (length,) = LENGTH.unpack_from(data)
        if length > min(MAX_HEADER_BYTES, len(data) - LENGTH.size):
            raise Malformed("the header of a safetensors file is longer than the file")
        header = orjson.loads(data[LENGTH.size : LENGTH.size + length])
        metadata = dict(header.pop("__metadata__", {}))
        body = memoryview(data)[LENGTH.size + length :]
        return {name: _array(body, entry) for name, entry in header.items()}, metadata
    except Malformed:
        raise
    except (struct.error, AttributeError, KeyError, TypeError, ValueError) as error:
        raise Malformed(f"no safetensors file: {error!r}") from None


def _array(body: memoryview, entry: Mapping[str, Any]) -> npt.NDArray[Any]:
    start, end = entry["data_offsets"]
    dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
    if not 0 <= start <= end <= len(body) or int(np.prod(shape, dtype=np.int64)) * dtype.itemsize != end - start:
        raise Malformed("a tensor's offsets in a safetensors file do not fit its shape or the file")
    flat: npt.NDArray[Any] = np.frombuffer(body[start:end], dtype=dtype)
    return flat.reshape(shape)

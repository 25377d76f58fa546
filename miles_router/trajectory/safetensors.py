"""A writer and a reader of safetensors files.

The format (huggingface/safetensors, "Format"): 8 bytes little-endian header length, a JSON header of `{name: {dtype,
shape, data_offsets}}` with string-valued `__metadata__`, then the tensors' bytes. It is implemented here to avoid a
dependency of the core; tests compare it with the official package.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from mmap import mmap
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from miles_router.trajectory.pieces import Malformed

DTYPES: dict[str, np.dtype[Any]] = {
    "I64": np.dtype("<i8"),
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "I32": np.dtype("<i4"),
    "U16": np.dtype("<u2"),
    "I16": np.dtype("<i2"),
    "U8": np.dtype("u1"),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
#: The official library's order of tensors: by type as above, widest first to keep all aligned; then by name.
ORDER = {name: place for place, name in enumerate(DTYPES)}
MAX_HEADER_BYTES = 100_000_000
LENGTH = struct.Struct("<Q")
ALIGNMENT = 8
#: Bytes of an array that are converted per step.
CHUNK = 1 << 20


class TensorFile:
    """A safetensors file of named arrays that is ready to be written.

    Args:
        arrays: the tensors, of any shape.
        metadata: strings for the header.
        types: by array name, another type to write; it must hold all values. The array is converted in pieces while it
            is written.

    Raises:
        ValueError: an array would have a type that is not in `DTYPES`.
    """

    def __init__(
        self,
        arrays: Mapping[str, npt.NDArray[Any]],
        metadata: Mapping[str, str] | None = None,
        types: Mapping[str, npt.DTypeLike] | None = None,
    ) -> None:
        header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        columns = []
        for name, array in arrays.items():
            dtype = np.dtype((types or {}).get(name, array.dtype)).newbyteorder("<")
            if dtype not in NAMES:
                raise ValueError(
                    f"{name} is of type {dtype}; the types that can be written are {', '.join(map(str, NAMES))}"
                )
            columns.append((ORDER[NAMES[dtype]], name, array, dtype))
        columns.sort(key=lambda column: column[:2])
        offset = 0
        for _, name, array, dtype in columns:
            end = offset + array.size * dtype.itemsize
            header[name] = {"dtype": NAMES[dtype], "shape": list(array.shape), "data_offsets": [offset, end]}
            offset = end
        head = orjson.dumps(header)
        head += b" " * (-len(head) % ALIGNMENT)
        self._head = LENGTH.pack(len(head)) + head
        self._columns = [(array, dtype) for _, _, array, dtype in columns]
        #: The size of the file in bytes.
        self.nbytes = len(self._head) + offset

    def chunks(self) -> Iterator[bytes | memoryview]:
        """Yield the file's bytes in order. Contiguous arrays that need no conversion are not copied."""
        yield self._head
        for array, dtype in self._columns:
            flat = np.ascontiguousarray(array).reshape(-1)
            step = len(flat) if flat.dtype == dtype else CHUNK // dtype.itemsize
            for start in range(0, len(flat), max(step, 1)):
                yield flat[start : start + step].astype(dtype, copy=False).view(np.uint8).data


def pack(arrays: Mapping[str, npt.NDArray[Any]], metadata: Mapping[str, str]) -> bytes:
    """Return named arrays as one file; their bytes are copied once. Raises as `TensorFile`."""
    return b"".join(TensorFile(arrays, metadata).chunks())


def unpack(data: bytes | mmap) -> tuple[dict[str, npt.NDArray[Any]], dict[str, str]]:
    """Return the arrays (read-only views of `data`) and the metadata of a file.

    Raises:
        Malformed: the file is incomplete, is not a safetensors file, or has a type that `pack` does not write.
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
        raise Malformed(f"not a safetensors file: {error!r}") from None


def _array(body: memoryview, entry: Mapping[str, Any]) -> npt.NDArray[Any]:
    start, end = entry["data_offsets"]
    dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
    if not 0 <= start <= end <= len(body) or int(np.prod(shape, dtype=np.int64)) * dtype.itemsize != end - start:
        raise Malformed("a tensor's offsets in a safetensors file do not fit its shape or the file")
    flat: npt.NDArray[Any] = np.frombuffer(body[start:end], dtype=dtype)
    return flat.reshape(shape)

"""A trajectory on the wire: JSON for people, safetensors for trainers.

safetensors (huggingface/safetensors, "Format"): 8 bytes little-endian header length, a JSON header of
`{name: {dtype, shape, data_offsets}}` with string-valued `__metadata__`, then the tensors' bytes. Written and read here
in a few lines so that the core needs no further package; the tests hold it against the official one.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from miles_router.trajectory.pieces import InvalidTrajectory
from miles_router.trajectory.trajectory import Trajectory, from_arrays

DTYPES: dict[str, np.dtype[Any]] = {
    "I32": np.dtype("<i4"),
    "F32": np.dtype("<f4"),
    "U8": np.dtype("u1"),
    "U16": np.dtype("<u2"),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000
LENGTH = struct.Struct("<Q")
ALIGNMENT = 8
VERSIONS = "weight_versions"


def to_json(trajectory: Trajectory) -> dict[str, Any]:
    """`{"tokens", "logprobs", "loss_mask", "weight_versions": [{"version", "start", "end"}]}`, arrays as numpy arrays,
    which orjson writes with `OPT_SERIALIZE_NUMPY`."""
    return {
        "tokens": np.ascontiguousarray(trajectory.tokens),
        "logprobs": trajectory.logprobs,
        "loss_mask": trajectory.loss_mask,
        VERSIONS: [run._asdict() for run in trajectory.weight_versions],
    }


def from_json(data: Mapping[str, Any]) -> Trajectory:
    """The trajectory that `to_json` described.

    Raises:
        InvalidTrajectory: `complete`: a field is missing; else as `from_arrays`.
    """
    try:
        runs = [(run["version"], run["start"], run["end"]) for run in data[VERSIONS]]
        return from_arrays(data["tokens"], data["logprobs"], data["loss_mask"], runs)
    except (KeyError, TypeError) as error:
        raise InvalidTrajectory("complete", f"a field is missing or of the wrong kind: {error}") from None


def to_bytes(trajectory: Trajectory, metadata: Mapping[str, str] | None = None) -> bytes:
    """The safetensors form: tensors `tokens` I32, `logprobs` F32, `loss_mask` U8, versions as JSON in the metadata."""
    runs = orjson.dumps([run._asdict() for run in trajectory.weight_versions]).decode()
    arrays: dict[str, npt.NDArray[Any]] = {
        "tokens": trajectory.tokens,
        "logprobs": trajectory.logprobs,
        "loss_mask": trajectory.loss_mask,
    }
    return pack(arrays, {**(metadata or {}), VERSIONS: runs})


def from_bytes(data: bytes) -> tuple[Trajectory, dict[str, str]]:
    """The trajectory in a safetensors file, and the metadata beside it.

    Raises:
        InvalidTrajectory: `safetensors`: it is no such file; else as `from_arrays`.
    """
    arrays, metadata = unpack(data)
    try:
        runs = [(run["version"], run["start"], run["end"]) for run in orjson.loads(metadata.pop(VERSIONS, "[]"))]
        return from_arrays(arrays["tokens"], arrays["logprobs"], arrays["loss_mask"], runs), metadata
    except (KeyError, TypeError, orjson.JSONDecodeError) as error:
        raise InvalidTrajectory("complete", f"a tensor or run is missing or of the wrong kind: {error}") from None


def pack(arrays: Mapping[str, npt.NDArray[Any]], metadata: Mapping[str, str]) -> bytes:
    """Write named arrays (int32, float32, uint8, uint16; any shape) as safetensors."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    chunks = []
    offset = 0
    for name, array in sorted(
        arrays.items(), key=lambda item: -item[1].dtype.itemsize
    ):  # widest first: all stay aligned
        chunk = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).tobytes()
        offsets = [offset, offset + len(chunk)]
        header[name] = {"dtype": NAMES[array.dtype], "shape": list(array.shape), "data_offsets": offsets}
        chunks.append(chunk)
        offset += len(chunk)
    head = orjson.dumps(header)
    head += b" " * (-len(head) % ALIGNMENT)
    return b"".join([LENGTH.pack(len(head)), head, *chunks])


def unpack(data: bytes) -> tuple[dict[str, npt.NDArray[Any]], dict[str, str]]:
    """The arrays (read-only views of `data`) and metadata of a safetensors file.

    Raises:
        InvalidTrajectory: `safetensors`: it is cut, malformed, or has a dtype that no trajectory has.
    """
    try:
        (length,) = LENGTH.unpack_from(data)
        if length > min(MAX_HEADER_BYTES, len(data) - LENGTH.size):
            raise InvalidTrajectory("safetensors", "the header is longer than the file")
        header = orjson.loads(data[LENGTH.size : LENGTH.size + length])
        metadata = dict(header.pop("__metadata__", {}))
        body = memoryview(data)[LENGTH.size + length :]
        return {name: _array(body, entry) for name, entry in header.items()}, metadata
    except (struct.error, orjson.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, InvalidTrajectory):
            raise
        raise InvalidTrajectory("safetensors", f"not a safetensors file of a trajectory: {error}") from None


def _array(body: memoryview, entry: Mapping[str, Any]) -> npt.NDArray[Any]:
    start, end = entry["data_offsets"]
    dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
    if not 0 <= start <= end <= len(body) or int(np.prod(shape, dtype=np.int64)) * dtype.itemsize != end - start:
        raise InvalidTrajectory("safetensors", "a tensor's offsets do not fit its shape or the file")
    flat: npt.NDArray[Any] = np.frombuffer(body[start:end], dtype=dtype)
    return flat.reshape(shape)

"""Trajectories as JSON and as safetensors, the latter held against the official library both ways."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load, save

from miles_router.trajectory import InvalidTrajectory, Piece, Trajectory, from_bytes, from_json, to_bytes, to_json
from miles_router.trajectory.wire import pack, unpack

TURN = Trajectory([Piece.given([1, 2]), Piece.sampled([3, 4], [-0.5, -0.1], "v1"), Piece.sampled([5], [-9.0], "é")])
LOGPROBS = st.floats(-50, 0, width=32)
SAMPLED = st.lists(st.tuples(st.integers(0, 2**31 - 1), LOGPROBS), min_size=1, max_size=5)
PIECES = st.one_of(
    st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5).map(Piece.given),
    st.builds(
        lambda pairs, version: Piece.sampled([t for t, _ in pairs], [p for _, p in pairs], version), SAMPLED, st.text()
    ),
)


@given(pieces=st.lists(PIECES, max_size=6))
def test_both_forms_give_back_what_they_were_given(pieces: list[Piece]) -> None:
    trajectory = Trajectory(pieces)
    as_json = orjson.loads(orjson.dumps(to_json(trajectory), option=orjson.OPT_SERIALIZE_NUMPY))
    assert from_json(as_json) == trajectory
    assert from_bytes(to_bytes(trajectory, {"rid": "r"})) == (trajectory, {"rid": "r"})


def test_the_official_library_reads_what_we_write(tmp_path: Any) -> None:
    data = to_bytes(TURN, {"rid": "r1"})
    tensors = load(data)
    assert {name: (str(each.dtype), each.tolist()) for name, each in tensors.items()} == {
        "tokens": ("int32", [1, 2, 3, 4, 5]),
        "logprobs": ("float32", np.array([0, 0, -0.5, -0.1, -9], dtype=np.float32).tolist()),
        "loss_mask": ("uint8", [0, 0, 1, 1, 1]),
    }
    path = tmp_path / "trajectory.safetensors"
    path.write_bytes(data)
    with safe_open(path, framework="numpy") as opened:
        metadata = opened.metadata()
    assert metadata["rid"] == "r1"
    assert json.loads(metadata["weight_versions"])[1] == {"version": "é", "start": 4, "end": 5}


def test_we_read_what_the_official_library_writes() -> None:
    runs = json.dumps([{"version": "v1", "start": 2, "end": 4}, {"version": "é", "start": 4, "end": 5}])
    arrays = {"tokens": TURN.tokens, "logprobs": TURN.logprobs, "loss_mask": TURN.loss_mask}
    data = save({name: np.array(each) for name, each in arrays.items()}, {"weight_versions": runs, "more": "kept"})
    assert from_bytes(data) == (TURN, {"more": "kept"})


def test_arrays_of_any_shape_are_packed_and_aligned() -> None:
    experts = np.arange(24, dtype=np.uint16).reshape(2, 3, 4)
    data = pack({"a": np.array([1], dtype=np.uint8), "experts": experts, "n": np.array([7], dtype=np.int32)}, {})
    assert np.array_equal(load(data)["experts"], experts)
    arrays, metadata = unpack(data)
    assert np.array_equal(arrays["experts"], experts)
    assert (arrays["a"].tolist(), arrays["n"].tolist(), metadata) == ([1], [7], {})
    assert struct.unpack_from("<Q", data)[0] % 8 == 0


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 7,
        to_bytes(TURN)[:-1],
        to_bytes(TURN)[:40],
        struct.pack("<Q", 2**60) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 4) + b"nope",
        to_bytes(TURN).replace(b'"I32"', b'"I64"'),
        to_bytes(TURN).replace(b'"shape":[5]', b'"shape":[6]'),
    ],
)
def test_damaged_files_are_refused(data: bytes) -> None:
    with pytest.raises(InvalidTrajectory) as refused:
        from_bytes(data)
    assert refused.value.invariant == "safetensors"


def test_what_is_missing_is_said() -> None:
    with pytest.raises(InvalidTrajectory, match=r"complete.*loss_mask"):
        from_json({"tokens": [1], "logprobs": [0.0], "weight_versions": []})
    with pytest.raises(InvalidTrajectory, match="complete"):
        from_bytes(pack({"tokens": np.array([1], dtype=np.int32)}, {}))
    with pytest.raises(InvalidTrajectory, match="aligned"):
        from_json({"tokens": [1], "logprobs": [], "loss_mask": [0], "weight_versions": []})

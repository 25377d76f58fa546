"""safetensors files, held against the official library both ways."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from safetensors.numpy import load, save

from miles_router.trajectory import Malformed
from miles_router.trajectory.safetensors import DTYPES, pack, unpack

ARRAYS = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=4).filter(
        lambda name: name != "__metadata__"
    ),
    st.sampled_from(list(DTYPES.values())).flatmap(
        lambda dtype: arrays_of.arrays(dtype, arrays_of.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=3))
    ),
    min_size=1,  # version 0.8.0 of the official library writes a broken header for no tensors and no metadata
    max_size=4,
)
METADATA = st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2)
ONE = pack({"tokens": np.array([1, 2, 3, 4, 5], dtype=np.int32)}, {"a": "é"})


def same(one: dict[str, npt.NDArray[Any]], other: dict[str, npt.NDArray[Any]]) -> bool:
    return one.keys() == other.keys() and all(
        each.dtype == other[name].dtype and each.shape == other[name].shape and each.tobytes() == other[name].tobytes()
        for name, each in one.items()
    )


@given(arrays=ARRAYS, metadata=METADATA)
def test_the_official_library_reads_what_we_write_and_we_what_it_writes(
    arrays: dict[str, npt.NDArray[Any]], metadata: dict[str, str]
) -> None:
    data = pack(arrays, metadata)
    assert same(load(data), arrays)
    for file in (data, save(arrays, metadata)):
        read, beside = unpack(file)
        assert same(read, arrays)
        assert beside == metadata


def test_arrays_of_any_layout_are_packed_and_aligned() -> None:
    experts = np.arange(24, dtype=np.uint16).reshape(2, 3, 4)
    data = pack(
        {
            "a": np.array([1], dtype=np.uint8),
            "turned": experts.T,
            "big": experts.astype(">u2"),
            "n": np.array([7], dtype=np.int32),
        },
        {},
    )
    arrays, _ = unpack(data)
    assert np.array_equal(arrays["turned"], experts.T)
    assert np.array_equal(arrays["big"], experts)
    assert (arrays["a"].tolist(), arrays["n"].tolist()) == ([1], [7])
    assert struct.unpack_from("<Q", data)[0] % 8 == 0


def test_a_type_that_no_trajectory_has_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="mask is of type bool"):
        pack({"mask": np.array([True])}, {})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 7,
        ONE[:-1],
        ONE[:40],
        struct.pack("<Q", 2**60) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 4) + b"nope",
        ONE.replace(b'"I32"', b'"I64"'),
        ONE.replace(b'"shape":[5]', b'"shape":[6]'),
        ONE.replace(b"[0,20]", b"[0,99]"),
        ONE.replace(b"[0,20]", b"[0]   "),
    ],
)
def test_damaged_files_are_refused(data: bytes) -> None:
    with pytest.raises(Malformed):
        unpack(data)

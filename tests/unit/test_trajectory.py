"""Exact tokens: cutting and joining lose nothing, files hold them, and broken ones are refused by name."""

from __future__ import annotations

import base64
import dataclasses
import json
import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from safetensors.numpy import load, save

from miles_router.trajectory import (
    InvalidTrajectory,
    Malformed,
    Piece,
    Sample,
    Trajectory,
    VersionRun,
    from_arrays,
    json_items,
)
from miles_router.trajectory.json_items import objects_of_list
from miles_router.trajectory.rows import KINDS, RowKind
from miles_router.trajectory.safetensors import DTYPES, pack, unpack
from miles_router.trajectory.sample import READERS, WRITERS, Format, read_json, read_safetensors

TURN = Trajectory(
    [
        Piece.given([1, 2, 3]),
        Piece.sampled([4, 5], [-0.5, -0.25], "1"),
        Piece.sampled([6], [-1.5], "2"),
        Piece.given([7]),
        Piece.sampled([8, 9], [0.0, -2.0], "2"),
    ]
)


def test_arrays_make_a_trajectory_and_come_back() -> None:
    assert from_arrays(TURN.tokens, TURN.logprobs, TURN.loss_mask, TURN.weight_versions) == TURN
    assert from_arrays([], [], []) == Trajectory()


@pytest.mark.parametrize(
    ("broken", "changed"),
    [
        ("tokens_are_ids", {"tokens": [-1, 2, 3], "logprobs": [0, 0], "mask": [0, 7, 0]}),
        ("tokens_are_ids", {"tokens": [1, 2**31, 3]}),
        ("tokens_are_ids", {"tokens": [1, "two", 3]}),
        ("tokens_are_ids", {"tokens": [[1], [2], [3]]}),
        ("aligned", {"logprobs": [0, 0], "mask": [0, 7]}),
        ("mask_is_binary", {"mask": [0, 2, 1], "logprobs": [0, 5.0, 0]}),
        ("logprobs_are_logprobs", {"logprobs": [0, 0.5, -1], "versions": [("1", 9, 3)]}),
        ("logprobs_are_logprobs", {"logprobs": [0, float("nan"), -1]}),
        ("versions_in_order", {"versions": [("1", 1, 3), ("2", 2, 3)]}),
        ("versions_in_order", {"versions": [("1", 2, 4)]}),
        ("versions_cover_the_loss", {"versions": [("1", 1, 2)]}),
    ],
)
def test_the_first_broken_invariant_is_named(broken: str, changed: dict[str, Any]) -> None:
    good: dict[str, Any] = {"tokens": [1, 2, 3], "logprobs": [0, -1, -1], "mask": [0, 1, 1], "versions": [("1", 1, 3)]}
    from_arrays(*good.values())
    with pytest.raises(InvalidTrajectory, match=broken) as refused:
        from_arrays(*{**good, **changed}.values())
    assert refused.value.invariant == broken


@pytest.mark.parametrize(
    ("broken", "make"),
    [
        ("tokens_are_ids", lambda: Piece.given([-3])),
        ("aligned", lambda: Piece.sampled([1, 2], [-1.0], "1")),
        ("aligned", lambda: Trajectory([Piece(TURN.tokens, np.array([-1], dtype=np.float32))]).logprobs),
        ("logprobs_are_logprobs", lambda: Piece.sampled([1], [2.0], "1")),
        ("logprobs_are_logprobs", lambda: Piece.sampled([1], ["x"], "1")),  # type: ignore[list-item]
    ],
)
def test_pieces_are_checked_as_they_are_made(broken: str, make: Any) -> None:
    with pytest.raises(InvalidTrajectory) as refused:
        make()
    assert refused.value.invariant == broken


def test_a_million_tokens_cost_bytes_each() -> None:
    long = Trajectory([Piece.sampled(np.arange(1_000_000), np.full(1_000_000, -1.0), "1")])
    assert long.nbytes == 8_000_000
    assert len(long[500_000:].pieces) == 1


GIVEN: dict[str, Any] = {
    "tokens": [11, 12, 21, 22, 13, 23],
    "loss_mask": [0, 0, 1, 1, 0, 1],
    "logprobs": [0.0, 0.0, -0.5, -0.25, 0.0, -1.5],
    "weight_versions": [{"version": "1", "start": 2, "end": 4}, {"version": "2", "start": 5, "end": 6}],
    "response": "yes 42 no",
    "response_length": 4,
    "status": "completed",
    "reward": 0.5,
    "label": "42",
    "metadata": {"session_id": "s", "turns": [{"turn": 0, "start": 2, "end": 4, "finish_reason": "stop"}]},
}
EXPERTS = np.arange(5 * 2 * 3, dtype=np.uint8).reshape(5, 2, 3)


def encoded(experts: Any) -> dict[str, Any]:
    data = base64.b64encode(experts.tobytes()).decode()
    return {"dtype": experts.dtype.name, "shape": list(experts.shape), "data": data}


def file_of(*samples: dict[str, Any], **rows: Any) -> bytes:
    """Samples as the router's safetensors, written by the official library."""
    tensors, facts = {}, []
    for place, sample in enumerate(samples):
        tensors[f"{place}.tokens"] = np.array(sample["tokens"], dtype=np.int32)
        tensors[f"{place}.loss_mask"] = np.array(sample["loss_mask"], dtype=np.uint8)
        tensors[f"{place}.logprobs"] = np.array(sample["logprobs"], dtype=np.float32)
        tensors |= {f"{place}.{name}": array for name, array in rows.items()}
        facts.append({name: value for name, value in sample.items() if name not in ("tokens", "loss_mask", "logprobs")})
    return save(tensors, {"samples": json.dumps(facts), "metadata": "{}"})


def reply_of(*samples: dict[str, Any]) -> bytes:
    return orjson.dumps({"samples": samples, "metadata": {}})


LENGTHS = st.integers(0, 8)
LOGPROBS = st.floats(max_value=0, width=32, allow_nan=False, allow_infinity=False)


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    prompt, told, text = draw(LENGTHS), draw(LENGTHS), draw(st.text(max_size=5))
    logprobs = draw(st.lists(LOGPROBS, max_size=8))
    length = prompt + len(logprobs) + told
    experts = draw(st.sampled_from([None, np.uint8, np.dtype(">u2"), np.int32]))
    return Sample(
        tokens=np.arange(length, dtype=np.int32),
        loss_mask=np.array([0] * prompt + [1] * len(logprobs) + [0] * told, dtype=np.uint8),
        logprobs=np.array([0.0] * prompt + logprobs + [0.0] * told, dtype=np.float32),
        weight_versions=(VersionRun(text, prompt, prompt + len(logprobs)),) if logprobs else (),
        response=text,
        response_length=len(logprobs) + told,
        status=draw(st.sampled_from(["completed", "truncated", "aborted"])),
        reward=draw(st.sampled_from([None, 0.5, {"score": 1.0}])),
        label=[text],
        metadata={"turns": [{"turn": 0}]},
        routed_experts=None if experts is None else np.arange(max(length - 1, 0) * 2).reshape(-1, 2, 1).astype(experts),
    )


def check_equal(one: Sample, other: Sample) -> None:
    for each in dataclasses.fields(Sample):
        before, after = getattr(one, each.name), getattr(other, each.name)
        if isinstance(before, np.ndarray):
            assert before.dtype.newbyteorder("=") == after.dtype.newbyteorder("=")
            assert before.astype("<" + before.dtype.str[1:]).tobytes() == after.tobytes(), "bit for bit"
            assert before.shape == after.shape
        else:
            assert before == after


@pytest.mark.parametrize("form", ["json", "safetensors"])
@given(written=st.lists(samples(), max_size=3))
def test_what_one_end_writes_the_other_reads(form: Format, written: list[Sample]) -> None:
    read = READERS[form](WRITERS[form](written, {"session_id": "s"}))
    assert len(read) == len(written)
    for one, other in zip(written, read, strict=True):
        check_equal(one, other)


BROKEN: list[tuple[str, dict[str, Any]]] = [
    ("tokens_are_ids", {"tokens": [11, 12, -1, 22, 13, 23]}),
    ("tokens_are_ids", {"tokens": [11, 12, 2**31, 22, 13, 23]}),
    ("aligned", {"tokens": [11, 12, 21, 22, 13]}),
    ("mask_is_binary", {"loss_mask": [0, 0, 1, 2, 0, 1]}),
    ("logprobs_are_logprobs", {"logprobs": [0.0, 0.0, 0.5, -0.25, 0.0, -1.5]}),
    ("versions_in_order", {"weight_versions": GIVEN["weight_versions"][::-1]}),
    ("versions_cover_the_loss", {"weight_versions": GIVEN["weight_versions"][:1]}),
    ("status_is_known", {"status": "failed"}),
    ("response_fits", {"response_length": 7}),
    ("response_fits", {"response_length": 3.5}),
    ("loss_is_in_the_response", {"response_length": 3}),
    ("complete", {"response_length": ...}),
    ("complete", {"weight_versions": None}),
    ("complete", {"metadata": [1]}),
    ("complete", {"weight_versions": [{"version": "1"}]}),
]
BROKEN_ONLY_IN_JSON: list[tuple[str, dict[str, Any]]] = [
    ("aligned", {"tokens": ...}),
    ("tokens_are_ids", {"tokens": ["a"] * 6}),
    ("mask_is_binary", {"loss_mask": [0, 0, [1], [1, 1], 0, 1]}),
    ("logprobs_are_logprobs", {"logprobs": [None] * 6}),
]


def with_faults(faults: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in {**GIVEN, **faults}.items() if value is not ...}


@pytest.mark.parametrize(("invariant", "faults"), [*BROKEN, *BROKEN_ONLY_IN_JSON])
def test_a_broken_sample_in_json_is_refused_by_the_invariants_name(invariant: str, faults: dict[str, Any]) -> None:
    with pytest.raises(InvalidTrajectory) as caught:
        read_json(reply_of(GIVEN, with_faults(faults)))
    assert caught.value.invariant == invariant
    assert str(caught.value).startswith(f"{invariant}: ")


@pytest.mark.parametrize(
    "experts",
    [EXPERTS[:4], EXPERTS.reshape(5, 6), EXPERTS.astype(np.float32), np.concatenate([EXPERTS, EXPERTS])],
    ids=["a row short", "flat", "no integers", "too long"],
)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_rows_that_do_not_fit_the_tokens_are_refused(experts: Any, kind: RowKind) -> None:
    for read, data in (
        (read_json, reply_of({**GIVEN, kind.name: encoded(experts)})),
        (read_safetensors, file_of(GIVEN, **{kind.name: experts})),
    ):
        with pytest.raises(InvalidTrajectory) as caught:
            read(data)
        assert caught.value.invariant == f"{kind.name}_fit"


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"{}", b'{"samples": 7}', b'{"samples": [7]}', b"null"])
def test_what_is_no_reply_with_samples_is_malformed(data: bytes) -> None:
    with pytest.raises(Malformed):
        read_json(data)
    with pytest.raises(Malformed):
        read_safetensors(data)


def test_arrays_cannot_be_changed_and_a_changed_sample_is_checked_again() -> None:
    (sample,) = read_safetensors(file_of(GIVEN, routed_experts=EXPERTS))
    for array in (sample.tokens, sample.loss_mask, sample.logprobs, sample.routed_experts):
        assert array is not None
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    rewarded = dataclasses.replace(sample, reward=1.0)
    assert (rewarded.reward, rewarded.tokens.tolist()) == (1.0, GIVEN["tokens"])
    with pytest.raises(InvalidTrajectory, match="loss_is_in_the_response"):
        dataclasses.replace(sample, response_length=1)


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


@pytest.mark.parametrize(
    "data",
    [
        b"",
        ONE[:-1],
        struct.pack("<Q", 2**60) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        ONE.replace(b'"I32"', b'"I64"'),
        ONE.replace(b'"shape":[5]', b'"shape":[6]'),
        ONE.replace(b"[0,20]", b"[0,99]"),
    ],
)
def test_damaged_files_are_refused(data: bytes) -> None:
    with pytest.raises(Malformed):
        unpack(data)


def test_a_type_that_no_trajectory_has_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="mask is of type bool"):
        pack({"mask": np.array([True])}, {})


VALUES = st.recursive(
    st.none() | st.integers(-5, 5) | st.text('{}[]"\\,:a\n', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('{"samples', max_size=3), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.lists(st.dictionaries(st.sampled_from(["samples", "b", '"{']), VALUES, max_size=3), max_size=4)


def read(data: bytes) -> list[dict[str, Any]]:
    return [each for each, _ in objects_of_list(data, "samples")]


@given(OBJECTS, VALUES, VALUES, st.booleans())
def test_the_objects_are_those_of_a_whole_parse(samples: list[Any], before: Any, behind: Any, indented: bool) -> None:
    options = orjson.OPT_INDENT_2 if indented else 0
    data = orjson.dumps({"before": before, "samples": samples, "behind": behind}, option=options)
    assert read(data) == samples


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[{}]",
        b'{"other": [{}]}',
        b'{"samples": [1]}',
        b'{"samples": [{} {}]}',
        b'{"samples": [{}]} x',
        b'{"samples": [{"a": }]}',
        b'{"inner": {"samples": [{}]}}',
    ],
)
def test_what_is_no_list_of_objects_is_refused(data: bytes) -> None:
    with pytest.raises(Malformed):
        read(data)


def test_each_byte_of_a_string_that_is_cut_is_looked_at_once() -> None:
    """Its escaped quotes begin no strings: there may be a million of them, and each would be looked for to the end."""
    with pytest.raises(Malformed):
        read(b'{"samples": [{"a": "' + b'\\"x' * 1_000_000)


def test_what_stands_around_the_objects_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_items, "MAX_BYTES_AROUND", 100)
    assert read(b'{"samples": [{"a": "%b"}]}' % (b"x" * 1000)) == [{"a": "x" * 1000}]
    for data in (b'{"samples": [{}], "b": "%b"}', b'{"b": "%b", "samples": [{}]}', b'{"%b": 1}'):
        with pytest.raises(Malformed, match="more than 100 bytes"):
            read(data % (b"x" * 1000))

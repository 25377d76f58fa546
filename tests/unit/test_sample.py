"""Samples: checked wherever they come from, the same in every form, read-only."""

from __future__ import annotations

import base64
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load, save

from miles_router.dialects import trainer_fields
from miles_router.trajectory import InvalidTrajectory, Malformed, Sample, VersionRun
from miles_router.trajectory.rows import INDEXER_TOPK, KINDS, ROUTED_EXPERTS, RowKind
from miles_router.trajectory.safetensors import unpack
from miles_router.trajectory.sample import READERS, WRITERS, Format, read_json, read_safetensors, write_safetensors

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
ARRAYS = {"tokens": "int32", "loss_mask": "uint8", "logprobs": "float32"}
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


def check_given(sample: Sample) -> None:
    assert (sample.tokens.dtype.name, sample.tokens.tolist()) == ("int32", GIVEN["tokens"])
    assert (sample.loss_mask.dtype.name, sample.loss_mask.tolist()) == ("uint8", GIVEN["loss_mask"])
    assert (sample.logprobs.dtype.name, sample.logprobs.tolist()) == ("float32", GIVEN["logprobs"])
    assert sample.weight_versions == (VersionRun("1", 2, 4), VersionRun("2", 5, 6))
    names = ("response", "response_length", "status", "reward", "label", "metadata")
    assert {name: getattr(sample, name) for name in names} == {name: GIVEN[name] for name in names}


# Forms


def test_a_sample_is_read_from_json() -> None:
    (sample,) = read_json(reply_of(GIVEN))
    check_given(sample)
    assert sample.routed_experts is None
    assert (len(sample), sample.prompt_length) == (6, 2)


def test_samples_are_read_from_safetensors_in_their_order() -> None:
    other = {**GIVEN, "tokens": [1, 2, 3, 4, 5, 6], "status": "aborted", "reward": None}
    first, second = read_safetensors(file_of(GIVEN, other))
    check_given(first)
    assert (second.tokens.tolist(), second.status, second.reward) == ([1, 2, 3, 4, 5, 6], "aborted", None)


def test_no_samples_are_an_empty_list() -> None:
    assert read_json(reply_of()) == read_safetensors(file_of()) == []


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(ROUTED_EXPERTS, "uint8"), (ROUTED_EXPERTS, "uint16"), (INDEXER_TOPK, "int16"), (INDEXER_TOPK, "int32")],
    ids=str,
)
def test_rows_are_read_from_both_forms(kind: RowKind, dtype: str) -> None:
    rows = EXPERTS.astype(dtype)
    rows[0, 0, 0] = kind.least
    (binary,) = read_safetensors(file_of(GIVEN, **{kind.name: rows}))
    (plain,) = read_json(reply_of({**GIVEN, kind.name: encoded(rows)}))
    for sample in (binary, plain):
        assert set(sample.rows) == {kind.name}
        assert sample.rows[kind.name].dtype == dtype
        assert np.array_equal(sample.rows[kind.name], rows)


@pytest.mark.parametrize("form", ["json", "safetensors"])
def test_a_sample_may_have_rows_of_every_kind(form: Format) -> None:
    positions = EXPERTS.astype(np.int16)[:, :1] - 1
    sample = Sample.from_json({**GIVEN, "routed_experts": encoded(EXPERTS), "indexer_topk": encoded(positions)})
    (again,) = READERS[form](WRITERS[form]([sample], {}))
    check_equal(again, sample)
    assert list(again.rows) == ["routed_experts", "indexer_topk"]
    assert np.array_equal(again.rows["indexer_topk"], positions)
    assert np.array_equal(again.trainer_fields()["rollout_indexer_topk"], positions)


def test_what_may_be_left_out_may_be_left_out() -> None:
    sample = Sample.from_json({name: GIVEN[name] for name in GIVEN if name not in ("reward", "label", "metadata")})
    assert (sample.reward, sample.label, sample.metadata) == (None, None, {})


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


@given(sample=samples())
def test_to_dict_survives_json(sample: Sample) -> None:
    check_equal(sample, Sample.from_json(json.loads(json.dumps(sample.to_dict()))))


def test_the_official_library_reads_what_we_write(tmp_path: Path) -> None:
    given = [Sample.from_json({**GIVEN, "routed_experts": encoded(EXPERTS)}), Sample.from_json(GIVEN)]
    data = write_safetensors(given, {"turns": 1})
    tensors = load(data)
    assert set(tensors) == {"0.routed_experts", *(f"{i}.{name}" for i in "01" for name in ARRAYS)}
    assert np.array_equal(tensors["0.routed_experts"], EXPERTS)
    for name, dtype in ARRAYS.items():
        assert (tensors[f"1.{name}"].dtype.name, tensors[f"1.{name}"].tolist()) == (dtype, GIVEN[name])
    path = tmp_path / "samples.safetensors"
    path.write_bytes(data)
    with safe_open(path, framework="numpy") as opened:
        metadata = opened.metadata()
    facts = {name: value for name, value in GIVEN.items() if name not in ARRAYS}
    assert (json.loads(metadata["samples"]), json.loads(metadata["metadata"])) == ([facts, facts], {"turns": 1})


@pytest.mark.parametrize("form", ["json", "safetensors"])
@pytest.mark.parametrize("carried", [(), ("label",), ("reward", "label")])
def test_a_reward_that_nobody_gave_is_not_written(form: Format, carried: tuple[str, ...]) -> None:
    sample = Sample.from_json({**GIVEN, "reward": None, "label": None})
    data = WRITERS[form]([sample], {}, carried)
    (facts,) = json.loads(data)["samples"] if form == "json" else json.loads(unpack(data)[1]["samples"])
    assert {"reward", "label"} & facts.keys() == set(carried)
    check_equal(READERS[form](data)[0], sample)


def test_experts_of_a_type_that_the_file_does_not_have_are_refused_by_name() -> None:
    sample = Sample.from_json({**GIVEN, "routed_experts": encoded(EXPERTS.astype(np.uint32))})
    with pytest.raises(ValueError, match=r"0\.routed_experts is of type uint32"):
        write_safetensors([sample], {})


def test_trainers_of_slimes_kind_get_the_response_aligned_as_they_want_it() -> None:
    sample = Sample.from_json({**GIVEN, "routed_experts": encoded(EXPERTS)})
    fields = sample.trainer_fields()
    assert fields.keys() == trainer_fields(sample).keys()
    assert np.array_equal(fields.pop("rollout_routed_experts"), EXPERTS)
    assert fields == {
        "tokens": GIVEN["tokens"],
        "response": GIVEN["response"],
        "response_length": 4,
        "loss_mask": [1, 1, 0, 1],
        "rollout_log_probs": [-0.5, -0.25, 0.0, -1.5],
        "weight_versions": ["1", "2"],
        "status": "completed",
        "reward": 0.5,
        "label": "42",
        "metadata": GIVEN["metadata"],
    }


def test_trainers_keep_the_reward_and_the_label_that_they_have() -> None:
    fields = Sample.from_json({**GIVEN, "reward": None, "label": None}).trainer_fields()
    assert {"reward", "label", "rollout_routed_experts"}.isdisjoint(fields)


# Invariants

BROKEN: list[tuple[str, dict[str, Any]]] = [
    ("tokens_are_ids", {"tokens": [11, 12, -1, 22, 13, 23]}),
    ("tokens_are_ids", {"tokens": [11, 12, 2**31, 22, 13, 23]}),
    ("aligned", {"tokens": [11, 12, 21, 22, 13]}),
    ("aligned", {"loss_mask": [0, 0, 1, 1, 0]}),
    ("aligned", {"logprobs": [0.0] * 7}),
    ("mask_is_binary", {"loss_mask": [0, 0, 1, 2, 0, 1]}),
    ("logprobs_are_logprobs", {"logprobs": [0.0, 0.0, 0.5, -0.25, 0.0, -1.5]}),
    ("versions_in_order", {"weight_versions": GIVEN["weight_versions"][::-1]}),
    ("versions_in_order", {"weight_versions": [{"version": "1", "start": 2, "end": 7}]}),
    ("versions_cover_the_loss", {"weight_versions": GIVEN["weight_versions"][:1]}),
    ("status_is_known", {"status": "failed"}),
    ("response_fits", {"response_length": 7}),
    ("response_fits", {"response_length": -1}),
    ("response_fits", {"response_length": 3.5}),
    ("response_fits", {"response_length": True}),
    ("loss_is_in_the_response", {"response_length": 3}),
    ("complete", {"response_length": ...}),
    ("complete", {"status": ...}),
    ("complete", {"weight_versions": None}),
    ("complete", {"metadata": [1]}),
    ("complete", {"metadata": "ab"}),
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


@pytest.mark.parametrize(("invariant", "faults"), [case for case in BROKEN if 2**31 not in case[1].get("tokens", ())])
def test_a_broken_sample_in_safetensors_is_refused_too(invariant: str, faults: dict[str, Any]) -> None:
    with pytest.raises(InvalidTrajectory) as caught:
        read_safetensors(file_of(GIVEN, with_faults(faults)))
    assert caught.value.invariant == invariant


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


@pytest.mark.parametrize(
    "damage", [{"data": "AA=="}, {"data": "?"}, {"dtype": "no type"}, {"shape": [5, 2, 4]}, {"shape": None}]
)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_rows_that_cannot_be_read_are_refused(damage: dict[str, Any], kind: RowKind) -> None:
    with pytest.raises(InvalidTrajectory, match=f"{kind.name}_fit"):
        Sample.from_json({**GIVEN, kind.name: {**encoded(EXPERTS), **damage}})


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"{}", b'{"samples": 7}', b'{"samples": [7]}', b"null"])
def test_what_is_no_reply_with_samples_is_malformed(data: bytes) -> None:
    with pytest.raises(Malformed):
        read_json(data)
    with pytest.raises(Malformed):
        read_safetensors(data)


def test_a_file_without_an_array_or_without_facts_is_malformed() -> None:
    for data in (save({}, {"samples": json.dumps([GIVEN])}), save({}, {}), file_of(GIVEN)[:-1]):
        with pytest.raises(Malformed):
            read_safetensors(data)


# What one holds


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


def test_a_sample_does_not_follow_the_arrays_that_it_was_made_of() -> None:
    arrays: dict[str, Any] = {name: np.array(GIVEN[name], dtype=dtype) for name, dtype in ARRAYS.items()}
    runs = tuple(VersionRun(**run) for run in GIVEN["weight_versions"])
    sample = Sample(**arrays, weight_versions=runs, response_length=4, status="completed")
    for array in arrays.values():
        array[3] = 0
    assert {name: getattr(sample, name).tolist() for name in ARRAYS} == {name: GIVEN[name] for name in ARRAYS}


def test_a_sample_says_what_it_is() -> None:
    assert repr(Sample.from_json(GIVEN)) == "<Sample of 6 tokens, 3 in the loss, completed, reward 0.5>"

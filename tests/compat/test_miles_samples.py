"""The file of samples that miles reads: golden bytes of its own encoder, and ours decoded with its steps."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from middleware_hub.openai_session.dialects.miles import TENSORS, fields_of, samples_file
from miles_router.trajectory import Sample
from miles_router.trajectory.rows import KINDS
from miles_router.trajectory.sampling_mask import SamplingMask
from tests.compat.miles_client import decode

GOLDEN = Path(__file__).parent / "miles_samples"
NAMES = [path.stem for path in sorted(GOLDEN.glob("*.safetensors"))]
TYPES = {"tokens": np.int64, "loss_mask": np.uint8, "rollout_log_probs": np.float64, "rollout_routed_experts": np.uint8}


def golden(name: str) -> tuple[bytes, dict[str, Any]]:
    told = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
    return (GOLDEN / f"{name}.safetensors").read_bytes(), told


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def test_there_are_golden_bytes() -> None:
    assert NAMES == ["all_truncated", "v1_two_samples", "v2_reward"]


@pytest.mark.parametrize("name", NAMES)
def test_golden_bytes_are_read_as_what_went_in(name: str) -> None:
    data, told = golden(name)
    reply = decode(data, version=2 if name.startswith("v2") else 1)
    for sample, given in zip(reply.samples, told["samples"], strict=True):
        assert {field: plain(getattr(sample, field)) for field in given} == given
    assert (reply.session_metadata, reply.empty_reason) == (told["session_metadata"], told["empty_reason"])


@pytest.mark.parametrize("name", NAMES)
def test_what_went_in_is_written_as_the_golden_bytes(name: str) -> None:
    data, told = golden(name)
    entries = [
        {field: np.array(value, TYPES[field]) if value and field in TYPES else value for field, value in each.items()}
        for each in told["samples"]
    ]
    file = samples_file(entries, told["session_metadata"], told["empty_reason"])
    assert b"".join(file.chunks()) == data
    assert file.nbytes == len(data)


def sample_with(rows: int, **changes: Any) -> Sample:
    given: dict[str, Any] = {
        "tokens": np.arange(rows + 1, dtype=np.int32),
        "loss_mask": np.array([0] * (rows - 1) + [1, 1], dtype=np.uint8),
        "logprobs": np.array([0.0] * (rows - 1) + [-0.1, -0.2], dtype=np.float32),
        "response_length": 2,
        "response": "é",
        "status": "completed",
        "metadata": {"turns": [{"start": 7, "cached_tokens": 3}, {"start": 9, "cached_tokens": None}]},
    }
    return Sample(**{**given, **changes})


def test_a_sample_is_told_over_its_response() -> None:
    experts = np.arange(6 * 2 * 2, dtype=np.uint8).reshape(6, 2, 2)
    positions = np.full((6, 2, 3), -1, dtype=np.int16)
    sample = sample_with(6, routed_experts=experts, indexer_topk=positions, reward={"score": 1.0})
    (read,) = decode(b"".join(samples_file([fields_of(sample, {"a": 1})], {}, None).chunks()), version=2).samples
    read.check()
    assert (read.tokens, read.loss_mask) == ([0, 1, 2, 3, 4, 5, 6], [1, 1])
    assert read.rollout_log_probs == [float(np.float32(-0.1)), float(np.float32(-0.2))]
    assert np.array_equal(read.rollout_routed_experts, experts)  # type: ignore[arg-type]
    assert (read.response, read.reward, read.metadata) == ("é", {"score": 1.0}, {"a": 1})
    assert np.array_equal(read.rollout_indexer_topk, positions)  # type: ignore[arg-type]


def test_every_kind_of_rows_has_a_tensor() -> None:
    assert {f"rollout_{kind.name}" for kind in KINDS} == {name for name in TENSORS if name.startswith("rollout_")} - {
        "rollout_log_probs"
    }


def test_a_sample_without_rows_names_them_among_those_it_has_not() -> None:
    (read,) = decode(b"".join(samples_file([fields_of(sample_with(6), {})], {}, None).chunks()), version=2).samples
    assert (read.rollout_routed_experts, read.rollout_indexer_topk) == (None, None)


def test_a_sampling_mask_is_told_over_the_response_with_its_logprobs() -> None:
    ids, offsets = [0, 1, 2, 3, 4, 5, 9, 6], [0, 1, 2, 3, 4, 5, 7, 8]
    mask = SamplingMask.from_arrays({"ids": ids, "offsets": offsets}, [0.0] * 5 + [-0.5, -0.0625])
    data = b"".join(samples_file([fields_of(sample_with(6, sampling_mask=mask), {})], {}, None).chunks())
    (read,) = decode(data, masks=True).samples
    read.check()
    assert read.rollout_log_probs == [-0.5, -0.0625], "of the ids alone, as miles records them"
    assert read.rollout_sampling_mask is not None
    found = {name: array.tolist() for name, array in read.rollout_sampling_mask.items()}
    assert found == {"ids": [5, 9, 6], "offsets": [0, 2, 3]}
    with pytest.raises(AssertionError):
        decode(data)


def test_a_sample_that_lacks_a_mask_of_its_session_names_it() -> None:
    sample = sample_with(6)
    sample = sample_with(6, metadata={**sample.metadata, "sampling_mask_missing": 1})
    data = b"".join(samples_file([fields_of(sample, {})], {}, None).chunks())
    assert decode(data, masks=True).samples[0].rollout_sampling_mask is None
    with pytest.raises(AssertionError):
        decode(data)


def test_turns_whose_cached_tokens_are_not_known_count_in_neither_sum() -> None:
    fields = fields_of(sample_with(6), {})
    assert fields["prefix_cache_info"] == {"cached_tokens": 3, "total_prompt_tokens": 7}


def test_experts_are_widened_while_they_are_written_and_never_held() -> None:
    rows, width = 40_000, 48 * 8
    sample = sample_with(rows, routed_experts=np.full((rows, 48, 8), 127, dtype=np.uint8))
    file = samples_file([fields_of(sample, {})], {}, None)
    assert file.nbytes > 4 * rows * width
    tracemalloc.start()
    written = sum(len(chunk) for chunk in file.chunks())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert written == file.nbytes
    assert peak < 8 << 20, "of 60 MB"

"""The model's routing: what tells it, and which answers are of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from middleware_hub.routed_experts.model import Model, configured_shape, parse_shape
from miles_router.errors import ConfigError
from miles_router.middlewares.experts import Experts
from miles_router.trajectory import InvalidTrajectory
from miles_router.trajectory.experts import Blocks, ExpertShape, Rows


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("48x128x8", ExpertShape(48, 8, 128)),
        ("4X8X2", ExpertShape(4, 2, 8)),
        ("1x1x1", ExpertShape(1, 1, 1)),
        ("1x65536x65536", ExpertShape(1, 65536, 65536)),
    ],
)
def test_a_shape_is_layers_experts_and_top_k(text: str, shape: ExpertShape) -> None:
    assert parse_shape(text) == shape


@pytest.mark.parametrize(
    "text",
    [
        *("", "x", "48", "48x128", "48x128x8x1", "48x128x", "x48x128x8", "0x8x2", "4x0x0", "4x8x0", "4x8x9", "axbxc"),
        *(
            "4x65537x2",
            "-4x8x2",
            "4.0x8x2",
            "+4x8x2",
            " 4x8x2",
            "4x8 x2",
            "4x8x2\n",
            "4,8,2",
            "٤x8x2",
            "4x8x²",
            "4×8×2",
        ),
    ],
)
def test_what_is_no_shape_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="48x128x8"):
        parse_shape(text)


QWEN: dict[str, Any] = {"num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8, "model_type": "it"}


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (QWEN, ExpertShape(48, 8, 128)),
        ({"num_hidden_layers": 61, "n_routed_experts": 256, "num_experts_per_tok": 8}, ExpertShape(61, 8, 256)),
        ({"num_hidden_layers": 32, "num_local_experts": 8, "num_experts_per_tok": 2}, ExpertShape(32, 2, 8)),
        ({"num_hidden_layers": 32, "num_experts_per_tok": 2}, ExpertShape(32, 2, None)),
        ({"text_config": QWEN, "vision_config": {"num_hidden_layers": 3}}, ExpertShape(48, 8, 128)),
        ({**QWEN, "text_config": None}, ExpertShape(48, 8, 128)),
        ({**QWEN, "text_config": {"num_hidden_layers": 32}}, None),
        ({"num_hidden_layers": 32, "num_attention_heads": 8}, None),
        ({"num_experts": 128, "num_experts_per_tok": 8}, None),
        ({**QWEN, "num_experts_per_tok": None}, None),
        ({**QWEN, "num_experts_per_tok": 0}, None),
        ({**QWEN, "num_experts_per_tok": [8] * 48}, None),
        ({**QWEN, "num_hidden_layers": "48"}, None),
        ({**QWEN, "num_hidden_layers": True}, None),
        ({**QWEN, "num_hidden_layers": 0}, None),
        ({**QWEN, "num_experts": None}, ExpertShape(48, 8, None)),
        ({**QWEN, "num_experts": None, "n_routed_experts": 64}, ExpertShape(48, 8, 64)),
        ({}, None),
    ],
)
def test_a_checkpoints_configuration_tells_the_shape(config: dict[str, Any], shape: ExpertShape | None) -> None:
    assert configured_shape(config) == shape


def flat(count: int, width: int, start: int = 0) -> Rows:
    ids: Rows = (np.arange(count * width) % 7 + start).astype(np.uint8)
    return ids


def model(told: ExpertShape | None = None) -> tuple[Model, Experts]:
    experts = Experts()
    return Model(experts, told), experts


def rows(of: Model, ids: Rows, largest: int, start: int, expected: int) -> Rows:
    """Ids as the rows that the model takes them for."""
    return of.rows(Blocks([ids]), largest, start, expected)[:]


def refusal(of: Model, ids: Rows, start: int, expected: int) -> str:
    with pytest.raises(InvalidTrajectory) as error:
        rows(of, ids, int(ids.max(initial=0)), start, expected)
    return f"{error.value}"


TOLD = ExpertShape(2, 2, 8)


def test_a_model_that_is_told_is_known_before_any_answer() -> None:
    told, experts = model(TOLD)
    assert experts.shape == TOLD
    taken = rows(told, flat(3, 4), 6, 5, 3)
    assert (taken.shape, taken.reshape(-1).tolist()) == ((3, 4), flat(3, 4).tolist())
    assert experts.shape == TOLD


@pytest.mark.parametrize("is_told", [True, False])
def test_rows_that_are_missing_or_too_many_are_refused_by_name(is_told: bool) -> None:
    one, _ = model(TOLD if is_told else None)
    for count in (5, 4):
        rows(one, flat(count, 4), 6, 0, count)
    assert refusal(one, flat(2, 4), 10, 5) == "experts_without_gap: rows 12 to 14 are missing"
    assert refusal(one, flat(0, 4), 0, 1) == "experts_without_gap: rows 0 to 0 are missing"
    assert refusal(one, flat(6, 4), 10, 5).startswith("experts_without_overlap: 6 rows came for the 5 from row 10 on")
    assert refusal(one, flat(1, 6), 0, 5).startswith("experts_are_rows")
    assert rows(one, flat(5, 4), 6, 10, 5).shape == (5, 4)


@pytest.mark.parametrize("expected", [0, -1])
@pytest.mark.parametrize("is_told", [True, False])
def test_where_no_row_is_missing_none_may_come(expected: int, is_told: bool) -> None:
    one, experts = model(TOLD if is_told else None)
    none = flat(0, 4)
    assert len(rows(one, none, -1, 7, expected)) == 0
    assert refusal(one, flat(1, 4), 7, expected).startswith("experts_without_overlap")
    assert experts.shape == (TOLD if is_told else None)
    assert rows(one, flat(1, 4), 6, 7, 1).shape == (1, 4), "an answer without rows has told nothing"


@pytest.mark.parametrize("largest", [8, 255, 65535])
def test_an_expert_that_the_model_does_not_have_is_refused(largest: int) -> None:
    told, _ = model(TOLD)
    ids = np.array([0, 1, 2, largest], dtype=np.uint16)
    assert refusal(told, ids, 0, 1).startswith(f"experts_of_the_model: expert {largest} of a model with 8")
    ids[3] = 7
    assert rows(told, ids, 7, 0, 1).tolist() == [[0, 1, 2, 7]]


def test_a_model_without_a_known_number_of_experts_may_have_any() -> None:
    told, _ = model(ExpertShape(2, 2))
    assert rows(told, np.array([0, 1, 2, 65535], dtype=np.uint16), 65535, 0, 1).shape == (1, 4)


def test_the_length_of_a_row_is_learned_from_the_first_answers() -> None:
    one, experts = model()
    assert rows(one, flat(5, 6), 6, 2, 5).shape == (5, 6)
    assert rows(one, flat(3, 6), 6, 2, 3).shape == (3, 6)
    assert experts.shape is None
    assert refusal(one, flat(5, 5), 0, 5).startswith("experts_are_rows")
    assert refusal(one, flat(5, 12), 0, 5).startswith("experts_without_overlap")
    assert rows(one, flat(2, 6), 6, 0, 2).shape == (2, 6)


def test_a_length_that_only_one_answer_had_is_given_up_for_one_that_two_have() -> None:
    one, _ = model()
    assert rows(one, flat(10, 3), 6, 0, 10).shape == (10, 3), "half the ids of ten rows of six"
    assert refusal(one, flat(4, 6), 0, 4) == "experts_of_the_model: 24 ids are no 4 rows of 3, as in the first answer"
    for count in (4, 5, 6):
        assert rows(one, flat(count, 6), 6, 0, count).shape == (count, 6)
    assert refusal(one, flat(10, 3), 0, 10).startswith("experts_without_gap")


def test_a_first_answer_whose_ids_are_no_rows_tells_nothing() -> None:
    one, _ = model()
    assert refusal(one, flat(1, 7), 0, 5).startswith("experts_are_rows: 7 ids are no 5 rows")
    assert refusal(one, flat(0, 0), 3, 5) == "experts_without_gap: rows 3 to 7 are missing"
    assert rows(one, flat(5, 9), 6, 0, 5).shape == (5, 9)

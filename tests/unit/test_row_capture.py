"""From ids that came with an answer to rows that are held: which fit the model, whose they are, what is held once."""

from __future__ import annotations

import base64
from typing import Any
from weakref import ref

import numpy as np
import pytest

from middleware_hub.routed_experts.capture import Capture, CaptureContext
from middleware_hub.routed_experts.errors import RowsMissing
from middleware_hub.routed_experts.shapes import (
    RowWidth,
    RowWidths,
    ShapeCheck,
    configured_indexer_shape,
    configured_shape,
    parse_indexer_shape,
    parse_shape,
)
from middleware_hub.routed_experts.store import RowStore
from miles_router import Exchange
from miles_router.engines.facts import Facts
from miles_router.engines.rows import EXPERT_FIELDS
from miles_router.errors import ConfigError
from miles_router.middlewares.rows import RowDelivery, RowPrefix
from miles_router.trajectory import InvalidTrajectory
from miles_router.trajectory.rows import INDEXER_TOPK, ROUTED_EXPERTS, AlignedRows, Blocks, RowArray, RowShape

WIDTH = 2
ROOM = 1 << 20
A, B = "http://10.0.0.7:30000", "http://10.0.0.8:30000"

# The shape of the model


@pytest.mark.parametrize(
    ("text", "shape"),
    [
        ("48x128x8", RowShape(48, 8, 128)),
        ("4X8X2", RowShape(4, 2, 8)),
        ("1x1x1", RowShape(1, 1, 1)),
        ("1x65536x65536", RowShape(1, 65536, 65536)),
    ],
)
def test_a_shape_is_layers_experts_and_top_k(text: str, shape: RowShape) -> None:
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
        (QWEN, RowShape(48, 8, 128)),
        ({"num_hidden_layers": 61, "n_routed_experts": 256, "num_experts_per_tok": 8}, RowShape(61, 8, 256)),
        ({"num_hidden_layers": 32, "num_local_experts": 8, "num_experts_per_tok": 2}, RowShape(32, 2, 8)),
        ({"num_hidden_layers": 32, "num_experts_per_tok": 2}, RowShape(32, 2, None)),
        ({"text_config": QWEN, "vision_config": {"num_hidden_layers": 3}}, RowShape(48, 8, 128)),
        ({**QWEN, "text_config": None}, RowShape(48, 8, 128)),
        ({**QWEN, "text_config": {"num_hidden_layers": 32}}, None),
        ({"num_hidden_layers": 32, "num_attention_heads": 8}, None),
        ({"num_experts": 128, "num_experts_per_tok": 8}, None),
        ({**QWEN, "num_experts_per_tok": None}, None),
        ({**QWEN, "num_experts_per_tok": 0}, None),
        ({**QWEN, "num_experts_per_tok": [8] * 48}, None),
        ({**QWEN, "num_hidden_layers": "48"}, None),
        ({**QWEN, "num_hidden_layers": True}, None),
        ({**QWEN, "num_hidden_layers": 0}, None),
        ({**QWEN, "num_experts": None}, RowShape(48, 8, None)),
        ({**QWEN, "num_experts": None, "n_routed_experts": 64}, RowShape(48, 8, 64)),
        ({}, None),
    ],
)
def test_a_checkpoints_configuration_tells_the_shape(config: dict[str, Any], shape: RowShape | None) -> None:
    assert configured_shape(config) == shape


@pytest.mark.parametrize(
    ("text", "shape"), [("61x2048", RowShape(61, 2048)), ("2X4", RowShape(2, 4)), ("1x1", RowShape(1, 1))]
)
def test_the_shape_of_chosen_positions_is_layers_by_top_k(text: str, shape: RowShape) -> None:
    assert parse_indexer_shape(text) == shape


@pytest.mark.parametrize("text", ["61", "61x", "0x4", "4x0", "2x3x4", "2x-1", "ax4", "61x99999999"])
def test_what_is_no_shape_of_chosen_positions_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="61x2048"):
        parse_indexer_shape(text)


SPARSE: dict[str, Any] = {"num_hidden_layers": 61, "index_topk": 2048, "model_type": "it"}


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (SPARSE, RowShape(61, 2048)),
        ({"text_config": SPARSE}, RowShape(61, 2048)),
        ({**SPARSE, "num_indexer_layers": 12}, RowShape(12, 2048)),
        ({**SPARSE, "compress_ratios": [0, 4, 128, 4]}, RowShape(2, 2048)),
        ({**SPARSE, "compress_ratios": [0, 128]}, None),
        ({**SPARSE, "index_topk": None}, None),
        ({**SPARSE, "index_topk": 0}, None),
        ({"index_topk": 2048}, None),
        (QWEN, None),
    ],
)
def test_a_checkpoints_configuration_tells_the_shape_of_chosen_positions(
    config: dict[str, Any], shape: RowShape | None
) -> None:
    assert configured_indexer_shape(config) == shape


def test_a_position_behind_its_rows_own_is_refused() -> None:
    check, engine = ShapeCheck(INDEXER_TOPK, RowShape(1, 2)), RowWidth()
    told = np.zeros((600, 2), dtype=np.int16)
    told[:, 1] = np.arange(600) + 7

    def rows() -> Blocks:
        return check.rows(Blocks([told.reshape(-1)]), int(told.max()), 7, 600, engine)

    assert len(rows()) == 600
    told[300, 0] = 308
    with pytest.raises(InvalidTrajectory, match="positions_are_causal: row 307 has position 308, which is"):
        rows()


def flat(count: int, width: int, start: int = 0) -> RowArray:
    ids: RowArray = (np.arange(count * width) % 7 + start).astype(np.uint8)
    return ids


class Model:
    """A model's shape, or none, and an engine that shows its rows."""

    def __init__(self, shape: RowShape | None = None) -> None:
        self.check = ShapeCheck(ROUTED_EXPERTS, shape)
        self.learned = RowWidth()

    def rows(self, ids: RowArray, start: int, expected: int) -> RowArray:
        """Ids as the rows that the model takes them for."""
        return self.check.rows(Blocks([ids]), int(ids.max(initial=0)), start, expected, self.learned)[:]

    def refusal(self, ids: RowArray, start: int, expected: int) -> str:
        with pytest.raises(InvalidTrajectory) as error:
            self.rows(ids, start, expected)
        return f"{error.value}"


SHAPE = RowShape(2, 2, 8)


def test_a_model_whose_shape_is_known_needs_no_answer_to_learn_it() -> None:
    known = Model(SHAPE)
    taken = known.rows(flat(3, 4), 5, 3)
    assert (taken.shape, taken.reshape(-1).tolist()) == ((3, 4), flat(3, 4).tolist())
    assert (known.check.learns, known.learned) == (False, RowWidth())


def test_the_shape_of_the_model_counts_whatever_an_engine_has_shown() -> None:
    known = Model(SHAPE)
    known.learned = RowWidth(6, certain=True)
    assert known.rows(flat(3, 4), 0, 3).shape == (3, 4)
    assert known.refusal(flat(2, 6), 0, 2).startswith("experts_without_overlap")


@pytest.mark.parametrize("shape", [SHAPE, None])
def test_rows_that_are_missing_or_too_many_are_refused_by_name(shape: RowShape | None) -> None:
    one = Model(shape)
    for count in (5, 4):
        one.rows(flat(count, 4), 0, count)
    assert one.refusal(flat(2, 4), 10, 5) == "experts_without_gap: rows 12 to 14 are missing"
    assert one.refusal(flat(0, 4), 0, 1) == "experts_without_gap: rows 0 to 0 are missing"
    assert one.refusal(flat(6, 4), 10, 5).startswith(
        "experts_without_overlap: the worker sent 6 rows for the 5 from row 10"
    )
    assert one.refusal(flat(1, 6), 0, 5).startswith("experts_are_rows")
    assert one.rows(flat(5, 4), 10, 5).shape == (5, 4)


@pytest.mark.parametrize("expected", [0, -1])
@pytest.mark.parametrize("shape", [SHAPE, None])
def test_where_no_row_is_missing_none_may_come(expected: int, shape: RowShape | None) -> None:
    one = Model(shape)
    assert len(one.rows(flat(0, 4), 7, expected)) == 0
    assert one.refusal(flat(1, 4), 7, expected).startswith("experts_without_overlap")
    assert one.learned == RowWidth(), "an answer without rows has shown nothing"
    assert one.rows(flat(1, 4), 7, 1).shape == (1, 4)


@pytest.mark.parametrize("largest", [8, 255, 65535])
def test_an_expert_that_the_model_does_not_have_is_refused(largest: int) -> None:
    known = Model(SHAPE)
    ids = np.array([0, 1, 2, largest], dtype=np.uint16)
    assert known.refusal(ids, 0, 1) == f"experts_of_the_model: id {largest} is not one of the model's 8 experts"
    ids[3] = 7
    assert known.rows(ids, 0, 1).tolist() == [[0, 1, 2, 7]]


def test_a_model_without_a_known_number_of_experts_may_have_any() -> None:
    known = Model(RowShape(2, 2))
    assert known.rows(np.array([0, 1, 2, 65535], dtype=np.uint16), 0, 1).shape == (1, 4)


def test_the_length_of_a_row_is_learned_from_the_first_answers() -> None:
    one = Model()
    assert one.check.learns
    assert one.rows(flat(5, 6), 2, 5).shape == (5, 6)
    assert one.rows(flat(3, 6), 2, 3).shape == (3, 6)
    assert one.refusal(flat(5, 5), 0, 5).startswith("experts_are_rows")
    assert one.refusal(flat(5, 12), 0, 5).startswith("experts_without_overlap")
    assert one.rows(flat(2, 6), 0, 2).shape == (2, 6)


def test_a_length_that_only_one_answer_had_is_given_up_for_one_that_two_have() -> None:
    one = Model()
    assert one.rows(flat(10, 3), 0, 10).shape == (10, 3), "half the ids of ten rows of six"
    said = "experts_of_the_model: 24 ids are not 4 rows of 3, as in this engine's first answer"
    assert one.refusal(flat(4, 6), 0, 4) == said
    for count in (4, 5, 6):
        assert one.rows(flat(count, 6), 0, count).shape == (count, 6)
    assert one.refusal(flat(10, 3), 0, 10).startswith("experts_without_gap")


def test_a_first_answer_whose_ids_are_no_rows_tells_nothing() -> None:
    one = Model()
    assert one.refusal(flat(1, 7), 0, 5).startswith("experts_are_rows: 7 ids are not 5 rows")
    assert one.refusal(flat(0, 0), 3, 5) == "experts_without_gap: rows 3 to 7 are missing"
    assert one.rows(flat(5, 9), 0, 5).shape == (5, 9)


# Whose rows they are, and what is held


def rows(*ids: int) -> RowArray:
    """One row for each number, which is in all of its places."""
    return np.repeat(np.array(ids, dtype=np.uint8), WIDTH).reshape(-1, WIDTH)


class Scene:
    """A capture and the store behind it. Engines are known by their URLs."""

    def __init__(
        self,
        delivery: RowDelivery | None = None,
        *,
        start: int = 0,
        required: bool = True,
        shape: RowShape | None = None,
    ) -> None:
        self.store = RowStore(ROUTED_EXPERTS, ROOM)
        engines = self.engines = {A: Facts(), B: Facts()}

        async def facts(url: str) -> Facts:
            return engines[url]

        check = ShapeCheck(ROUTED_EXPERTS, shape)
        self.context = CaptureContext(EXPERT_FIELDS, self.store, check, facts, required)
        self.request(delivery, start=start)

    def request(self, delivery: RowDelivery | None = None, *, start: int = 0) -> None:
        """Another request."""
        self.exchange = Exchange("r")
        self.capture = Capture(self.context, self.exchange, delivery, start=start)

    def take(self, answer: int, *ids: int, width: int = WIDTH, rid: str | None = None) -> None:
        """An answer of as many rows comes, of a prompt of all its tokens but one."""
        decoder = self.capture.decoder()
        own = rows(*ids)[:, :1].repeat(width, 1)
        decoder.feed(memoryview(base64.b64encode(own.astype("<i4").tobytes())))
        decoder.end()
        meta = {"prompt_tokens": len(ids), "completion_tokens": 1, "id": rid or str(answer)}
        self.capture.take(answer, decoder, meta)

    async def answer(self, url: str, rid: str, *ids: int, width: int) -> bool:
        """One request that this engine answers; whether its rows are held."""
        self.request()
        self.exchange.flight.worker_url = url
        await self.capture.begin()
        self.take(0, *ids, width=width, rid=rid)
        return self.store.by_rid(rid) is not None

    def hold(self, *ids: int) -> RowPrefix:
        return RowPrefix(self.store.add(rows(*ids), start=0, rid=None, keep=True), len(ids))


def first_ids(node: AlignedRows) -> list[int]:
    ids: list[int] = node.array()[:, 0].tolist()
    return ids


def test_answers_to_one_prompt_hold_its_rows_once() -> None:
    made = Scene()
    for answer, ids in enumerate([(1, 2, 3), (1, 2, 4), (1, 2, 3), (7, 8, 9), (7, 8, 8)]):
        made.take(answer, *ids)
    found = [made.store.by_rid(str(answer)) for answer in range(5)]
    assert [first_ids(node) for node in found if node is not None] == [
        [1, 2, 3],
        [1, 2, 4],
        [1, 2, 3],
        [7, 8, 9],
        [7, 8, 8],
    ]
    assert made.store.nbytes == WIDTH * (3 + 1 + 0 + 3 + 1)
    made.store.check_integrity()


def test_rows_that_go_on_alike_from_different_ones_are_not_shared() -> None:
    delivery = RowDelivery(ROUTED_EXPERTS)
    made = Scene(delivery, start=2)
    delivery.prefixes = [made.hold(1, 2), made.hold(5, 6)]
    for answer in (0, 1):
        made.take(answer, 3, 4)
    taken = [delivery.take(answer, 5).rows for answer in (0, 1)]
    assert [first_ids(node) for node in taken if node is not None] == [[1, 2, 3, 4], [5, 6, 3, 4]]


def test_what_is_held_already_is_not_held_again_when_the_client_asked_for_it() -> None:
    delivery = RowDelivery(ROUTED_EXPERTS)
    made = Scene(delivery, start=1)
    delivery.prefixes = [made.hold(1, 2, 3)]
    made.take(0, 2, 3, 4)
    node, reason = delivery.take(0, 5)
    assert (node is not None, reason) == (True, None)
    assert node is not None
    assert first_ids(node) == [1, 2, 3, 4]
    assert node.nbytes == WIDTH


def test_prompt_that_is_held_to_its_end_has_one_row_less() -> None:
    delivery = RowDelivery(ROUTED_EXPERTS)
    made = Scene(delivery, start=3)
    delivery.prefixes = [made.hold(1, 2, 3)]
    made.take(0)
    node = delivery.take(0, 3).rows
    assert node is not None
    assert first_ids(node) == [1, 2]


def test_rows_that_leave_a_gap_behind_what_is_held_are_refused_by_name() -> None:
    delivery = RowDelivery(ROUTED_EXPERTS)
    made = Scene(delivery, start=3)
    delivery.prefixes = [made.hold(1, 2)]
    made.take(0, 4)
    assert delivery.take(0, 5) == (
        None,
        "experts_without_gap: rows 2 to 2 are missing: the client asked for rows from 3 on",
    )
    assert made.store.statistics.missing == {"experts_without_gap": 1}


def test_rows_are_held_from_when_somebody_takes_them_until_nobody_has_them() -> None:
    delivery = RowDelivery(ROUTED_EXPERTS)
    made = Scene(delivery)
    made.take(0, 1, 2)
    assert made.store.nbytes == 0
    taken = delivery.take(0, 3)
    del made.capture  # the request has ended
    assert made.store.nbytes == 2 * WIDTH
    del taken
    assert made.store.nbytes == 0


def test_ids_that_nobody_takes_go_with_the_request() -> None:
    delivery = RowDelivery(ROUTED_EXPERTS)
    made = Scene(delivery)
    made.take(0, 1, 2)
    left = ref(delivery.unchecked[0])
    del made, delivery
    assert left() is None, "at once, and not when the garbage collector comes by"


@pytest.mark.parametrize(("aborted", "required"), [(False, False), (True, True)])
def test_missing_rows_are_tolerated_where_they_may_be(aborted: bool, required: bool) -> None:
    delivery = RowDelivery(ROUTED_EXPERTS)
    Scene(delivery, required=required).capture.missing({}, aborted=aborted)
    node, reason = delivery.take(0, 3)
    assert node is None
    assert reason is not None
    assert ("aborted" if aborted else "--enable-return-routed-experts") in reason


def test_missing_rows_that_are_required_are_an_error_that_names_the_worker() -> None:
    made = Scene()
    made.exchange.flight.worker_url = A
    with pytest.raises(RowsMissing, match=r"http://10\.0\.0\.7:30000 .* --enable-return-routed-experts"):
        made.capture.missing({}, aborted=False)
    assert made.store.statistics.missing == {"worker": 1}


@pytest.mark.parametrize("told", [True, False])
def test_rows_of_an_earlier_generation_are_not_taken_for_a_later_one(told: bool) -> None:
    made = Scene(required=False)
    made.take(0, 1, 2)
    assert made.store.by_rid("0") is not None
    if told:
        made.capture.take(0, made.capture.decoder(), {"prompt_tokens": 3, "completion_tokens": 1, "id": "0"})
    else:
        made.capture.missing({"id": "0"}, aborted=False)
    assert made.store.by_rid("0") is None


def test_what_came_with_a_first_try_is_not_taken_for_the_second_one_s() -> None:
    delivery = RowDelivery(ROUTED_EXPERTS)
    made = Scene(delivery, required=False)
    made.take(0, 1, 2)
    made.request(delivery)
    made.capture.missing({}, aborted=False)
    node, reason = delivery.take(0, 3)
    assert node is None
    assert reason is not None
    assert "--enable-return-routed-experts" in reason


def test_long_prompts_that_begin_alike_share_no_more_than_that() -> None:
    made = Scene()
    many = [tuple(range(300)), (*range(260), *[7] * 40), tuple(range(300))]
    for answer, ids in enumerate(many):
        made.take(answer, *(each % 250 for each in ids))
    assert made.store.nbytes == WIDTH * (300 + 40 + 0)
    for answer, ids in enumerate(many):
        node = made.store.by_rid(str(answer))
        assert node is not None
        assert first_ids(node) == [each % 250 for each in ids]


async def test_an_engine_s_rows_are_judged_by_what_this_engine_has_shown_and_no_other() -> None:
    made = Scene()
    for rid, url, width in (("a1", A, 2), ("b1", B, 3), ("a2", A, 2), ("b2", B, 3)):
        assert await made.answer(url, rid, 1, 2, 3, 4, width=width)
    assert not await made.answer(A, "a3", 1, 2, 3, 4, width=3)
    assert not await made.answer(B, "b3", 1, 2, 3, 4, width=2)
    assert sum(made.store.statistics.missing.values()) == 2


async def test_restarted_engine_is_not_judged_by_the_process_before() -> None:
    made = Scene()
    for rid in ("old1", "old2"):
        assert await made.answer(A, rid, 1, 2, 3, 4, width=2)
    made.engines[A] = Facts()
    for rid in ("new1", "new2"):
        assert await made.answer(A, rid, 1, 2, 3, 4, width=3)
    assert made.store.statistics.missing == {}


async def test_rows_of_another_length_continue_none_whoever_tells_them() -> None:
    delivery = RowDelivery(ROUTED_EXPERTS)
    made = Scene()
    assert await made.answer(A, "first", 1, 2, 3, width=2)
    made.request(delivery, start=3)
    held = made.store.by_rid("first")
    assert held is not None
    delivery.prefixes = [RowPrefix(held, 3)]
    made.exchange.flight.worker_url = B
    await made.capture.begin()
    made.take(0, 4, 5, width=3)
    assert delivery.take(0, 6) == (None, "experts_of_the_model: rows of 3 ids behind rows of 2")


async def test_what_an_engine_has_shown_does_not_count_where_the_shape_is_known() -> None:
    made = Scene(shape=RowShape(1, 2, 8))
    assert not await made.answer(A, "wide", 1, 2, 3, 4, width=3)
    assert await made.answer(A, "right", 1, 2, 3, 4, width=2)
    assert made.engines[A].learned(RowWidths) == {}

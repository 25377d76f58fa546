"""From extracted ids to held rows: whose they are, and what is held once."""

from __future__ import annotations

import base64
from weakref import ref

import numpy as np
import pytest

from middleware_hub.routed_experts.asking import Asked
from middleware_hub.routed_experts.capture import Capture
from middleware_hub.routed_experts.errors import ExpertsMissing
from middleware_hub.routed_experts.model import Model
from middleware_hub.routed_experts.store import ExpertStore
from miles_router import Exchange
from miles_router.middlewares.experts import Experts, Handover, Held
from miles_router.trajectory.experts import ExpertRows, Rows

WIDTH = 2
ROOM = 1 << 20


def rows(*ids: int) -> Rows:
    """One row for each number, which is in all of its places."""
    return np.repeat(np.array(ids, dtype=np.uint8), WIDTH).reshape(-1, WIDTH)


class Scene:
    """A capture and the store behind it."""

    def __init__(self, handover: Handover | None = None, *, start: int = 0, required: bool = True) -> None:
        self.store = ExpertStore(ROOM)
        self.exchange = Exchange("r")
        asked, model = Asked(b"{}", start), Model(Experts(), None)
        self.capture = Capture(self.store, model, self.exchange, asked, handover, required=required)

    def take(self, answer: int, *ids: int) -> None:
        """An answer of as many rows comes, of a prompt of all its tokens but one."""
        decoder = self.capture.decoder()
        decoder.feed(memoryview(base64.b64encode(rows(*ids).astype("<i4").tobytes())))
        decoder.end()
        self.capture.take(answer, decoder, {"prompt_tokens": len(ids), "completion_tokens": 1, "id": str(answer)})

    def hold(self, *ids: int) -> Held:
        return Held(self.store.add(rows(*ids), start=0, rid=None, keep=True), len(ids))


def first_ids(node: ExpertRows) -> list[int]:
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
    handover = Handover()
    made = Scene(handover, start=2)
    handover.held = [made.hold(1, 2), made.hold(5, 6)]
    for answer in (0, 1):
        made.take(answer, 3, 4)
    taken = [handover.take(answer, 5).rows for answer in (0, 1)]
    assert [first_ids(node) for node in taken if node is not None] == [[1, 2, 3, 4], [5, 6, 3, 4]]


def test_what_is_held_already_is_not_held_again_when_the_client_asked_for_it() -> None:
    handover = Handover()
    made = Scene(handover, start=1)
    handover.held = [made.hold(1, 2, 3)]
    made.take(0, 2, 3, 4)
    node, reason = handover.take(0, 5)
    assert (node is not None, reason) == (True, None)
    assert node is not None
    assert first_ids(node) == [1, 2, 3, 4]
    assert node.nbytes == WIDTH


def test_a_prompt_that_is_held_to_its_end_and_goes_no_further_has_a_row_less_than_is_held() -> None:
    handover = Handover()
    made = Scene(handover, start=3)
    handover.held = [made.hold(1, 2, 3)]
    made.take(0)
    node = handover.take(0, 3).rows
    assert node is not None
    assert first_ids(node) == [1, 2]


def test_rows_that_leave_a_gap_behind_what_is_held_are_refused_by_name() -> None:
    handover = Handover()
    made = Scene(handover, start=3)
    handover.held = [made.hold(1, 2)]
    made.take(0, 4)
    assert handover.take(0, 5) == (
        None,
        "experts_without_gap: rows 2 to 2: the client asked for those from 3 on",
    )
    assert made.store.statistics.missing == {"experts_without_gap": 1}


def test_rows_are_held_from_when_somebody_takes_them_until_nobody_has_them() -> None:
    handover = Handover()
    made = Scene(handover)
    made.take(0, 1, 2)
    assert made.store.nbytes == 0
    taken = handover.take(0, 3)
    del made.capture  # the request has ended
    assert made.store.nbytes == 2 * WIDTH
    del taken
    assert made.store.nbytes == 0


def test_ids_that_nobody_takes_go_with_the_request() -> None:
    handover = Handover()
    made = Scene(handover)
    made.take(0, 1, 2)
    left = ref(handover.captured[0])
    del made, handover
    assert left() is None, "at once, and not when the garbage collector comes by"


@pytest.mark.parametrize(("aborted", "required"), [(False, False), (True, True)])
def test_missing_rows_are_tolerated_where_they_may_be(aborted: bool, required: bool) -> None:
    handover = Handover()
    Scene(handover, required=required).capture.missing({}, aborted=aborted)
    node, reason = handover.take(0, 3)
    assert node is None
    assert reason is not None
    assert ("aborted" if aborted else "--enable-return-routed-experts") in reason


def test_missing_rows_that_are_required_are_an_error_that_names_the_worker() -> None:
    made = Scene()
    made.exchange.flight.worker_url = "http://10.0.0.7:30000"
    with pytest.raises(ExpertsMissing, match=r"http://10\.0\.0\.7:30000 .* --enable-return-routed-experts"):
        made.capture.missing({}, aborted=False)
    assert made.store.statistics.missing == {"worker": 1}


@pytest.mark.parametrize("told", [True, False])
def test_rows_of_an_earlier_generation_of_the_same_id_are_not_taken_for_a_later_one_s(told: bool) -> None:
    made = Scene(required=False)
    made.take(0, 1, 2)
    assert made.store.by_rid("0") is not None
    if told:
        made.capture.take(0, made.capture.decoder(), {"prompt_tokens": 3, "completion_tokens": 1, "id": "0"})
    else:
        made.capture.missing({"id": "0"}, aborted=False)
    assert made.store.by_rid("0") is None


def test_what_came_with_a_first_try_is_not_taken_for_the_second_one_s() -> None:
    handover = Handover()
    made = Scene(handover, required=False)
    made.take(0, 1, 2)
    second = Capture(made.store, Model(Experts(), None), made.exchange, Asked(b"{}", 0), handover, required=False)
    second.missing({}, aborted=False)
    node, reason = handover.take(0, 3)
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

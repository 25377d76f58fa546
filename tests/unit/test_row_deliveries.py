"""How layers hand each other rows: what is held of a prompt, what becomes of an answer's rows."""

from __future__ import annotations

import numpy as np
import pytest

from miles_router.asgi.exchange import Exchange
from miles_router.middlewares.rows import RowChannel, RowDelivery, RowPrefix, TrajectoryRows
from miles_router.trajectory import InvalidTrajectory
from miles_router.trajectory.rows import ROUTED_EXPERTS, AlignedRows, RowShape


def rows(count: int, *, start: int = 0, parent: AlignedRows | None = None, width: int = 4) -> AlignedRows:
    own = np.arange(start * width, (start + count) * width, dtype=np.uint8).reshape(count, width)
    return AlignedRows(own, ROUTED_EXPERTS, start=start, parent=parent)


class Came:
    """Rows that came with an answer; `broken` is what is wrong with them."""

    def __init__(self, broken: InvalidTrajectory | None = None) -> None:
        self.asked: list[tuple[int, str | None]] = []
        self._broken = broken

    def align(self, tokens: int, rid: str | None) -> AlignedRows:
        self.asked.append((tokens, rid))
        if self._broken is not None:
            raise self._broken
        return rows(tokens - 1)


@pytest.mark.parametrize(("tokens", "count"), [(1, 1), (4, 4), (5, 5), (6, 5), (99, 5)])
def test_as_many_rows_are_held_as_the_prompt_and_the_generation_have_in_common(tokens: int, count: int) -> None:
    generation = rows(5)
    held = RowPrefix.of(generation, tokens)
    assert held == RowPrefix(generation, count)


def test_nothing_is_held_without_rows_or_of_no_tokens() -> None:
    assert RowPrefix.of(None, 5) is None
    assert RowPrefix.of(rows(5), 0) is None
    assert RowPrefix.of(rows(0), 5) is None


def test_rows_with_a_hole_are_held_up_to_it_only() -> None:
    parent = rows(3)
    child = rows(4, start=3, parent=parent)
    child.evict()
    assert RowPrefix.of(child, 3) == RowPrefix(parent, 3)
    assert RowPrefix.of(child, 4) is None
    assert RowPrefix.of(rows(3, start=2), 4) is None, "the first two were never asked for"


def handed(*counts: int | None, per_prompt: int = 1) -> RowDelivery:
    prefixes = [None if count is None else RowPrefix(rows(count), count) for count in counts]
    return RowDelivery(ROUTED_EXPERTS, prefixes, per_prompt)


def test_answers_are_prompt_major() -> None:
    delivery = handed(3, None, 5, per_prompt=2)
    assert [delivery.prompt_of(answer) for answer in range(6)] == [0, 0, 1, 1, 2, 2]
    found = [delivery.prefix_for(answer) for answer in range(6)]
    assert [each and each.count for each in found] == [3, 3, None, None, 5, 5]
    assert found[0] is found[1] is delivery.prefixes[0]


def test_nothing_is_prefix_for_an_answer_that_nobody_asked_for() -> None:
    assert handed(3).prefix_for(1) is None
    assert RowDelivery(ROUTED_EXPERTS).prefix_for(0) is None


def test_a_handover_is_found_while_it_is_left_and_leaves_nothing_behind() -> None:
    exchange = Exchange("it")
    assert RowDelivery.of(exchange, ROUTED_EXPERTS) is None
    delivery = handed(3)
    with delivery.left_on(exchange) as left:
        assert left is delivery
        assert RowDelivery.of(exchange, ROUTED_EXPERTS) is delivery
        delivery.unchecked[0] = Came()
    assert RowDelivery.of(exchange, ROUTED_EXPERTS) is None
    assert exchange.notes == {}
    assert (delivery.prefixes, delivery.unchecked) == ((), {})


def test_so_it_is_when_the_request_fails() -> None:
    exchange, delivery = Exchange("it"), handed(3)
    with pytest.raises(ConnectionError), delivery.left_on(exchange):
        raise ConnectionError
    assert exchange.notes == {}
    assert delivery.prefixes == ()


def test_an_answers_rows_are_taken_once_against_its_tokens() -> None:
    delivery, came = handed(None), Came()
    delivery.unchecked[0] = came
    taken = delivery.take(0, 8, "r1")
    assert taken.rows is not None
    assert (len(taken.rows), taken.reason, came.asked) == (7, None, [(8, "r1")])
    again = delivery.take(0, 8, "r1")
    assert again.rows is None
    assert came.asked == [(8, "r1")]


def test_each_answer_has_its_own_rows() -> None:
    delivery, first, second = handed(None, per_prompt=2), Came(), Came()
    delivery.unchecked |= {0: first, 1: second}
    delivery.take(1, 5)
    assert (first.asked, second.asked) == ([], [(5, None)])


def test_an_answer_without_rows_says_why() -> None:
    delivery = handed(None)
    assert delivery.take(0, 5) == TrajectoryRows(None, "the worker sent no rows with this answer")
    delivery.missing = "the generation was aborted"
    assert delivery.take(0, 5) == TrajectoryRows(None, "the generation was aborted")


def test_rows_that_do_not_fit_are_none_and_the_reason_names_the_invariant() -> None:
    delivery = handed(None)
    delivery.unchecked[0] = Came(InvalidTrajectory("experts_without_gap", "rows 3 to 4 are missing"))
    assert delivery.take(0, 5) == TrajectoryRows(None, "experts_without_gap: rows 3 to 4 are missing")


def test_an_array_has_the_shape_of_the_model() -> None:
    experts = RowChannel(ROUTED_EXPERTS)
    experts.shape = RowShape(2, 2)
    generation = rows(2, start=3, parent=rows(3))
    array = experts.array(generation, 1, 5)
    assert (array.shape, array.dtype.name) == ((4, 2, 2), "uint8")
    assert array.reshape(-1).tolist() == list(range(4, 20))
    assert experts.array(generation, 5, 5).shape == (0, 2, 2)


def test_no_rows_have_the_models_shape_even_where_no_row_is_left() -> None:
    experts, gone = RowChannel(ROUTED_EXPERTS), rows(3)
    experts.shape = RowShape(2, 2)
    gone.evict()
    assert experts.array(gone, 2, 2).shape == (0, 2, 2)


def test_an_array_has_rows_alone_where_the_shape_is_not_known() -> None:
    array = RowChannel(ROUTED_EXPERTS).array(rows(3), 1, 3)
    assert array.tolist() == [[4, 5, 6, 7], [8, 9, 10, 11]]
    assert RowChannel(ROUTED_EXPERTS).array(rows(3), 2, 2).shape == (0, 4)


@pytest.mark.parametrize("shape", [None, RowShape(2, 2)])
def test_missing_rows_are_refused_by_name(shape: RowShape | None) -> None:
    experts = RowChannel(ROUTED_EXPERTS)
    experts.shape = shape
    with pytest.raises(InvalidTrajectory) as gap:
        experts.array(rows(3, start=2), 0, 3)
    assert gap.value.invariant == "experts_without_gap"
    gone = rows(3)
    gone.evict()
    with pytest.raises(InvalidTrajectory) as evicted:
        experts.array(gone, 0, 3)
    assert evicted.value.invariant == "experts_held"


def test_shared_rows_belong_to_one_owner_so_rollouts_stay_independent() -> None:
    made = [AlignedRows(np.zeros((4, 2), dtype=np.uint8), ROUTED_EXPERTS)]
    for _ in range(20):  # one prompt of three tokens, again and again
        held = RowPrefix.of(made[-1], 3)
        assert held is not None
        assert held.count == 3
        made.append(AlignedRows(np.ones((1, 2), dtype=np.uint8), ROUTED_EXPERTS, start=3, parent=held.rows))
    assert all(node.parent is made[0] for node in made[1:])
    behind = RowPrefix.of(made[-1], 4)
    assert behind is not None
    assert behind.rows is made[-1]

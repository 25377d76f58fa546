"""Rows of generations that continue each other: read whole or in part, and never with a hole that nobody is told of."""

from __future__ import annotations

import gc
from itertools import pairwise
from typing import Any
from weakref import ref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles_router.trajectory import InvalidTrajectory
from miles_router.trajectory.rows import ROUTED_EXPERTS, AlignedRows, Blocks, RowArray, RowShape, common_rows

WIDTH = 3


def numbered(start: int, stop: int, *, base: int = 0, dtype: Any = np.uint8) -> RowArray:
    """Rows [start, stop), each with ids of its own."""
    first = base + WIDTH * np.arange(start, stop)
    rows: RowArray = (first[:, None] + np.arange(WIDTH)).astype(dtype)
    return rows


def aligned(own: RowArray | Blocks, *, start: int = 0, parent: AlignedRows | None = None) -> AlignedRows:
    return AlignedRows(own, ROUTED_EXPERTS, start=start, parent=parent)


def line() -> tuple[AlignedRows, AlignedRows, AlignedRows]:
    """Rows 0 to 3, 4 to 6 and 7 to 11 of one trajectory."""
    first = aligned(numbered(0, 4))
    second = aligned(numbered(4, 7), start=4, parent=first)
    return first, second, aligned(numbered(7, 12), start=7, parent=second)


def refused(rows: AlignedRows, *wanted: int) -> str:
    with pytest.raises(InvalidTrajectory) as error:
        rows.array(*wanted)
    return error.value.invariant


def test_a_line_reads_as_one_array() -> None:
    first, second, third = line()
    for rows, stop in ((first, 4), (second, 7), (third, 12)):
        assert len(rows) == stop
        assert rows.array().tolist() == numbered(0, stop).tolist()
        assert rows.complete()
    assert list(third.line) == [third, second, first]


@pytest.mark.parametrize("start", range(13))
@pytest.mark.parametrize("stop", range(13))
def test_a_range_is_the_slice_of_the_whole(start: int, stop: int) -> None:
    *_, third = line()
    if start > stop:
        assert refused(third, start, stop) == "experts_without_gap"
        return
    part = third.array(start, stop)
    assert part.tolist() == numbered(start, stop).tolist()
    assert part.shape == (stop - start, WIDTH)


@pytest.mark.parametrize("wanted", [(0, 13), (-1, 3), (13,), (-2, -1)])
def test_a_range_beyond_the_rows_is_refused(wanted: tuple[int, ...]) -> None:
    *_, third = line()
    assert refused(third, *wanted) == "experts_without_gap"


def test_a_child_that_begins_behind_its_parents_end_is_refused() -> None:
    first, *_ = line()
    with pytest.raises(InvalidTrajectory, match="rows 4 to 5 are missing") as error:
        aligned(numbered(6, 8), start=6, parent=first)
    assert error.value.invariant == "experts_without_gap"


def test_branches_share_the_rows_before_them() -> None:
    first, *_ = line()
    branches = [aligned(numbered(2, 5, base=base), start=2, parent=first) for base in (50, 100)]
    for base, branch in zip((50, 100), branches, strict=True):
        expected = [*numbered(0, 2).tolist(), *numbered(2, 5, base=base).tolist()]
        assert branch.array().tolist() == expected
    assert first.array().tolist() == numbered(0, 4).tolist()
    assert sum(each.nbytes for each in (first, *branches)) == WIDTH * (4 + 3 + 3)


def test_a_branch_before_its_parents_own_rows_has_those_of_the_grandparent() -> None:
    first, second, _ = line()
    branch = aligned(numbered(2, 3, base=90), start=2, parent=second)
    assert branch.array().tolist() == [*numbered(0, 2).tolist(), *numbered(2, 3, base=90).tolist()]
    second.evict()
    assert branch.complete(), "rows of the evicted one are not in this branch"
    first.evict()
    assert not branch.complete()


def test_rows_that_were_never_asked_for_are_missed_by_every_read_of_them() -> None:
    late = aligned(numbered(5, 8), start=5)
    assert len(late) == 8
    assert not late.complete()
    assert late.complete(0)
    assert late.array(5).tolist() == numbered(5, 8).tolist()
    with pytest.raises(InvalidTrajectory, match="rows 2 to 4 were never requested") as error:
        late.array(2)
    assert error.value.invariant == "experts_without_gap"
    behind = aligned(numbered(8, 9), start=8, parent=late)
    assert not behind.complete()
    assert behind.array(6).tolist() == numbered(6, 9).tolist()
    assert refused(behind) == "experts_without_gap"


def test_a_branch_in_front_of_what_its_parent_was_asked_for_has_a_gap() -> None:
    branch = aligned(numbered(3, 4), start=3, parent=aligned(numbered(5, 8), start=5))
    assert not branch.complete()
    assert branch.array(3).tolist() == numbered(3, 4).tolist()
    assert refused(branch, 2) == "experts_without_gap"


def test_evicted_rows_are_missed_and_the_others_are_still_there() -> None:
    _, second, third = line()
    second.evict()
    assert (second.held, second.nbytes, len(second)) == (False, 0, 7)
    assert "evicted" in repr(second)
    assert "evicted" not in repr(third)
    assert third.array(7).tolist() == numbered(7, 12).tolist()
    assert third.array(0, 4).tolist() == numbered(0, 4).tolist()
    assert (third.complete(), third.complete(4), third.complete(5)) == (False, True, False)
    with pytest.raises(InvalidTrajectory, match="rows 4 to 6 have been evicted") as error:
        third.array()
    assert error.value.invariant == "experts_held"
    assert refused(third, 5, 6) == "experts_held"


def test_an_evicted_end_leaves_what_it_continues() -> None:
    *_, third = line()
    third.evict()
    assert third.complete(7)
    assert not third.complete(8)
    assert third.array(0, 7).tolist() == numbered(0, 7).tolist()


def test_more_rows_than_there_are_are_not_complete() -> None:
    *_, third = line()
    assert third.complete(12)
    assert not third.complete(13)


def test_evicting_lets_go_of_the_memory() -> None:
    memory = numbered(0, 1000)
    rows, watched = aligned(memory), ref(memory)
    del memory
    assert watched() is not None
    gc.disable()
    try:
        rows.evict()
        assert watched() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("wide", [0, 1, 2])
def test_a_line_of_two_types_comes_in_the_wider_one(wide: int) -> None:
    types: list[Any] = [np.uint16 if place == wide else np.uint8 for place in range(3)]
    node: AlignedRows | None = None
    for place, dtype in enumerate(types):
        node = aligned(numbered(2 * place, 2 * place + 2, dtype=dtype), start=2 * place, parent=node)
    assert node is not None
    assert node.array().dtype == np.uint16
    assert node.array().tolist() == numbered(0, 6).tolist()
    assert node.nbytes == WIDTH * 2 * np.dtype(types[2]).itemsize
    assert node.array(2 * wide, 2 * wide + 1).dtype == np.uint16


def test_ids_above_a_byte_survive_beside_narrow_ones() -> None:
    first = aligned(numbered(0, 2))
    second = aligned(numbered(2, 4, base=60_000, dtype=np.uint16), start=2, parent=first)
    assert second.array().tolist() == [*numbered(0, 2).tolist(), *numbered(2, 4, base=60_000, dtype=np.int32).tolist()]


def test_rows_cannot_be_written_through_what_is_read() -> None:
    first, *_ = line()
    for part in (first.array(), first.array(1, 3)):
        with pytest.raises(ValueError, match="read-only"):
            part[0] = 9
    *_, third = line()
    third.array()[:] = 0
    assert third.array().tolist() == numbered(0, 12).tolist()


def test_a_read_within_one_generation_copies_nothing() -> None:
    memory = numbered(0, 10)
    assert np.shares_memory(aligned(memory).array(2, 9), memory)


def test_a_generation_may_add_no_rows() -> None:
    first, *_ = line()
    same = aligned(numbered(4, 4), start=4, parent=first)
    assert (len(same), same.nbytes, same.complete()) == (4, 0, True)
    assert same.array().tolist() == numbered(0, 4).tolist()
    same.evict()
    assert same.complete()
    assert same.array().tolist() == numbered(0, 4).tolist()


def test_no_rows_at_all_have_the_width_of_their_line() -> None:
    _, second, third = line()
    assert third.array(5, 5).shape == (0, WIDTH)
    assert aligned(numbered(0, 0)).array().shape == (0, WIDTH)
    third.evict()
    assert third.array(12).shape == (0, WIDTH)
    second.evict()
    third.parent = second.parent = None
    assert third.array(3, 3).shape == (0, 0), "nobody knows it any more"


@given(st.data())
def test_any_tree_reads_as_the_rows_that_its_branches_were_made_of(data: st.DataObject) -> None:
    made: list[tuple[AlignedRows, list[int]]] = []  # and which generation each of its rows is from
    for number in range(data.draw(st.integers(1, 8))):
        parent, before = data.draw(st.sampled_from([(None, []), *made]))
        start = data.draw(st.integers(0, len(before)))
        own = data.draw(st.integers(0, 4))
        rows = np.full((own, WIDTH), number, dtype=data.draw(st.sampled_from([np.uint8, np.uint16])))
        made.append((aligned(rows, start=start, parent=parent), [*before[:start], *[number] * own]))
    evicted = data.draw(st.sets(st.sampled_from(range(len(made)))))
    for number in evicted:
        made[number][0].evict()
    for node, whose in made:
        assert len(node) == len(whose)
        for stop in range(len(whose) + 1):
            start = data.draw(st.integers(0, stop))
            assert node.complete(stop) is evicted.isdisjoint(whose[:stop])
            if not evicted.isdisjoint(whose[start:stop]):
                assert refused(node, start, stop) == "experts_held"
            else:
                assert node.array(start, stop).tolist() == [[number] * WIDTH for number in whose[start:stop]]


def test_a_shape_divides_rows_into_layers_without_a_copy() -> None:
    shape = RowShape(layers=4, top_k=2)
    flat: RowArray = np.arange(24, dtype=np.uint8).reshape(3, 8)
    assert (shape.width, shape.choices) == (8, None)
    shaped = shape.reshape(flat)
    assert shaped.shape == (3, 4, 2)
    assert shaped[1, 2].tolist() == [12, 13]
    assert np.shares_memory(shaped, flat)
    assert shape.reshape(flat[:0]).shape == (0, 4, 2)


def test_rows_of_another_width_are_not_of_this_shape() -> None:
    with pytest.raises(ValueError, match="reshape"):
        RowShape(layers=4, top_k=2).reshape(np.zeros((2, 6), dtype=np.uint8))


def rows_of(*firsts: int, dtype: Any = np.uint8) -> RowArray:
    made: RowArray = np.array([[first, 7] for first in firsts], dtype=dtype).reshape(-1, 2)
    return made


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [
        (rows_of(1, 2, 3), rows_of(1, 2, 3), 3),
        (rows_of(1, 2, 3), rows_of(1, 2, 9), 2),
        (rows_of(1, 2, 3), rows_of(9, 2, 3), 0),
        (rows_of(1, 2, 3), rows_of(1, 9, 3), 1),
        (rows_of(1, 2, 3), rows_of(1, 2), 2),
        (rows_of(1, 2, 3), rows_of(), 0),
        (rows_of(), rows_of(), 0),
        (rows_of(1, 2), rows_of(1, 2, 300, dtype=np.uint16), 2),
        (rows_of(44), rows_of(300, dtype=np.uint16), 0),
    ],
)
def test_rows_are_common_up_to_the_first_that_differs(one: RowArray, other: RowArray, common: int) -> None:
    assert common_rows(one, other) == common_rows(other, one) == common


def test_one_differing_id_anywhere_in_a_row_ends_what_is_common() -> None:
    whole = numbered(0, 5)
    for place in range(WIDTH):
        changed = whole.copy()
        changed[3, place] ^= 1
        assert common_rows(whole, changed) == 3


# RowArray in blocks of memory


@given(st.lists(st.integers(0, 7), max_size=6), st.integers(1, 4), st.data())
def test_rows_in_blocks_are_read_as_if_they_lay_in_one(lengths: list[int], width: int, data: st.DataObject) -> None:
    count = sum(lengths) // width
    ids = np.arange(sum(lengths), dtype=np.uint8)[: count * width]
    edges = [0, *np.cumsum(lengths).tolist()]
    blocks = Blocks([ids[begin:end] for begin, end in pairwise(edges) if len(ids[begin:end])], width)
    whole = ids.reshape(count, width)
    assert (len(blocks), blocks.size, blocks.nbytes) == (count, count * width, count * width)
    assert np.array_equal(blocks.flat, ids)
    assert np.array_equal(blocks[:], whole)
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(0, count))
    assert np.array_equal(blocks[start:stop], whole[start:stop])
    assert blocks[start:stop].shape == whole[start:stop].shape
    made = aligned(blocks)
    assert np.array_equal(made.array(), whole)


def test_blocks_cannot_be_written_and_are_not_copied_where_one_has_the_rows() -> None:
    block = np.arange(12, dtype=np.uint8)
    blocks = Blocks([block, block], 3)
    assert np.shares_memory(blocks[1:3], block)
    with pytest.raises(ValueError, match="read-only"):
        blocks[1:3][0, 0] = 1


def test_rows_behind_rows_in_blocks_are_told_apart_from_them() -> None:
    parent = aligned(Blocks([np.arange(4, dtype=np.uint8), np.arange(4, 8, dtype=np.uint8)], 2))
    child = aligned(np.array([[300, 301]], dtype=np.uint16), start=3, parent=parent)
    assert child.array().tolist() == [[0, 1], [2, 3], [4, 5], [300, 301]]
    parent.evict()
    assert not child.complete()
    with pytest.raises(InvalidTrajectory, match="experts_held"):
        child.array()


def test_no_rows_have_the_width_of_those_that_they_belong_to() -> None:
    assert aligned(Blocks([np.arange(6, dtype=np.uint8)], 3)).array(1, 1).shape == (0, 3)
    assert Blocks([], 3)[:].shape == (0, 3)


def test_rows_of_another_length_do_not_continue_any() -> None:
    parent = aligned(np.zeros((2, 3), dtype=np.uint8))
    with pytest.raises(InvalidTrajectory, match="experts_of_the_model: rows of 4 ids behind rows of 3"):
        aligned(np.zeros((1, 4), dtype=np.uint8), start=2, parent=parent)
    assert len(aligned(np.zeros((0, 1), dtype=np.uint8), start=2, parent=parent)) == 2

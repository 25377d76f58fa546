"""Rows of ids: aligned to tokens, shared by branches, held within a budget of bytes, and never with a hole."""

from __future__ import annotations

import gc
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from middleware_hub.routed_experts.store import RowStore
from miles_router.trajectory import InvalidTrajectory
from miles_router.trajectory.rows import ROUTED_EXPERTS, AlignedRows, Blocks, RowArray, common_rows
from tests.support.tiers import examples

WIDTH = 3


def aligned(own: RowArray | Blocks, *, start: int = 0, parent: AlignedRows | None = None) -> AlignedRows:
    return AlignedRows(own, ROUTED_EXPERTS, start=start, parent=parent)


def refused(rows: AlignedRows, *wanted: int) -> str:
    with pytest.raises(InvalidTrajectory) as error:
        rows.array(*wanted)
    return error.value.invariant


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


def test_rows_of_another_length_do_not_continue_any() -> None:
    parent = aligned(np.zeros((2, 3), dtype=np.uint8))
    with pytest.raises(InvalidTrajectory, match="experts_of_the_model: rows of 4 ids behind rows of 3"):
        aligned(np.zeros((1, 4), dtype=np.uint8), start=2, parent=parent)
    assert len(aligned(np.zeros((0, 1), dtype=np.uint8), start=2, parent=parent)) == 2


def zeros(rows: int) -> RowArray:
    return np.zeros((rows, WIDTH), np.uint8)


def line() -> tuple[AlignedRows, AlignedRows, AlignedRows]:
    """Rows 0 to 3, 4 to 6 and 7 to 11 of one trajectory."""
    first = aligned(zeros(4))
    second = aligned(zeros(3), start=4, parent=first)
    return first, second, aligned(zeros(5), start=7, parent=second)


@pytest.mark.parametrize("wanted", [(0, 13), (-1, 3), (13,), (-2, -1)])
def test_a_range_beyond_the_rows_is_refused(wanted: tuple[int, ...]) -> None:
    *_, third = line()
    assert refused(third, *wanted) == "experts_without_gap"


def test_a_child_that_begins_behind_its_parents_end_is_refused() -> None:
    first, *_ = line()
    with pytest.raises(InvalidTrajectory, match="rows 4 to 5 are missing") as error:
        aligned(zeros(2), start=6, parent=first)
    assert error.value.invariant == "experts_without_gap"


STORE_WIDTH = 10


class Holders(RuleBasedStateMachine):
    """Owners, pins and ids in any order, beside a plain account of them."""

    def __init__(self) -> None:
        super().__init__()
        gc.disable()  # whatever is let go, is let go without it
        self.store = RowStore(ROUTED_EXPERTS, 150)
        self.owned: list[AlignedRows] = []
        self.names: set[str] = set()  # of those that are kept
        self.pins: list[tuple[ExitStack, AlignedRows]] = []
        self.protected: dict[int, list[AlignedRows]] = {}
        self.number = 0

    def pick(self, place: int) -> AlignedRows | None:
        return self.owned[place % len(self.owned)] if self.owned else None

    @rule(count=st.integers(0, 9), base=st.none() | st.integers(0, 50), back=st.integers(0, 4), keep=st.booleans())
    def hold(self, count: int, base: int | None, back: int, keep: bool) -> None:
        parent = None if base is None else self.pick(base)
        start = 0 if parent is None else max(0, len(parent) - back)
        self.number += 1
        rid = f"r{self.number}"
        own = np.full((count, STORE_WIDTH), self.number % 256, dtype=np.uint8)
        before = None if parent is None or not parent.complete(start) else parent.array(0, start)
        try:
            node = self.store.add(own, start=start, parent=parent, rid=rid, keep=keep)
        except InvalidTrajectory:
            assert self.peek(rid) is None
            assert self.store.nbytes + own.nbytes > self.store.max_bytes, "there was room"
            return
        assert node.held
        assert self.store.by_rid(rid) is node
        assert node.array(start).tolist() == own.tolist()
        if before is not None and node.complete():
            assert node.array(0, start).tolist() == before.tolist()
        if keep:
            self.names.add(rid)
        else:
            self.owned.append(node)

    @rule(place=st.integers(0, 50))
    def let_go(self, place: int) -> None:
        if self.owned:
            self.owned.pop(place % len(self.owned))

    @rule(place=st.integers(1, 100))
    def use(self, place: int) -> None:
        node = self.store.by_rid(f"r{1 + place % (self.number + 1)}")
        assert node is None or node.held
        if node is not None and place % 3 == 0:
            self.owned.append(node)

    @rule(place=st.integers(0, 50))
    def pin(self, place: int) -> None:
        node = self.pick(place)
        if node is not None and len(self.pins) < 3:
            stack = ExitStack()
            stack.enter_context(self.store.pinned([node]))
            self.pins.append((stack, node))
            self.protected[id(stack)] = [each for each in node.line if each.held]

    @rule(place=st.integers(0, 50))
    def unpin(self, place: int) -> None:
        if self.pins:
            stack, _ = self.pins.pop(place % len(self.pins))
            del self.protected[id(stack)]
            stack.close()

    @invariant()
    def everything_adds_up(self) -> None:
        self.store.check_integrity()
        assert self.store.nbytes <= self.store.max_bytes
        assert all(node.held for nodes in self.protected.values() for node in nodes), "a pinned one was evicted"
        reached = {id(each): each for node in self.owned for each in node.line}
        reached |= {id(each): each for _, node in self.pins for each in node.line}
        kept = [node for name in self.names if (node := self.peek(name)) is not None]
        reached |= {id(each): each for node in kept for each in node.line}
        assert self.store.nbytes == sum(node.nbytes for node in reached.values()), "nothing else is held"

    def peek(self, rid: str) -> AlignedRows | None:
        """By its id, without using it."""
        key = self.store._by_rid.get(rid)
        return None if key is None else key()

    def teardown(self) -> None:
        gc.enable()
        for stack, _ in self.pins:
            stack.close()


Holders.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=60)
TestHolders = Holders.TestCase


def test_more_rows_than_there_are_are_not_complete() -> None:
    *_, third = line()
    assert third.complete(12)
    assert not third.complete(13)

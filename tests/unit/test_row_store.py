"""All rows within a byte budget: the least recently used go first, and never those that others continue."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from middleware_hub.routed_experts import store as storing
from middleware_hub.routed_experts.store import RowStore
from miles_router.trajectory import InvalidTrajectory
from miles_router.trajectory.rows import ROUTED_EXPERTS, AlignedRows
from tests.support.tiers import examples

WIDTH = 10


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """Whatever is let go, is let go without the garbage collector."""
    gc.disable()
    yield
    gc.enable()


def add(
    store: RowStore, count: int, rid: str | None = None, *, parent: AlignedRows | None = None, keep: bool = False
) -> AlignedRows:
    """`count` rows of `WIDTH` bytes behind all those of `parent`."""
    start = 0 if parent is None else len(parent)
    own = np.full((count, WIDTH), start, dtype=np.uint8)
    node = store.add(own, start=start, parent=parent, rid=rid, keep=keep)
    store.check_integrity()
    return node


def held(*nodes: AlignedRows) -> str:
    return "".join("+" if node.held else "-" for node in nodes)


def test_rows_are_held_for_as_long_as_their_owner_has_them() -> None:
    store = RowStore(ROUTED_EXPERTS, 1000)
    first, second = add(store, 3, "a"), add(store, 4, "b")
    assert (len(store), store.nbytes) == (2, 70)
    del first
    store.check_integrity()
    assert (len(store), store.nbytes, store.by_rid("a")) == (1, 40, None)
    assert store.by_rid("b") is second
    del second
    assert (len(store), store.nbytes) == (0, 0)
    assert store.statistics.evicted == 0


def test_rows_are_held_for_as_long_as_somebody_continues_them() -> None:
    store = RowStore(ROUTED_EXPERTS, 1000)
    first = add(store, 3, "a")
    second = add(store, 4, "b", parent=first)
    del first
    assert (len(store), store.nbytes) == (2, 70)
    assert second.complete()
    del second
    store.check_integrity()
    assert (len(store), store.nbytes) == (0, 0)


def test_kept_rows_stay_without_an_owner_and_are_found_by_their_id() -> None:
    store = RowStore(ROUTED_EXPERTS, 1000)
    add(store, 3, "a", keep=True)
    assert (len(store), store.nbytes) == (1, 30)
    found = store.by_rid("a")
    assert found is not None
    assert found.complete()
    assert store.by_rid("b") is None


def test_rows_without_an_id_are_held_too() -> None:
    store = RowStore(ROUTED_EXPERTS, 1000)
    node = add(store, 3)
    assert (len(store), node.complete()) == (1, True)


def test_the_newest_generation_has_an_id_that_came_twice() -> None:
    store = RowStore(ROUTED_EXPERTS, 1000)
    first, second = add(store, 3, "a"), add(store, 4, "a")
    assert store.by_rid("a") is second
    del first
    store.check_integrity()
    assert store.by_rid("a") is second
    first = add(store, 2, "a")
    assert store.by_rid("a") is first
    del second
    assert store.by_rid("a") is first


def test_the_budget_may_be_used_to_the_last_byte() -> None:
    store = RowStore(ROUTED_EXPERTS, 100)
    first, second = add(store, 6), add(store, 4)
    assert (store.nbytes, held(first, second)) == (100, "++")
    third = add(store, 1)
    assert (store.nbytes, held(first, second, third)) == (50, "-++")
    assert (store.statistics.evicted, store.statistics.evicted_bytes) == (1, 60)


def test_the_least_recently_used_go_first() -> None:
    store = RowStore(ROUTED_EXPERTS, 100)
    first, second, third = (add(store, 3, rid) for rid in "abc")
    store.by_rid("a")
    fourth = add(store, 3)
    assert held(first, second, third, fourth) == "+-++"
    with store.pinned([third]):
        pass
    fifth = add(store, 3)
    assert held(first, third, fourth, fifth) == "-+++"
    store.check_integrity()


def test_what_is_evicted_is_found_no_more() -> None:
    store = RowStore(ROUTED_EXPERTS, 100)
    add(store, 6, "kept", keep=True)
    owned = add(store, 4, "owned")
    new = add(store, 10, "new")
    assert (len(store), store.nbytes) == (1, 100)
    assert store.by_rid("kept") is store.by_rid("owned") is None
    assert store.by_rid("new") is new
    assert (owned.held, owned.complete()) == (False, False)
    with pytest.raises(InvalidTrajectory, match="experts_held"):
        owned.array()


def test_rows_of_a_trajectory_are_not_evicted_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    store = RowStore(ROUTED_EXPERTS, 100)
    add(store, 5, "kept", keep=True)
    owned = add(store, 5, "owned")
    with caplog.at_level(logging.WARNING):
        new = add(store, 10)
    assert held(owned, new) == "-+"
    (line,) = caplog.records
    assert line.message == "routed_experts_evicted"
    assert line.__dict__["fields"] == {"rid": "owned", "rows": 5}


def test_nothing_goes_before_what_continues_it() -> None:
    store = RowStore(ROUTED_EXPERTS, 100)
    parent = add(store, 3, "parent")
    other = add(store, 3, "other")
    child = add(store, 3, "child", parent=parent)
    new = add(store, 4)
    assert held(parent, other, child, new) == "+-++"
    more = add(store, 3)
    assert held(parent, child, new, more) == "+-++", "the child goes first, and its parent can be continued again"
    assert not child.complete()
    assert parent.complete()
    store.check_integrity()


def test_a_use_of_a_child_is_a_use_of_all_that_it_continues() -> None:
    store = RowStore(ROUTED_EXPERTS, 100)
    line = [add(store, 2, "0")]
    for rid in "123":
        line.append(add(store, 2, rid, parent=line[-1]))
    other = add(store, 2, "other")
    store.by_rid("2")
    new = add(store, 2)
    assert (held(*line), held(other, new)) == ("+++-", "++")
    newer = add(store, 2)
    assert (held(*line), held(other, new, newer)) == ("+++-", "-++"), "the line was used behind the other one"


def test_pinned_rows_and_all_that_they_continue_stay() -> None:
    store = RowStore(ROUTED_EXPERTS, 100)
    grandparent = add(store, 3)
    parent = add(store, 3, parent=grandparent)
    leaf, other = add(store, 1, parent=parent), add(store, 3)
    with store.pinned([parent]):
        new = add(store, 4)
        assert held(grandparent, parent, leaf, other, new) == "++--+"
        with pytest.raises(InvalidTrajectory, match="experts_fit") as error:
            add(store, 5)
        assert error.value.invariant == "experts_fit"
        assert held(grandparent, parent) == "++"
        store.check_integrity()
    newest = add(store, 10)
    assert held(grandparent, parent, new, newest) == "---+"


def test_rows_are_pinned_for_as_long_as_anybody_pins_them() -> None:
    store = RowStore(ROUTED_EXPERTS, 100)
    node = add(store, 6)
    with store.pinned([node, node]):
        with store.pinned([node]):
            pass
        with pytest.raises(InvalidTrajectory, match="experts_fit"):
            add(store, 5)
        assert node.held
    with pytest.raises(RuntimeError, match="lost"), store.pinned([node]):
        raise RuntimeError("lost")
    add(store, 5)
    assert not node.held
    store.check_integrity()


def test_a_pinned_end_that_was_evicted_still_protects_what_it_continues() -> None:
    """What is held of a prompt may be the rows before those that have been evicted."""
    store = RowStore(ROUTED_EXPERTS, 100)
    parent = add(store, 5)
    end = add(store, 1, parent=parent)
    other = add(store, 4)
    with store.pinned([other]):
        new = add(store, 1)
    assert held(parent, end, other, new) == "+-++"
    with store.pinned([end]):
        assert end.complete(5)
        with pytest.raises(InvalidTrajectory, match="experts_fit"):
            add(store, 9)
        assert end.complete(5), "an answer will continue them"
    add(store, 9)
    assert not end.complete(5)
    store.check_integrity()


def test_what_does_not_fit_without_all_others_is_refused_and_not_held() -> None:
    store = RowStore(ROUTED_EXPERTS, 100)
    with pytest.raises(InvalidTrajectory, match="110 bytes") as error:
        add(store, 11, "large", keep=True)
    assert error.value.invariant == "experts_fit"
    store.check_integrity()
    assert (len(store), store.nbytes, store.by_rid("large")) == (0, 0, None)


def test_what_does_not_fit_behind_what_it_continues_is_refused() -> None:
    store = RowStore(ROUTED_EXPERTS, 100)
    parent = add(store, 6, "parent")
    with pytest.raises(InvalidTrajectory, match="experts_fit"):
        add(store, 5, "child", parent=parent)
    store.check_integrity()
    assert (held(parent), len(store), store.by_rid("child")) == ("+", 1, None)
    assert add(store, 4, parent=parent).complete()


def test_a_gap_is_refused_and_nothing_is_held() -> None:
    store = RowStore(ROUTED_EXPERTS, 100)
    parent = add(store, 3)
    with pytest.raises(InvalidTrajectory, match="experts_without_gap"):
        store.add(np.zeros((1, WIDTH), dtype=np.uint8), start=5, parent=parent, rid="a", keep=True)
    store.check_integrity()
    assert (len(store), store.nbytes, store.by_rid("a")) == (1, 30, None)


def test_generations_without_rows_of_their_own_take_no_room() -> None:
    store = RowStore(ROUTED_EXPERTS, 30)
    parent = add(store, 3, "parent")
    same = add(store, 0, "same", parent=parent)
    assert (len(store), store.nbytes) == (2, 30)
    assert store.by_rid("same") is same
    assert same.complete()


def test_a_kept_line_is_let_go_from_its_end() -> None:
    store = RowStore(ROUTED_EXPERTS, 100)
    add(store, 4, "a", keep=True)
    for rid, parent in (("b", "a"), ("c", "b")):
        add(store, 3, rid, parent=store.by_rid(parent), keep=True)
    add(store, 3, "d", keep=True)
    assert [store.by_rid(rid) is not None for rid in "abcd"] == [True, True, False, True]
    store.check_integrity()


def test_a_wide_row_counts_with_all_its_bytes() -> None:
    store = RowStore(ROUTED_EXPERTS, 100)
    node = store.add(np.zeros((3, WIDTH), dtype=np.uint16), start=0, rid=None, keep=False)
    assert (store.nbytes, node.nbytes) == (60, 60)


class Holders(RuleBasedStateMachine):
    """Owners, pins and ids in any order, beside a plain account of them."""

    def __init__(self) -> None:
        super().__init__()
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
        own = np.full((count, WIDTH), self.number % 256, dtype=np.uint8)
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
        for stack, _ in self.pins:
            stack.close()


Holders.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=60)
TestHolders = Holders.TestCase


def test_generations_without_rows_of_their_own_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storing, "MAX_RECORDS", 3)
    held = RowStore(ROUTED_EXPERTS, 100)
    for rid in "abcde":
        held.add(np.zeros((0, 2), dtype=np.uint8), start=0, rid=rid, keep=True)
    assert len(held) == 3
    assert [rid for rid in "abcde" if held.by_rid(rid) is not None] == ["c", "d", "e"]
    held.check_integrity()

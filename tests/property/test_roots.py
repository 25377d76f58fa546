"""Which process has a text: the directory beside a plain one, and what several processes reuse beside one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from middleware_hub.radix_tree.cache import RadixTreeCache
from middleware_hub.radix_tree.entry import TextRecord
from miles_router.asgi.moving import Elsewhere
from miles_router.cluster.owners import roots as directory
from miles_router.cluster.owners.links import Hear, Links, Parcel
from miles_router.cluster.owners.roots import RootChange, Roots, pack, unpack
from miles_router.cluster.owners.texts import ROOTS, TextOwners
from miles_router.cluster.peers import Peers
from miles_router.middlewares.roots import BLOCK, Root, hash_of
from miles_router.trajectory import Piece
from tests.support.tiers import examples
from tests.support.waiting import at_once

PROCESSES = 4
SAMPLES, TURNS = 8, 5
#: Roots whose lengths lie around the ends of blocks, many of them beginnings of others; in several bytes a character.
TEXTS = st.builds(
    lambda char, length, end: char * length + end,
    st.sampled_from(("a", "ä", "\U0001f600")),
    st.sampled_from((0, 1, BLOCK // 2, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK)),
    st.text("ab", min_size=1, max_size=2),
)


@settings(max_examples=examples(600))
@given(st.lists(st.tuples(TEXTS, st.integers(0, 2), st.booleans()), max_size=12), TEXTS, st.text("ab", max_size=3))
def test_the_longest_root_with_which_a_text_begins_is_found(
    changes: list[tuple[str, int, bool]], text: str, more: str
) -> None:
    roots, plain = Roots(3, 0, 100), dict[str, int]()
    for changed, owner, added in changes:
        (change,) = unpack(pack([RootChange(Root.of(changed), owner, added)]))
        roots.apply(change)
        if added:
            plain[changed] = min(owner, plain.get(changed, owner))
        elif plain.get(changed) == owner:
            del plain[changed]
    whole = text + more
    found = roots.find(whole)
    known = max((each for each in plain if whole.startswith(each)), key=len, default=None)
    assert found == (None if known is None else (Root.of(known), plain[known]))
    roots.lose(1)
    assert len(roots) == sum(owner != 1 for owner in plain.values())


def test_a_text_is_hashed_in_as_many_steps_as_roots_end_in_different_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it is, and however long the longest of them: the event loop waits for that."""
    roots, steps = Roots(2, 0, 100), list[int]()
    for root in ("a" * 10, "b" * 20, "a" * 1_000_000):
        roots.apply(RootChange(Root.of(root), 0, True))

    class Hasher:
        def __init__(self, hasher: Any) -> None:
            self.copy, self.digest = hasher.copy, hasher.digest
            self._hasher = hasher

        def update(self, data: memoryview) -> None:
            steps.append(len(data))
            self._hasher.update(data)

    monkeypatch.setattr(directory, "hash_of", lambda data: Hasher(hash_of(data)))
    assert roots.find("a" * 1_000_001) == (Root.of("a" * 1_000_000), 0)
    assert sum(steps) <= 1_000_000
    assert len(steps) == 2
    roots.lose(0)
    assert roots.find("a" * 1_000_001) is None
    assert len(steps) == 2


def test_a_process_forgets_the_roots_that_it_has_not_used_for_the_longest_time() -> None:
    roots, other = Roots(2, 0, 2), Roots(2, 1, 2)
    names = [Root.of(name) for name in "abcd"]
    for change in roots.give(names[:3], 0):
        other.apply(change)
    roots.use(names[0])
    for change in [*roots.give(names[3:], 1), *roots.evicted()]:
        other.apply(change)
    assert [[each.owner(root) for root in names] for each in (roots, other)] == [[0, None, 0, 1]] * 2


def test_roots_of_a_process_that_ended_stay_its_own_until_the_next_one_has_told_which_it_has() -> None:
    roots = Roots(3, 0, 100)
    kept, gone, others = (Root.of(name) for name in "abc")
    for root, owner in ((kept, 1), (gone, 1), (others, 2)):
        roots.apply(RootChange(root, owner, True))
    roots.doubt(1)
    assert [roots.owner(each) for each in (kept, gone, others)] == [1, 1, 2]
    roots.apply(RootChange(kept, 1, True))
    roots.settle(1)
    assert [roots.owner(each) for each in (kept, gone, others)] == [1, None, 2]
    roots.settle(1)
    assert roots.owner(kept) == 1


class Wires:
    """The links of one process: what others tell it lies there until it reads."""

    busy = False

    def __init__(self) -> None:
        self.hearers: dict[bytes, Hear] = {}
        self.others: list[Wires] = []
        self.arrived: list[bytes] = []

    def tell_all(self, parcel: Parcel) -> None:
        for other in self.others:
            other.arrived.append(parcel.packet()[0])

    def read_now(self) -> None:
        arrived, self.arrived = self.arrived, []
        for data in arrived:
            self.hearers[ROOTS](0, data)

    async def flushed(self, seconds: float) -> None:
        pass


class Process:
    """One process: its directory and its cache."""

    def __init__(self, index: int) -> None:
        self.wires = Wires()
        self.owners = TextOwners(Peers(index, PROCESSES, Path()), cast(Links, self.wires))
        for other in range(PROCESSES):
            self.wires.hearers[ROOTS](other, ROOTS)
        self.cache = RadixTreeCache(max_tokens=1 << 30, keep_versions=1)


def all_processes() -> list[Process]:
    processes = [Process(index) for index in range(PROCESSES)]
    for process in processes:
        process.wires.others = [other.wires for other in processes if other is not process]
    return processes


def owner_of(processes: Sequence[Process], arrives: int, text: str) -> int:
    """Where a text that arrives somewhere is answered, through as few processes as that takes."""
    at, note = arrives, b""
    for _ in range(5):
        try:
            at_once(processes[at].owners.require(note, [text], processes[at].cache.continues))
        except Elsewhere as elsewhere:
            at, note = elsewhere.owner, elsewhere.note
        else:
            return at
    raise AssertionError("it goes from process to process")


def turn(cache: RadixTreeCache, text: str, answer: str, rid: str) -> int:
    """Answer a text and record that, a token for each character. How many were reused."""
    match = cache.match(text)
    given = Piece.given([ord(char) for char in text[match.chars :]])
    sampled = Piece.sampled([ord(char) + 1000 for char in answer], [-1.0] * len(answer), "1")
    trajectory = match.trajectory.append(given, sampled)
    whole = text + answer
    ends = np.arange(1, len(whole) + 1, dtype=np.uint32)
    record: Any = TextRecord(whole, len(whole), trajectory, ends, rid, "stop")
    cache.record(record, match)
    return len(match.trajectory)


@settings(max_examples=examples(60))
@given(
    prompts=st.integers(1, 6),
    common=st.sampled_from((0, 10, BLOCK, 3000)),
    alone=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_several_processes_reuse_what_one_does(prompts: int, common: int, alone: bool, seed: int) -> None:
    """Groups of prompts that begin alike, eight samples each, five turns: every request lands anywhere."""
    dice = random.Random(seed)
    processes, one = all_processes(), RadixTreeCache(max_tokens=1 << 30, keep_versions=1)
    system = "s" * common
    rollouts = [(f"{system}Question {prompt}:", sample) for prompt in range(prompts) for sample in range(SAMPLES)]
    texts = {each: each[0] for each in rollouts}
    if alone and system:  # somebody asks for the shared beginning itself
        texts[system, 0] = system
    waiting = [each for each in texts for _ in range(TURNS)]
    dice.shuffle(waiting)
    for number, rollout in enumerate(waiting):
        text = texts[rollout]
        answer = "".join(dice.choices("xyz", k=dice.randint(1, 4)))
        owner = processes[owner_of(processes, dice.randrange(PROCESSES), text)]
        reused = turn(owner.cache, text, answer, f"r{number}")
        assert reused == turn(one, text, answer, f"r{number}")
        texts[rollout] = f"{text}{answer} and {dice.randrange(3)}?"
    for process in processes:
        process.wires.read_now()
        assert len(process.owners.roots) == len({name for name, _ in texts})
    firsts = [len(process.cache) > 0 for process in processes]
    assert sum(firsts) == min(PROCESSES, len({name for name, _ in texts}))

"""The text cache: what is found, what is reused, what goes first when room is needed, and what the disk has."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from middleware_hub.radix_tree.archive.archive import TextArchive
from middleware_hub.radix_tree.archive.text_rows import TextRows
from middleware_hub.radix_tree.cache import ENTRY_CHARGE, NO_MATCH, PrefixMatch, RadixTreeCache
from middleware_hub.radix_tree.entry import Entry, TextRecord
from middleware_hub.radix_tree.recording import TokenizedText
from miles_router.errors import StateError
from miles_router.state.store import StateStore
from miles_router.trajectory import Piece, Trajectory
from tests.support.cache_integrity import check_integrity
from tests.support.waiting import until


def held(*, max_tokens: int = 10_000, keep_versions: int = 1) -> RadixTreeCache:
    return RadixTreeCache(max_tokens=max_tokens, keep_versions=keep_versions)


def put(cache: RadixTreeCache, record: TextRecord) -> Entry:
    entry = cache.record(record, NO_MATCH)
    assert entry is not None
    return entry


def rids(cache: RadixTreeCache) -> set[str]:
    return {entry.rid for node in cache._tree.nodes() for entry in node.entries}


def reused(cache: RadixTreeCache, text: str) -> tuple[int, str]:
    match = cache.match(text)
    assert len(match.trajectory) == len(match.ends)
    sampled = sum(len(piece) for piece in match.trajectory.pieces if piece.logprobs is not None)
    return sampled, text[: match.chars]


def record(rid: str, text: str, shown: int, pieces: list[Piece], ends: list[int]) -> TextRecord:
    return TextRecord(text, shown, Trajectory(pieces), np.array(ends, dtype=np.uint32), rid, "stop")


def sampled(*ids: int) -> Piece:
    return Piece.sampled(ids, [-0.5] * len(ids), "1")


def test_a_million_tokens_stay_within_the_budget() -> None:
    cache = held(max_tokens=100_000)
    ids = np.arange(1000)
    for number in range(1000):
        ends = np.arange(1, 1001, dtype=np.uint32)
        sampled = Piece.sampled(ids[1:], np.full(999, -1.0), f"{number // 100}")
        trajectory = Trajectory([Piece.given([number]), sampled])
        put(cache, TextRecord(f"{number:04}" * 250, 1000, trajectory, ends, f"r{number}", "stop"))
        assert cache.tokens + ENTRY_CHARGE * len(cache) <= 100_000
    assert cache.tokens > 97_000
    assert cache.nbytes <= 12 * cache.tokens
    assert 990 * len(cache) < cache.characters <= 1000 * len(cache), "texts share their beginnings"
    assert min(int(rid[1:]) for rid in rids(cache)) == 1000 - len(cache)
    check_integrity(cache)


class Process(NamedTuple):
    """The texts of one process."""

    cache: RadixTreeCache
    archive: TextArchive

    @classmethod
    def on(cls, store: StateStore) -> Process:
        cache = RadixTreeCache(max_tokens=10_000, keep_versions=1)
        return cls(cache, TextArchive(cache, store, TextRows({}, write=False), max_tokens=10_000))

    async def look_up(self, text: str) -> PrefixMatch:
        await self.archive.load(text)
        return self.cache.match(text)

    async def record(self, text: str, match: PrefixMatch, rid: str, said: str = "!") -> Entry:
        """An answer to a text, a token a character."""
        rest = Piece.given([ord(each) for each in text[match.chars :]])
        trajectory = match.trajectory.append(rest, Piece.sampled([ord(said)], [-1.0], "1"))
        ends = np.arange(1, len(text) + 2, dtype=np.uint32)
        before = TokenizedText(text, match.trajectory, match.ends, match).continued_entry
        entry = self.cache.record(TextRecord(text + said, len(text) + 1, trajectory, ends, rid, "stop"), match)
        assert entry is not None
        self.archive.add(entry, before, text)
        await self.archive.save([entry])
        return entry


async def test_what_went_on_from_an_evicted_text_outlives_its_prompts_other_answers(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    running = Process.on(store)
    first = await running.record("ask", await running.look_up("ask"), "first")
    match = await running.look_up("ask!more")
    running.cache.evict(first)
    await until(lambda: not running.archive._families, "the disk knows that")
    await running.record("ask!more", match, "second")
    other = await running.record("ask", await running.look_up("ask"), "other")
    running.cache.evict(other)
    await until(lambda: running.archive._sweeping is not None and running.archive._sweeping.done(), "and that")
    then = Process.on(store)
    await then.archive.load_rid("second")
    assert then.cache.by_rid("second") is not None
    await store.close()


async def test_a_family_that_cannot_be_read_is_refused_by_name_and_counted(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    running, then = Process.on(store), Process.on(store)
    entry = await running.record("ask", await running.look_up("ask"), "first")
    assert entry.family is not None
    await store.append(entry.family.owner, {entry.serial: b"nonsense"}, slot=entry.family.slot)
    with pytest.raises(StateError):
        await then.look_up("ask")
    assert then.archive.statistics.numbers()["failed"] == {"state_failed": 1}
    await store.close()


def test_sibling_that_branches_inside_a_turn_shares_only_the_common_part() -> None:
    # The newest generation below the parting is a second turn, whose own tokens begin behind it.
    cache = held()
    turn = record("first", "Qabc", 4, [Piece.given([1]), sampled(2, 3, 4)], [1, 2, 3, 4])
    cache.record(turn)
    more = record("second", "Qabcde", 6, [*turn.trajectory.pieces, Piece.given([5]), sampled(6)], [1, 2, 3, 4, 5, 6])
    cache.record(more, cache.match("Qabcd"))
    sibling = record("sibling", "Qabx", 4, [Piece.given([1]), sampled(2, 3, 9)], [1, 2, 3, 4])
    entry = cache.record(sibling)
    assert entry is not None
    assert entry.trajectory() == sibling.trajectory
    check_integrity(cache)


def letters(given: str, sampled: str, rid: str, *, version: str) -> TextRecord:
    """One token a letter, its id the letter's code; sampled ones in capital ids, so that encoding would differ."""
    text = given + sampled
    ids = [ord(letter) + 1000 for letter in sampled]
    pieces = [Piece.given([ord(letter) for letter in given]), Piece.sampled(ids, [-0.5] * len(ids), version)]
    ends = np.arange(1, len(text) + 1, dtype=np.uint32)
    return TextRecord(text, len(text), Trajectory(pieces), ends, rid, "stop")


def room_for(*entries: int) -> int:
    """A budget in which entries with so many own tokens just fit."""
    return sum(entries) + ENTRY_CHARGE * len(entries)


def test_versions_before_those_kept_go_before_anything_else() -> None:
    cache = held(max_tokens=room_for(3, 3, 3, 3), keep_versions=1)
    for name, version in (("a", "v1"), ("b", "v2"), ("c", "v1"), ("d", "v3")):
        put(cache, letters(name, "xy", name, version=version))
    cache.match("axy and more")
    put(cache, letters("e", "xy", "e", version="v3"))
    assert rids(cache) == {"a", "b", "d", "e"}, "v1 is two behind v3: the least recently used of it goes"
    put(cache, letters("f", "xy", "f", version="v3"))
    assert rids(cache) == {"b", "d", "e", "f"}
    put(cache, letters("g", "xy", "g", version="v3"))
    assert rids(cache) == {"d", "e", "f", "g"}, "nothing stale is left: the least recently used"

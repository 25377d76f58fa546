"""Recorded texts beyond memory: what is evicted while something goes on from it, and texts that begin with nothing."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from middleware_hub.radix_tree.archive.archive import TextArchive
from middleware_hub.radix_tree.archive.text_rows import TextRows
from middleware_hub.radix_tree.cache import PrefixMatch, RadixTreeCache
from middleware_hub.radix_tree.entry import Entry, TextRecord
from middleware_hub.radix_tree.recording import TokenizedText
from miles_router.errors import StateError
from miles_router.state.store import StateStore
from miles_router.trajectory import Piece
from tests.support.waiting import until


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


async def test_an_answer_to_an_empty_text_is_there_again(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    running, then = Process.on(store), Process.on(store)
    await running.record("", await running.look_up(""), "first")
    assert (await then.look_up("!")).chars == 1
    assert [entry.rid for entry in then.cache.retrieve("!")] == ["first"]
    await store.close()


async def test_a_text_is_held_though_what_it_was_written_behind_was_evicted(tmp_path: Path) -> None:
    store = StateStore(tmp_path)
    running, then, last = Process.on(store), Process.on(store), Process.on(store)
    await running.record("ask", await running.look_up("ask"), "first")
    second = await running.record("ask", await running.look_up("ask"), "second", "?")
    assert second.parent is running.cache.peek_rid("first")
    await running.record("asked", await running.look_up("asked"), "other")
    for rid in ("other", "first"):  # what both of them share, they share now with the other, which was read before
        await then.archive.load_rid(rid)
    first = then.cache.peek_rid("first")
    assert first is not None
    assert not first.children
    then.cache.evict(first)
    await until(lambda: then.archive._sweeping is not None and then.archive._sweeping.done(), "the disk knows")
    await last.archive.load_rid("second")
    assert last.cache.by_rid("second") is not None
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

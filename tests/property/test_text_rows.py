"""Rows of texts beyond memory: whatever is evicted, rows that memory has are read again, and no others."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from middleware_hub.radix_tree.archive.archive import TextArchive
from middleware_hub.radix_tree.archive.text_rows import TextRows
from middleware_hub.radix_tree.cache import RadixTreeCache
from middleware_hub.radix_tree.entry import Entry, TextRecord
from middleware_hub.radix_tree.recording import TokenizedText
from middleware_hub.routed_experts.store import RowStore
from miles_router.middlewares.rows import RowChannel, TrajectoryRows
from miles_router.state.store import StateStore
from miles_router.trajectory import InvalidTrajectory, Piece, Trajectory
from miles_router.trajectory.rows import ROUTED_EXPERTS, AlignedRows, RowArray
from tests.support.tiers import examples
from tests.support.waiting import until

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
PLENTY = 1 << 20


class Step(NamedTuple):
    """A generation behind an earlier one, or one that is evicted, or room for so many bytes of rows."""

    base: int
    said: str
    sibling: bool  # its rows go on from those of the generation before
    evicts: bool
    max_bytes: int


STEPS = st.builds(
    Step,
    st.integers(0, 5),
    st.text("xyz", min_size=1, max_size=3),
    st.booleans(),
    st.booleans(),
    st.sampled_from([PLENTY, PLENTY, 40, 12]),
)


def rows_of(trajectory: Trajectory, start: int) -> RowArray:
    """Two ids of each token but the last."""
    tokens = trajectory.tokens[:-1]
    return np.stack([tokens % 251, np.arange(len(tokens)) % 251], axis=1)[start:].astype(np.uint8)


class Process:
    """Texts and rows of one process."""

    def __init__(self, directory: Path) -> None:
        self.rows = RowStore(ROUTED_EXPERTS, PLENTY)
        channel = RowChannel(ROUTED_EXPERTS)
        channel.max_bytes, channel.hold = PLENTY, self.rows.restore
        self.rows.when_evicted = lambda rows: channel.when_evicted(rows)
        self.cache = RadixTreeCache(max_tokens=PLENTY, keep_versions=1)
        self.store = StateStore(directory)
        text_rows = TextRows({ROUTED_EXPERTS: channel}, write=True)
        self.archive = TextArchive(self.cache, self.store, text_rows, max_tokens=PLENTY)
        self.before: AlignedRows | None = None
        self.texts = ["a", "ab"]
        self.rids: list[str] = []

    async def step(self, step: Step) -> None:
        self.rows.max_bytes = step.max_bytes
        if step.evicts:
            leaves = [entry for rid in self.rids if (entry := self.cache.peek_rid(rid)) and not entry.children]
            if leaves:
                self.cache.evict(leaves[step.base % len(leaves)])
            return
        text = self.texts[step.base % len(self.texts)]
        await self.archive.load(text)
        match = self.cache.match(text)
        prompt = match.trajectory.append(Piece.given([ord(each) for each in text[match.chars :]]))
        trajectory = prompt.append(Piece.sampled([ord(each) for each in step.said], [-1.0] * len(step.said), "1"))
        rid = f"r{len(self.rids)}"
        tokenized = TokenizedText(text, prompt, np.arange(1, len(text) + 1, dtype=np.uint32), match)
        record = TextRecord(
            text + step.said,
            len(text) + len(step.said),
            trajectory,
            np.arange(1, len(trajectory) + 1, dtype=np.uint32),
            rid,
            "stop",
            rows={ROUTED_EXPERTS: TrajectoryRows(self._new_rows(tokenized, trajectory, step))},
        )
        entry = self.cache.record(record, match)
        assert entry is not None
        self.archive.add(entry, tokenized.continued_entry, text)
        await self.archive.save([entry])
        self.rids.append(rid)
        self.texts.append(record.text)

    def _new_rows(self, prompt: TokenizedText, trajectory: Trajectory, step: Step) -> AlignedRows | None:
        prefix = prompt.held_rows(ROUTED_EXPERTS)
        parent, start = (None, 0) if prefix is None else (prefix.rows, min(prefix.count, len(trajectory) - 1))
        if step.sibling and self.before is not None and self.before.complete():
            alike = np.cumprod(_equal_rows(self.before.array(), rows_of(trajectory, 0))).sum()
            if alike > start:
                parent, start = self.before, int(alike)
        own = rows_of(trajectory, start)
        try:
            self.before = self.rows.add(own, start=start, parent=parent, rid=None, keep=False)
        except InvalidTrajectory:  # there is no room
            return None
        return self.before

    async def swept(self) -> None:
        sweeping = self.archive._sweeping
        if sweeping is not None:
            await until(sweeping.done, "the disk knows")

    def told(self, entry: Entry) -> bytes | None:
        """Its rows, where they can be read."""
        rows = entry.rows[ROUTED_EXPERTS].rows
        return rows.array().tobytes() if rows is not None and rows.complete() else None


def _equal_rows(one: RowArray, other: RowArray) -> RowArray:
    length = min(len(one), len(other))
    equal: RowArray = (one[:length] == other[:length]).all(axis=1).astype(np.int64)
    return equal


async def read_again(steps: Sequence[Step], place: Path) -> None:
    first = Process(place)
    for step in steps:
        await first.step(step)
    await first.swept()
    held = {rid: entry for rid in first.rids if (entry := first.cache.peek_rid(rid)) is not None}
    told = {rid: first.told(entry) for rid, entry in held.items()}
    on_disk = {
        (family.name, number)
        for family in first.archive._families.values()
        for number in await first.store.load(family.owner, large=True, slot=family.slot)
    }
    known = {(family.name, number) for family in first.archive._families.values() for number in family.rows.records}
    assert on_disk == known
    assert first.archive._rows.nbytes == sum(family.rows.nbytes for family in first.archive._families.values())
    await first.store.close()
    second = Process(place)
    for rid, before in told.items():
        await second.archive.load_rid(rid)
        entry = second.cache.peek_rid(rid)
        assert entry is not None
        after, exact = second.told(entry), rows_of(entry.trajectory(), 0).tobytes()
        assert before in (None, exact)
        # What memory let go of is there again where others went on from it.
        assert after in (before, exact), (before, after)
    await second.swept()
    await second.store.close()


@settings(max_examples=examples(150), deadline=None)
@given(steps=st.lists(STEPS, min_size=2, max_size=14))
def test_rows_that_memory_has_are_read_again_whatever_was_evicted(steps: list[Step]) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as place:
        asyncio.run(read_again(steps, Path(place)))

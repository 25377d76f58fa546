"""Recorded texts that outlive the process: what is read again answers as what was recorded."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from middleware_hub.radix_tree.archive.archive import TextArchive
from middleware_hub.radix_tree.archive.text_rows import TextRows
from middleware_hub.radix_tree.cache import PrefixMatch, RadixTreeCache
from middleware_hub.radix_tree.entry import Entry
from middleware_hub.radix_tree.recording import TokenizedText
from miles_router.state.store import StateStore
from tests.property.test_radix_tree import PLENTY, STEPS, Model, Step
from tests.support.cache_integrity import check_integrity
from tests.support.tiers import examples

#: Where files cost least.
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


class Process:
    """A cache with what makes it outlive the process, on a copy of what another one left behind."""

    def __init__(self, directory: Path, model: Model) -> None:
        self.cache = model.cache
        self.store = StateStore(directory)
        self.archive = TextArchive(self.cache, self.store, TextRows({}, write=False), max_tokens=model.budget)

    async def step(self, model: Model, step: Step) -> None:
        """As `Model.step`, without its checks."""
        base = model.texts[-1 - step.base % len(model.texts)]
        text = base[: len(base) - step.cut] + step.more or "a"
        await self.archive.load(text)
        match = self.cache.match(text)
        if not step.sampled:
            return
        record = model.made(step, text, match)
        before = TokenizedText(text, match.trajectory, match.ends, match).continued_entry
        entry = self.cache.record(record, match)
        if entry is not None:
            self.archive.add(entry, before, text)
            await self.archive.save([entry])

    async def answers(self, text: str) -> tuple[Reused, list[object]]:
        await self.archive.load(text)
        return of_match(self.cache.match(text)), [of_entry(self.cache, each) for each in self.cache.retrieve(text)]

    async def by_rid(self, rid: str) -> object:
        await self.archive.load_rid(rid)
        entry = self.cache.by_rid(rid)
        return None if entry is None else of_entry(self.cache, entry)


class Reused(NamedTuple):
    """What is taken over, and the facts of what it goes on from."""

    chars: int
    sampled: int
    of: tuple[object, ...]


def of_match(match: PrefixMatch) -> Reused:
    before = TokenizedText("", match.trajectory, match.ends, match).continued_entry
    whole = match.trajectory
    arrays = (whole.tokens.tolist(), whole.logprobs.tobytes(), whole.loss_mask.tolist(), whole.weight_versions)
    return Reused(
        match.chars,
        int(whole.loss_mask.sum()),
        (*arrays, match.ends.tolist(), None if before is None else before.cache_versions),
    )


def of_entry(cache: RadixTreeCache, entry: Entry) -> tuple[object, ...]:
    whole, ends = entry.prefix(len(entry))
    facts = (entry.rid, entry.serial, entry.rank, entry.finish, entry.shown_chars, entry.cache_versions)
    arrays = (whole.tokens.tolist(), whole.logprobs.tobytes(), whole.loss_mask.tolist(), whole.weight_versions)
    return (*facts, cache.whole_text_of(entry), *arrays, np.asarray(ends).tolist())


async def same_after_a_restart(steps: Sequence[Step], then: Sequence[Step], order: int, place: Path) -> None:
    model = Model(PLENTY)
    first = Process(place / "1", model)
    for step in steps:
        await first.step(model, step)
    texts = sorted({text[:end] + more for text in model.texts for end in range(len(text) + 1) for more in ("", "ab")})
    texts = texts[order % len(texts) :] + texts[: order % len(texts)]
    told = {text: await first.answers(text) for text in texts if text}
    rids = {rid: await first.by_rid(rid) for rid in model.records}
    await first.store.close()
    shutil.copytree(place / "1", place / "2")
    model.cache = RadixTreeCache(max_tokens=model.budget, keep_versions=1)
    second = Process(place / "2", model)
    for rid in list(rids)[order % (len(rids) or 1) :][:2]:
        assert await second.by_rid(rid) == rids[rid]
    for text, before in told.items():
        match, entries = await second.answers(text)
        assert entries == before[1]
        # Entries of other roots that only pass here may stand in the way no more; and a whole prompt that was given
        # need not be found (encoding it again gives the same).
        assert match == before[0] or match.chars > before[0].chars or not before[0].sampled, (text, match, before[0])
    for rid, answer in rids.items():
        assert await second.by_rid(rid) == answer
    check_integrity(second.cache)
    newest = max((entry.serial for entry in model.held().values()), default=0)
    for step in then:
        await second.step(model, step)
        model.check_all()
    assert all(entry.serial > newest for rid, entry in model.held().items() if rid not in rids)
    await second.store.close()


@settings(max_examples=examples(40), deadline=None)
@given(
    steps=st.lists(STEPS, min_size=2, max_size=14), then=st.lists(STEPS, max_size=4), order=st.integers(0, 1_000_000)
)
def test_what_is_read_again_answers_every_look_up_as_before(steps: list[Step], then: list[Step], order: int) -> None:
    with tempfile.TemporaryDirectory(dir=MEMORY) as place:
        asyncio.run(same_after_a_restart(steps, then, order, Path(place)))

"""The text cache beside a plain model: a dictionary, a linear scan, and pygtrie's character trie."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import pygtrie
from hypothesis import given, settings
from hypothesis import strategies as st

from middleware_hub.radix_tree.cache import ENTRY_CHARGE, NO_MATCH, PrefixMatch, RadixTreeCache
from middleware_hub.radix_tree.entry import Entry, TextRecord
from miles_router.engines.spelling import NO_CUT
from miles_router.trajectory import Piece
from tests.support.cache_integrity import check_integrity
from tests.support.tiers import examples

KEEP_VERSIONS = 1
PLENTY = 100_000


@dataclass(frozen=True)
class Step:
    """A generation, or (where nothing is sampled) only a look-up."""

    base: int  # which earlier text it continues
    cut: int
    more: str
    sampled: tuple[tuple[str, int, bool], ...]  # spelling, one of its ids, can it be cut behind?
    hidden: int  # characters at the end that the client does not see
    late: bool  # looked up before the generation of the step before was recorded
    with_match: bool  # the cache is told what it continues
    version: int
    pinned: bool


SAMPLED = st.lists(st.tuples(st.sampled_from(("a", "b", "ab", "ba", "")), st.integers(0, 1), st.booleans()), max_size=5)
STEPS = st.builds(
    Step,
    base=st.integers(0, 12),
    cut=st.sampled_from((0, 0, 0, 1, 2, 3)),
    more=st.text("ab", max_size=4),
    sampled=SAMPLED.map(tuple),
    hidden=st.sampled_from((0, 0, 1, 2)),
    late=st.booleans(),
    with_match=st.booleans(),
    version=st.integers(0, 6),
    pinned=st.booleans(),
)


@dataclass
class Model:
    """Every record ever made, and the cache under test."""

    budget: int
    records: dict[str, TextRecord] = field(default_factory=dict)
    texts: list[str] = field(default_factory=lambda: ["b", "aab"])
    ahead: PrefixMatch | None = None

    def __post_init__(self) -> None:
        self.cache = RadixTreeCache(max_tokens=self.budget, keep_versions=KEEP_VERSIONS)
        self.numbers = count()

    def held(self) -> dict[str, Entry]:
        return {entry.rid: entry for node in self.cache._tree.nodes() for entry in node.entries}

    def step(self, step: Step) -> None:
        base = self.texts[-1 - step.base % len(self.texts)]
        text = base[: len(base) - step.cut] + step.more or "a"
        late = self.cache.match(text)
        self.check_match(text, late)
        if not step.sampled:
            return
        with ExitStack() as stack:
            if step.pinned:
                stack.enter_context(self.cache.pinned(late.entry))
            record = self.made(step, text, late)
            before = self.held()
            facts = {rid: (e.children, e.pins, e.rank, e.last_used) for rid, e in before.items()}
            entry = self.cache.record(record, late if step.with_match else NO_MATCH)
            self.check_recorded(record, entry, before, facts)
        check_integrity(self.cache)
        self.check_budget()
        self.check_all()

    def made(self, step: Step, text: str, match: PrefixMatch) -> TextRecord:
        rest = text[match.chars :]
        pieces = [*match.trajectory.pieces, Piece.given([ord(c) for c in rest])]
        ends = [*match.ends.tolist(), *range(match.chars + 1, len(text) + 1)]
        spelled = text
        ids = []
        for spelling, which, cuttable in step.sampled:
            spelled += spelling
            ids.append(1000 + 10 * ("a", "b", "ab", "ba", "").index(spelling) + which)
            ends.append(len(spelled) if cuttable else NO_CUT)
        ends[-1] = len(spelled)
        logprobs = [-1.0 - 0.1 * index for index in range(len(ids))]
        whole = match.trajectory.append(
            *pieces[len(match.trajectory.pieces) :], Piece.sampled(ids, logprobs, f"{step.version}")
        )
        shown = max(len(text), len(spelled) - step.hidden)
        record = TextRecord(spelled, shown, whole, np.array(ends, dtype=np.uint32), f"r{next(self.numbers)}", "stop")
        self.records[record.rid] = record
        self.texts.append(spelled[:shown])
        return record

    # What must hold

    def check_match(self, text: str, match: PrefixMatch) -> None:
        """It is a prefix of a held record, as long as that allows, and no shorter than what any record allows whose
        text is a prefix of this one. A whole given run need not be found: encoding it again gives the same."""
        held = {rid: self.records[rid] for rid in self.held()}
        reached = [reusable(record, text, whole) for record in held.values() for whole in (True, False)]
        tokens = len(match.trajectory)
        assert (tokens, match.chars) in [(0, 0), *reached]
        if tokens:
            sources = [
                r
                for r in held.values()
                if r.trajectory[:tokens] == match.trajectory and r.text[: match.chars] == text[: match.chars]
            ]
            assert any(np.array_equal(r.ends[:tokens], match.ends) for r in sources)
        trie = pygtrie.CharTrie()
        for record in held.values():
            for key in {record.text, record.text[: record.shown_chars]}:
                trie.setdefault(key, []).append(record)
        for extended in trie.prefixes(text):
            assert match.chars >= max(reusable(each, extended.key)[1] for each in extended.value[-4:]), extended.key
        common = max((common_prefix(record.text, text) for record in held.values()), default=0)
        below = [rid for rid, record in held.items() if common_prefix(record.text, text) == common]
        newest = max(below, key=lambda rid: self.held()[rid].serial, default=None)
        assert newest is None or match.chars >= reusable(held[newest], text)[1]

    def check_recorded(
        self,
        record: TextRecord,
        entry: Entry | None,
        before: dict[str, Entry],
        facts: dict[str, tuple[int, int, int, int]],
    ) -> None:
        after = self.held()
        gone = set(before) - set(after)
        if entry is None:
            assert not gone
            assert record.rid not in after
            return
        newest = len(self.cache._ranks) - 1 - KEEP_VERSIONS

        def order(rid: str) -> tuple[bool, int]:
            return (facts[rid][2] >= newest, facts[rid][3])

        assert all(facts[rid][1] == 0 for rid in gone), "a pinned entry was evicted"
        above = {part.rid for part, _ in entry.lineage()}  # those it hangs on cannot go before it
        for kept in set(before) & set(after) - above:
            children, pins, *_ = facts[kept]
            if not children and not pins and not after[kept].children:
                assert all(order(rid) < order(kept) for rid in gone if not facts[rid][0]), "evicted out of order"

    def check_budget(self) -> None:
        cache = self.cache
        used = cache.tokens + ENTRY_CHARGE * len(cache)
        assert used <= self.budget or all(e.pins or e.children for e in self.held().values())

    def check_all(self) -> None:
        held = self.held()
        assert len(self.cache) == len(held)
        for rid, entry in held.items():
            record = self.records[rid]
            assert entry.trajectory() == record.trajectory
            assert np.array_equal(entry.prefix(len(entry))[1], record.ends)
            assert self.cache.text_of(entry) == record.text[: record.shown_chars]
        for text in {record.text[: record.shown_chars] for record in map(self.records.__getitem__, held)}:
            found = [entry.rid for entry in self.cache._tree.find(text).shown_entries]  # type: ignore[union-attr]
            assert found == [
                r for r in self.records if r in held and self.records[r].text[: self.records[r].shown_chars] == text
            ]


def common_prefix(one: str, other: str) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def reusable(record: TextRecord, text: str, whole: bool = False) -> tuple[int, int]:
    """By scanning: whole tokens in the common text, up to a sampled one, or (`whole`) a run that ends with `text`."""
    common = common_prefix(record.text, text)
    sampled = [piece.logprobs is not None for piece in record.trajectory.pieces for _ in range(len(piece))]
    tokens, chars = 0, 0
    for index, end in enumerate(record.ends.tolist()):
        if end != NO_CUT and chars < end <= common:
            tokens, chars = index + 1, end
    if whole and chars == len(text) and tokens in run_ends(sampled):
        return tokens, chars
    while tokens and not (sampled[tokens - 1] and record.ends[tokens - 1] != NO_CUT):
        tokens -= 1
    return (tokens, int(record.ends[tokens - 1])) if tokens else (0, 0)


def run_ends(sampled: Sequence[bool]) -> set[int]:
    changes = {i + 1 for i in range(len(sampled) - 1) if sampled[i] != sampled[i + 1]}
    return {*changes, len(sampled)}


@settings(max_examples=examples(150))
@given(steps=st.lists(STEPS, min_size=2, max_size=14), budget=st.sampled_from((PLENTY, 60, 120, 25)))
def test_the_cache_does_what_a_plain_model_does(steps: list[Step], budget: int) -> None:
    model = Model(budget)
    for step in steps:
        model.step(step)

"""The text-keyed cache: text decides which tokens exist, the cache decides which ids spell that text.

match     the recorded ids for the beginning of a text; the caller encodes the rest
record    add a generation, which shares its common prefix with another entry
retrieve  the generations of a text, or of an id
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from middleware_hub.radix_tree.entry import Entry, TextRecord
from middleware_hub.radix_tree.eviction import EvictionQueue
from middleware_hub.radix_tree.statistics import CacheStatistics
from middleware_hub.radix_tree.text_tree import TextTree
from miles_router.engines.spelling import Ends
from miles_router.middlewares.rows import NO_ROWS
from miles_router.trajectory import Trajectory
from miles_router.trajectory.trajectory import common_prefix

#: Tokens that each entry costs besides its own. They bound entries without own tokens (a generation repeated token for
#: token), too.
ENTRY_CHARGE = 16
#: How many of the newest entries are compared where several entries end at one node (generations of one text).
CANDIDATES = 4


@dataclass(frozen=True)
class PrefixMatch:
    """A recorded prefix of a text: its tokens, the end of each in characters, and the `chars` characters they spell."""

    trajectory: Trajectory
    ends: Ends
    chars: int
    entry: Entry | None


@dataclass(frozen=True)
class RestoredEntry:
    """An entry that was read from the disk.

    Attributes:
        serial: the entry's number in its family.
        rank: the position of its newest weight version in the order in which versions were first seen.
        parent: the serial of the entry whose prefix it shares; None for a root.
        reused, reused_chars: the length of the shared prefix, in tokens and characters.
    """

    record: TextRecord
    serial: int
    rank: int
    parent: int | None
    reused: int
    reused_chars: int


NO_MATCH = PrefixMatch(Trajectory(), np.zeros(0, dtype=np.uint32), 0, None)


class RadixTreeCache:
    """A cache of recorded generations under a token budget.

    Args:
        max_tokens: limit of own tokens of all entries, plus `ENTRY_CHARGE` for each entry; a shared prefix counts once.
        keep_versions: weight versions before `current - keep_versions` are evicted first.
    """

    def __init__(self, *, max_tokens: int, keep_versions: int) -> None:
        self.statistics = CacheStatistics(
            entries=lambda: len(self),
            tokens=lambda: self.tokens,
            token_bytes=lambda: self.nbytes,
            text_characters=lambda: self.characters,
        )
        self.tokens = 0  # own tokens of all entries
        self._max_tokens = max_tokens
        self._keep_versions = keep_versions
        self._tree = TextTree()
        self._queue = EvictionQueue()
        self._by_rid: dict[str, Entry] = {}
        self._ranks: dict[str, int] = {}  # weight version -> its position in the order of first appearance
        self._newest_rank = -1
        #: Called with each entry that is evicted.
        self.when_evicted: list[Callable[[Entry], None]] = []
        #: Called with each entry that is restored from the disk.
        self.when_restored: Callable[[Entry], None] = lambda entry: None
        self._entries = 0
        self._nbytes = 0
        self._clock = 0
        self._eviction_pauses = 0

    def __len__(self) -> int:
        return self._entries

    @property
    def nbytes(self) -> int:
        """Bytes of the token blocks. Texts take memory besides, once for each distinct run of characters."""
        return self._nbytes

    @property
    def characters(self) -> int:
        return self._tree.characters

    # Looking up

    def match(self, text: str) -> PrefixMatch:
        """Return the longest recorded prefix of `text` whose ids the engine should be given.

        The prefix ends behind a sampled token, or at the end of the text. Where texts diverge inside a run of prompt
        tokens, the caller encodes that run: a cut there could give ids that encoding this text never gives.
        """
        self.statistics.lookups += 1
        entry, tokens, chars = self._longest(text)
        if entry is None:
            return NO_MATCH
        trajectory, ends = entry.prefix(tokens)
        self._mark_used(entry)
        self.statistics.hits += 1
        self.statistics.reused_tokens += len(trajectory)
        return PrefixMatch(trajectory, ends, chars, entry)

    def sampled_chars(self, text: str) -> int:
        """Return how many first characters recorded tokens spell, up to a sampled one, without counting as a use."""
        return self._longest(text, given=False)[2]

    def has(self, text: str) -> bool:
        """Return whether `retrieve` would find the text, without counting as a use."""
        node = self._tree.find(text)
        return node is not None and bool(node.shown_entries or node.entries)

    def _longest(self, text: str, *, given: bool = True) -> tuple[Entry | None, int, int]:
        """Find the entry with the longest reusable prefix of `text`: `(entry, tokens, characters)`.

        The prefix ends with a sampled token, or if `given`, with all of the text.
        """
        node, agreed = self._tree.descend(text)
        best: tuple[Entry | None, int, int] = (None, 0, 0)
        for above in node.path_to_root():
            limit = min(agreed, above.depth)
            if limit <= best[2]:
                break
            # Any entry below `agreed` will do: take the newest. But an entry that ends here may reach further.
            ending = {*above.entries[-CANDIDATES:], *above.shown_entries[-CANDIDATES:]}
            candidates = {*ending, above.newest} if above is node else ending
            for entry in sorted(filter(None, candidates), key=_serial, reverse=True):
                tokens, chars = entry.reusable_prefix(limit, whole=given and limit == len(text))
                if chars > best[2]:
                    best = (entry, tokens, chars)
                if chars == limit:
                    break
        return best

    def retrieve(self, text: str) -> list[Entry]:
        """Return the entries whose shown text, or whole text, is exactly `text`; newest last."""
        node = self._tree.find(text)
        if node is None:
            return []
        entries = sorted({*node.shown_entries, *node.entries}, key=_serial)
        if entries:
            self._mark_used(entries[-1])
        return entries

    def by_rid(self, rid: str) -> Entry | None:
        """Return the entry of the generation with this id (SGLang's `meta_info.id`), and count it as used."""
        entry = self._by_rid.get(rid)
        if entry is not None:
            self._mark_used(entry)
        return entry

    def peek_rid(self, rid: str) -> Entry | None:
        """Return the same as `by_rid`, without counting as a use."""
        return self._by_rid.get(rid)

    def text_of(self, entry: Entry) -> str:
        """Return the text of an entry that the client saw."""
        return self.whole_text_of(entry)[: entry.shown_chars]

    def whole_text_of(self, entry: Entry) -> str:
        """Return the text of an entry with the spelling of its hidden tail."""
        assert entry.node is not None
        labels = [node.label for node in entry.node.path_to_root()]
        return "".join(reversed(labels))

    # Recording

    @contextmanager
    def eviction_paused(self) -> Iterator[None]:
        """Evict nothing inside this context; at its exit, evict entries until the cache is within its budget."""
        self._eviction_pauses += 1
        try:
            yield
        finally:
            self._eviction_pauses -= 1
            self._evict_to_budget()

    @contextmanager
    def pinned(self, *entries: Entry | None) -> Iterator[None]:
        """Protect these entries from eviction inside this context."""
        pinned = [entry for entry in entries if entry is not None]
        for entry in pinned:
            entry.pins += 1
        try:
            yield
        finally:
            for entry in pinned:
                entry.pins -= 1
                self._queue_if_leaf(entry)
            self._evict_to_budget()

    def record(self, record: TextRecord, match: PrefixMatch = NO_MATCH) -> Entry | None:
        """Add a generation and return its entry, or None if it is larger than the whole budget.

        `match` is the prefix that its prompt reused: tokens taken from there need no comparison.
        """
        parent, reused, reused_chars = self._find_parent(record, match)
        entry = Entry(
            record,
            parent=parent,
            reused=reused,
            reused_chars=reused_chars,
            rank=self._rank(record.trajectory),
            serial=self._clock + 1,
        )
        if entry.charge + ENTRY_CHARGE > self._max_tokens:
            self.statistics.refused += 1
            return None
        self._clock += 1
        self._insert(entry, record.text)
        self.statistics.recorded += 1
        self.statistics.partial += not entry.finished
        self._evict_to_budget()
        return entry

    # Restoring entries of an earlier process

    @property
    def clock(self) -> int:
        """The serial of the last recording or use."""
        return self._clock

    def continue_after(self, clock: int, version: str | None, rank: int) -> None:
        """Continue serials behind `clock`, and give `version` the rank that it had in an earlier process."""
        self._clock = max(self._clock, clock)
        if version is not None:
            self._ranks.setdefault(version, rank)
            self._newest_rank = max(self._newest_rank, rank)

    def restore(self, kept: RestoredEntry, parent: Entry | None) -> Entry:
        """Add an entry that was read from the disk.

        Args:
            parent: the entry whose prefix it shares; None where it is unknown, so that the shared prefix is searched.
        """
        reused, reused_chars = kept.reused, kept.reused_chars
        if parent is None:
            parent, reused, reused_chars = self._find_parent(kept.record, NO_MATCH)
        else:
            parent = parent.entry_at(reused)  # the parent itself may share more with its own parent now
        entry = Entry(
            kept.record, parent=parent, reused=reused, reused_chars=reused_chars, rank=kept.rank, serial=kept.serial
        )
        self._clock += 1
        entry.last_used = self._clock
        self._insert(entry, kept.record.text)
        self.when_restored(entry)
        self._evict_to_budget()
        return entry

    def evict_one(self) -> bool:
        """Evict one entry; return False where all entries left are pinned."""
        entry = self._queue.pop(self._newest_rank - self._keep_versions)
        if entry is not None:
            self.evict(entry)
        return entry is not None

    def _find_parent(self, record: TextRecord, match: PrefixMatch) -> tuple[Entry | None, int, int]:
        """Find the entry that shares most tokens with the generation: `(entry, tokens, characters)`."""
        known = _reused_tokens(match.trajectory, record.trajectory)
        node, _ = self._tree.descend(record.text)
        best: tuple[Entry | None, int, int] = (None, 0, 0)
        for candidate in filter(None, {node.newest, match.entry}):
            if candidate.node is None:
                continue  # evicted since it was looked up
            start = min(known, candidate.shared_tokens(match.entry)) if known and match.entry is not None else 0
            common = start + _common_length(*candidate.suffix(start), record.trajectory[start:], record.ends[start:])
            tokens, chars = candidate.prefix_within_tokens(common) if common else (0, 0)
            if tokens > best[1]:
                best = (candidate.entry_at(tokens), tokens, chars)
        return best

    def _insert(self, entry: Entry, text: str) -> None:
        self._tree.add(text, entry)
        if entry.parent is not None:
            entry.parent.children += 1
        named = self._by_rid.get(entry.rid)
        if named is None or named.serial < entry.serial:
            self._by_rid[entry.rid] = entry
        self._entries += 1
        self.tokens += entry.charge
        self._nbytes += entry.nbytes
        self._queue.add(entry)

    def _rank(self, trajectory: Trajectory) -> int:
        """Return the highest rank of the trajectory's weight versions; versions seen first get the next ranks."""
        versions = [piece.version for piece in trajectory.pieces if piece.version is not None]
        for version in versions:
            if version not in self._ranks:
                self._newest_rank += 1
                self._ranks[version] = self._newest_rank
        return max((self._ranks[version] for version in versions), default=0)

    # Evicting

    def _mark_used(self, entry: Entry) -> None:
        self._clock += 1
        entry.last_used = self._clock
        self._queue_if_leaf(entry)

    def _queue_if_leaf(self, entry: Entry) -> None:
        if not entry.children and not entry.pins and entry.node is not None:
            self._queue.add(entry)

    def _evict_to_budget(self) -> None:
        while not self._eviction_pauses and self.tokens + ENTRY_CHARGE * self._entries > self._max_tokens:
            if not self.evict_one():
                return  # requests in flight pin all that is left

    def evict(self, entry: Entry) -> None:
        """Evict this entry, which must be a leaf."""
        self._tree.remove(entry)
        entry.rows = NO_ROWS  # at once: a stale item in the queue may keep the entry alive
        if self._by_rid.get(entry.rid) is entry:
            del self._by_rid[entry.rid]
        self._entries -= 1
        self.tokens -= entry.charge
        self._nbytes -= entry.nbytes
        self.statistics.evicted += 1
        self.statistics.evicted_tokens += entry.own
        parent = entry.parent
        if parent is not None:
            parent.children -= 1
            # Each use of the child was a use of the parent.
            parent.last_used = max(parent.last_used, entry.last_used)
            self._queue_if_leaf(parent)
        for callback in self.when_evicted:
            callback(entry)


def _serial(entry: Entry) -> int:
    return entry.serial


def _common_length(one: Trajectory, ends: Ends, other: Trajectory, other_ends: Ends) -> int:
    """Return how many leading positions have equal ids and ends. Ends can differ: some clients see special tokens."""
    common = common_prefix(one, other)
    differ = np.flatnonzero(ends[:common] != other_ends[:common])
    return int(differ[0]) if len(differ) else common


def _reused_tokens(matched: Trajectory, recorded: Trajectory) -> int:
    """Return how many leading tokens come from a match: their pieces are the same objects."""
    shared = 0
    for one, other in zip(matched.pieces, recorded.pieces, strict=False):
        if one is not other:
            break
        shared += len(one)
    return shared

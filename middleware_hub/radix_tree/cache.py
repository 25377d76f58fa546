"""The text-keyed cache: text decides which tokens exist, the cache decides which ids spell that text.

match     a text to the ids to give the engine: recorded ones as far as they go, the rest encoded by the caller
record    a generation, sharing the tokens it has in common with what is held
retrieve  what was recorded under a text, or under an id
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from middleware_hub.radix_tree.entry import Entry
from middleware_hub.radix_tree.eviction import EvictionQueue
from middleware_hub.radix_tree.statistics import CacheStatistics
from middleware_hub.radix_tree.text_tree import Node, TextTree
from middleware_hub.tokenizing.spelling import Ends
from miles_router.middlewares.experts import Taken
from miles_router.trajectory import Trajectory
from miles_router.trajectory.trajectory import common_prefix

NOTHING: Ends = np.zeros(0, dtype=np.uint32)
#: What an entry is charged besides its own tokens, so that entries without any (a generation repeated token for token)
#: are bounded too.
ENTRY_CHARGE = 16
#: Of entries that end at one place (generations of one text), how many are looked at.
TRIED = 4


@dataclass(frozen=True)
class Match:
    """The part of a text that recorded tokens spell: `chars` characters, and for each token where it ends."""

    trajectory: Trajectory
    ends: Ends
    chars: int
    entry: Entry | None

    @property
    def sampled(self) -> int:
        """How many of the reused tokens the engine sampled."""
        return sum(len(piece) for piece in self.trajectory.pieces if piece.logprobs is not None)


NO_MATCH = Match(Trajectory(), NOTHING, 0, None)


@dataclass(frozen=True)
class Record:
    """A generation to hold. `text` is its whole text with the hidden tail spelled behind the `shown` characters."""

    text: str
    shown: int
    trajectory: Trajectory
    ends: Ends
    rid: str
    finish: str
    experts: Taken | None = None  # routed experts, where they are captured


class RadixTreeCache:
    """Recorded generations under a token budget.

    Args:
        max_tokens: own tokens of all entries together and `ENTRY_CHARGE` for each entry; a prefix that entries share is
            counted once.
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
        self._ranks: dict[str, int] = {}
        self._entries = 0
        self._nbytes = 0
        self._clock = 0

    def __len__(self) -> int:
        return self._entries

    @property
    def nbytes(self) -> int:
        """Bytes of the token blocks; the texts are held besides, once for each distinct run of characters."""
        return self._nbytes

    @property
    def characters(self) -> int:
        """Characters of text held."""
        return self._tree.characters

    # Looking up

    def match(self, text: str) -> Match:
        """The longest prefix of `text` that should be given to the engine in recorded ids.

        It ends behind a token that was sampled, or at the end of the text. Where the common text ends inside tokens
        that were only given, those are left to the caller's encoding: nothing was sampled in them, and a cut where two
        texts happen to part would give the engine ids that encoding this text would never give.
        """
        self.statistics.lookups += 1
        entry, tokens, chars = self._longest(text)
        if entry is None:
            return NO_MATCH
        trajectory, ends = entry.prefix(tokens)
        self._use(entry)
        self.statistics.hits += 1
        self.statistics.reused_tokens += len(trajectory)
        return Match(trajectory, ends, chars, entry)

    def _longest(self, text: str) -> tuple[Entry | None, int, int]:
        """The entry with the longest prefix to reuse for `text`: `(entry, tokens, characters)`."""
        node, agreed = self._tree.descend(text)
        best: tuple[Entry | None, int, int] = (None, 0, 0)
        for above in node.upwards():
            limit = min(agreed, above.depth)
            if limit <= best[2]:
                break
            # Below `agreed` any entry will do, the newest is taken; but one that ends here may reach further than it.
            ending = {*above.ending[-TRIED:], *above.shown[-TRIED:]}
            tried = {*ending, above.newest} if above is node else ending
            for entry in sorted(filter(None, tried), key=lambda each: each.serial, reverse=True):
                tokens, chars = _reusable(entry, limit, len(text))
                if chars > best[2]:
                    best = (entry, tokens, chars)
                if chars == limit:
                    break
        return best

    def retrieve(self, text: str) -> list[Entry]:
        """Entries whose shown text, or whole text, is exactly `text`; newest last."""
        node = self._tree.at(text)
        if node is None:
            return []
        found = sorted({*node.shown, *node.ending}, key=lambda entry: entry.serial)
        for entry in found[-1:]:
            self._use(entry)
        return found

    def by_rid(self, rid: str) -> Entry | None:
        """The entry of the generation with this id (SGLang's `meta_info.id`)."""
        entry = self._by_rid.get(rid)
        if entry is not None:
            self._use(entry)
        return entry

    def text_of(self, entry: Entry) -> str:
        """The text that the client saw of an entry."""
        assert entry.node is not None
        labels = [node.label for node in entry.node.upwards()]
        return "".join(reversed(labels))[: entry.shown]

    # Recording

    @contextmanager
    def pinned(self, *entries: Entry | None) -> Iterator[None]:
        """While this is entered, these entries are not evicted."""
        held = [entry for entry in entries if entry is not None]
        for entry in held:
            entry.pins += 1
        try:
            yield
        finally:
            for entry in held:
                entry.pins -= 1
                self._queue_if_leaf(entry)
            self._evict()

    def record(self, record: Record, hint: Match | Entry | None = None) -> Entry | None:
        """Hold a generation. Gives None if it is larger than the whole budget.

        `hint` is the match that it continued, which saves comparing what came from there, or the entry.
        """
        parent, reused, reused_chars = self._shared(record, hint)
        if len(record.trajectory) - reused + ENTRY_CHARGE > self._max_tokens:
            self.statistics.refused += 1
            return None
        self._clock += 1
        entry = Entry(
            trajectory=record.trajectory,
            ends=record.ends,
            parent=parent,
            reused=reused,
            reused_chars=reused_chars,
            shown=record.shown,
            rid=record.rid,
            finish=record.finish,
            rank=self._rank(record.trajectory),
            serial=self._clock,
            experts=record.experts,
        )
        self._insert(entry, record.text)
        self._evict()
        return entry

    def _shared(self, record: Record, hint: Match | Entry | None) -> tuple[Entry | None, int, int]:
        """With which entry the generation has most tokens in common: `(entry, tokens, characters)`."""
        continued = hint.entry if isinstance(hint, Match) else hint
        known = _taken_over(hint.trajectory, record.trajectory) if isinstance(hint, Match) else 0
        node, _ = self._tree.descend(record.text)
        best: tuple[Entry | None, int, int] = (None, 0, 0)
        for candidate in {node.newest, continued} - {None}:
            assert candidate is not None
            if candidate.node is None:
                continue  # evicted since it was looked up
            start = min(known, candidate.shared_with(continued)) if known and continued is not None else 0
            common = start + _alike(*candidate.behind(start), record.trajectory[start:], record.ends[start:])
            tokens, chars = candidate.cut_before(common) if common else (0, 0)
            if tokens > best[1]:
                best = (candidate.part_at(tokens), tokens, chars)
        return best

    def _insert(self, entry: Entry, text: str) -> None:
        self._tree.add(text, entry.shown, entry)
        if entry.parent is not None:
            entry.parent.children += 1
        self._by_rid[entry.rid] = entry
        self._entries += 1
        self.tokens += entry.own
        self._nbytes += len(entry.block)
        self.statistics.recorded += 1
        self.statistics.partial += not entry.finished
        self._queue.add(entry)

    def _rank(self, trajectory: Trajectory) -> int:
        """The place of the newest weight version, in the order in which versions were first seen."""
        versions = [piece.version for piece in trajectory.pieces if piece.version is not None]
        for version in versions:
            self._ranks.setdefault(version, len(self._ranks))
        return max((self._ranks[version] for version in versions), default=0)

    # Evicting

    def _use(self, entry: Entry) -> None:
        self._clock += 1
        entry.last_used = self._clock
        self._queue_if_leaf(entry)

    def _queue_if_leaf(self, entry: Entry) -> None:
        if not entry.children and not entry.pins and entry.node is not None:
            self._queue.add(entry)

    def _evict(self) -> None:
        while self.tokens + ENTRY_CHARGE * self._entries > self._max_tokens:
            entry = self._queue.pop(len(self._ranks) - 1 - self._keep_versions)
            if entry is None:
                return  # all that is left is pinned by requests in flight
            self._drop(entry)

    def _drop(self, entry: Entry) -> None:
        self._tree.remove(entry)
        entry.experts = None  # at once: a stale place in the queue may hold on to the entry
        if self._by_rid.get(entry.rid) is entry:
            del self._by_rid[entry.rid]
        self._entries -= 1
        self.tokens -= entry.own
        self._nbytes -= len(entry.block)
        self.statistics.evicted += 1
        self.statistics.evicted_tokens += entry.own
        parent = entry.parent
        if parent is not None:
            parent.children -= 1
            # The parent was used whenever its child was.
            parent.last_used = max(parent.last_used, entry.last_used)
            self._queue_if_leaf(parent)

    def check_integrity(self) -> None:
        """Assert every invariant; for tests."""
        entries: list[Entry] = []
        for node in self._tree.nodes():
            entries += node.ending
            _check_node(node)
        assert len(entries) == self._entries
        assert sum(entry.own for entry in entries) == self.tokens
        assert sum(len(entry.block) for entry in entries) == self.nbytes
        assert sum(len(node.label) for node in self._tree.nodes()) == self._tree.characters
        for entry in entries:
            assert entry.node is not None
            assert entry.children == sum(other.parent is entry for other in entries)
            assert entry in self._tree.shown_node(entry).shown
            assert entry.parent is None or entry.parent in entries
            assert entry.parent is None or entry.parent.reused < entry.reused <= len(entry.parent)


def _check_node(node: Node) -> None:
    children = node.children
    below = [child.newest for child in children.values()]
    assert node.newest is max((*filter(None, below), *node.ending), key=lambda e: e.serial, default=None)
    assert all(char == child.label[0] and child.parent is node for char, child in children.items())
    assert node.parent is None or node.ending or node.shown or len(children) > 1, "a node that nobody needs"


def _alike(held: Trajectory, held_ends: Ends, given: Trajectory, given_ends: Ends) -> int:
    """How many leading positions agree, in the characters they spell too: a special token is shown to some clients."""
    common = common_prefix(held, given)
    differ = np.flatnonzero(held_ends[:common] != given_ends[:common])
    return int(differ[0]) if len(differ) else common


def _taken_over(matched: Trajectory, recorded: Trajectory) -> int:
    """How many leading tokens were taken over from a match: those whose pieces are the very same objects."""
    shared = 0
    for one, other in zip(matched.pieces, recorded.pieces, strict=False):
        if one is not other:
            break
        shared += len(one)
    return shared


def _reusable(entry: Entry, limit: int, length: int) -> tuple[int, int]:
    """The longest prefix inside `limit` characters that ends behind a sampled token, or, at the end of a text of
    `length` characters, with a given run: `(tokens, characters)`."""
    tokens, chars = entry.cut_at(limit)
    if not tokens:
        return 0, 0
    part = entry.part_at(tokens)
    closes = any(part.reused + end == tokens for end, _, _ in part.runs)
    sampled = _sampled_within(part, tokens)
    if sampled == tokens or (closes and chars == length):
        return tokens, chars
    return entry.cut_before(sampled) if sampled else (0, 0)


def _sampled_within(part: Entry | None, tokens: int) -> int:
    """Behind the last sampled one of the first `tokens` tokens; the last of those is own to `part`."""
    while part is not None:
        begin, found = part.reused, 0
        for end, sampled, _ in part.runs:
            if sampled and begin < tokens:
                found = min(part.reused + end, tokens)
            begin = part.reused + end
        if found:
            return found
        tokens, part = part.reused, part.parent
    return 0

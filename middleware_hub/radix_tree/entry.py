"""One recorded generation: its own tokens, and the entry whose first tokens it shares.

The block of own tokens holds, in this order: ids (int32), logprobs of the sampled ones (float32), and ends. Ends are
uint16 offsets from `reused_chars`, or uint32 positions where an offset is too large or a token has no end (`NO_CUT`).
numpy arrays are made from the block on demand. An entry whose generation was sampled with a sampling mask also has
`sampling_mask`, in which a token that was given, or sampled without one, has no ids.

Characters and tokens count from the beginning of the text, own tokens
from `reused`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from miles_router.engines.recomputing import AskedSampling
from miles_router.engines.spelling import NO_CUT, Ends
from miles_router.middlewares.rows import NO_ROWS, RowPrefix, RowsByKind, first_prefix
from miles_router.trajectory import Piece, Trajectory
from miles_router.trajectory.rows import RowKind
from miles_router.trajectory.sampling_mask import SamplingMask

if TYPE_CHECKING:
    from middleware_hub.radix_tree.archive.families import Family
    from middleware_hub.radix_tree.text_tree import Node

NEAR, FAR = np.dtype("<u2"), np.dtype("<u4")
IDS, LOGPROBS = np.dtype("<i4"), np.dtype("<f4")
TOKEN_BYTES = 12  # of a sampled token with its logprob and end, at most
TokenRun = tuple[int, bool, "str | None"]  # (own tokens up to here, sampled?, weight version)


@dataclass(frozen=True)
class TextRecord:
    """A generation to record.

    Attributes:
        text: the prompt and the answer that the client saw, and behind them the spelling of the hidden tail.
        shown_chars: how many characters of `text` the client saw.
        ends: for each token, how many characters of the text are spelled up to and with it, or `NO_CUT`.
        rid: the engine's name of the generation.
        finish: the finish reason: `stop`, `length` or `abort`.
        rows: the captured rows.
        cache: the number of the prefix cache that the engine used; generations that continue this one keep using it.
        cache_versions: the weight versions that may have filled what the engine found in its prefix cache, and what the
            engine found for the generation that this one continues.
        asked: how the client asked for sampling, or None if unknown.
        worker: the worker that sampled the generation, or None if unknown.
    """

    text: str
    shown_chars: int
    trajectory: Trajectory
    ends: Ends
    rid: str
    finish: str
    rows: RowsByKind = field(default_factory=lambda: NO_ROWS)
    cache: int | None = None
    cache_versions: tuple[str | None, ...] = ()
    asked: AskedSampling | None = None
    worker: str | None = None


class Entry:
    """One recorded generation: its prompt and sampled tokens. Tokens never change after construction."""

    __slots__ = (
        "asked",
        "block",
        "cache",
        "cache_versions",
        "children",
        "end_type",
        "family",
        "finish",
        "last_used",
        "node",
        "own",
        "parent",
        "pins",
        "rank",
        "reused",
        "reused_chars",
        "rid",
        "rows",
        "runs",
        "sampling_mask",
        "serial",
        "shown_chars",
        "worker",
    )

    def __init__(
        self, record: TextRecord, *, parent: Entry | None, reused: int, reused_chars: int, rank: int, serial: int
    ) -> None:
        own = record.trajectory[reused:]
        self.own = len(own)
        self.end_type, own_ends = _packed(record.ends[reused:], reused_chars)
        sampled = [piece.logprobs.astype(LOGPROBS).tobytes() for piece in own.pieces if piece.logprobs is not None]
        self.block = b"".join([own.tokens.astype(IDS).tobytes(), *sampled, own_ends])
        self.runs = _runs(own)
        self.sampling_mask = _mask(own)
        self.parent = parent
        self.reused = reused
        self.reused_chars = reused_chars
        self.shown_chars = record.shown_chars
        self.rid = record.rid
        self.finish = record.finish
        self.cache = record.cache
        self.cache_versions = record.cache_versions
        self.asked = record.asked
        self.worker = record.worker
        self.rank = rank  # of its newest weight version: later ones rank higher
        self.serial = serial  # order of recording
        self.rows = record.rows  # captured rows, of all tokens but the last
        self.children = 0
        self.pins = 0
        self.last_used = serial
        self.node: Node | None = None
        self.family: Family | None = None  # its family in the store, if it is persisted

    def __len__(self) -> int:
        return self.reused + self.own

    @property
    def nbytes(self) -> int:
        """The size of its own tokens in bytes, with their sampling mask."""
        return len(self.block) + (0 if self.sampling_mask is None else self.sampling_mask.nbytes)

    @property
    def charge(self) -> int:
        """The number of tokens that the entry counts as in token limits: its own tokens, plus one for each
        `TOKEN_BYTES` of its sampling mask."""
        return self.own + (0 if self.sampling_mask is None else self.sampling_mask.nbytes // TOKEN_BYTES)

    @property
    def finished(self) -> bool:
        """Whether the engine finished the generation; an aborted one is recorded as partial."""
        return self.finish in ("stop", "length")

    @property
    def own_ends(self) -> Ends:
        """For each own token, the number of characters of the text up to and with it, or `NO_CUT`."""
        return unpacked_ends(self.block, self.own, self.end_type, self.reused_chars)

    def own_pieces(self, stop: int) -> list[Piece]:
        """Return own tokens `[0, stop)`."""
        return unpacked_pieces(self.block, self.own, self.runs, self.sampling_mask, stop)

    def lineage(self) -> list[tuple[Entry, int]]:
        """Return the chain of entries that this one consists of, root first.

        Each comes with the number of tokens, from the beginning, that the chain up to it contributes.
        """
        parts = [(self, len(self))]
        entry = self
        while entry.parent is not None:
            parts.append((entry.parent, entry.reused))
            entry = entry.parent
        parts.reverse()
        return parts

    def shared_tokens(self, other: Entry) -> int:
        """Return how many leading tokens both entries take from the same entries."""
        shared = 0
        for (mine, upto), (theirs, their_upto) in zip(self.lineage(), other.lineage(), strict=False):
            if mine is not theirs:
                break
            shared = min(upto, their_upto)
            if upto != their_upto:
                break
        return shared

    def held_rows(self, kind: RowKind, tokens: int) -> RowPrefix | None:
        """Return the rows that memory has of the first `tokens` tokens, or of as many of them as it has."""
        return first_prefix((entry.rows.get(kind), min(upto, tokens)) for entry, upto in reversed(self.lineage()))

    def entry_at(self, tokens: int) -> Entry:
        """Return the entry in the chain that owns the token at position `tokens - 1`."""
        entry = self
        while entry.parent is not None and tokens <= entry.reused:
            entry = entry.parent
        return entry

    def prefix(self, tokens: int) -> tuple[Trajectory, Ends]:
        """Return the first `tokens` tokens and their ends."""
        pieces: list[Piece] = []
        ends: list[Ends] = []
        for entry, upto in self.lineage():
            stop = min(upto, tokens) - entry.reused
            if stop > 0:
                pieces += entry.own_pieces(stop)
                ends.append(entry.own_ends[:stop])
            if upto >= tokens:
                break
        return Trajectory(pieces), np.concatenate(ends) if ends else np.zeros(0, dtype=np.uint32)

    def trajectory(self) -> Trajectory:
        """Return all tokens of the generation, prompt included."""
        return self.prefix(len(self))[0]

    def suffix(self, start: int) -> tuple[Trajectory, Ends]:
        """Return the tokens from position `start` on, and their ends."""
        parts = [(self, self.own)]
        while parts[-1][0].reused > start:
            entry = parts[-1][0]
            assert entry.parent is not None
            parts.append((entry.parent, entry.reused - entry.parent.reused))
        parts.reverse()
        skip = start - parts[0][0].reused
        whole = Trajectory(piece for entry, stop in parts for piece in entry.own_pieces(stop))
        return whole[skip:], np.concatenate([entry.own_ends[:stop] for entry, stop in parts])[skip:]

    def prefix_within_chars(self, chars: int) -> tuple[int, int]:
        """Find the longest prefix that spells at most `chars` characters and ends between two characters.

        Returns:
            `(tokens, characters)`. Zero-width tokens at the very end are not part of the prefix.
        """
        entry: Entry = self
        while entry.parent is not None and chars <= entry.reused_chars:
            entry = entry.parent
        ends = entry.own_ends
        fitting = np.flatnonzero(ends <= chars)  # NO_CUT is larger than any text
        if len(fitting):
            furthest = int(ends[fitting[-1]])
            if furthest > entry.reused_chars or entry.parent is None:
                return entry.reused + int(np.flatnonzero(ends == furthest)[0]) + 1, furthest
        if entry.parent is None:
            return 0, 0
        return entry.reused, entry.reused_chars

    def prefix_within_tokens(self, tokens: int) -> tuple[int, int]:
        """Find the longest prefix of at most `tokens` tokens that ends between characters: `(tokens, characters)`."""
        entry = self.entry_at(tokens)
        ends = entry.own_ends
        possible = np.flatnonzero(ends[: tokens - entry.reused] != NO_CUT)
        if len(possible):
            return entry.reused + int(possible[-1]) + 1, int(ends[possible[-1]])
        return entry.reused, entry.reused_chars

    def reusable_prefix(self, chars: int, *, whole: bool) -> tuple[int, int]:
        """Find the longest prefix within `chars` characters that ends behind a sampled token: `(tokens, characters)`.

        With `whole` (`chars` is the length of the text), the prefix may also end with a run of prompt tokens.
        """
        tokens, reached = self.prefix_within_chars(chars)
        if not tokens:
            return 0, 0
        part = self.entry_at(tokens)
        sampled = part.end_of_sampled(tokens)
        closes = whole and reached == chars and any(part.reused + end == tokens for end, _, _ in part.runs)
        if closes or sampled == tokens:
            return tokens, reached
        return self.prefix_within_tokens(sampled) if sampled else (0, 0)

    def prompt_length(self) -> int:
        """Return the number of prompt tokens: those before the first token that this generation sampled.

        The number is derived from the runs. Without prompt tokens of its own, the entry either continues all of its
        parent, or is a sibling of it. A sibling sampled the last of the shared tokens too.
        """
        given = [end for end, sampled, _ in self.runs if not sampled]
        if given:
            return self.reused + given[-1]
        if self.parent is None or (self.own and self.reused == len(self.parent)):
            return self.reused
        shared = np.flatnonzero(self.prefix(self.reused)[0].loss_mask == 0)
        return int(shared[-1]) + 1 if len(shared) else 0

    def end_of_sampled(self, tokens: int) -> int:
        """Return the position behind the last sampled one of `tokens` first tokens; 0 without a sampled one."""
        part: Entry | None = self
        while part is not None:
            begin, last = part.reused, 0
            for end, sampled, _ in part.runs:
                if sampled and begin < tokens:
                    last = min(part.reused + end, tokens)
                begin = part.reused + end
            if last:
                return last
            tokens, part = part.reused, part.parent
        return 0


def _packed(ends: Ends, base: int) -> tuple[np.dtype[np.unsignedinteger[Any]], bytes]:
    """Return the type and bytes of ends: the smaller type where every end is known and near `base`."""
    if len(ends) and int(ends.min()) >= base and int(ends.max()) - base <= np.iinfo(NEAR).max:
        return NEAR, (ends - np.uint32(base)).astype(NEAR).tobytes()
    return FAR, ends.astype(FAR).tobytes()


def unpacked_ends(block: bytes, own: int, kind: np.dtype[np.unsignedinteger[Any]], base: int) -> Ends:
    """Return the ends of the tokens in a block, whose text begins at character `base`."""
    ends = np.frombuffer(block, kind, own, len(block) - own * kind.itemsize)
    return ends if kind is FAR else np.add(ends, base, dtype=np.uint32)


def unpacked_pieces(
    block: bytes, own: int, runs: Sequence[TokenRun], mask: SamplingMask | None, stop: int
) -> list[Piece]:
    """Return tokens `[0, stop)` of a block of `own` tokens."""
    tokens = np.frombuffer(block, IDS, own)
    pieces = []
    begin, offset = 0, 4 * own
    for end, sampled, version in runs:
        if begin >= stop:
            break
        kept = min(end, stop)
        logprobs = np.frombuffer(block, LOGPROBS, kept - begin, offset) if sampled else None
        sets = mask.cut(begin, kept) if mask is not None and sampled else None
        has_sets = sets is not None and bool((np.diff(sets.offsets) > 0).all())
        pieces.append(Piece(tokens[begin:kept], logprobs, version, sampling_mask=sets if has_sets else None))
        offset += 4 * (end - begin) if sampled else 0
        begin = end
    return pieces


def _mask(own: Trajectory) -> SamplingMask | None:
    """Return the sampling mask of own tokens, or None if no token has one."""
    if all(piece.sampling_mask is None for piece in own.pieces):
        return None
    return SamplingMask.join([piece.sampling_mask or SamplingMask.empty(len(piece)) for piece in own.pieces])


def _runs(own: Trajectory) -> tuple[TokenRun, ...]:
    runs: list[TokenRun] = []
    end, before = 0, None
    for piece in own.pieces:
        end += len(piece)
        run = (end, piece.logprobs is not None, piece.version)
        if before is not None and before.same_origin(piece):
            runs[-1] = run
        else:
            runs.append(run)
        before = piece
    return tuple(runs)

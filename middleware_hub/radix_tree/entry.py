"""One recorded generation: the tokens that are its own, and the entry whose first tokens it shares.

Own tokens lie in one block of bytes, 12 for each (id int32, end uint32, logprob float32): numpy arrays are made from it
when they are wanted. An entry's characters and tokens count from the beginning of the text, its own ones from `reused`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from middleware_hub.radix_tree.spelling import NO_CUT, Ends
from miles_router.trajectory import Piece, Trajectory

if TYPE_CHECKING:
    from middleware_hub.radix_tree.text_tree import Node

BYTES_PER_TOKEN = 12
Run = tuple[int, bool, "str | None"]  # (own tokens up to here, sampled?, weight version)


class Entry:
    """What was given and sampled in one generation, from the first token on. Written once."""

    __slots__ = (
        "block",
        "children",
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
        "runs",
        "serial",
        "shown",
    )

    def __init__(
        self,
        *,
        trajectory: Trajectory,
        ends: Ends,
        parent: Entry | None,
        reused: int,
        reused_chars: int,
        shown: int,
        rid: str,
        finish: str,
        rank: int,
        serial: int,
    ) -> None:
        own = trajectory[reused:]
        self.own = len(own)
        self.block = b"".join([own.tokens.tobytes(), ends[reused:].astype("<u4").tobytes(), own.logprobs.tobytes()])
        self.runs = _runs(own)
        self.parent = parent
        self.reused = reused
        self.reused_chars = reused_chars
        self.shown = shown  # characters of the text that the client saw
        self.rid = rid
        self.finish = finish  # SGLang's finish_reason.type
        self.rank = rank  # of its newest weight version: later ones rank higher
        self.serial = serial  # order of recording
        self.children = 0
        self.pins = 0
        self.last_used = serial
        self.node: Node | None = None

    def __len__(self) -> int:
        return self.reused + self.own

    @property
    def finished(self) -> bool:
        """Whether the engine ended it by itself; an aborted generation is recorded as partial."""
        return self.finish in ("stop", "length")

    @property
    def own_ends(self) -> Ends:
        """For each own token the characters of the text up to it, or NO_CUT."""
        return np.frombuffer(self.block, dtype="<u4", count=self.own, offset=4 * self.own)

    def own_pieces(self, stop: int) -> list[Piece]:
        """Own tokens `[0, stop)`."""
        tokens = np.frombuffer(self.block, dtype="<i4", count=self.own)
        logprobs = np.frombuffer(self.block, dtype="<f4", count=self.own, offset=8 * self.own)
        pieces = []
        begin = 0
        for end, sampled, version in self.runs:
            end = min(end, stop)
            if begin < end:
                pieces.append(Piece(tokens[begin:end], logprobs[begin:end] if sampled else None, version))
            begin = max(begin, end)
        return pieces

    def lineage(self) -> list[tuple[Entry, int]]:
        """The entries that make up this one, first to last, each with how many tokens have come from up to it."""
        parts = [(self, len(self))]
        entry = self
        while entry.parent is not None:
            parts.append((entry.parent, entry.reused))
            entry = entry.parent
        parts.reverse()
        return parts

    def prefix(self, tokens: int) -> tuple[Trajectory, Ends]:
        """The first `tokens` positions and their ends."""
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
        """All of it."""
        return self.prefix(len(self))[0]

    def cut_at(self, chars: int) -> tuple[int, int]:
        """The longest prefix that spells at most `chars` characters of the text and ends between characters:
        `(tokens, characters)`. Tokens without width at its very end are not part of it."""
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

    def cut_before(self, tokens: int) -> tuple[int, int]:
        """The longest prefix of at most `tokens` tokens that ends between characters: `(tokens, characters)`."""
        entry: Entry = self
        while entry.parent is not None and tokens <= entry.reused:
            entry = entry.parent
        possible = np.flatnonzero(entry.own_ends[: tokens - entry.reused] != NO_CUT)
        if len(possible):
            return entry.reused + int(possible[-1]) + 1, int(entry.own_ends[possible[-1]])
        return entry.reused, entry.reused_chars


def _runs(own: Trajectory) -> tuple[Run, ...]:
    runs: list[Run] = []
    end = 0
    for piece in own.pieces:
        end += len(piece)
        run = (end, piece.logprobs is not None, piece.version)
        if runs and runs[-1][1:] == run[1:]:
            runs[-1] = run
        else:
            runs.append(run)
    return tuple(runs)

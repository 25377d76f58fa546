"""Per-token rows: ids that an engine returns for each token besides its logprob, in rows of equal length.

Row i belongs to token i. A generation of n tokens has n - 1 rows: its last token was sampled and never went through the
model. Rows of several generations form a tree like their tokens: a continuation stores only its own rows.

There are two kinds: routed experts, the experts of each token per layer; and indexer top-k, the positions that the
indexer of sparse attention chose for each token per layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from miles_router.trajectory.pieces import InvalidTrajectory, frozen

#: Ids of one of the types of their kind, [rows, layers * top_k].
RowArray = npt.NDArray[np.integer[Any]]
IdType = np.dtype[np.integer[Any]]
COMPARED = 256  # rows per comparison


@dataclass(frozen=True)
class RowKind:
    """A kind of rows.

    Attributes:
        name: its field in samples and files.
        title: its name in messages.
        ids: the noun for its ids in the names of broken invariants.
        types: the types in which ids are stored, smallest first.
        least: the smallest valid id; -1 pads rows with fewer choices.
        causal: whether ids are positions in the sequence, none behind the row's own.
    """

    name: str
    title: str
    ids: str
    types: tuple[IdType, ...]
    least: int = 0
    causal: bool = False

    def invalid(self, invariant: str, message: str) -> InvalidTrajectory:
        """Return the error for a broken invariant of these rows."""
        return InvalidTrajectory(f"{self.ids}_{invariant}", message)


ROUTED_EXPERTS = RowKind("routed_experts", "routed experts", "experts", (np.dtype("u1"), np.dtype("<u2")))
#: A row near the beginning has fewer positions than its width, and is padded with -1.
INDEXER_TOPK = RowKind(
    "indexer_topk", "chosen positions", "positions", (np.dtype("<i2"), np.dtype("<i4")), least=-1, causal=True
)
#: All kinds. Append new ones: stored rows refer to their kind by its index.
KINDS = (ROUTED_EXPERTS, INDEXER_TOPK)


class Blocks:
    """Rows of `width` ids whose memory consists of blocks, and which are read as arrays. One contiguous array per long
    rollout would fragment memory; blocks of one size are reused for the next rollout."""

    __slots__ = ("_ends", "blocks", "width")

    def __init__(self, blocks: Iterable[RowArray], width: int = 1) -> None:
        self.blocks = tuple(frozen(block) for block in blocks)  # flat, all of one type
        self.width = width
        self._ends = tuple(accumulate(len(block) for block in self.blocks))

    @property
    def size(self) -> int:
        """The number of ids."""
        return self._ends[-1] if self._ends else 0

    def __len__(self) -> int:
        return self.size // self.width

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)

    @property
    def dtype(self) -> IdType:
        return self.blocks[0].dtype if self.blocks else np.dtype(np.uint8)

    @property
    def flat(self) -> RowArray:
        """All ids, [size]."""
        return self.with_width(1)[:].reshape(-1)

    def with_width(self, width: int) -> Blocks:
        """Return the same memory with another width."""
        return Blocks(self.blocks, width)

    def __getitem__(self, rows: slice) -> RowArray:
        """Return rows `[start, stop)`, [stop - start, width], without a copy if they lie in one block."""
        start, stop, _ = rows.indices(len(self))
        begin, end = start * self.width, max(start, stop) * self.width
        parts = []
        for block, upto in zip(self.blocks, self._ends, strict=True):
            before = upto - len(block)
            if before < end and upto > begin:
                parts.append(block[max(begin - before, 0) : end - before])
        if len(parts) == 1:
            return parts[0].reshape(-1, self.width)
        return (np.concatenate(parts) if parts else np.zeros(0, self.dtype)).reshape(-1, self.width)


class AlignedRows:
    """The rows of one generation: its own rows from `start` on, behind the first `start` rows of `parent`. Immutable
    except for `evict`. Without a parent, rows before `start` are missing, and reading them raises an error."""

    __slots__ = ("__weakref__", "_own", "_stop", "kind", "parent", "start")

    def __init__(
        self, own: RowArray | Blocks, kind: RowKind, *, start: int = 0, parent: AlignedRows | None = None
    ) -> None:
        if parent is not None and start > len(parent):
            raise kind.invalid("without_gap", f"rows {len(parent)} to {start - 1} are missing")
        if parent is not None and len(own) and parent.width not in (None, _width(own)):
            raise kind.invalid("of_the_model", f"rows of {_width(own)} ids behind rows of {parent.width}")
        self._own: RowArray | Blocks | None = own if isinstance(own, Blocks) else frozen(own)
        self._stop = start + len(own)
        self.kind = kind
        self.start = start
        self.parent = parent

    def __len__(self) -> int:
        """Return the number of rows, including the parent's rows."""
        return self._stop

    def __repr__(self) -> str:
        return f"<AlignedRows {self.start} to {self._stop}{'' if self.held else ', evicted'}>"

    @property
    def held(self) -> bool:
        """Whether its own rows are in memory, not evicted."""
        return self._own is not None

    @property
    def nbytes(self) -> int:
        """The size of its own rows in bytes."""
        return 0 if self._own is None else self._own.nbytes

    @property
    def width(self) -> int | None:
        """The number of ids per row; None if all rows are empty or evicted."""
        return next((_width(node._own) for node in self.line if node._own is not None and len(node._own)), None)

    @property
    def line(self) -> Iterator[AlignedRows]:
        """This node, then its parent, and so on up to the root."""
        node: AlignedRows | None = self
        while node is not None:
            yield node
            node = node.parent

    def evict(self) -> None:
        """Drop its own rows from memory; reading them fails from now on."""
        self._own = None

    def complete(self, stop: int | None = None) -> bool:
        """Return whether rows `[0, stop)`, by default all, can be read."""
        upto = self._stop if stop is None else stop
        if upto > self._stop:
            return False
        for node in self.line:
            if node.start < upto:
                if node._own is None:
                    return False
                upto = node.start
        return upto == 0

    def array(self, start: int = 0, stop: int | None = None) -> RowArray:
        """Return rows `[start, stop)`, by default to the end: [stop - start, layers * top_k], in their widest type.

        Raises:
            InvalidTrajectory: `without_gap` of the kind: rows outside the sequence, or never requested; `held`: evicted
                rows.
        """
        upto = self._stop if stop is None else stop
        if not 0 <= start <= upto <= self._stop:
            raise self.kind.invalid("without_gap", f"rows {start} to {upto - 1} do not exist; there are {self._stop}")
        parts: list[RowArray] = []
        for node in self.line:
            if upto <= start:
                break
            begin = max(start, node.start)
            if begin < upto:
                parts.append(node._part(begin, upto))
                upto = begin
        if start < upto:
            raise self.kind.invalid("without_gap", f"rows {start} to {upto - 1} were never requested")
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts[::-1]) if parts else self._empty()

    def _part(self, start: int, stop: int) -> RowArray:
        own = self._own  # read once: another thread may evict
        if own is None:
            raise self.kind.invalid("held", f"rows {start} to {stop - 1} have been evicted")
        return own[start - self.start : stop - self.start]

    def count_equal(self, own: RowArray | Blocks) -> int:
        """Return the number of leading rows of `own` that equal this node's own rows."""
        for at in range(0, min(len(self) - self.start, len(own)), COMPARED):
            mine = self._part(self.start + at, min(self.start + at + COMPARED, len(self)))
            common = common_rows(mine, own[at : at + COMPARED])
            if common < COMPARED:
                return at + common
        return min(len(self) - self.start, len(own))

    def _empty(self) -> RowArray:
        own = 0 if self._own is None else _width(self._own)
        return np.zeros((0, self.width or own), dtype=self.kind.types[0])


def _width(own: RowArray | Blocks) -> int:
    return own.width if isinstance(own, Blocks) else int(own.shape[1])


class RowShape(NamedTuple):
    """The shape of a model's rows: `top_k` ids for each of `layers`. Ids are below `choices`, if that is known."""

    layers: int
    top_k: int
    choices: int | None = None

    @property
    def width(self) -> int:
        return self.layers * self.top_k

    def reshape(self, rows: RowArray) -> RowArray:
        """Return the rows as [rows, layers, top_k], without a copy."""
        return rows.reshape(len(rows), self.layers, self.top_k)


def common_rows(first: RowArray, second: RowArray) -> int:
    """Return the number of equal leading rows."""
    length = min(len(first), len(second))
    if not length or not np.array_equal(first[0], second[0]):
        return 0
    differ = (first[:length] != second[:length]).any(axis=1)
    at = int(differ.argmax())
    return at if differ[at] else length

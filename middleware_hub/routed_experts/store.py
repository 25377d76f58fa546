"""The rows in memory, under a byte budget.

Rows of a trajectory (a turn of a session, a text of the cache) belong to the trajectory, and are freed with it. Rows of
other generations are kept alive here, under their ids. Without room, the least recently used rows are evicted, also
those of trajectories; a later read of them raises an error. Using rows counts as using the rows that they continue, so
that these are never evicted before their continuations.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import ref

from middleware_hub.routed_experts.statistics import STATISTICS
from miles_router.trajectory.rows import AlignedRows, Blocks, RowArray, RowKind

logger = logging.getLogger(__name__)

Key = ref[AlignedRows]
#: Limit of generations: one without rows of its own takes no bytes, but a record.
MAX_RECORDS = 1_000_000


@dataclass
class _Record:
    rid: str | None
    nbytes: int
    kept: AlignedRows | None  # keeps the rows alive where no trajectory has them
    pins: int


class RowStore:
    """A table of rows by generation id, least recently used first.

    Args:
        kind: the kind of all rows.
        max_bytes: limit of all rows together.
    """

    def __init__(self, kind: RowKind, max_bytes: int) -> None:
        self.kind = kind
        self.statistics = STATISTICS[kind](generations=lambda: len(self), bytes=lambda: self.nbytes)
        self.max_bytes = max_bytes
        self.nbytes = 0
        #: Called with the rows of a trajectory when they are evicted.
        self.when_evicted: Callable[[AlignedRows], None] = lambda rows: None
        self._records: OrderedDict[Key, _Record] = OrderedDict()
        self._by_rid: dict[str, Key] = {}

    def __len__(self) -> int:
        return len(self._records)

    def add(
        self, own: RowArray | Blocks, *, start: int, parent: AlignedRows | None = None, rid: str | None, keep: bool
    ) -> AlignedRows:
        """Add rows. With `keep`, the store keeps them alive until it needs room; otherwise the caller must.

        Raises:
            InvalidTrajectory: `without_gap`: rows of the parent are missing. `fit`: even without all other rows there
                is no room.
        """
        if own.nbytes > self.max_bytes:
            raise self.kind.invalid("fit", f"{own.nbytes} bytes are over the limit (max_bytes)")
        node = AlignedRows(own, self.kind, start=start, parent=parent)
        key = ref(node, self._forget)
        self._records[key] = _Record(rid, node.nbytes, node if keep else None, pins=1)
        self.nbytes += node.nbytes
        if rid is not None:
            self._by_rid[rid] = key
        self._mark_used(node)
        self._make_room()
        self._records[key].pins -= 1
        if self.nbytes > self.max_bytes:
            self._evict(key)
            raise self.kind.invalid("fit", f"there is no room for {own.nbytes} bytes (max_bytes)")
        return node

    def restore(
        self, own: RowArray | Blocks, start: int, parent: AlignedRows | None, rid: str | None = None
    ) -> AlignedRows:
        """Add the rows of a restored trajectory, under `rid` unless a later generation has it. Raises like `add`."""
        return self.add(own, start=start, parent=parent, rid=None if rid in self._by_rid else rid, keep=False)

    def release_id(self, rid: str) -> None:
        """Remove an id from earlier rows, since a new generation has it."""
        key = self._by_rid.pop(rid, None)
        if key is not None and (record := self._records.get(key)) is not None:
            record.rid = record.kept = None

    def by_rid(self, rid: str) -> AlignedRows | None:
        """Return the rows of a generation, or None, and count them as used."""
        key = self._by_rid.get(rid)
        node = key() if key is not None else None
        if node is not None:
            self._mark_used(node)
        return node

    @contextmanager
    def pinned(self, nodes: Iterable[AlignedRows]) -> Iterator[None]:
        """Protect these rows, and the rows that they continue, from eviction inside this context."""
        records = []
        for node in nodes:
            self._mark_used(node)
            # Where a node's own rows were evicted, the answer will continue the nearest rows before it.
            record = next((self._records[key] for each in node.line if (key := ref(each)) in self._records), None)
            if record is not None:
                record.pins += 1
                records.append(record)
        try:
            yield
        finally:
            for record in records:
                record.pins -= 1

    def _mark_used(self, node: AlignedRows) -> None:
        """Move rows to the end, parents behind their children, so that the first of all rows has no children."""
        for each in node.line:
            key = ref(each)
            if key in self._records:
                self._records.move_to_end(key)

    def _make_room(self) -> None:
        pinned: set[Key] = set()
        while True:
            if self.nbytes <= self.max_bytes and len(self._records) <= MAX_RECORDS:
                return
            key, record = next(iter(self._records.items()))
            node = key()
            if key in pinned:
                return  # requests in flight pin all that is left, or it is continued by pinned rows
            if record.pins and node is not None:
                pinned.add(key)
                self._mark_used(node)
            else:
                self._evict(key)

    def _evict(self, key: Key) -> None:
        record, node = self._records[key], key()
        self.statistics.evicted += 1
        self.statistics.evicted_bytes += record.nbytes
        if node is not None:
            node.evict()
            if record.kept is None:
                fields = {"rid": record.rid, "rows": len(node) - node.start}
                logger.warning(f"{self.kind.name}_evicted", extra={"fields": fields})
                self.when_evicted(node)
        self._forget(key)

    def _forget(self, key: Key) -> None:
        record = self._records.pop(key, None)
        if record is None:
            return  # evicted earlier
        self.nbytes -= record.nbytes
        if record.rid is not None and self._by_rid.get(record.rid) is key:
            del self._by_rid[record.rid]

    def check_integrity(self) -> None:
        """Assert every invariant; for tests."""
        seen: set[int] = set()
        for key, record in self._records.items():
            node = key()
            assert node is not None
            assert node.held
            assert node.nbytes == record.nbytes
            assert record.pins >= 0
            assert not any(id(above) in seen for above in node.line)
            seen.add(id(node))
        assert self.nbytes == sum(record.nbytes for record in self._records.values())
        assert all(self._records[key].rid == rid for rid, key in self._by_rid.items())

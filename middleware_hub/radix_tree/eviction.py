"""The order of eviction: first entries of old weight versions, then the least recently used."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from middleware_hub.radix_tree.entry import Entry

#: A heap up to this length is not cleaned of stale items.
SMALL = 64
QueueItem = tuple[int, int, Entry]  # (last used, serial, entry), as they were when the item was queued


class EvictionQueue:
    """A queue of evictable entries (leaves): a heap for each weight version. Stale items are dropped at the top."""

    def __init__(self) -> None:
        self._heaps: dict[int, list[QueueItem]] = {}
        self._clean_at: dict[int, int] = {}

    def add(self, entry: Entry) -> None:
        """Queue an entry that has become a leaf, or a leaf that was used."""
        heap = self._heaps.setdefault(entry.rank, [])
        heapq.heappush(heap, (entry.last_used, entry.serial, entry))
        if len(heap) > self._clean_at.get(entry.rank, SMALL):  # each use leaves a stale item behind
            heap[:] = [item for item in heap if _is_current(item)]
            heapq.heapify(heap)
            self._clean_at[entry.rank] = max(SMALL, 2 * len(heap))

    def pop(self, oldest_wanted: int) -> Entry | None:
        """Remove and return the least recently used leaf of versions before `oldest_wanted`, else of all versions.

        Return None where the queue is empty.
        """
        tops = list(self._tops())
        stale = [top for top in tops if top[2].rank < oldest_wanted]
        chosen = min(stale or tops, default=None)
        if chosen is None:
            return None
        heapq.heappop(self._heaps[chosen[2].rank])
        return chosen[2]

    def _tops(self) -> Iterator[QueueItem]:
        for rank, heap in list(self._heaps.items()):
            while heap and not _is_current(heap[0]):
                heapq.heappop(heap)
            if heap:
                yield heap[0]
            else:
                del self._heaps[rank]
                self._clean_at.pop(rank, None)


def _is_current(item: QueueItem) -> bool:
    used, _, entry = item
    return used == entry.last_used and not entry.children and not entry.pins and entry.node is not None

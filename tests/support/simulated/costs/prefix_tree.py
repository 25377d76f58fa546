"""The prefix cache of an engine: a radix tree over ids in whole pages, which evicts least recently used leaves.

As in SGLang's `RadixCache`, a node in use is locked together with its ancestors, and only unlocked leaves can be
evicted. Ids are packed, `ID_BYTES` each, so that comparing them is a memcmp.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

ID_BYTES = 4


def packed(ids: Sequence[int]) -> bytes:
    """Pack ids for the tree.

    Raises:
        OverflowError: an id is negative or needs more than 32 bits.
    """
    return array("I", ids).tobytes()


@dataclass(slots=True, eq=False)
class Node:
    """A run of ids that follows its parent's."""

    parent: Node | None
    run: bytes = b""
    children: dict[bytes, Node] = field(default_factory=dict)
    locks: int = 0
    used: int = 0
    listed: bool = False

    @property
    def tokens(self) -> int:
        return len(self.run) // ID_BYTES


class PrefixTree:
    """A radix tree with `size` tokens, of which `locked` cannot be evicted."""

    def __init__(self, page_tokens: int = 1) -> None:
        self._page = page_tokens * ID_BYTES
        self._uses = self._listings = 0
        self.clear()

    def clear(self) -> None:
        """Remove everything, locks included. Call it only while no request runs."""
        self._roots: dict[str, Node] = {}
        self.size = 0
        self.locked = 0
        # Heap of leaves that may be evictable, by last use. An entry may be stale and is checked when it is popped.
        self._leaves: list[tuple[int, int, Node]] = []

    @property
    def evictable(self) -> int:
        return self.size - self.locked

    def match(self, ids: bytes, key: str = "") -> tuple[Node, int]:
        """Return the node at the end of the longest cached prefix in whole pages, and the prefix's number of tokens.

        Only sequences with the same `key` share prefixes.
        """
        self._uses += 1
        node, at = self._roots.setdefault(key, Node(None)), 0
        while (child := node.children.get(ids[at : at + self._page])) is not None:
            common = _common(child.run, ids[at : at + len(child.run)]) // self._page * self._page
            if common < len(child.run):
                child = self._split(child, common)
            child.used = self._uses
            node, at = child, at + common
        return node, at // ID_BYTES

    def insert(self, ids: bytes, key: str = "") -> tuple[Node, int]:
        """Add `ids` up to their last whole page. Return the node at their end, and how many of the tokens are new."""
        node, known = self.match(ids, key)
        run = ids[known * ID_BYTES : len(ids) // self._page * self._page]
        if not run:
            return node, 0
        leaf = Node(node, run, used=self._uses)
        node.children[run[: self._page]] = leaf
        self.size += leaf.tokens
        self._list(leaf)
        return leaf, leaf.tokens

    def lock(self, node: Node) -> None:
        """Lock a node and its ancestors against eviction."""
        above: Node | None = node
        while above is not None:
            if above.locks == 0:
                self.locked += above.tokens
            above.locks += 1
            above = above.parent

    def unlock(self, node: Node) -> None:
        """Undo one `lock`."""
        above: Node | None = node
        while above is not None:
            above.locks -= 1
            if above.locks == 0:
                self.locked -= above.tokens
                self._list(above)
            above = above.parent

    def evict(self, tokens: int) -> None:
        """Evict leaves, least recently used first, until `tokens` tokens are removed or nothing is evictable."""
        goal = self.size - tokens
        while self.size > goal and self._leaves:
            used, _, leaf = heapq.heappop(self._leaves)
            leaf.listed = False
            if leaf.used != used:
                self._list(leaf)
            elif self._can_go(leaf):
                self._forget(leaf)

    def _forget(self, leaf: Node) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.run[: self._page]]
        leaf.parent = None
        self.size -= leaf.tokens
        self._list(parent)

    def _split(self, child: Node, length: int) -> Node:
        """Split a node and return the new upper node, which has the first `length` bytes of its run."""
        parent = child.parent
        assert parent is not None
        upper = Node(parent, child.run[:length], locks=child.locks, used=child.used)
        child.run = child.run[length:]
        child.parent = upper
        upper.children[child.run[: self._page]] = child
        parent.children[upper.run[: self._page]] = upper
        return upper

    def _can_go(self, node: Node) -> bool:
        return node.locks == 0 and not node.children and node.parent is not None

    def _list(self, node: Node) -> None:
        if self._can_go(node) and not node.listed:
            node.listed = True
            self._listings += 1  # makes heap entries unique, since nodes cannot be compared
            heapq.heappush(self._leaves, (node.used, self._listings, node))


def _common(left: bytes, right: bytes) -> int:
    """Return the length of the common prefix in bytes."""
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low

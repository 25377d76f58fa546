"""The prefix cache of an engine: a radix tree over ids in whole pages, least recently used leaves leave first.

As SGLang's `RadixCache`: a node in use is locked together with all above it, and only leaves that nobody has locked
can be evicted. Ids are packed, `ID_BYTES` each, so that comparing them costs a memcmp.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

ID_BYTES = 4


def packed(ids: Sequence[int]) -> bytes:
    """Ids as the tree compares them; OverflowError for one below 0 or above 32 bits."""
    return array("I", ids).tobytes()


@dataclass(slots=True, eq=False)
class Node:
    """A run of ids behind its parent's."""

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
    """`size` tokens in all, of which `locked` cannot be evicted."""

    def __init__(self, page_tokens: int = 1) -> None:
        self._page = page_tokens * ID_BYTES
        self._uses = self._listings = 0
        self.clear()

    def clear(self) -> None:
        """Forget everything, locks included: only an engine at rest may."""
        self._roots: dict[str, Node] = {}
        self.size = 0
        self.locked = 0
        # Leaves that could be evicted, by when they were last used; looked at again when they come up.
        self._leaves: list[tuple[int, int, Node]] = []

    @property
    def evictable(self) -> int:
        return self.size - self.locked

    def match(self, ids: bytes, key: str = "") -> tuple[Node, int]:
        """The node at the end of the longest known prefix, in whole pages, and the prefix's tokens. Only sequences of
        the same `key` share one."""
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
        """Know `ids` up to their last whole page: the node at their end, and how many tokens of them are new."""
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
        """Keep a node and all above it."""
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
        """Forget leaves, least recently used first, until so many tokens are gone or nothing can go."""
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
        """Cut a node's run: the new upper node has its first `length` bytes."""
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
            self._listings += 1  # so that no two entries are equal
            heapq.heappush(self._leaves, (node.used, self._listings, node))


def _common(left: bytes, right: bytes) -> int:
    """Bytes that both begin with."""
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

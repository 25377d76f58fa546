"""A radix tree over characters. A node marks where texts diverge, or where an entry's text or shown text ends.

An edge holds the characters between two nodes as one string, so that a step compares a run of text at memory speed. The
steps of a look-up depend on the number of branchings, not on the length of the text. A trie with a node for each
character or block would need a Python object for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from middleware_hub.radix_tree.entry import Entry


class Node:
    """A node of the tree. `label` is the text between the parent and this node, `depth` the characters from the root.

    Most nodes have at most one child, so a dictionary is made only for the second.
    """

    __slots__ = ("_below", "depth", "entries", "label", "newest", "parent", "shown_entries")

    def __init__(self, parent: Node | None, label: str) -> None:
        self.parent = parent
        self.label = label
        self.depth: int = (parent.depth if parent is not None else 0) + len(label)
        self._below: Node | dict[str, Node] | None = None  # one child, or several by their first character
        # In order of recording:
        self.entries: tuple[Entry, ...] = ()  # entries whose text, hidden tail included, ends here
        self.shown_entries: tuple[Entry, ...] = ()  # entries whose shown text ends here
        self.newest: Entry | None = None  # of all entries whose text reaches or passes this node

    def __repr__(self) -> str:
        return f"<Node at {self.depth}, {len(self.children)} children, {len(self.shown_entries)} shown>"

    @property
    def children(self) -> Mapping[str, Node]:
        """The child nodes by the first character of their labels."""
        below = self._below
        if below is None:
            return {}
        return {below.label[0]: below} if isinstance(below, Node) else below

    def child(self, char: str) -> Node | None:
        """Return the child whose label begins with `char`, or None."""
        below = self._below
        if below is None:
            return None
        if isinstance(below, Node):
            return below if below.label[0] == char else None
        return below.get(char)

    def set_child(self, child: Node) -> None:
        """Add a child; replace one whose label begins with the same character."""
        below, char = self._below, child.label[0]
        if isinstance(below, dict):
            below[char] = child
        elif below is None or below.label[0] == char:
            self._below = child
        else:
            self._below = {below.label[0]: below, char: child}

    def remove_child(self, child: Node) -> None:
        if not isinstance(self._below, dict):
            self._below = None
            return
        del self._below[child.label[0]]
        if len(self._below) == 1:
            (self._below,) = self._below.values()

    def path_to_root(self) -> Iterator[Node]:
        """Yield this node and its ancestors, up to the root."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent


class TextTree:
    """A tree of texts with the entries at their ends."""

    def __init__(self) -> None:
        self.root = Node(None, "")
        self.characters = 0  # held in labels

    def descend(self, text: str) -> tuple[Node, int]:
        """Follow `text` from the root; return the node at or below where it diverges, and how many characters agree."""
        node, position = self.root, 0
        while position < len(text):
            child = node.child(text[position])
            if child is None:
                return node, position
            if not text.startswith(child.label, position):
                return child, position + common_length(child.label, text, position)
            node, position = child, position + len(child.label)
        return node, position

    def find(self, text: str) -> Node | None:
        """Return the node exactly at the end of `text`, or None."""
        node, position = self.descend(text)
        return node if position == len(text) == node.depth else None

    def add(self, text: str, entry: Entry) -> None:
        """Add an entry at the end of its `text`, and at the end of its shown text."""
        end = self._ensure_node(text)
        shown_end = end if entry.shown_chars == len(text) else self._ensure_node(text[: entry.shown_chars])
        end.entries = _added(end.entries, entry)
        shown_end.shown_entries = _added(shown_end.shown_entries, entry)
        entry.node = end
        for node in end.path_to_root():
            if node.newest is not None and node.newest.serial > entry.serial:
                break  # the nodes above have newer entries too
            node.newest = entry

    def remove(self, entry: Entry) -> None:
        """Remove an entry, and every node that only this entry needed."""
        end = entry.node
        assert end is not None
        shown_end = self.shown_node(entry)
        shown_end.shown_entries = _removed(shown_end.shown_entries, entry)
        end.entries = _removed(end.entries, entry)
        entry.node = None
        for node in list(end.path_to_root()):
            if node.newest is entry:
                node.newest = _newest(node)
        self._prune(end)
        if shown_end is not end:
            self._prune(shown_end)

    def shown_node(self, entry: Entry) -> Node:
        """Return the node at the end of an entry's shown text: the entry's node or an ancestor of it."""
        assert entry.node is not None
        return next(node for node in entry.node.path_to_root() if node.depth <= entry.shown_chars)

    def _ensure_node(self, text: str) -> Node:
        node, position = self.descend(text)
        if position < node.depth:
            node = self._split(node, position)
        if position < len(text):
            child = Node(node, text[position:])
            self.characters += len(child.label)
            node.set_child(child)
            node = child
        return node

    def _split(self, node: Node, depth: int) -> Node:
        """Insert a node at `depth`, in the middle of the edge that leads to `node`."""
        assert node.parent is not None
        keep = len(node.label) - (node.depth - depth)
        upper = Node(node.parent, node.label[:keep])
        upper.newest = node.newest
        node.parent.set_child(upper)
        node.label = node.label[keep:]
        node.parent = upper
        upper.set_child(node)
        return upper

    def _prune(self, node: Node) -> None:
        """Remove a node without entries and children, then check its parent; merge a node with its only child.

        Removed nodes have no parent afterwards.
        """
        while node.parent is not None and not node.entries and not node.shown_entries:
            children = node.children
            parent = node.parent
            if not children:
                parent.remove_child(node)
                self.characters -= len(node.label)
                node.parent = None
                node = parent
            elif len(children) == 1:
                (child,) = children.values()
                child.label = node.label + child.label
                child.parent = parent
                node.parent = None
                parent.set_child(child)
                return
            else:
                return

    def nodes(self) -> Iterator[Node]:
        """Yield every node, parents first."""
        waiting = [self.root]
        while waiting:
            node = waiting.pop()
            yield node
            waiting += node.children.values()


def _added(entries: tuple[Entry, ...], entry: Entry) -> tuple[Entry, ...]:
    together = (*entries, entry)
    if entries and entries[-1].serial > entry.serial:  # restored from the disk, recorded by an earlier process
        return tuple(sorted(together, key=lambda each: each.serial))
    return together


def _removed(entries: tuple[Entry, ...], entry: Entry) -> tuple[Entry, ...]:
    index = entries.index(entry)
    return entries[:index] + entries[index + 1 :]


def _newest(node: Node) -> Entry | None:
    below = [child.newest for child in node.children.values() if child.newest is not None]
    return max((*below, *node.entries), key=lambda entry: entry.serial, default=None)


def common_length(label: str, text: str, position: int) -> int:
    """Return how many characters of `label` occur in `text` at `position`; bisect, to compare at memory speed."""
    low, high = 0, min(len(label), len(text) - position)
    while low < high:
        middle = (low + high + 1) // 2
        if text.startswith(label[low:middle], position + low):
            low = middle
        else:
            high = middle - 1
    return low

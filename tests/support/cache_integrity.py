"""Every invariant of the text cache, checked by looking at all that it holds."""

from __future__ import annotations

from middleware_hub.radix_tree.cache import RadixTreeCache
from middleware_hub.radix_tree.entry import Entry
from middleware_hub.radix_tree.text_tree import Node


def check_integrity(cache: RadixTreeCache) -> None:
    """Raises AssertionError for the first one broken."""
    entries: list[Entry] = []
    nodes = list(cache._tree.nodes())
    for node in nodes:
        entries += node.entries
        _check_node(node)
    assert len(entries) == len(cache)
    assert sum(entry.own for entry in entries) == cache.tokens
    assert sum(len(entry.block) for entry in entries) == cache.nbytes
    assert sum(len(node.label) for node in nodes) == cache.characters
    for entry in entries:
        assert entry.node is not None
        assert entry.children == sum(other.parent is entry for other in entries)
        assert entry in cache._tree.shown_node(entry).shown_entries
        assert entry.parent is None or entry.parent in entries
        assert entry.parent is None or entry.parent.reused < entry.reused <= len(entry.parent)


def _check_node(node: Node) -> None:
    children = node.children
    below = [child.newest for child in children.values()]
    assert node.newest is max((*filter(None, below), *node.entries), key=lambda entry: entry.serial, default=None)
    assert all(char == child.label[0] and child.parent is node for char, child in children.items())
    needed = node.parent is None or node.entries or node.shown_entries or len(children) > 1
    assert needed, "a node that nobody needs"

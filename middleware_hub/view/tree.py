"""`BranchTree`: how the samples of a session branch, as lines of a list.

A line is a run of consecutive turns. A new line begins at a branch, after the last turn of a sample, and at a turn that
has a reason for beginning a new segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from middleware_hub.view.sheets import TokenSheet


@dataclass(eq=False)
class _TurnNode:
    turn: int
    sampled: int
    reason: str | None
    children: dict[int, _TurnNode] = field(default_factory=dict)
    samples: list[int] = field(default_factory=list)

    @property
    def next_turn(self) -> _TurnNode | None:
        """The next turn on the same line; None if the line ends here."""
        if len(self.children) != 1 or self.samples:
            return None
        (child,) = self.children.values()
        return child if child.reason is None else None


class BranchTree:
    """The turns of one session's samples."""

    def __init__(self) -> None:
        self._roots: dict[int, _TurnNode] = {}
        self._nodes: dict[int, _TurnNode] = {}

    def add(self, place: int, sheet: TokenSheet) -> None:
        """Add the turns of the sample at index `place` of the file."""
        spans = {turn["turn"]: turn for turn in sheet.turns}
        before = None
        for number in sheet.path:
            turn = spans.get(number, {})
            self.add_turn(number, before, turn.get("end", 0) - turn.get("start", 0), turn.get("reason"))
            before = number
        if before is not None:
            self.end(before, place)

    def add_turn(self, turn: int, parent: int | None, sampled: int, reason: object) -> None:
        """Add a turn below `parent`, which must exist. A turn that exists already is left as it is.

        Args:
            sampled: how many tokens the turn sampled.
            reason: why the turn begins a new segment, or None.
        """
        if turn not in self._nodes:
            node = self._nodes[turn] = _TurnNode(turn, sampled, None if reason is None else str(reason))
            (self._roots if parent is None else self._nodes[parent].children)[turn] = node

    def end(self, turn: int, sample: int) -> None:
        """Record that a sample ends with this turn, which must exist."""
        self._nodes[turn].samples.append(sample)

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines, depth first. Each has its `depth`, the `first` and `last` turn, the counts of `turns` and
        sampled `tokens`, the `reason` of its first turn, and the `samples` that end with its last turn."""
        lines = []
        waiting = [(node, 0) for node in reversed(self._roots.values())]
        while waiting:
            node, depth = waiting.pop()
            chain = [node]
            while (following := chain[-1].next_turn) is not None:
                chain.append(following)
            lines.append(_line(chain, depth))
            waiting += [(child, depth + 1) for child in reversed(chain[-1].children.values())]
        return lines


def _line(chain: Sequence[_TurnNode], depth: int) -> dict[str, Any]:
    return {
        "depth": depth,
        "first": chain[0].turn,
        "last": chain[-1].turn,
        "turns": len(chain),
        "tokens": sum(node.sampled for node in chain),
        "reason": chain[0].reason,
        "samples": chain[-1].samples,
    }

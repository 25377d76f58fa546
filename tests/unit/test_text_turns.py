"""Turns of a text rollout: which of them branch, and that to find out costs no look at all the others."""

from __future__ import annotations

from typing import Any, cast

from middleware_hub.radix_tree.dashboard.turns import BRANCH, NOTHING_KNOWN, TextRollout, TextTurn

NOBODY = cast(Any, None)


class Unlooked(dict[int, TextTurn]):
    """Nobody goes through it."""

    def values(self) -> Any:
        raise AssertionError("all turns were looked at")


def test_all_but_the_first_of_many_turns_behind_one_are_branches() -> None:
    rollout = TextRollout(0.0)
    rollout.turns = Unlooked()
    root = TextTurn(rollout, NOBODY, None, 0, 1, NOTHING_KNOWN)
    behind = [TextTurn(rollout, NOBODY, root, 1, 2, NOTHING_KNOWN) for _ in range(3)]
    assert [turn.reason for turn in (root, *behind)] == [None, None, BRANCH, BRANCH]
    assert [*root.after] == behind

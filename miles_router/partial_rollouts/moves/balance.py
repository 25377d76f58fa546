"""Choose from where to where a running request moves. Pure.

Requests are counted, not tokens: in simulated rollouts, neither a worker's tokens nor its step time predicted the
length of its tail any better.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeVar

#: A move pays if the source has more requests than this factor times the target's requests after the move.
SLACK = 1.25

Place = TypeVar("Place")


def choose_move(loads: Mapping[Place, int], movable: Mapping[Place, Collection[object]]) -> tuple[Place, Place] | None:
    """Return the place with the most requests among those with `movable` ones, and the place with the fewest.

    Return None if a move between them does not pay.
    """
    sources = [place for place in loads if movable.get(place)]
    if not sources:
        return None
    source, target = max(sources, key=loads.__getitem__), min(loads, key=loads.__getitem__)
    return (source, target) if loads[source] > SLACK * (loads[target] + 1) else None

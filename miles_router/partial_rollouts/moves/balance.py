"""From where to where a running request moves. Pure.

Requests are counted, not tokens: in simulated rollouts neither a worker's tokens nor the time of its steps said more of
how long its tail will be.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeVar

#: A move pays where a place has more than so many times the requests that the idlest would have with one more.
SLACK = 1.25

Place = TypeVar("Place")


def relocation(loads: Mapping[Place, int], movable: Mapping[Place, Collection[object]]) -> tuple[Place, Place] | None:
    """The place with the most requests, of those where some are `movable`, and the one with the fewest; None where they
    are not so far apart that a move pays."""
    sources = [place for place in loads if movable.get(place)]
    if not sources:
        return None
    source, target = max(sources, key=loads.__getitem__), min(loads, key=loads.__getitem__)
    return (source, target) if loads[source] > SLACK * (loads[target] + 1) else None

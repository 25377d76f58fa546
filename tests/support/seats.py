"""What one shard of several knows of the others, for routers in the event loop of a test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from miles_router.fleet.affinity import Affinity
from miles_router.shards.owners import ShardOwners
from miles_router.shards.places import Seat, Shards


def owners_at(
    index: int,
    count: int,
    directory: Path,
    urls: Sequence[str],
    affinity: Affinity,
    is_there: Callable[[int], bool] = lambda other: True,
) -> ShardOwners:
    """Return the owners of one of `count` shards. `urls` is filled in once all listen."""
    seat = Seat(Shards(count), index, directory, "")
    return ShardOwners(seat, affinity, url_of=urls.__getitem__, is_there=is_there)

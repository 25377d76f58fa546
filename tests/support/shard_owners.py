"""What one shard of several knows of the others, for routers in the event loop of a test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from miles_router.fleet.placement.sessions import Affinity
from miles_router.shards.owners import ShardOwners
from miles_router.shards.topology import Shard, Shards


def owners_at(
    index: int,
    count: int,
    directory: Path,
    urls: Sequence[str],
    affinity: Affinity,
    is_running: Callable[[int], bool] = lambda other: True,
) -> ShardOwners:
    """Return the owners of one of `count` shards. `urls` is filled in once all listen."""
    shard = Shard(Shards(count), index, directory, "")
    return ShardOwners(shard, affinity, url_of=urls.__getitem__, is_running=is_running)

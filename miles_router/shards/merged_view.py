"""The leader's `/metrics` and `/router/info`, which show all shards as one router."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

import orjson

from miles_router.admin.routes import Admin
from miles_router.control.engine_metrics import merge
from miles_router.metrics import Statistics, gauge
from miles_router.pools.pools import Pools
from miles_router.settings.config import FIELDS, RouterConfig, shown
from miles_router.shards.coordinator import ShardCoordinator

#: The metric label that tells shards apart, and its value for the leader.
SHARD, LEADER = "shard", "leader"


class ShardStatistics(Statistics, prefix="miles_router_shard"):
    """The shards of a router."""

    up = gauge("1: the shard tells its numbers.", by=SHARD)


class MergedView:
    """The leader's view of all shards as one router.

    Args:
        admin: the leader's own admin, whose metrics and info this class replaces.
        config: the settings of the whole router; this process itself runs with a part of them.
    """

    def __init__(self, admin: Admin, pools: Pools, coordinator: ShardCoordinator, config: RouterConfig) -> None:
        self._admin = admin
        self._pools = pools
        self._coordinator = coordinator
        self._config = config
        #: Shard index to 1 if the shard answered the last metrics request, else 0.
        self._up = dict.fromkeys(map(str, range(coordinator.shards.count)), 0)
        pools.default.router.metrics.register(ShardStatistics(up=lambda: self._up))
        admin.metrics_text, admin.info_fields = self._metrics, self._info

    async def _metrics(self) -> bytes:
        """Return the metrics of the leader and of all shards, labelled by shard."""
        replies = {
            answer.fields[SHARD]: answer.blob.decode() for answer in await self._coordinator.ask_responsive("metrics")
        }
        self._up = {shard: int(shard in replies) for shard in self._up}
        own = {LEADER: (await self._admin.own_metrics()).decode()}
        merged, _ = await asyncio.to_thread(merge, own | replies, SHARD)
        return merged.encode()

    async def _info(self) -> dict[str, Any]:
        """Return `/router/info` with the numbers of all shards added up."""
        replies = [orjson.loads(answer.blob) for answer in await self._coordinator.ask_all("numbers")]
        described = await self._admin.described()
        described["config"] = {name: shown(self._config, name) for name in FIELDS}
        described["statistics"] |= _statistics(replies)  # statistics of discovery come from the leader itself
        for each in replies:
            for name, gate in each["gates"].items():
                shown_gates = [described["gate"]] if name == self._pools.default.name else []
                if name in described.get("pools", ()):
                    shown_gates.append(described["pools"][name]["gate"])
                for own in shown_gates:
                    own["held"], own["queued"] = own["held"] + gate["held"], own["queued"] + gate["queued"]
        described["processes"] = sorted(self._coordinator.processes())
        return described


def _statistics(replies: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the statistics of the middlewares of all shards.

    Numbers are added. For other facts the last shard that reports a value other than None wins.
    """
    numbers: dict[str, Any] = {}
    facts: dict[str, dict[str, Any]] = {}
    for each in replies:
        numbers = _sum(numbers, each["numbers"])
        for name, own in each["facts"].items():
            known = facts.setdefault(name, {})
            known |= {fact: value for fact, value in own.items() if value is not None or fact not in known}
    return {name: {**numbers.get(name, {}), **own} for name, own in facts.items()}


def _sum(one: Any, other: Any) -> Any:
    """Add two nested mappings of numbers name by name."""
    if isinstance(one, Mapping):
        return {**one, **{name: _sum(one[name], each) if name in one else each for name, each in other.items()}}
    return one + other

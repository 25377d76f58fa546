"""All shards, shown as one router by the leader."""

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
from miles_router.shards.seats import Seats

#: The label of all that `GET /metrics` shows of several shards, and its value for the leader.
SHARD, LEADER = "shard", "leader"


class ShardStatistics(Statistics, prefix="miles_router_shard"):
    """The shards of a router."""

    up = gauge("1: the shard tells its numbers.", by=SHARD)


class AsOne:
    """Shows all shards as one router.

    Args:
        admin: the leader's own.
        config: the router's settings; this process has a part of them.
    """

    def __init__(self, admin: Admin, pools: Pools, seats: Seats, config: RouterConfig) -> None:
        #: The layers of a shard, outermost first.
        self.stack: list[dict[str, object]] = []
        self._admin = admin
        self._pools = pools
        self._seats = seats
        self._config = config
        #: Of which shards the numbers are known, as of the last look.
        self._up = dict.fromkeys(map(str, range(seats.shards.count)), 0)
        pools.default.router.metrics.register(ShardStatistics(up=lambda: self._up))
        admin.shown_metrics, admin.shown = self._metrics, self._info

    async def _metrics(self) -> bytes:
        """Those of all shards, each by itself."""
        told = {answer.fields[SHARD]: answer.blob.decode() for answer in await self._seats.tell("metrics")}
        self._up = {shard: int(shard in told) for shard in self._up}
        own = {LEADER: (await self._admin.own_metrics()).decode()}
        merged, _ = await asyncio.to_thread(merge, own | told, SHARD)
        return merged.encode()

    async def _info(self) -> dict[str, Any]:
        """The router, with what all shards hold."""
        told = [orjson.loads(answer.blob) for answer in await self._seats.ask_all("numbers")]
        described = await self._admin.described()
        described["middlewares"] = self.stack
        described["config"] = {name: shown(self._config, name) for name in FIELDS}
        described["statistics"] = _statistics(told)
        for each in told:
            for name, held in each["held"].items():
                if name == self._pools.default.name:
                    described["gate"]["held"] += held
                if name in described.get("pools", ()):
                    described["pools"][name]["gate"]["held"] += held
        described["processes"] = sorted(self._seats.processes())
        return described


def _statistics(told: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What the layers of all shards show: numbers are added up; of all else, who was asked last and knows has its
    word."""
    numbers: dict[str, Any] = {}
    facts: dict[str, dict[str, Any]] = {}
    for each in told:
        numbers = _sum(numbers, each["numbers"])
        for name, own in each["facts"].items():
            known = facts.setdefault(name, {})
            known |= {fact: value for fact, value in own.items() if value is not None or fact not in known}
    return {name: {**numbers.get(name, {}), **own} for name, own in facts.items()}


def _sum(one: Any, other: Any) -> Any:
    """Numbers of two shards, by the same names."""
    if isinstance(one, Mapping):
        return {**one, **{name: _sum(one[name], each) if name in one else each for name, each in other.items()}}
    return one + other

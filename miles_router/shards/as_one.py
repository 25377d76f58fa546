"""All shards, shown as one router by the leader."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from miles_router.admin.routes import Admin, Json
from miles_router.control.engine_metrics import MEDIA_TYPE, merge
from miles_router.metrics import Statistics, gauge
from miles_router.pools.pools import Pools
from miles_router.pools.registrations import Registrations
from miles_router.settings.config import FIELDS, RouterConfig, shown
from miles_router.shards.seats import Seats

#: The label of all that `GET /metrics` shows of several shards, and its value for the leader.
SHARD, LEADER = "shard", "leader"


class ShardStatistics(Statistics, prefix="miles_router_shard"):
    """The shards of a router."""

    up = gauge("1: the shard tells its numbers.", by=SHARD)


class WholeAdmin(Admin):
    """Shows all shards as one router."""

    def __init__(
        self,
        pools: Pools,
        registrations: Registrations,
        seats: Seats,
        config: RouterConfig,
    ) -> None:
        self.stack: list[dict[str, object]] = []
        super().__init__(pools, registrations, self.stack)
        self._seats = seats
        self._config = config
        #: Of which shards the numbers are known, as of the last look.
        self._up = dict.fromkeys(map(str, range(seats.shards.count)), 0)
        self._router.metrics.register(ShardStatistics(up=lambda: self._up))

    async def metrics(self, request: Request) -> Response:
        """Those of all shards, each by itself."""
        told = {answer.fields[SHARD]: answer.blob.decode() for answer in await self._seats.tell("metrics")}
        self._up = {shard: int(shard in told) for shard in self._up}
        own = {LEADER: self._router.metrics.render().decode()}
        return Response(await asyncio.to_thread(merge, own | told, SHARD), media_type=MEDIA_TYPE)

    async def info(self, request: Request) -> Response:
        """The router, with what all shards hold."""
        told = [orjson.loads(answer.blob) for answer in await self._seats.ask_all("numbers")]
        described = self.described()
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
        return Json(described)


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

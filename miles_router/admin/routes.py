"""The router's own HTTP routes: health, statistics, and worker administration under the paths of each framework."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from miles_router import tasks
from miles_router.asgi.exchange import Exchange
from miles_router.control.engine_metrics import MEDIA_TYPE
from miles_router.errors import BadRequest, NotFound
from miles_router.fleet.worker_url import parse_worker_url
from miles_router.fleet.workers import Worker, WorkerState
from miles_router.middlewares.router import Router
from miles_router.pools.pools import ModelPool, Pools
from miles_router.pools.registrations import Registrations
from miles_router.pools.registry import WorkerRegistry, url_of
from miles_router.settings.config import FIELDS, shown
from miles_router.version import __version__

MAX_ADMIN_BODY = 64 * 1024
#: Most characters of a wrong argument in an error message.
SHOWN = 100
TRUE = frozenset({"1", "true", "yes"})
FALSE = frozenset({"", "0", "false", "no"})


class Json(Response):
    """A JSON response, encoded by orjson."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


class Admin:
    """The handlers of the administration routes for one router."""

    def __init__(self, pools: Pools, registrations: Registrations, stack: list[dict[str, object]]) -> None:
        self._pools = pools
        self.registry = WorkerRegistry(pools, registrations)
        self._router = pools.default.router
        #: The middlewares, outermost first. The leader shows those of its shards.
        self.stack = stack
        #: The sources of `GET /metrics` and `GET /router/info`. With several processes, `shards/` replaces them by
        #: functions that merge the answers of all processes.
        self.metrics_text: Callable[[], Awaitable[bytes]] = self.own_metrics
        self.info_fields: Callable[[], Awaitable[dict[str, Any]]] = self.described
        self._started = time.time()

    def open_routes(self) -> list[BaseRoute]:
        """Return the routes for load balancers, which need no key; they reveal nothing but counts."""
        return [
            Route("/health", self.health, methods=["GET"]),
            Route("/liveness", self.health, methods=["GET"]),
            Route("/readiness", self.readiness, methods=["GET"]),
        ]

    def guarded_routes(self) -> list[BaseRoute]:
        """Return the routes that need the administration key."""
        return [
            Route("/add_worker", self.add_worker, methods=["POST"]),
            Route("/remove_worker", self.remove_worker, methods=["POST"]),
            Route("/list_workers", self.list_workers, methods=["GET"]),
            Route("/workers", self.create_worker, methods=["POST"]),
            Route("/workers", self.show_workers, methods=["GET"]),
            Route("/workers/{id:path}", self.show_worker, methods=["GET"]),
            Route("/workers/{id:path}", self.delete_worker, methods=["DELETE"]),
            Route("/router/info", self.info, methods=["GET"]),
            Route("/router/capacity", self.capacity, methods=["GET"]),
            Route("/router/weight_version", self.set_weight_version, methods=["POST"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/engine_metrics", self.engine_metrics, methods=["GET"]),
        ]

    # Workers, the spelling of slime and miles

    async def add_worker(self, request: Request) -> Response:
        worker = await self.registry.add(await _arguments(request))
        missing_flags = {"lacks": list(lacks)} if (lacks := await self._lacks(worker)) else {}
        return Json({"status": "success", "worker_urls": self._in_flight(request), **missing_flags})

    async def _lacks(self, worker: Worker) -> Sequence[str]:
        """Return the flags that a worker's engine should have been started with; empty if it does not answer soon."""
        with suppress(NotFound, TimeoutError):
            pool, _ = self._pools.find_worker(worker.url)
            facts = pool.fleet.facts(worker.url)
            return (await tasks.within(self._router.config.health_check_timeout, facts, name="facts")).lacks or ()
        return ()

    async def remove_worker(self, request: Request) -> Response:
        arguments = await _arguments(request)
        _, worker = self._pools.find_worker(url_of(arguments).url, self._pools.selected_by_path(request.scope))
        await self.registry.remove(worker.url, drain=_flag(arguments, "drain"))
        return Json({"status": "success", "worker_urls": self._in_flight(request)})

    async def list_workers(self, request: Request) -> Response:
        workers = self._workers(request)
        unreached = {worker.url: worker.reason for worker in workers if worker.state is WorkerState.UNREACHED}
        return Json({"urls": [worker.url for worker in workers], **({"unreached": unreached} if unreached else {})})

    # Workers, the REST spelling of the SGLang gateway

    async def create_worker(self, request: Request) -> Response:
        return Json((await self.registry.add(await _arguments(request))).describe(), status_code=201)

    async def show_workers(self, request: Request) -> Response:
        workers = [worker.describe() for worker in self._workers(request)]
        return Json({"workers": workers, "total": len(workers)})

    async def show_worker(self, request: Request) -> Response:
        return Json(self._named(request)[1].describe())

    async def delete_worker(self, request: Request) -> Response:
        _, worker = self._named(request)
        await self.registry.remove(worker.url, drain=_flag(request.query_params, "drain"))
        return Json({"status": "success", "id": worker.address.id, "url": worker.url})

    # The router itself

    async def health(self, request: Request) -> Response:
        return Json({"status": "ok", **self._counts(self._pools.selected_by_path(request.scope))})

    async def readiness(self, request: Request) -> Response:
        pools = self._pools.selected_by_path(request.scope)
        ready = any(pool.fleet.snapshot.generating for pool in pools)
        return Json(
            {"status": "ready" if ready else "no routable worker", **self._counts(pools)}, 200 if ready else 503
        )

    async def info(self, request: Request) -> Response:
        shown, pool = await self.info_fields(), Exchange.of(request.scope).pool
        return Json(shown if pool is None else self._of_model(self._pools[pool], shown))

    def _of_model(self, pool: ModelPool, shown: Mapping[str, Any]) -> dict[str, Any]:
        """Return what `GET /router/info` shows below the path of a model, made of what it shows of all."""
        own, suffix = shown["pools"][pool.name], f":{pool.name}"
        statistics = {name: each for name, each in shown["statistics"].items() if name.endswith(suffix)}
        return {
            **shown,
            **self._counts([pool]),
            "weight_version": own["weight_version"],
            "gate": own["gate"],
            "pools": {pool.name: own},
            "workers": [worker.describe() for worker in pool.fleet.pool],
            "statistics": {name.removesuffix(suffix): each for name, each in statistics.items()},
        }

    async def described(self) -> dict[str, Any]:
        """Return what `GET /router/info` shows of this process."""
        config = self._router.config
        return {
            "version": __version__,
            "now": time.time(),
            "uptime_seconds": round(time.time() - self._started, 3),
            **self._counts([*self._pools]),
            "weight_version": self._router.pool.weight_version,
            "gate": self._router.gate.describe(),
            **({"pools": self._each_pool()} if self._pools.named else {}),
            "workers": [worker.describe() for worker in self._pools.workers],
            "middlewares": self.stack,
            "statistics": self.statistics(),
            "config": {name: shown(config, name) for name in FIELDS},
        }

    async def capacity(self, request: Request) -> Response:
        """Answer how many more episodes may begin (`room`) on the workers of one model.

        The query's `tokens` is the length that an episode is expected to reach; by default the mean of what the
        sessions hold now. `room` is null if that is not known, or if an engine does not report its memory.
        """
        pool = self._pools.of_path(Exchange.of(request.scope), request.query_params.get("model_id"))
        tokens = _length(request.query_params.get("tokens"))
        units = pool.fleet.snapshot.generating  # a session on a pair also counts on its prefill half
        sessions, held = sum(unit.sessions for unit in units), sum(unit.tokens for unit in units)
        if tokens is None and sessions and held:
            tokens = -(-held // sessions)
        sizes = [unit.capacity for unit in units]
        shown = await self.info_fields()
        gate = shown["pools"][pool.name]["gate"] if pool.name in shown.get("pools", ()) else shown["gate"]
        room = None if tokens is None else pool.fleet.pool.admission.count(tokens)
        return Json(
            {
                "room": None if room is None else max(0, room - gate["queued"]),
                "waiting": gate["queued"],
                "sessions": sessions,
                "tokens_per_session": tokens,
                "tokens_held": held,
                "tokens_capacity": None if None in sizes else sum(size or 0 for size in sizes),
                "workers": len(pool.fleet.snapshot.generating),
                "paused": gate["closed"],
            }
        )

    def statistics(self) -> dict[str, Any]:
        """Return the statistics of middlewares and of the router's parts, by group."""
        return {
            f"{name}{suffix}": give() for suffix, router in self._routers() for name, give in router.statistics.items()
        }

    def numbers(self) -> dict[str, dict[str, object]]:
        """Return the statistics that are declared numbers, by group."""
        return {
            f"{name}{suffix}": each.numbers()
            for suffix, router in self._routers()
            for name, each in router.published.items()
        }

    def facts(self) -> dict[str, dict[str, Any]]:
        """Return the published values that are not declared as metrics, by group; `numbers` has the others."""
        numbers = self.numbers()
        return {
            name: {each: value for each, value in shown.items() if each not in numbers.get(name, ())}
            for name, shown in self.statistics().items()
        }

    async def set_weight_version(self, request: Request) -> Response:
        """Set the weight version of those workers whose engines do not report one."""
        arguments = await _arguments(request)
        version, fleet = arguments.get("weight_version"), self._pools.of_id(arguments.get("model_id")).fleet
        if not isinstance(version, str) or not version:
            raise BadRequest("weight_version must be a non-empty string")
        workers = list(fleet.pool)
        engines = await fleet.engines(workers)
        silent = [worker for worker, each in zip(workers, engines, strict=True) if not each.tells_version]
        if not silent:
            raise BadRequest("no registered worker needs a weight version: the engines report it themselves")
        fleet.pool.name_version(silent, version)
        return Json({"weight_version": version, "workers": [worker.url for worker in silent]})

    async def metrics(self, request: Request) -> Response:
        return Response(await self.metrics_text(), media_type=MEDIA_TYPE)

    async def own_metrics(self) -> bytes:
        """Return what `GET /metrics` shows of this process."""
        return self._router.metrics.render()

    async def engine_metrics(self, request: Request) -> Response:
        text = await self._router.control.engine_metrics(self._workers(request))
        return Response(text, media_type=MEDIA_TYPE)

    # What they share

    def _named(self, request: Request) -> tuple[ModelPool, Worker]:
        """Return the pool and the worker that the path names, by id or by percent-encoded URL."""
        name: str = request.path_params["id"]
        url_or_id = parse_worker_url(name).url if ":" in name else name
        return self._pools.find_worker(url_or_id, self._pools.selected_by_path(request.scope))

    def _routers(self) -> list[tuple[str, Router]]:
        """Return the handles of the models with middlewares, each with the suffix for the names of its statistics."""
        trained = [(f":{name}", self._pools[name].router) for name in sorted(self._pools.trained)]
        return [("", self._router), *trained]

    def _workers(self, request: Request) -> list[Worker]:
        return [worker for pool in self._pools.selected_by_path(request.scope) for worker in pool.fleet.pool]

    def _in_flight(self, request: Request) -> dict[str, int]:
        return {worker.url: worker.in_flight for worker in self._workers(request)}

    def _each_pool(self) -> dict[str, object]:
        """Return each pool's own state, by the pool's name."""
        return {
            pool.name: {
                "weight_version": pool.fleet.pool.weight_version,
                "gate": pool.fleet.gate.describe(),
                "workers_total": len(pool.fleet.pool),
                "workers_routable": len(pool.fleet.pool.routable),
            }
            for pool in self._pools
            if pool.selectable
        }

    def _counts(self, pools: Sequence[ModelPool]) -> dict[str, int]:
        states = [worker.state for pool in pools for worker in pool.fleet.pool]
        return {
            "workers_total": len(states),
            "workers_routable": states.count(WorkerState.READY),
            "workers_quarantined": states.count(WorkerState.QUARANTINED),
            "workers_draining": states.count(WorkerState.DRAINING),
            "workers_outdated": states.count(WorkerState.OUTDATED),
            "workers_paused": states.count(WorkerState.PAUSED),
            "workers_unreached": states.count(WorkerState.UNREACHED),
            "in_flight": sum(pool.fleet.pool.in_flight for pool in pools),
        }


async def _arguments(request: Request) -> dict[str, Any]:
    """Return the query parameters, overridden by the fields of a JSON body, and the `model_id` that the path names.

    Raises:
        BadRequest: the body is not a JSON object, or it names another model than the path.
    """
    exchange = Exchange.of(request.scope)
    exchange.max_body_bytes = min(exchange.max_body_bytes, MAX_ADMIN_BODY)
    arguments: dict[str, Any] = dict(request.query_params)
    body = await exchange.read(request.receive)
    if body.strip():
        parsed = exchange.loads(body)
        if not isinstance(parsed, Mapping):
            raise BadRequest("the request body must be a JSON object")
        arguments.update(parsed)
    if exchange.pool is not None and arguments.setdefault("model_id", exchange.pool) != exchange.pool:
        raise BadRequest(f"the path is for the model {exchange.pool!r}; leave model_id out")
    return arguments


def _length(text: str | None) -> int | None:
    """Return a number of tokens from a query, None if it is not given. Raises BadRequest if it is not one."""
    if text is None:
        return None
    if not text.isascii() or not text.isdecimal() or not 0 < len(text) < 10 or int(text) == 0:
        raise BadRequest(f"tokens must be a positive number of tokens, got {text[:SHOWN]!r}")
    return int(text)


def _flag(arguments: Mapping[str, Any], name: str) -> bool:
    value = arguments.get(name, False)
    text = str(value).lower()
    if text not in TRUE | FALSE:
        raise BadRequest(f"{name} must be true or false, got {value!r}")
    return text in TRUE

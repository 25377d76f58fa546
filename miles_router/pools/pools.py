"""Pools: the workers of each model behind one router.

A pool has a fleet of its own: weight version, gate, pauses, health checks. An operation on one pool does not affect the
others. Workers that register without a `model_id` are in the default pool, and the middlewares work on that pool.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, Generic, TypeVar

from miles_router import tasks
from miles_router.asgi.exchange import Exchange, Receive, Scope, Send, replay, with_body
from miles_router.control.health import HealthMonitor
from miles_router.engines import models
from miles_router.engines.engine import CannotServe
from miles_router.engines.known import with_adapter
from miles_router.errors import BadRequest, NotFound, NoWorkerAvailable, UnknownModel, UnsupportedByEngine
from miles_router.fleet.adapters import ask_for_adapters
from miles_router.fleet.fleet import Fleet
from miles_router.fleet.gate import computes
from miles_router.fleet.workers import Transition, Worker
from miles_router.middlewares.contract import ASGIApp
from miles_router.middlewares.router import Router

MAX_POOLS = 64
UNTOLD = "a worker has not reported its adapters yet, and the request may name one"
#: Seconds for which an answer is reused, and seconds a worker may take when some worker has answered before.
FRESH, IMPATIENCE = 1.0, 0.5
#: Bounds of an error message: names of one model, adapters, and characters of a name from the request.
SHOWN_NAMES, SHOWN_ADAPTERS, SHOWN = 4, 16, 100

Answer = TypeVar("Answer")


class Inquiry(Generic[Answer]):
    """A question to all workers of a pool. Concurrent requests share one answer, which is reused for `FRESH`
    seconds."""

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, Answer]]) -> None:
        self._ask = ask
        self._task: asyncio.Task[Answer] | None = None
        self._ended = 0.0

    async def answer(self) -> Answer:
        """Return the newest answer, or wait for the question in progress."""
        if self._task is None or (self._task.done() and time.monotonic() - self._ended >= FRESH):
            self._task = tasks.spawn(self._asked(), name="probe models")
        task = self._task
        await asyncio.wait({task})
        return task.result()

    async def _asked(self) -> Answer:
        try:
            return await self._ask()
        finally:
            self._ended = time.monotonic()


class ModelPool:
    """The workers of one model.

    Args:
        app: the innermost app of the pool's requests.
        health: checks the pool's workers.
        running: returns a context that runs health checks and the like.
    """

    def __init__(
        self,
        name: str,
        router: Router,
        app: ASGIApp,
        health: HealthMonitor,
        running: Callable[[], AbstractAsyncContextManager[None]],
    ) -> None:
        #: The `model_id` of the workers; empty for workers without one.
        self.name = name
        #: The handle that the middlewares of this pool use.
        self.router = router
        self.fleet = router.fleet
        self.app = app
        self.health = health
        self.running = running
        #: Whether requests may name this pool: it has had a worker, or it is one of `trained`.
        self.selectable = False
        self._facts = Inquiry(self._ask_facts)
        self._adapters = Inquiry(self._ask_adapters)
        self._key: bytes | None = None  # the key last sent to workers that withhold their adapters without one
        self._withheld = self._adapters

    @property
    def names(self) -> set[str]:
        """The names of the model: its `model_id`, and the names that its engines have reported so far."""
        return {self.name, *self.fleet.model_names} - {""}

    def spelled(self, adapter: str) -> str:
        """Return the model name by which engines find an adapter. Engines accept any base name, except that a base with
        a colon must be their own."""
        served = [worker.facts.served_model_name for worker in self.fleet.pool if worker.facts is not None]
        return f"{next(filter(None, served), models.DEFAULT)}:{adapter}"

    async def adapters(self, key: bytes | None = None) -> set[str]:
        """Ask all workers for their adapters, and return the union. A worker that does not answer counts with its last
        list. `key` is the client's `Authorization`, sent to workers that have no key of their own.

        Raises:
            NoWorkerAvailable: no worker has ever reported its adapters.
        """
        await self._adapters.answer()
        workers = [*self.fleet.pool]
        if key is not None and any(worker.withholds_adapters for worker in workers):
            if key != self._key:
                self._key, self._withheld = key, Inquiry(lambda: self._ask_adapters(key))
            await self._withheld.answer()
        reported = [worker.adapters for worker in workers if worker.adapters is not None]
        if not workers:
            return {*self.fleet.adapter_names}
        if not reported and not all(worker.withholds_adapters for worker in self.fleet.alive):
            raise NoWorkerAvailable(UNTOLD)
        # A worker that withholds its list from this client's key refuses the request too.
        return set().union(*reported)

    async def has_had(self, adapter: str, key: bytes | None = None) -> bool:
        """Return whether a worker has this adapter, or had it earlier in this run: the engine then loads it again or
        refuses it.

        Raises:
            NoWorkerAvailable: no known adapter has this name, but a worker that applies adapters has not reported its
                list yet.
        """
        if adapter in self.fleet.adapter_names:
            return True
        if self.fleet.all_reported and not self.fleet.applies_adapters:
            return False  # without a question for each name that an agent makes up
        if adapter in await self.adapters(key):
            return True
        self.see_told()
        return False

    def see_told(self) -> None:
        """Check that each worker that applies adapters has reported its list.

        Raises:
            NoWorkerAvailable: a worker has not reported it.
        """
        if any(worker.applies_adapters and worker.adapters is None for worker in self.fleet.alive):
            raise NoWorkerAvailable(UNTOLD)

    def forget_adapters(self) -> None:
        """Make the next request ask for the adapters again, since they may have changed."""
        self._adapters, self._key = Inquiry(self._ask_adapters), None

    async def learn(self) -> None:
        """Ask the workers for the name of their model, unless one has reported it already."""
        if self.selectable and not self.fleet.model_names:
            await self._facts.answer()

    async def ask_first_workers(self) -> None:
        """Ask the first workers whether they apply adapters, and wait for the answers. Requests do not wait for workers
        that join later, since these may still be starting."""
        answering = self.fleet.alive
        if answering and not any(worker.asked for worker in answering):
            await self._facts.answer()

    async def _ask_adapters(self, key: bytes | None = None) -> None:
        fleet = self.fleet
        asked = [worker for worker in fleet.alive if key is None or worker.withholds_adapters]
        patience = IMPATIENCE if any(worker.adapters is not None for worker in asked) else None
        asking = (ask_for_adapters(fleet.probes, worker, patience, key) for worker in asked)
        for worker, reported in zip(asked, await asyncio.gather(*asking), strict=True):
            if reported is not None:
                worker.adapters = reported
                fleet.note_adapters(reported)

    async def _ask_facts(self) -> None:
        await asyncio.gather(*(self.fleet.facts(worker.url) for worker in self.fleet.alive))


class Pools:
    """All pools of a router, by `model_id`.

    Args:
        default: the name of the default pool.
        make: creates the pool of a name.
        trained: the names of further pools with middlewares, known before their first worker.
    """

    def __init__(self, default: str, make: Callable[[str], ModelPool], trained: Iterable[str] = ()) -> None:
        self._make = make
        self._pools: dict[str, ModelPool] = {}
        self._fleets: dict[str, Fleet] = {}
        self._running: AsyncExitStack | None = None
        #: Whether a worker has ever been registered with a `model_id`.
        self.named = False
        #: Whether a middleware serves one model only. Which model must not depend on the worker that registers first.
        self.one_model_only = False
        self.default = self._new(default)
        #: The names of further pools with middlewares.
        self.trained = frozenset(trained)
        for name in sorted(self.trained):
            self._new(name).selectable = self.named = True

    def __iter__(self) -> Iterator[ModelPool]:
        return iter(tuple(self._pools.values()))

    def _new(self, name: str) -> ModelPool:
        pool = self._pools[name] = self._make(name)
        self._fleets[name] = pool.fleet
        pool.router.fleets = self._fleets
        pool.router.of_model = lambda model_id: self.of_id(model_id).router

        def note(transition: Transition) -> None:
            pool.selectable = True
            pool.forget_adapters()  # the new worker may have others
            self.named = self.named or bool(pool.name)

        pool.fleet.subscribe(note)
        return pool

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the health checks of every pool while entered, also of pools that are created meanwhile."""
        async with AsyncExitStack() as running:
            for pool in self:
                await running.enter_async_context(pool.running())
            self._running = running
            try:
                yield
            finally:
                self._running = None

    def has_one_model(self) -> bool:
        """Return True if `must_read_model` would return False: all requests are for one model without adapters, and
        every worker has reported that."""
        fleet = self.default.fleet
        return not self.named and not fleet.applies_adapters and fleet.all_reported

    async def must_read_model(self) -> bool:
        """Return whether the router must read the model in a request, to choose its pool or LoRA adapter. Wait for the
        first workers' answers about adapters."""
        if self.named:
            return True
        default = self.default
        if not default.fleet.all_reported:
            await default.ask_first_workers()
        return default.fleet.applies_adapters or not default.fleet.all_reported

    # By name

    def find(self, name: str) -> ModelPool | None:
        """Return the pool of a `model_id`, or None if it has never had a worker."""
        pool = self._pools.get(name)
        return pool if pool is not None and pool.selectable else None

    def __getitem__(self, name: str) -> ModelPool:
        """Return the existing pool of this name."""
        return self._pools[name]

    async def open(self, name: str | None) -> ModelPool:
        """Return the pool of a `model_id`, created if it is new; the default pool for None.

        Raises:
            BadRequest: there are too many pools, or the setting `model_id` is required and missing.
        """
        if name is None:
            return self.default
        pool = self._pools.get(name)
        if pool is None:
            if self.one_model_only and not self.default.name:
                raise BadRequest("model_id: the router's middlewares serve one model; set its model_id with --model-id")
            if len(self._pools) >= MAX_POOLS:
                raise BadRequest(f"the router has {MAX_POOLS} models already, which is the limit")
            pool = self._new(name)
            if self._running is not None:
                await self._running.enter_async_context(pool.running())
        return pool

    def of_id(self, model_id: str | None) -> ModelPool:
        """Return the pool of a control request.

        Raises:
            UnknownModel: no worker was ever registered with this `model_id`, or the request must contain one.
        """
        if model_id is None:
            return self.meant("model_id")
        pool = self.find(model_id)
        if pool is None:
            others = self.known() if any(each.name for each in self) else "none has one: --model-id names their model"
            raise UnknownModel(f"no worker is registered with the model_id {model_id[:SHOWN]!r}; {others}", "model_id")
        return pool

    def selected_by_path(self, scope: Scope) -> list[ModelPool]:
        """Return the pool that a request's path names, as a list of one; all pools if the path names none."""
        name = Exchange.of(scope).pool
        return [*self] if name is None else [self._pools[name]]

    def of_path(self, exchange: Exchange, model_id: str | None) -> ModelPool:
        """Return the pool of a control request, from its path or its parameter `model_id`. Raises like `of_id`.

        Raises:
            BadRequest: the path and `model_id` name different models.
        """
        named = exchange.pool
        if named is not None and model_id not in (None, named):
            raise BadRequest(f"the path is for the model {named!r}; leave model_id out")
        return self.of_id(model_id if named is None else named)

    def meant(self, parameter: str | None) -> ModelPool:
        """Return the pool of a request that names no model: the default pool if it has had workers, or if others are
        trained too, else the first.

        Raises:
            UnknownModel: there are several, and the request must name one in this parameter.
        """
        selectable = [pool for pool in self if pool.selectable]
        if self.default.selectable or not selectable or self.trained:
            return self.default
        if parameter is not None and len(selectable) > 1:
            raise UnknownModel(f"the request names no model; {self.known()}", parameter)
        return selectable[0]

    def known(self) -> str:
        """Return the models for an error message."""
        pools = [pool for pool in self if pool.selectable]
        names = {
            name
            for pool in pools
            for name in ([pool.name] if pool.name else list(pool.fleet.model_names)[:SHOWN_NAMES])
        }
        return f"known models: {', '.join(sorted(names))}" if names else "no model is known"

    # By worker

    @property
    def workers(self) -> list[Worker]:
        return [worker for pool in self for worker in pool.fleet.pool]

    def find_worker(self, name: str, among: Iterable[ModelPool] | None = None) -> tuple[ModelPool, Worker]:
        """Return the worker with this normalized URL or id, and its pool. `among`: the pools to look at; None: all.

        Raises:
            NotFound: no such worker is registered.
        """
        for pool in self if among is None else among:
            for worker in pool.fleet.pool:
                if name in (worker.url, worker.address.id):
                    return pool, worker
        raise NotFound(f"no worker {name!r} is registered")


Choose = Callable[[Scope, Exchange, bytes], Awaitable[bytes]]


class Reception:
    """The outermost app: it finds the pool and the LoRA adapter that a request names. It reads no body until a worker
    has a `model_id` or an engine applies adapters.

    Args:
        choose: `PoolChoice.choose`.
    """

    def __init__(self, app: ASGIApp, pools: Pools, choose: Choose) -> None:
        self._app = app
        self._pools = pools
        self._choose_pool = choose

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Coroutine[Any, Any, None]:
        """Run one request. Raises the errors of `PoolChoice.choose`."""
        if scope["type"] != "http" or self._pools.has_one_model():  # no coroutine: it would cost 1 % of a short request
            return self._app(scope, receive, send)
        return self._choose(scope, receive, send)

    async def _choose(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not await self._pools.must_read_model():
            await self._app(scope, receive, send)
            return
        exchange = Exchange.of(scope)
        body = await exchange.read(receive)
        written = await self._choose_pool(scope, exchange, body)
        await self._app(scope if written is body else with_body(scope, written), replay(written, receive), send)


class Dispatch:
    """The innermost app: it passes each request to its pool, with the adapter written where the route reads it."""

    def __init__(self) -> None:
        self.pools: Pools

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Coroutine[Any, Any, None]:
        """Run one request.

        Raises:
            UnsupportedByEngine: the request names an adapter that its route cannot apply.
        """
        pools, exchange = self.pools, Exchange.of(scope)
        app = (pools.default if exchange.pool is None else pools.of_id(exchange.pool)).app
        if exchange.adapter is None or not computes(scope["path"]):
            return app(scope, receive, send)
        return _apply(exchange.adapter, exchange, app, scope, receive, send)


async def _apply(adapter: str, exchange: Exchange, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    body = await exchange.read(receive)
    try:
        written = with_adapter(scope["path"], body, adapter, exchange.loads)
    except CannotServe as refusal:
        raise UnsupportedByEngine(f"the adapter {adapter[:SHOWN]!r}: {refusal}") from None
    await app(scope if written is body else with_body(scope, written), replay(written, receive), send)

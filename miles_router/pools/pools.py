"""Pools: the workers of each model behind one router.

A pool has a fleet of its own: weight version, gate, pauses, checks. What is done to one leaves the others alone.
Workers that register without a `model_id` are the default pool, and the layers are there for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Any, Generic, TypeVar

from miles_router import tasks
from miles_router.control.health import HealthMonitor
from miles_router.engines import models
from miles_router.errors import BadRequest, NotFound, NoWorkerAvailable, UnknownModel
from miles_router.fleet.adapters import told_adapters
from miles_router.fleet.workers import Transition, Worker
from miles_router.middlewares.contract import ASGIApp
from miles_router.middlewares.router import Router

MAX_POOLS = 64
UNTOLD = "a worker has not said which adapters it has, and the request may name one"
#: Seconds for which an answer holds, and that a worker has for one where others, or it itself, have given one before.
FRESH, IMPATIENCE = 1.0, 0.5
#: Names of one model, adapters, and characters of a request's own, that a refusal repeats.
SHOWN_NAMES, SHOWN_ADAPTERS, SHOWN = 4, 16, 100

Answer = TypeVar("Answer")


class Inquiry(Generic[Answer]):
    """What workers are asked for requests that name something unknown: once for all that come at the same time, and
    not again before a second has passed."""

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, Answer]]) -> None:
        self._ask = ask
        self._task: asyncio.Task[Answer] | None = None
        self._ended = 0.0

    async def answer(self) -> Answer:
        """The newest answer, or the one that is under way."""
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
        app: the innermost app of its requests.
        health: who checks its workers.
        running: health checks and the like, while it is entered.
    """

    def __init__(
        self,
        name: str,
        router: Router,
        app: ASGIApp,
        health: HealthMonitor,
        running: Callable[[], AbstractAsyncContextManager[None]],
    ) -> None:
        #: Its `model_id`; empty where its workers were given none.
        self.name = name
        #: The handle of its layers, and of what serves it.
        self.router = router
        #: Who its workers are.
        self.fleet = router.fleet
        self.app = app
        self.health = health
        self.running = running
        #: Whether it has ever had a worker.
        self.peopled = False
        self._facts = Inquiry(self._ask_facts)
        self._adapters = Inquiry(self._ask_adapters)
        self._key: bytes | None = None  # what those that withhold theirs were asked with last
        self._withheld = self._adapters

    @property
    def names(self) -> set[str]:
        """What its model is called: as its workers were registered, and as far as is known as their engines say."""
        return {self.name, *self.fleet.model_names} - {""}

    def spelled(self, adapter: str) -> str:
        """An adapter of its model, as engines read it. Any base will do, but one with a colon must be their own."""
        served = [worker.facts.served_model_name for worker in self.fleet.pool if worker.facts is not None]
        return f"{next(filter(None, served), models.DEFAULT)}:{adapter}"

    async def adapters(self, key: bytes | None = None) -> set[str]:
        """The adapters that its workers have, together, each as it said last: asked now, with this `Authorization`
        where they are asked without a key of their own.

        Raises:
            NoWorkerAvailable: none has ever said it.
        """
        await self._adapters.answer()
        workers = [*self.fleet.pool]
        if key is not None and any(worker.withholds for worker in workers):
            if key != self._key:
                self._key, self._withheld = key, Inquiry(lambda: self._ask_adapters(key))
            await self._withheld.answer()
        told = [worker.adapters for worker in workers if worker.adapters is not None]
        if not workers:
            return {*self.fleet.adapter_names}
        if not told and not all(worker.withholds for worker in self.fleet.alive):
            raise NoWorkerAvailable(UNTOLD)
        return set().union(*told)  # who withholds them from this client refuses the request, too

    async def has_had(self, adapter: str, key: bytes | None = None) -> bool:
        """Whether its workers have an adapter of this name, or had one while the router looked: engines load such a
        one again, or refuse it.

        Raises:
            NoWorkerAvailable: one that applies adapters has never said which it has, or no worker has, and nobody has
                this one.
        """
        if adapter in self.fleet.adapter_names or adapter in await self.adapters(key):
            return True
        self.see_told()
        return False

    def see_told(self) -> None:
        """See that each worker that applies adapters has said which.

        Raises:
            NoWorkerAvailable: one has not.
        """
        if any(worker.applies_adapters and worker.adapters is None for worker in self.fleet.alive):
            raise NoWorkerAvailable(UNTOLD)

    def forget_adapters(self) -> None:
        """They may have changed."""
        self._adapters, self._key = Inquiry(self._ask_adapters), None

    async def learn(self) -> None:
        """Have workers asked what they are where none has said it yet."""
        if self.peopled and not self.fleet.model_names:
            await self._facts.answer()

    async def hear(self) -> None:
        """Have the first workers asked whether they apply adapters, and wait for that. Nobody waits for later ones,
        which may be starting still."""
        answering = self.fleet.alive
        if answering and not any(worker.asked for worker in answering):
            await self._facts.answer()

    async def _ask_adapters(self, key: bytes | None = None) -> None:
        fleet = self.fleet
        asked = [worker for worker in fleet.alive if key is None or worker.withholds]
        patience = IMPATIENCE if any(worker.adapters is not None for worker in asked) else None
        asking = (told_adapters(fleet.questions, worker, patience, key) for worker in asked)
        for worker, told in zip(asked, await asyncio.gather(*asking), strict=True):
            if told is not None:
                worker.adapters = told
                fleet.note_adapters(told)

    async def _ask_facts(self) -> None:
        await asyncio.gather(*(self.fleet.facts(worker.url) for worker in self.fleet.alive))


class Pools:
    """All pools, and which of them takes a request.

    Args:
        default: the name of the default pool.
        make: a pool by its name.
    """

    def __init__(self, default: str, make: Callable[[str], ModelPool]) -> None:
        self._make = make
        self._pools: dict[str, ModelPool] = {}
        self._running: AsyncExitStack | None = None
        #: Whether some worker has ever been registered with a `model_id`.
        self.named = False
        #: Whether some layer is of one model: which one must not depend on who registers first.
        self.layered = False
        self.default = self._new(default)

    def __iter__(self) -> Iterator[ModelPool]:
        return iter(tuple(self._pools.values()))

    def _new(self, name: str) -> ModelPool:
        pool = self._pools[name] = self._make(name)

        def note(transition: Transition) -> None:
            pool.peopled = True
            pool.forget_adapters()  # who comes may have others
            self.named = self.named or bool(pool.name)

        pool.fleet.subscribe(note)
        return pool

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """While it is entered, the workers of every pool are looked after, those of later ones too."""
        async with AsyncExitStack() as running:
            for pool in self:
                await running.enter_async_context(pool.running())
            self._running = running
            try:
                yield
            finally:
                self._running = None

    async def look(self) -> bool:
        """Whether the model that a request names says who answers it, or with which adapter."""
        if self.named:
            return True
        default = self.default
        if not default.fleet.heard:
            await default.hear()
        return default.fleet.applies_adapters or not default.fleet.heard

    # By name

    def find(self, name: str) -> ModelPool | None:
        """The pool of a `model_id`, where it has ever had a worker."""
        pool = self._pools.get(name)
        return pool if pool is not None and pool.peopled else None

    async def open(self, name: str | None) -> ModelPool:
        """The pool of a `model_id`, made where there is none; the default one for None.

        Raises:
            BadRequest: there are too many, or nobody has said which model the layers are for.
        """
        if name is None:
            return self.default
        pool = self._pools.get(name)
        if pool is None:
            if self.layered and not self.default.name:
                raise BadRequest("model_id: the router's middlewares are of one model; say by --model-id which that is")
            if len(self._pools) >= MAX_POOLS:
                raise BadRequest(f"there are {MAX_POOLS} models already; a router takes no more")
            pool = self._new(name)
            if self._running is not None:
                await self._running.enter_async_context(pool.running())
        return pool

    def of_id(self, model_id: str | None) -> ModelPool:
        """The pool that a request about a fleet means.

        Raises:
            UnknownModel: no worker was ever registered with this `model_id`, or it has to be given.
        """
        if model_id is None:
            return self.meant("model_id")
        pool = self.find(model_id)
        if pool is None:
            raise UnknownModel(
                f"no worker is registered with the model_id {model_id[:SHOWN]!r}; {self.known()}", "model_id"
            )
        return pool

    def meant(self, parameter: str | None) -> ModelPool:
        """The pool of a request that names none: the default one, or the first.

        Raises:
            UnknownModel: it is not the only one, and a request must name it by this parameter.
        """
        peopled = [pool for pool in self if pool.peopled]
        if self.default.peopled or not peopled:
            return self.default
        if parameter is not None and len(peopled) > 1:
            raise UnknownModel(f"the request names no model; {self.known()}", parameter)
        return peopled[0]

    def known(self) -> str:
        """The models that there are, in words."""
        pools = [pool for pool in self if pool.peopled]
        names = {
            name
            for pool in pools
            for name in ([pool.name] if pool.name else list(pool.fleet.model_names)[:SHOWN_NAMES])
        }
        return f"known are {', '.join(sorted(names))}" if names else "none is known"

    # By worker

    @property
    def workers(self) -> list[Worker]:
        """Every registered worker."""
        return [worker for pool in self for worker in pool.fleet.pool]

    def holding(self, name: str) -> tuple[ModelPool, Worker]:
        """The worker with this normal URL or id, and its pool.

        Raises:
            NotFound: no such worker is registered.
        """
        for pool in self:
            for worker in pool.fleet.pool:
                if name in (worker.url, worker.address.id):
                    return pool, worker
        raise NotFound(f"no worker {name!r} is registered")

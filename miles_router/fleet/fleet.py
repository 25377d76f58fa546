"""The fleet: one object for who the workers are, and what is known of the engine behind each."""

from __future__ import annotations

import asyncio
from typing import Protocol

from miles_router import tasks
from miles_router.engines.facts import Facts
from miles_router.fleet.workers import Worker, WorkerPool


class Questions(Protocol):
    """How the fleet asks one worker about itself: `control.probes.Probes`."""

    async def facts(self, worker: Worker) -> tuple[Facts, int | None]:
        """All that it says, and the number of the process that said it; None where that is not certain."""
        ...

    def process(self, worker: Worker) -> int | None:
        """The number of the process that answers at its address; None where nobody can say."""
        ...


class Fleet:
    """Who the workers are."""

    def __init__(self, pool: WorkerPool, questions: Questions) -> None:
        self._pool = pool
        self._questions = questions
        self._asking: dict[Worker, asyncio.Task[Facts]] = {}

    # Facts

    async def facts(self, url: str) -> Facts:
        """What the engine at a worker's URL is and can do; asked now, unless this very process is known already.

        Facts are those of one process: ask again for each request, and keep none. They are dropped when the worker is
        lost, refused or quarantined, when all connections to it were closed, or when it names another model.
        Between the question and a reply the worker may have been started anew. So where a fact decides how a reply is
        read, ask when its head has come, and before it is closed: its connection holds the process.

        Whatever the engine does not answer is None, and so is everything for a URL that is no worker's.
        """
        worker = self._pool.find(url)
        if worker is None:
            return Facts()
        known = self._known(worker)
        if known is not None:
            return known
        self._ask_soon(worker)
        asking = self._asking[worker]
        await asyncio.wait({asking})
        return Facts() if asking.cancelled() else asking.result()

    async def all_facts(self) -> list[Facts]:
        """The facts of each routable worker, for what has to be decided before one of them is chosen."""
        routable = self._pool.routable
        known = [facts for worker in routable if (facts := self._known(worker)) is not None]
        if len(known) == len(routable):  # mostly, and then no tasks are needed
            return known
        return list(await asyncio.gather(*(self.facts(worker.url) for worker in routable)))

    def known_facts(self, url: str) -> Facts:
        """The same without asking: as far as it is known of the process that answers there now."""
        worker = self._pool.find(url)
        return (self._known(worker) if worker is not None else None) or Facts()

    def ask_for_facts(self, worker: Worker) -> None:
        """Have the facts of a worker that has just joined or returned, as soon as it tells them."""
        if self._known(worker) is None:
            self._ask_soon(worker)

    def said(self, worker: Worker, facts: Facts) -> None:
        """A worker has answered with a part of its facts; where they are no longer those that are known, it is another
        process, or has another model."""
        if worker.facts is not None and worker.facts.contradicts(facts):
            worker.facts = None

    def _known(self, worker: Worker) -> Facts | None:
        process = self._questions.process(worker)
        return worker.facts if process is not None and worker.facts_of == process else None

    def _ask_soon(self, worker: Worker) -> None:
        if worker not in self._asking:
            asking = tasks.spawn(self._ask(worker), name=f"probe facts {worker.url}")
            self._asking[worker] = asking
            asking.add_done_callback(lambda _: self._asking.pop(worker, None))

    async def _ask(self, worker: Worker) -> Facts:
        facts, process = await self._questions.facts(worker)
        if process is not None and self._pool.find(worker.url) is worker:
            worker.facts, worker.facts_of = facts.after(worker.facts), process
            return worker.facts
        return facts

    async def close(self) -> None:
        """Ask nobody any more."""
        for asking in tuple(self._asking.values()):
            await tasks.cancelled(asking)

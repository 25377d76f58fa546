"""The fleet: one object for who the workers are, how they join, leave, pause and wake, and what is known of each. Below
it stand the pool, which decides what is routable, and the gate, where generation waits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Protocol

from miles_router import tasks
from miles_router.engines.actions import Order, Pause
from miles_router.engines.client_json import read_json
from miles_router.engines.engine import CannotServe, Engine
from miles_router.engines.facts import Facts
from miles_router.engines.known import USUAL, ReadOrder
from miles_router.engines.models import possible_adapters
from miles_router.errors import PartlyFailed, RouterError, UpstreamError, UpstreamUnreachable
from miles_router.fleet.adapters import AdapterQuestion, adapters_by
from miles_router.fleet.gate import Gate
from miles_router.fleet.lease import Lease
from miles_router.fleet.placement.contract import Policy
from miles_router.fleet.placement.homes import prefill_key
from miles_router.fleet.pool import WorkerPool
from miles_router.fleet.snapshot import Snapshot
from miles_router.fleet.tokenizing import TokenizerQuestion
from miles_router.fleet.worker_url import WorkerUrl
from miles_router.fleet.workers import ALIVE, RankFault, Transition, Unit, Worker, WorkerState

logger = logging.getLogger(__name__)


class Questions(AdapterQuestion, TokenizerQuestion, Protocol):
    """How the fleet asks one worker about itself: `control.probes.Probes`."""

    async def liveness(self, worker: Worker) -> Facts:
        """What it says at the cheap check; raises UpstreamError where it does not answer."""
        ...

    async def facts(self, worker: Worker) -> tuple[Facts, int | None]:
        """All that it says, and the number of the process that said it; None where that is not certain."""
        ...

    def process(self, worker: Worker) -> int | None:
        """The number of the process that answers at its address; None where nobody can say."""
        ...


class Orders(Protocol):
    """How the fleet has one worker do something: `control.fan_out.FanOut`."""

    async def obey(self, worker: Worker, order: Order) -> str | None:
        """Give it an order; None where it did it, else what it said."""
        ...


#: Names of its model, and adapters seen last, that a fleet remembers.
MAX_NAMES, MAX_ADAPTERS = 64, 1024


class Fleet:
    """Who the workers are."""

    def __init__(self, *, pool: WorkerPool, gate: Gate, policy: Policy, questions: Questions, orders: Orders) -> None:
        self.pool = pool
        self.gate = gate
        #: Held by whoever joins, and while the fleet is being paused, continued, put to sleep or woken.
        self.membership = asyncio.Lock()
        #: The router's own pause, while it lasts.
        self.pause: Pause | None = None
        self._policy = policy
        self.questions = questions
        self._orders = orders
        #: The parts of its memory that the fleet is without, and what led to that.
        self.released: set[str] = set()
        self.memory_orders: list[Order] = []
        self.slept: set[str] = set()  # the URLs of those that were told
        #: Makes durable whether the fleet stands still, where the router has a state directory.
        self.keep: Callable[[], Awaitable[None]] = _here
        #: Where another process decides: tells it what was seen of a worker, `(what, worker, reason)`.
        self.report: Callable[[str, Worker, str], None] | None = None
        #: Returns when every process that sends requests acts by what was decided here.
        self.everywhere: Callable[[], Awaitable[None]] = _here
        self._asking: dict[Worker, asyncio.Task[Facts]] = {}
        #: What its engines have called their model, in that order: a new checkpoint from disk changes the name.
        self.model_names: dict[str, None] = {}
        #: Whether one of its engines has said that it applies adapters.
        self.applies_adapters = False
        #: Adapters that it has or had, as far as anybody has said so, the last one at the end.
        self.adapter_names: dict[str, None] = {}
        #: Called with each worker whose engine has said what it is: a newcomer, or a new process at its address.
        self.facts_listeners: list[Callable[[Worker], None]] = []
        self._heard_in: Snapshot | None = None  # for which it was found out whether all have said that
        self._all_heard = False
        pool.listeners.append(self._changed)

    # What may be chosen

    @property
    def snapshot(self) -> Snapshot:
        """What is routable now."""
        return self.pool.snapshot

    def lease(
        self,
        key: str | None = None,
        excluded: Collection[Worker] = (),
        preferred: str | None = None,
        rank: int | None = None,
        tokens: int = 0,
        body: bytes = b"",
        *,
        generates: bool = False,
    ) -> Lease:
        """A slot on the unit that the policy chooses, as `WorkerPool.lease`."""
        return self.pool.lease(self._policy, key, excluded, preferred, rank, tokens, body, generates=generates)

    def lease_prefill(self, key: str | None, excluded: Collection[Worker], tokens: int, body: bytes) -> Lease:
        """The same for the other half of a pair, as `WorkerPool.lease_prefill`."""
        return self.pool.lease_prefill(self._policy, key, excluded, tokens, body)

    def record_silence(self, worker: Worker, reason: str) -> None:
        """Count that a worker took no connection in time, as `WorkerPool.record_failure` does."""
        if self.report is None:
            self.pool.record_failure(worker, reason)
        else:  # other processes may hear it
            self.report("silence", worker, reason)

    def end_session(self, key: str) -> None:
        """A session is over: what it holds on its workers counts no more."""
        for each in (key, prefill_key(key)):
            self.pool.homes.forget(each)

    def subscribe(self, listener: Callable[[Transition], None]) -> Callable[[], None]:
        """Tell `listener` of every change of a worker's state, until what this returns is called."""
        self.pool.listeners.append(listener)
        return lambda: self.pool.listeners.remove(listener)

    def _changed(self, transition: Transition) -> None:
        if self.report is not None:  # logged where it was decided; who waits for room must know whether there is some
            if transition.after is WorkerState.READY:
                self.ask_for_facts(transition.worker)
            return
        transition.log()
        if transition.after is None:
            self.slept.discard(transition.worker.url)
        self.gate.workers_paused(not self.snapshot.generating and bool(self.snapshot.paused))

    # Who joins, and who leaves

    async def join(
        self, address: WorkerUrl, *, api_key: str | None = None, attributes: Mapping[str, object] | None = None
    ) -> Worker:
        """Register a worker, as `WorkerPool.add`. Before anything else reaches it, it is paused or put to sleep as the
        fleet is, and its weight version is known, for it may come with weights that the fleet no longer has.

        Raises:
            PartlyFailed: it could not be paused or put to sleep.
            UpstreamUnreachable: the fleet is paused, and it does not say what it is.
        """
        newcomer = Worker(address, api_key=api_key)
        version = None
        if self.pool.weight_version is not None and not self._is_registered(address):
            version = await self._version_of(newcomer)
        async with self.membership:
            await self._bring_along(newcomer)
            worker = self.pool.add(address, api_key=api_key, attributes=attributes, weight_version=version)
        if worker.asked:
            self.ask_for_facts(worker)  # it may say more to another key
        return worker

    async def reach(self, worker: Worker, weight_version: str | None) -> None:
        """Make a worker routable that has answered for the first time, once it is paused or put to sleep as the fleet
        is. Raises as `join`."""
        async with self.membership:
            await self._bring_along(worker)
            self.pool.reach(worker, None if self.pool.weight_version is None else weight_version)

    def _is_registered(self, address: WorkerUrl) -> bool:
        return any(each.url == address.url and each.state is not WorkerState.UNREACHED for each in self.pool)

    async def _version_of(self, newcomer: Worker) -> str | None:
        with suppress(UpstreamError):
            return (await self.questions.liveness(newcomer)).weight_version
        return None

    async def _bring_along(self, newcomer: Worker) -> None:
        """It gives up what the fleet has given up: a waking SGLang 0.5.23 dies of memory that it never released. One
        that is registered already sleeps."""
        if self.pause is not None:
            engine = await self.engine(newcomer)
            await self._order(newcomer, engine.order(engine.pause_told(self.pause)), "the fleet is paused")
        if self.memory_orders and not self._is_registered(newcomer.address) and newcomer.url not in self.slept:
            self.slept.add(newcomer.url)
            try:
                await self.keep()
                for order in self.memory_orders:
                    await self._order(newcomer, await self._spelled(newcomer, order), "the fleet is asleep")
            except RouterError:
                self.slept.discard(newcomer.url)
                raise

    async def _spelled(self, newcomer: Worker, order: Order) -> Order:
        """An order that others were given, as a newcomer takes it."""
        read = ReadOrder.from_order(order, read_json)
        if read is None or read.is_common:
            return order
        engine = await self.engine(newcomer)
        try:
            return order if read.is_spelled_by(engine) else engine.order(read.action)
        except CannotServe as error:
            raise PartlyFailed(f"the fleet is asleep, and {newcomer.url} cannot be: {error}") from None

    async def _order(self, newcomer: Worker, order: Order, why: str) -> None:
        if (refusal := await self._orders.obey(newcomer, order)) is not None:
            raise PartlyFailed(f"{why}, and {newcomer.url} could not be: {refusal}")

    # Standstills: what the router has done to all

    def begin_pause(self, pause: Pause) -> None:
        """The workers are about to be paused, or paused in another mode."""
        self.pause = pause
        self.gate.pause(pause.mode)

    def keep_pause(self, before: Pause) -> None:
        """A second pause has failed, and the first one stands."""
        self.pause = before
        self.gate.mode = before.mode

    def end_pause(self) -> None:
        """The workers go on."""
        self.pause = None
        self.gate.resume()

    def begin_sleep(self) -> None:
        """The workers are about to release memory."""
        self.gate.sleep()

    def memory_released(self, parts: Collection[str], order: Order, workers: Iterable[Worker]) -> None:
        """These are told to release these parts."""
        self.released |= set(parts)
        self.memory_orders.append(order)
        self.slept |= {worker.url for worker in workers}

    def memory_resumed(self, parts: Collection[str], order: Order) -> None:
        """They have these parts again; all, where none is named."""
        self.released -= set(parts) or self.released
        self.memory_orders.append(order)

    def wake_if_whole(self) -> None:
        """Trainers wake a fleet in steps: its weights, an update, then the rest. It sleeps until the last."""
        if not self.released:
            self.memory_orders.clear()
            self.slept.clear()
            self.gate.wake()

    # Facts

    async def facts(self, url: str) -> Facts:
        """What the engine at a worker's URL is and can do; asked now, unless this very process is known already.

        Facts are those of one process: ask again for each request, and keep none. They are dropped when the worker is
        lost, refused or quarantined, when all connections to it were closed, or when it names another model. Between
        the question and a reply the worker may have been started anew. So where a fact decides how a reply is read, ask
        when its head has come, and before it is closed: its connection holds the process.

        Whatever the engine does not answer is None, and so is everything for a URL that is no worker's.
        """
        worker = self.pool.find(url)
        return Facts() if worker is None else await self._facts_of(worker)

    async def _facts_of(self, worker: Worker) -> Facts:
        known = self._known(worker)
        if known is not None:
            return known
        self._ask_soon(worker)
        asking = self._asking[worker]
        await asyncio.wait({asking})
        return Facts() if asking.cancelled() else asking.result()

    async def engine(self, worker: Worker) -> Engine:
        """Return the kind of engine that a worker is. The answer holds until the worker is lost or says that it is
        another, and for requests that are translated by its flags until no connection to it is open.

        Raises:
            UpstreamUnreachable: it answers, and does not say what it is.
        """
        if worker.engine is not None and (not worker.engine.translates or self._known(worker) is not None):
            return worker.engine
        facts = await self._facts_of(worker)
        if worker.engine is None and facts.model_path is not None:
            raise UpstreamUnreachable(f"{worker.url} has not said yet what engine it is")
        return worker.engine or USUAL  # it says nothing at all

    async def engines(self, workers: Collection[Worker]) -> list[Engine]:
        """Return the engines of several workers; the usual one where a worker does not say which it is."""
        found = await asyncio.gather(*map(self.engine, workers), return_exceptions=True)
        return [each if isinstance(each, Engine) else USUAL for each in found]

    async def weight_version(self, url: str) -> str | None:
        """The weights that the engine at a worker's URL says it has, asked now; None where it does not say."""
        worker = self.pool.find(url)
        return None if worker is None else await self._version_of(worker)

    def note_heard(self) -> None:
        """Some worker may have said it, or no longer."""
        self._heard_in = None

    @property
    def heard(self) -> bool:
        """Whether all workers that answer have said whether they apply adapters."""
        if self._heard_in is not self.pool.snapshot:
            self._all_heard, self._heard_in = all(map(self._has_said, self.alive)), self.pool.snapshot
        return self._all_heard

    @property
    def alive(self) -> list[Worker]:
        """The workers that answer."""
        return [worker for worker in self.pool if worker.state in ALIVE]

    @property
    def applies_none(self) -> bool:
        """Whether all that is known of its engines is that they apply none. Who withholds that is not waited for."""
        untold = any(worker.adapters is None and not worker.withholds for worker in self.alive)
        return not self.applies_adapters and not untold

    def _has_said(self, worker: Worker) -> bool:
        """What this process knows counts, too, where others have not heard it."""
        known = self._known(worker)
        return worker.applies_adapters is not None or (known is not None and known.lora is not None)

    def note_applies(self, worker: Worker, applies: bool | None, adapters: frozenset[str] | None) -> None:
        """A worker has said whether it applies adapters, and which it has; None where it has not."""
        worker.applies_adapters, worker.adapters = applies, adapters
        self.applies_adapters = self.applies_adapters or applies is True
        self.note_adapters(adapters or ())
        self.note_heard()

    async def all_facts(self) -> list[Facts]:
        """The facts of each routable worker, for what has to be decided before one of them is chosen."""
        routable = self.pool.routable
        known = [facts for worker in routable if (facts := self._known(worker)) is not None]
        if len(known) == len(routable):  # mostly, and then no tasks are needed
            return known
        return list(await asyncio.gather(*(self.facts(worker.url) for worker in routable)))

    def known_facts(self, url: str) -> Facts:
        """The same without asking: as far as it is known of the process that answers there now."""
        worker = self.pool.find(url)
        return (self._known(worker) if worker is not None else None) or Facts()

    def ask_for_facts(self, worker: Worker) -> None:
        """Have the facts of a worker that has just joined or returned, as soon as it tells them."""
        if self._known(worker) is None:
            self._ask_soon(worker)

    def said(self, worker: Worker, facts: Facts) -> None:
        """A worker has answered with a part of its facts; where they are no longer those that are known, it is another
        process, or has another model."""
        if worker.facts is not None and worker.facts.contradicts(facts):
            worker.forget_engine()
            self.note_heard()

    def _known(self, worker: Worker) -> Facts | None:
        process = self.questions.process(worker)
        return worker.facts if process is not None and worker.facts_of == process else None

    def _ask_soon(self, worker: Worker) -> None:
        if worker not in self._asking:
            asking = tasks.spawn(self._ask(worker), name=f"probe facts {worker.url}")
            self._asking[worker] = asking
            asking.add_done_callback(lambda _: self._asking.pop(worker, None))

    async def _ask(self, worker: Worker) -> Facts:
        facts, process = await self.questions.facts(worker)
        adapters = await adapters_by(self.questions, facts, worker)
        worker.engine = facts.engine or worker.engine
        worker.asked, worker.last_capacity = True, facts.token_capacity or worker.last_capacity
        self.note_applies(worker, facts.lora, adapters)
        self.note_adapters(facts.adapters or ())
        if process is not None and self.pool.find(worker.url) is worker:
            before = worker.facts or Facts()
            if facts.auto_truncate and not before.auto_truncate:
                logger.warning("worker_truncates_prompts", extra={"fields": {"worker": worker.url}})
            if facts.lacks and facts.lacks != before.lacks:
                logger.warning("worker_lacks", extra={"fields": {"worker": worker.url, "lacks": [*facts.lacks]}})
            worker.facts, worker.facts_of = facts.after(before), process
            self._count_on_ranks(worker, worker.facts)
            self._note_names(worker.facts)
            for listener in self.facts_listeners:
                listener(worker)
            return worker.facts
        return facts

    def _note_names(self, facts: Facts) -> None:
        for name in (facts.served_model_name, facts.model_path):
            if name and len(self.model_names) < MAX_NAMES:
                self.model_names[name] = None

    def note_adapters(self, names: Iterable[str]) -> None:
        """It has these, or has loaded or unloaded them."""
        for name in names:
            self.adapter_names.pop(name, None)
            self.adapter_names[name] = None
        for name in [*self.adapter_names][:-MAX_ADAPTERS]:
            del self.adapter_names[name]

    def adapter_of(self, model: str) -> str | None:
        """The adapter that it has or had which a model names that nobody knows."""
        return next((name for name in possible_adapters(model) if name in self.adapter_names), None)

    def _count_on_ranks(self, worker: Worker, facts: Facts) -> None:
        """Each rank of its engine is a unit, unless this very process has ignored which one was meant."""
        if self.report is not None and worker.rank_fault is not None:  # another process has seen it
            facts.learned(RankFault).reason = worker.rank_fault
        fault = facts.learned(RankFault).reason
        if self.pool.set_ranks(worker, 1 if fault else (worker.engine or USUAL).ranks(facts), fault):
            logger.info("worker_ranks", extra={"fields": {"worker": worker.url, "ranks": len(worker.units)}})

    def rank_ignored(self, unit: Unit, reason: str) -> None:
        """An engine has not heeded which rank was meant: it is one unit from now on, until another process is there."""
        if not unit.retired:
            if self.report is not None:
                self.report("ranks", unit.worker, reason)
            self.drop_ranks(unit.worker, reason)

    def drop_ranks(self, worker: Worker, reason: str) -> None:
        """Count a worker as one unit for this reason, until another process is there."""
        if worker.facts is None or worker.facts.learned(RankFault).reason is not None:
            return
        worker.facts.learned(RankFault).reason = reason
        logger.warning("rank_ignored", extra={"fields": {"worker": worker.url, "reason": reason}})
        self._count_on_ranks(worker, worker.facts)

    async def close(self) -> None:
        """Ask nobody any more."""
        for asking in tuple(self._asking.values()):
            await tasks.cancelled(asking)


async def _here() -> None:
    """There is only this process."""

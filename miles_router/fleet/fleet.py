"""The fleet: the object through which workers join, leave, pause and wake, and report their facts. It uses the pool,
which decides which workers are routable, and the gate, at which generations wait."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from miles_router import tasks
from miles_router.engines.actions import Order, Pause
from miles_router.engines.engine import CannotServe, Engine
from miles_router.engines.facts import Facts
from miles_router.engines.json_bytes import read_json
from miles_router.engines.known import USUAL, ReadOrder
from miles_router.engines.models import possible_adapters
from miles_router.errors import PartlyFailed, RouterError, UpstreamError, UpstreamUnreachable
from miles_router.fleet.adapters import current_adapters
from miles_router.fleet.gate import Gate
from miles_router.fleet.placement.contract import Policy
from miles_router.fleet.placement.sessions import prefill_key
from miles_router.fleet.pool import WorkerPool
from miles_router.fleet.snapshot import Snapshot
from miles_router.fleet.worker_table import Lease
from miles_router.fleet.worker_url import WorkerUrl
from miles_router.fleet.workers import ALIVE, RankFault, Transition, Unit, Worker, WorkerState

if TYPE_CHECKING:
    from miles_router.control.fan_out import FanOut
    from miles_router.control.probes import Probes

logger = logging.getLogger(__name__)


#: Model names and adapters (the last seen) that a fleet remembers.
MAX_NAMES, MAX_ADAPTERS = 64, 1024
#: Seconds that the fleet waits for a worker that has never answered: it may be starting, or hang.
UNREACHED_PATIENCE = 5.0


class Fleet:
    """The workers of one model, and everything the router does to all of them."""

    def __init__(self, *, pool: WorkerPool, gate: Gate, policy: Policy, probes: Probes, fan_out: FanOut) -> None:
        self.pool = pool
        self.gate = gate
        #: Held while a worker joins, and while the fleet is being paused, continued, put to sleep or woken.
        self.join_lock = asyncio.Lock()
        #: The router's own pause; None while there is none.
        self.pause: Pause | None = None
        self._policy = policy
        self.probes = probes
        self._fan_out = fan_out
        #: The memory parts that the fleet has released, and the orders that released or resumed them.
        self.released: set[str] = set()
        self.memory_orders: list[Order] = []
        self.slept: set[str] = set()  # the URLs of the workers that got these orders
        #: Saves the pause and sleep of the fleet to the state directory, if the router has one.
        self.save_standstill: Callable[[], Awaitable[None]] = _return_at_once
        #: Set where another process decides: reports an observation `(what, worker, reason)` to that process.
        self.report: Callable[[str, Worker, str], None] | None = None
        #: Returns when every process that sends requests has applied the decisions of this one.
        self.wait_until_applied: Callable[[], Awaitable[None]] = _return_at_once
        self._asking: dict[Worker, asyncio.Task[Facts]] = {}
        self._silent: set[Worker] = set()  # of those being asked: have not answered within `UNREACHED_PATIENCE`
        #: The names that engines gave their model, in order of appearance: a new checkpoint from disk changes the name.
        self.model_names: dict[str, None] = {}
        #: Whether any engine has reported that it applies LoRA adapters.
        self.applies_adapters = False
        #: The adapters that are or were loaded on any worker, the last seen at the end, and when each was last loaded
        #: or unloaded through this router (Unix seconds; 0.0: never). What happened before `began` is not known.
        self.adapter_names: dict[str, float] = {}
        self.began = time.time()
        #: Called with each worker whose facts have arrived: a new worker, or a new process at its address.
        self.facts_listeners: list[Callable[[Worker], None]] = []
        self._reported_in: Snapshot | None = None  # the snapshot for which `_all_reported` was computed
        self._all_reported = False
        pool.listeners.append(self._handle_transition)
        pool.when_settled = self.gate.update

    # Leases

    @property
    def snapshot(self) -> Snapshot:
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
        """Lease a unit with the fleet's policy; `WorkerPool.lease` documents the arguments."""
        return self.pool.lease(self._policy, key, excluded, preferred, rank, tokens, body, generates=generates)

    def lease_prefill(self, key: str | None, excluded: Collection[Worker], tokens: int, body: bytes) -> Lease:
        """Lease a prefill unit with the fleet's policy; `WorkerPool.lease_prefill` documents the arguments."""
        return self.pool.lease_prefill(self._policy, key, excluded, tokens, body)

    def record_silence(self, worker: Worker, reason: str) -> None:
        """Record that a worker did not accept a connection in time. Another process decides if there is one."""
        if self.report is None:
            self.pool.record_failure(worker, reason)
        else:  # other processes may still reach it
            self.report("silence", worker, reason)

    def end_session(self, key: str) -> None:
        """Forget the homes of a session that has ended, so that its tokens count no more."""
        for each in (key, prefill_key(key)):
            self.pool.homes.forget(each)

    def subscribe(self, listener: Callable[[Transition], None]) -> Callable[[], None]:
        """Call `listener` for each change of a worker's state. Return a function that ends this."""
        self.pool.listeners.append(listener)
        return lambda: self.pool.listeners.remove(listener)

    def _handle_transition(self, transition: Transition) -> None:
        if self.report is not None:  # the deciding process logs it; admission needs the facts in this process too
            if transition.after is WorkerState.READY:
                self.ask_for_facts(transition.worker)
            return
        transition.log()
        if transition.after is None:
            self.slept.discard(transition.worker.url)
        self.gate.workers_paused(not self.snapshot.generating and bool(self.snapshot.paused))

    # Joining workers

    async def join(
        self, address: WorkerUrl, *, api_key: str | None = None, attributes: Mapping[str, object] | None = None
    ) -> Worker:
        """Register a worker and return it.

        Before it gets requests, its weight version is read, since it may have older weights than the fleet. If the
        fleet is paused or asleep, the worker is paused or put to sleep first.

        Raises:
            PartlyFailed: it could not be paused or put to sleep.
            UpstreamUnreachable: the fleet is paused, and the worker does not report its kind of engine.
        """
        new_worker = Worker(address, api_key=api_key)
        version = None
        if self.pool.weight_version is not None and not self._is_registered(address):
            version = await self._version_of(new_worker)
        async with self.join_lock:
            await self._match_fleet_state(new_worker)
            worker = self.pool.add(address, api_key=api_key, attributes=attributes, weight_version=version)
        if worker.asked:
            self.ask_for_facts(worker)  # a new key may permit more answers
        return worker

    async def join_configured(self, worker: Worker, weight_version: str | None) -> None:
        """Make a configured worker routable after its first answer, in which it reported `weight_version`. Pause the
        worker or put it to sleep first, like the fleet. Raises the errors of `join`."""
        async with self.join_lock:
            await self._match_fleet_state(worker)
            self.pool.make_ready(worker, None if self.pool.weight_version is None else weight_version)

    def _is_registered(self, address: WorkerUrl) -> bool:
        return any(each.url == address.url and each.state is not WorkerState.UNREACHED for each in self.pool)

    async def _version_of(self, new_worker: Worker) -> str | None:
        with suppress(UpstreamError):
            return await self.probes.weight_version(new_worker)
        return None

    async def _match_fleet_state(self, new_worker: Worker) -> None:
        """Pause a new worker, or put it to sleep, like the fleet: SGLang 0.5.23 crashes when told to resume memory that
        it never released. A registered worker already sleeps."""
        if self.pause is not None:
            engine = await self.engine(new_worker)
            await self._send_order(new_worker, engine.order(engine.supported_pause(self.pause)), "the fleet is paused")
        if self.memory_orders and not self._is_registered(new_worker.address) and new_worker.url not in self.slept:
            self.slept.add(new_worker.url)
            try:
                await self.save_standstill()
                for order in self.memory_orders:
                    await self._send_order(
                        new_worker, await self._translate_order(new_worker, order), "the fleet is asleep"
                    )
            except RouterError:
                self.slept.discard(new_worker.url)
                raise

    async def _translate_order(self, new_worker: Worker, order: Order) -> Order:
        """Translate an order that the other workers got to the API of the new worker's engine."""
        read = ReadOrder.from_order(order, read_json)
        if read is None or read.is_common:
            return order
        engine = await self.engine(new_worker)
        try:
            return order if read.is_spelled_by(engine) else engine.order(read.action)
        except CannotServe as error:
            raise PartlyFailed(f"the fleet is asleep, and {new_worker.url} cannot be put to sleep: {error}") from None

    async def _send_order(self, new_worker: Worker, order: Order, why: str) -> None:
        if (refusal := await self._fan_out.send_order(new_worker, order)) is not None:
            raise PartlyFailed(f"{why}, and the same order failed on {new_worker.url}: {refusal}")

    # Pause and sleep of the whole fleet

    def begin_pause(self, pause: Pause) -> None:
        """Record that the workers are about to be paused, or paused in another mode."""
        self.pause = pause
        self.gate.pause(pause.mode)

    def restore_pause(self, before: Pause) -> None:
        """Restore the first pause after a second one failed."""
        self.pause = before
        self.gate.mode = before.mode

    def end_pause(self) -> None:
        """Record that the workers continue."""
        self.pause = None
        self.gate.resume()

    def begin_sleep(self) -> None:
        """Record that the workers are about to release memory."""
        self.gate.sleep()

    def memory_released(self, parts: Collection[str], order: Order, workers: Iterable[Worker]) -> None:
        """Record that `workers` get an order to release these parts of their memory."""
        self.released |= set(parts)
        self.memory_orders.append(order)
        self.slept |= {worker.url for worker in workers}

    def memory_resumed(self, parts: Collection[str], order: Order) -> None:
        """Record that the workers have these parts of their memory again; all parts if none is named."""
        self.released -= set(parts) or self.released
        self.memory_orders.append(order)

    def wake_if_all_resumed(self) -> None:
        """Open the gate once no memory part is released: trainers resume weights, update them, then resume the rest."""
        if not self.released:
            self.memory_orders.clear()
            self.slept.clear()
            self.gate.wake()

    # Facts

    async def facts(self, url: str) -> Facts:
        """Return the facts of the engine at a worker's URL, asking it unless this engine process is known already.

        Facts belong to one engine process: ask again for each request, and do not store them. They are dropped when the
        worker is lost, refused or quarantined, when all connections to it are closed, or when it reports another model.
        The engine may restart between this question and a reply. So where a fact decides how a reply is read, ask after
        the head of the reply has arrived and before the reply is closed: its connection pins the process.

        Facts that the engine does not report are None; so are all facts for a URL that is not a worker's.
        """
        worker = self.pool.find(url)
        return Facts() if worker is None else await self._facts_of(worker)

    async def _facts_of(self, worker: Worker) -> Facts:
        known = self._known_facts(worker)
        if known is not None:
            return known
        self._start_asking(worker)
        asking = self._asking[worker]
        await asyncio.wait({asking})
        return Facts() if asking.cancelled() else asking.result()

    async def engine(self, worker: Worker) -> Engine:
        """Return the kind of engine of a worker; the usual one if the worker reports nothing at all.

        The answer is valid until the worker is lost or reports another kind. For an engine whose flags decide how
        requests are translated, it is valid only while a connection to the worker is open.

        Raises:
            UpstreamUnreachable: the worker answers but does not report its kind.
        """
        if worker.engine is not None and (not worker.engine.translates or self._known_facts(worker) is not None):
            return worker.engine
        facts = await self._facts_of(worker)
        if worker.engine is None and facts.model_path is not None:
            raise UpstreamUnreachable(f"worker {worker.url} has not reported its kind of engine yet")
        return worker.engine or USUAL

    async def engines(self, workers: Collection[Worker]) -> list[Engine]:
        """Return the kinds of engine of several workers, in order; the usual one where it is unknown."""
        found = await asyncio.gather(*map(self._engine_soon, workers), return_exceptions=True)
        return [each if isinstance(each, Engine) else USUAL for each in found]

    async def _engine_soon(self, worker: Worker) -> Engine:
        if worker.state is not WorkerState.UNREACHED:
            return await self.engine(worker)
        if worker in self._silent:
            return USUAL
        try:
            return await tasks.within(UNREACHED_PATIENCE, self.engine(worker), name=f"engine of {worker.url}")
        except TimeoutError:
            self._silent.update({worker} & self._asking.keys())  # until it answers, it is not waited for again
            return USUAL

    async def weight_version(self, url: str) -> str | None:
        """Ask the worker at this URL for its weight version; return None if it does not report one."""
        worker = self.pool.find(url)
        return None if worker is None else await self._version_of(worker)

    def invalidate_reported(self) -> None:
        """Recompute `all_reported` at its next use."""
        self._reported_in = None

    @property
    def all_reported(self) -> bool:
        """True if every live worker has reported whether it applies LoRA adapters."""
        if self._reported_in is not self.pool.snapshot:
            self._all_reported, self._reported_in = all(map(self._has_reported, self.alive)), self.pool.snapshot
        return self._all_reported

    @property
    def alive(self) -> list[Worker]:
        """The workers that answer."""
        return [worker for worker in self.pool if worker.state in ALIVE]

    @property
    def applies_none(self) -> bool:
        """True if no engine has ever reported that it applies LoRA adapters, and every live worker has reported its
        adapters or refuses to."""
        unreported = any(worker.adapters is None and not worker.withholds_adapters for worker in self.alive)
        return not self.applies_adapters and not unreported

    def _has_reported(self, worker: Worker) -> bool:
        known = self._known_facts(worker)
        return worker.applies_adapters is not None or (known is not None and known.lora is not None)

    def note_applies(self, worker: Worker, applies: bool | None, adapters: frozenset[str] | None) -> None:
        """Record whether a worker applies adapters, and which are loaded; None where it did not report it."""
        worker.applies_adapters, worker.adapters = applies, adapters
        self.applies_adapters = self.applies_adapters or applies is True
        self.note_adapters(adapters or ())
        self.invalidate_reported()

    async def all_facts(self) -> list[Facts]:
        """Return the facts of each routable worker, for decisions before a worker is chosen."""
        routable = self.pool.routable
        known = [facts for worker in routable if (facts := self._known_facts(worker)) is not None]
        if len(known) == len(routable):  # the usual case, which needs no tasks
            return known
        return list(await asyncio.gather(*(self.facts(worker.url) for worker in routable)))

    def known_facts(self, url: str) -> Facts:
        """Return the facts of the engine at a worker's URL without asking it; empty facts if they are not known."""
        worker = self.pool.find(url)
        return (self._known_facts(worker) if worker is not None else None) or Facts()

    def ask_for_facts(self, worker: Worker) -> None:
        """Ask a worker for its facts in the background, unless they are known."""
        if self._known_facts(worker) is None:
            self._start_asking(worker)

    def forget_if_contradicted(self, worker: Worker, facts: Facts) -> None:
        """Forget a worker's engine if newly reported facts contradict the known ones: another process answers there, or
        it has another model."""
        if worker.facts is not None and worker.facts.contradicts(facts):
            worker.forget_engine()
            self.invalidate_reported()

    def _known_facts(self, worker: Worker) -> Facts | None:
        process = self.probes.process(worker)
        return worker.facts if process is not None and worker.facts_of == process else None

    def _start_asking(self, worker: Worker) -> None:
        if worker not in self._asking:
            asking = tasks.spawn(self._ask_facts(worker), name=f"probe facts {worker.url}")
            self._asking[worker] = asking
            asking.add_done_callback(lambda _: self._asking.pop(worker, None))
            asking.add_done_callback(lambda _: self._silent.discard(worker))

    async def _ask_facts(self, worker: Worker) -> Facts:
        facts, process = await self.probes.facts(worker)
        adapters = await current_adapters(self.probes, facts, worker)
        worker.engine = facts.engine or worker.engine
        worker.asked, worker.last_capacity = True, facts.token_capacity or worker.last_capacity
        self.note_applies(worker, facts.lora, adapters)
        self.note_adapters(facts.adapters or ())
        if process is not None and self.pool.find(worker.url) is worker:
            before = worker.facts or Facts()
            if facts.auto_truncate and not before.auto_truncate:
                logger.warning("worker_truncates_prompts", extra={"fields": {"worker": worker.url}})
            if facts.lacks and facts.lacks != before.lacks:
                missing = {"worker": worker.url, "lacks": [*facts.lacks]}
                logger.warning("worker_flags_missing", extra={"fields": missing})
            worker.facts, worker.facts_of = facts.after(before), process
            self._update_ranks(worker, worker.facts)
            self._note_names(worker.facts)
            for listener in self.facts_listeners:
                listener(worker)
            return worker.facts
        return facts

    def _note_names(self, facts: Facts) -> None:
        for name in (facts.served_model_name, facts.model_path):
            if name and len(self.model_names) < MAX_NAMES:
                self.model_names[name] = None

    def note_adapters(self, names: Iterable[str], changed_at: float = 0.0) -> None:
        """Remember these adapters, which a worker has, or loads or unloads at `changed_at`; forget the oldest beyond
        `MAX_ADAPTERS`."""
        for name in names:
            self.adapter_names[name] = max(self.adapter_names.pop(name, 0.0), changed_at)
        for name in [*self.adapter_names][:-MAX_ADAPTERS]:
            del self.adapter_names[name]

    def adapter_of(self, model: str) -> str | None:
        """Return the known LoRA adapter that `model` refers to, or None.

        Unloaded adapters still count, so that a request for one is refused instead of answered with base weights.
        """
        return next((name for name in possible_adapters(model) if name in self.adapter_names), None)

    def _update_ranks(self, worker: Worker, facts: Facts) -> None:
        """Count requests on each rank of the engine, unless this engine process has ignored the rank of a request."""
        if self.report is not None and worker.rank_fault is not None:  # another router process has observed it
            facts.learned(RankFault).reason = worker.rank_fault
        fault = facts.learned(RankFault).reason
        if self.pool.set_ranks(worker, 1 if fault else (worker.engine or USUAL).ranks(facts), fault):
            logger.info("worker_ranks", extra={"fields": {"worker": worker.url, "ranks": len(worker.units)}})

    def record_ignored_rank(self, unit: Unit, reason: str) -> None:
        """Record that an engine ignored the rank of a request: it counts as one unit until its process changes."""
        if not unit.retired:
            if self.report is not None:
                self.report("ranks", unit.worker, reason)
            self.drop_ranks(unit.worker, reason)

    def drop_ranks(self, worker: Worker, reason: str) -> None:
        """Count a worker as one unit until another engine process answers there, and log the reason."""
        if worker.facts is None or worker.facts.learned(RankFault).reason is not None:
            return
        worker.facts.learned(RankFault).reason = reason
        logger.warning("rank_ignored", extra={"fields": {"worker": worker.url, "reason": reason}})
        self._update_ranks(worker, worker.facts)

    async def close(self) -> None:
        """Cancel the questions that are under way."""
        for asking in tuple(self._asking.values()):
            await tasks.cancelled(asking)


async def _return_at_once() -> None:
    """Do nothing, in a router of one process without a state directory."""

"""Discovery: adds the workers that sources list, and drains workers that are not listed any more."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

from miles_router import tasks
from miles_router.errors import NotFound, RouterError, StateError
from miles_router.fleet.sources import Listed, Source, SourceUnreadable
from miles_router.fleet.workers import BOOTSTRAP_PORT, DISCOVERED, ROLE, Role, Worker, WorkerState
from miles_router.metrics import Statistics, counter, gauge
from miles_router.pools.pools import Pools
from miles_router.pools.registry import WorkerRegistry

logger = logging.getLogger(__name__)

#: Most seconds between two reads of all sources.
AGAIN = 5.0
#: Seconds that the start waits for the first reads, and that a read may take before it counts as failed.
FIRST_READ, PATIENCE = 5.0, 4.0


class DiscoveryStatistics(Statistics, prefix="miles_router_discovery"):
    """Counts of reads, and of workers added and drained."""

    listed = gauge("Workers that each source lists.", by="source")
    failures = counter("Reads of a source that failed or were incomplete; its last list stays valid.", by="source")
    added = counter("Workers added because a source lists them.", by="source")
    drained = counter("Workers drained because no source lists them any more.", by="source")
    refused = counter("Listed workers that could not be added, at each attempt.", by="source")


class _Read:
    """The list of one source, as far as it was read."""

    def __init__(self, source: Source) -> None:
        self.source = source
        #: The present list by URL; None before the first complete read.
        self.listed: dict[str, Listed] | None = None
        self.problem: str | None = None
        self._missing: set[str] = set()
        self._reading: asyncio.Task[Sequence[Listed]] | None = None

    async def update(self) -> bool:
        """Read the source, and return whether that succeeded. A worker leaves the list when two reads in a row lack it:
        a file may be read while it is rewritten, and one answer of a DNS server may be incomplete."""
        if self._reading is None:
            self._reading = asyncio.get_running_loop().create_task(self.source.read(), name="read source")
        try:
            if not await tasks.ends_within(PATIENCE, self._reading):  # it is not asked again before it has answered
                raise SourceUnreadable(f"{self.source.name}: no answer in {PATIENCE:g} s")
            reading, self._reading = self._reading, None
            found = {each["url"]: each for each in reading.result()}
        except SourceUnreadable as error:
            if self.problem != str(error):
                fields = {"source": self.source.name, "reason": str(error)}
                logger.warning("discovery_source_unreadable", extra={"fields": fields})
            self.problem = str(error)
            return False
        self.problem = None
        before = self.listed or {}
        missing = before.keys() - found.keys()
        waiting = missing - self._missing
        self.listed = {**found, **{url: before[url] for url in waiting}}
        self._missing = waiting
        return True

    async def close(self) -> None:
        """Give up the read under way."""
        if self._reading is not None:
            await tasks.cancelled(self._reading)


class Discovery:
    """The comparison of what sources list with the registered workers.

    A worker that discovery added has the attribute `discovered`, also after a restart; discovery drains only those.
    """

    def __init__(self, sources: Sequence[Source], registry: WorkerRegistry, pools: Pools, *, interval: float) -> None:
        self._reads = [_Read(source) for source in sources]
        self._names = {source.name for source in sources}
        self._registry = registry
        self._pools = pools
        self._interval = min(AGAIN, interval)
        #: What was added, by URL. A worker that an operator removes is not added again while it stays listed.
        self._added: dict[str, Listed] = {}
        self._refused: dict[str, str] = {}
        self._drains: dict[str, asyncio.Task[None]] = {}
        self.statistics = DiscoveryStatistics(
            listed=lambda: Counter({each.source.name: len(each.listed or ()) for each in self._reads})
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Read the sources in the background, and for the first time before this returns, if they answer soon."""
        first = asyncio.Event()
        reading = tasks.spawn(self._read_again(first), name="discovery")
        await tasks.ends_within(FIRST_READ, waiting := tasks.spawn(first.wait(), name="first discovery"))
        await tasks.cancelled(waiting)
        try:
            yield
        finally:
            for task in (reading, *self._drains.values()):
                await tasks.cancelled(task)
            for each in self._reads:
                await each.close()

    async def _read_again(self, first: asyncio.Event) -> None:
        while True:
            await self.read_sources()
            first.set()
            await asyncio.sleep(self._interval)

    async def read_sources(self) -> None:
        """Read every source once, and add and drain workers accordingly."""
        for each, read in zip(self._reads, await asyncio.gather(*(each.update() for each in self._reads)), strict=True):
            if not read:
                self.statistics.failures[each.source.name] += 1
        wanted: dict[str, tuple[str, Listed]] = {}
        for each in self._reads:
            for url, listed in (each.listed or {}).items():
                wanted.setdefault(url, (each.source.name, listed))
        registered = {worker.url: worker for worker in self._pools.workers}
        self._drain_unlisted(wanted)
        self._added = {url: listed for url, listed in self._added.items() if url in wanted}
        self._refused = {url: reason for url, reason in self._refused.items() if url in wanted}
        pace = tasks.Pace()
        for url, (source, listed) in wanted.items():
            worker = registered.get(url)
            if url in self._added:  # an operator's removal holds
                if worker is None or worker.state is WorkerState.DRAINING or self._added[url] == listed:
                    continue
            elif worker is not None and url in self._drains and not self._is(worker, listed):
                continue  # it is added as the other worker once it has left
            await self._add(url, source, listed)
            await pace.step()

    async def _add(self, url: str, source: str, listed: Listed) -> None:
        try:
            await self._registry.add(listed, source=source)
        except RouterError as error:
            self.statistics.refused[source] += 1
            if self._refused.get(url) != str(error):
                fields = {"worker": url, "source": source, "reason": str(error)}
                logger.warning("discovered_worker_refused", extra={"fields": fields})
            self._refused[url] = str(error)
            return
        self._refused.pop(url, None)
        if url not in self._added:
            self.statistics.added[source] += 1
        self._added[url] = listed

    def _drain_unlisted(self, wanted: Mapping[str, tuple[str, Listed]]) -> None:
        """Drain the workers that discovery added and that no source lists, or lists as another worker.

        A worker stays while its source was never read, and while its fleet is paused or asleep: it would leave paused,
        and no order to continue would reach it.
        """
        unread = {each.source.name for each in self._reads if each.listed is None}
        for pool in self._pools:
            for worker in pool.fleet.pool if not pool.fleet.gate.closed_by_router else ():
                source = worker.attributes.get(DISCOVERED)
                if source is None or source in unread or worker.url in self._drains:
                    continue
                if worker.url in wanted and self._is(worker, wanted[worker.url][1]):
                    continue
                if source not in self._names and unread:
                    continue  # of a source that is not set any more; another one may list it, once it is read
                if worker.state is not WorkerState.DRAINING:
                    self._added.pop(worker.url, None)
                    drain = self._drain(worker.url, str(source))
                    self._drains[worker.url] = tasks.spawn(drain, name=f"drain {worker.url}")

    async def _drain(self, url: str, source: str) -> None:
        try:
            with suppress(NotFound):  # an operator was faster
                await self._registry.remove(url, drain=True)
                self.statistics.drained[source] += 1
        except StateError as error:  # the next look tries again
            fields = {"worker": url, "source": source, "reason": str(error)}
            logger.warning("unlisted_worker_not_drained", extra={"fields": fields})
        finally:
            del self._drains[url]

    def _is(self, worker: Worker, listed: Listed) -> bool:
        """Return whether the worker is the listed one: another model or role at its address is another worker."""
        return self._identity(worker.attributes) == self._identity(listed)

    def _identity(self, fields: Mapping[str, object]) -> tuple[object, str, str]:
        role, port = fields.get(ROLE) or Role.REGULAR, fields.get(BOOTSTRAP_PORT) or ""
        return fields.get("model_id") or self._pools.default.name, str(role), str(port)

"""Generation names (`rid`) that engines may still use, and aborts of generations whose clients have disconnected.

SGLang 0.5.23 checks only every 4 s whether the client of a non-streamed answer is still connected, and refuses a second
use of its name until then. 2 s after the end of a stream it aborts the generation that has the stream's name at that
time (`TokenizerManager`). So a client that disconnects and repeats its request at once would get a refusal or an
aborted answer.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress

from miles_router import tasks
from miles_router.engines.actions import Abort
from miles_router.engines.client_json import read_json
from miles_router.engines.engine import CannotServe
from miles_router.engines.known import USUAL
from miles_router.engines.names import engine_names
from miles_router.errors import BadRequest, UpstreamError
from miles_router.fleet.pool import WorkerPool
from miles_router.fleet.workers import Worker
from miles_router.forwarding.outgoing import Outgoing, send
from miles_router.forwarding.upstream import Upstream

#: Seconds after the end of a request during which its worker gets no generation with the same name.
KEPT = 30.0
#: Maximum number of names remembered after the end of their requests; the oldest are dropped first.
MAX_NAMES = 10_000
#: Maximum number of aborts for one abandoned request. The engine detects the disconnect of the rest by itself.
MAX_ABORTS = 256
#: Maximum number of aborts in progress.
ABORTS_AT_ONCE = 32


class NameUse:
    """The generation names of one request at the workers that got the request.

    Args:
        own: the client's names, if the workers got those.
        others: the names that the workers got in place of the client's.
    """

    __slots__ = ("_ended", "_table", "others", "own", "workers")

    def __init__(
        self, table: UsedNames, workers: Sequence[Worker], own: Collection[str], others: Collection[str]
    ) -> None:
        self.workers = workers
        self.own = own
        self.others = others
        self._table = table
        self._ended = False
        table.sent.update((worker, name) for worker in workers for name in own)

    def end(self, *, released: bool) -> None:
        """Record that the request is over. Idempotent.

        Args:
            released: True if the workers certainly do not use the names any more.
        """
        if not self._ended:
            self._ended = True
            self._table.end([(worker, name) for worker in self.workers for name in self.own], released=released)


class UsedNames:
    """The generation names that each worker got from clients and may still use."""

    def __init__(self) -> None:
        self.sent: Counter[tuple[Worker, str]] = Counter()
        self._ended: dict[tuple[Worker, str], float] = {}
        self._aborting: Counter[tuple[Worker, str]] = Counter()

    def __len__(self) -> int:
        return len(self.sent) + len(self._ended)

    def any_used(self, worker: Worker, names: Collection[str]) -> bool:
        """Return True if the worker may still use one of these names, or an abort in progress could match one."""
        oldest_kept = time.monotonic() - KEPT
        while self._ended and (oldest := next(iter(self._ended.items())))[1] < oldest_kept:
            del self._ended[oldest[0]]
        if any((worker, name) in self.sent or (worker, name) in self._ended for name in names):
            return True
        return any(
            each is worker and _abort_matches(name, aborted) for each, aborted in self._aborting for name in names
        )

    def end(self, keys: Sequence[tuple[Worker, str]], *, released: bool) -> None:
        """Record that a request with these names is over (see `NameUse.end`)."""
        for key in keys:
            self.sent[key] -= 1
            if not self.sent[key]:
                del self.sent[key]
            if not released:
                self._ended.pop(key, None)
                self._ended[key] = time.monotonic()
        while len(self._ended) > MAX_NAMES:
            del self._ended[next(iter(self._ended))]

    def would_end_others(self, worker: Worker, name: str) -> bool:
        """Return True if an abort of this name could also end a generation of another running request."""
        return any(each is worker and _abort_matches(sent, name) for each, sent in self.sent)

    @contextmanager
    def aborting(self, worker: Worker, name: str) -> Iterator[None]:
        """Mark an abort of this name as in progress while the block runs, so that `any_used` reports matching names."""
        key = (worker, name)
        self._aborting[key] += 1
        try:
            yield
        finally:
            self._aborting[key] -= 1
            if not self._aborting[key]:
                del self._aborting[key]


def _abort_matches(name: str, aborted: str) -> bool:
    """Return True if an abort of `aborted` could end the generation `name`.

    SGLang aborts by prefix, and a list of prompts with the name `r` runs as `r_0`, `r_1`.
    """
    return name.startswith(aborted) or aborted.startswith(f"{name}_")


class AbandonedRequests:
    """A sender of aborts for requests whose clients have disconnected. Aborts run in the background."""

    def __init__(self, names: UsedNames, upstream: Upstream, pool: WorkerPool) -> None:
        self._names = names
        self._upstream = upstream
        self._pool = pool
        self._slots = asyncio.Semaphore(ABORTS_AT_ONCE)

    def abort(self, request: Outgoing) -> None:
        """Start aborts of the request's generations at its workers; return without waiting."""
        use, request.names = request.names, None
        if use is not None:
            for worker in use.workers:
                tasks.spawn(self._abort_at(worker, use, request), name=f"aborts at {worker.url}")

    async def _abort_at(self, worker: Worker, use: NameUse, request: Outgoing) -> None:
        names = use.others
        if not names:
            with suppress(BadRequest):  # the engine has refused an unreadable body too
                names = engine_names(request.endpoint, request.body, read_json)
        for name in sorted(names)[:MAX_ABORTS]:
            async with self._slots:
                # SGLang aborts all names that begin with this one. If that would hit other requests, send no abort: the
                # engine ends the generation when it detects the disconnect.
                if self._pool.find(worker.url) is worker and not self._names.would_end_others(worker, name):
                    with self._names.aborting(worker, name):
                        await self._send_abort(worker, name)

    async def _send_abort(self, worker: Worker, name: str) -> None:
        # If the abort fails, the engine ends the generation when it detects the disconnect.
        with suppress(CannotServe, UpstreamError, TimeoutError):
            order = (worker.engine or USUAL).order(Abort(name))
            asked = Outgoing(order.method, order.target, [(b"content-type", b"application/json")], order.body)
            sending = send(self._upstream, worker, asked, slot=False)
            reply = await tasks.within(self._upstream.connect_timeout, sending, name=f"abort at {worker.url}")
            reply.close()

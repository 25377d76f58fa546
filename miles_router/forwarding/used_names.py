"""Names (`rid`) under which engines may still have generations, and aborts of the generations that clients left.

SGLang 0.5.23 looks every 4 s whether the client of a whole answer is still there, and refuses its name until then. 2 s
after a stream has ended, it aborts the generation that has the stream's name then (`TokenizerManager`). A client that
leaves and repeats its request at once would get a refusal, or an aborted answer.
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
from miles_router.fleet.gate import endpoint
from miles_router.fleet.pool import WorkerPool
from miles_router.fleet.workers import Worker
from miles_router.forwarding.outgoing import Outgoing, send
from miles_router.forwarding.upstream import Upstream

#: Seconds after the end of a request in which its worker is not sent its name again.
KEPT = 30.0
#: Names that are remembered after the end of their requests. The oldest are forgotten first.
MAX_NAMES = 10_000
#: Aborts that are sent for one request that its client left. The engine ends the other generations by itself.
MAX_ABORTS = 256
#: Aborts that are on their way at a time.
ABORTS_AT_ONCE = 32


class NameUse:
    """The names of one request at the workers that were sent it.

    Args:
        own: the client's names, where the workers were sent those.
        others: the names that the workers were sent in place of the client's.
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

    def end(self, *, forgotten: bool) -> None:
        """Note that the request is over. Calling it again changes nothing.

        Args:
            forgotten: its workers keep nothing of it.
        """
        if not self._ended:
            self._ended = True
            self._table.end([(worker, name) for worker in self.workers for name in self.own], forgotten=forgotten)


class UsedNames:
    """The names that each worker was sent and may still have."""

    def __init__(self) -> None:
        self.sent: Counter[tuple[Worker, str]] = Counter()
        self._ended: dict[tuple[Worker, str], float] = {}
        self._aborting: Counter[tuple[Worker, str]] = Counter()

    def __len__(self) -> int:
        return len(self.sent) + len(self._ended)

    def any_used(self, worker: Worker, names: Collection[str]) -> bool:
        """Return whether a worker may still have one of these names, or is told to abort one that begins alike."""
        oldest_kept = time.monotonic() - KEPT
        while self._ended and (oldest := next(iter(self._ended.items())))[1] < oldest_kept:
            del self._ended[oldest[0]]
        if any((worker, name) in self.sent or (worker, name) in self._ended for name in names):
            return True
        return any(each is worker and _begin_alike(name, told) for each, told in self._aborting for name in names)

    def end(self, keys: Sequence[tuple[Worker, str]], *, forgotten: bool) -> None:
        """Note that a request with these names is over."""
        for key in keys:
            self.sent[key] -= 1
            if not self.sent[key]:
                del self.sent[key]
            if not forgotten:
                self._ended.pop(key, None)
                self._ended[key] = time.monotonic()
        while len(self._ended) > MAX_NAMES:
            del self._ended[next(iter(self._ended))]

    def would_end_others(self, worker: Worker, name: str) -> bool:
        """Return whether an abort of this name at a worker could end a generation of a request under way."""
        return any(each is worker and _begin_alike(sent, name) for each, sent in self.sent)

    @contextmanager
    def aborting(self, worker: Worker, name: str) -> Iterator[None]:
        """Send a worker no name that begins like this one while the block runs."""
        key = (worker, name)
        self._aborting[key] += 1
        try:
            yield
        finally:
            self._aborting[key] -= 1
            if not self._aborting[key]:
                del self._aborting[key]


def _begin_alike(name: str, told: str) -> bool:
    """Return whether an abort of `told` could end what is named `name`: `r` may stand for a list, `r_0` and `r_1`."""
    return name.startswith(told) or told.startswith(f"{name}_")


class LeftRequests:
    """Aborts of the generations that clients left. They run beside the requests, and delay none."""

    def __init__(self, names: UsedNames, upstream: Upstream, pool: WorkerPool) -> None:
        self._names = names
        self._upstream = upstream
        self._pool = pool
        self._slots = asyncio.Semaphore(ABORTS_AT_ONCE)

    def abort(self, request: Outgoing) -> None:
        """Tell the workers of a request whose client has left to abort its generations at once."""
        use, request.names = request.names, None
        if use is not None:
            for worker in use.workers:
                tasks.spawn(self._abort_at(worker, use, request), name=f"aborts at {worker.url}")

    async def _abort_at(self, worker: Worker, use: NameUse, request: Outgoing) -> None:
        names = use.others
        if not names:
            with suppress(BadRequest):  # then its engine has refused it
                names = engine_names(endpoint(request.path), request.body, read_json)
        for name in sorted(names)[:MAX_ABORTS]:
            async with self._slots:
                # SGLang aborts all names that begin with this one. Where others begin so, it ends its own by itself.
                if self._pool.find(worker.url) is worker and not self._names.would_end_others(worker, name):
                    with self._names.aborting(worker, name):
                        await self._tell(worker, name)

    async def _tell(self, worker: Worker, name: str) -> None:
        # What fails or cannot be said leaves it to the engine, which ends it when it looks for its client.
        with suppress(CannotServe, UpstreamError, TimeoutError):
            order = (worker.engine or USUAL).order(Abort(name))
            asked = Outgoing(order.method, order.target, [(b"content-type", b"application/json")], order.body)
            sending = send(self._upstream, worker, asked, slot=False)
            reply = await tasks.within(self._upstream.connect_timeout, sending, name=f"abort at {worker.url}")
            reply.close()

"""A context manager that stops a request when its client disconnects or its timeout expires.

ASGI reports a disconnect only through `receive`, so a second task has to wait there while the request's task waits for
the worker. For a short request that task would cost more than everything else, so it starts only after `WATCH_DELAY`.
"""

from __future__ import annotations

import asyncio
import sys
from contextvars import copy_context
from types import TracebackType

from miles_router import tasks
from miles_router.asgi.deadlines import Deadlines
from miles_router.asgi.exchange import Receive
from miles_router.errors import ClientDisconnected, RouterError, UpstreamTimeout

#: Seconds before the router begins to watch for a disconnect. Generations take far longer, other requests less.
WATCH_DELAY = 0.1


class Watch:
    """A context manager that breaks off the block of one request.

    `with Watch(receive, timeout):` raises from the block's current `await`: `ClientDisconnected` when the client has
    disconnected, `UpstreamTimeout` after `timeout` seconds (0: never). The request body must have been read before.
    """

    __slots__ = ("_context", "_deadline", "_patience", "_reason", "_receive", "_task", "_timeout", "_watcher")

    def __init__(self, receive: Receive, timeout: float = 0.0) -> None:
        self._receive = receive
        self._timeout = timeout
        self._reason: RouterError | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None

    def __enter__(self) -> Watch:
        loop = asyncio.get_running_loop()
        self._task = asyncio.current_task(loop)
        self._context = copy_context()
        self._patience = _patience if _patience is not None and _patience.loop is loop else _new_patience(loop)
        self._patience.start(self)
        if self._timeout:
            self._count_down(loop, tasks.LOOKS)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._patience.stop(self)
        if self._watcher is not None:
            self._watcher.cancel()
        if self._deadline is not None:
            self._deadline.cancel()
        if self._reason is not None and kind is asyncio.CancelledError:
            if sys.version_info >= (3, 11) and self._task is not None:
                self._task.uncancel()
            raise self._reason from None

    def _start_watching(self) -> None:
        self._context.run(self._spawn_watcher)  # a layer's `receive` may need the request's context variables

    def _spawn_watcher(self) -> None:
        self._watcher = tasks.spawn(self._wait_for_disconnect(), name="watch client")

    async def _wait_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.stop(ClientDisconnected("the client left before its answer was complete"))

    def _count_down(self, loop: asyncio.AbstractEventLoop, left: int) -> None:
        if left:
            self._deadline = loop.call_later(self._timeout / tasks.LOOKS, self._count_down, loop, left - 1)
            return
        self.stop(UpstreamTimeout(f"the worker's reply was not complete within {self._timeout:g} s"))

    def stop(self, reason: RouterError) -> None:
        """Raise `reason` from the block's current `await`. Only the first call counts."""
        if self._reason is None and self._task is not None:
            self._reason = reason
            self._task.cancel()


def _new_patience(loop: asyncio.AbstractEventLoop) -> Deadlines[Watch]:
    global _patience
    _patience = Deadlines(WATCH_DELAY, Watch._start_watching, loop)
    return _patience


#: The shared timer of the event loop that started a watch last. If a process has several loops, each
#: watch keeps the timer of its own loop.
_patience: Deadlines[Watch] | None = None

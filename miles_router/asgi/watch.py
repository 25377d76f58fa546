"""Stops a request's work when its client leaves or its time is up.

ASGI tells of a client's leaving only through `receive`, so somebody has to wait there while the request's own task
waits for the worker. A task per request would cost more than all else the router does for a short one; therefore the
second task starts only for requests that last.
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

#: Seconds before anybody looks whether the client is still there. Generations last far longer, everything else less.
PATIENCE = 0.1


class Watch:
    """`with Watch(receive, timeout):` raises, from whatever the block awaits, `ClientDisconnected` when the client is
    gone and `UpstreamTimeout` after `timeout` seconds (0: never). The request body must have been read before."""

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
            self._look(loop, tasks.LOOKS)
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

    def _patience_is_up(self) -> None:
        self._context.run(self._begin)  # `receive` may be a layer's, which has its request's context variables

    def _begin(self) -> None:
        self._watcher = tasks.spawn(self._until_gone(), name="watch client")

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.stop(ClientDisconnected("the client left before its answer was complete"))

    def _look(self, loop: asyncio.AbstractEventLoop, left: int) -> None:
        if left:
            self._deadline = loop.call_later(self._timeout / tasks.LOOKS, self._look, loop, left - 1)
            return
        self.stop(UpstreamTimeout(f"the worker's reply was not complete within {self._timeout:g} s"))

    def stop(self, reason: RouterError) -> None:
        """Raise this from whatever the block awaits, while it runs."""
        if self._reason is None and self._task is not None:
            self._reason = reason
            self._task.cancel()


def _new_patience(loop: asyncio.AbstractEventLoop) -> Deadlines[Watch]:
    global _patience
    _patience = Deadlines(PATIENCE, Watch._patience_is_up, loop)
    return _patience


#: Of the event loop in which a watch began last. A process has one; where it has several, each watch knows its own.
_patience: Deadlines[Watch] | None = None

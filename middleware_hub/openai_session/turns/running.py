"""A turn that runs, and how it is ended when it is no longer wanted.

It ends at its engine: that is told to abort it. What it has sampled until then comes as its answer, where that is to
stay. Where it is not, or where the engine does not end it, its connection is broken off too.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import suppress

from middleware_hub.openai_session.sessions.session import Session
from miles_router.errors import RouterError
from miles_router.middlewares import Exchange, Router, spawn, within

#: Seconds in which an engine ends a generation that it was told to abort, and after which it is told again: it may not
#: have had it yet.
GRACE, AGAIN = 5.0, 0.2


class RunningTurn:
    """A turn from its request to its end."""

    def __init__(self, session: Session, exchange: Exchange, router: Router) -> None:
        self.session = session
        #: Its name at the engine, by which it is aborted; None where the engine knows it by others.
        self.rid: str | None = None
        #: The error for which its session ended it; None while the session goes on.
        self.stopped_by: RouterError | None = None
        #: Tells the tokens of its stream that have come; None for a whole answer.
        self.streamed_tokens: Callable[[], int | None] = lambda: None
        self._error: RouterError | None = None
        self._exchange = exchange
        self._router = router
        #: Where its request is.
        self.flight = exchange.flight
        self._task = asyncio.current_task()
        self._ended = asyncio.Event()

    def stop(self, error: RouterError, *, keep: bool) -> None:
        """End it; `keep`: what was sampled until now stays. `error` is what its agent is told where nothing does."""
        self.flight.aborted = True
        if self.rid is None or self.flight.worker_url is None:
            self._break_off(error)
        else:
            end = self._abort(self.rid, error) if keep else self._drop(self.rid, error)
            spawn(end, name=f"abort {self.rid}")

    def over(self) -> None:
        """It has ended."""
        self._ended.set()

    async def _abort(self, rid: str, error: RouterError) -> None:
        spawn(self._tell_until_it_ends(rid), name=f"tell {rid}")
        await self._ends_within(GRACE)
        self._break_off(error)

    async def _tell_until_it_ends(self, rid: str) -> None:
        while not self._ended.is_set():
            await self._tell(rid)
            await self._ends_within(AGAIN)

    async def _ends_within(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await within(seconds, self._ended.wait(), name="a turn's end")

    async def _drop(self, rid: str, error: RouterError) -> None:
        await asyncio.wait({spawn(self._tell(rid), name=f"tell {rid}")}, timeout=AGAIN)
        self._break_off(error)

    async def _tell(self, rid: str) -> None:
        with suppress(RouterError):  # who cannot be told is broken off
            await self._router.control.abort(rid, self._exchange.request_id)

    def _break_off(self, error: RouterError) -> None:
        if self._error is None and self._task is not None and not self._ended.is_set():
            self._error = error
            self._task.cancel()

    def cancelled(self) -> RouterError | None:
        """Why its task was cancelled, if it was from here."""
        if self._error is not None and sys.version_info >= (3, 11) and self._task is not None:
            self._task.uncancel()
        return self._error

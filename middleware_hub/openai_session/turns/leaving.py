"""Turns whose client leaves, in a session with a budget: what was sampled for them counts.

Otherwise an agent that reads all but the end of its answers would sample without a bound. The engine is told to end the
turn, and what it has sampled until then is recorded as aborted; where it does not tell that, the turn is counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from middleware_hub.openai_session.sessions.pending import PendingTurn
from middleware_hub.openai_session.turns.running import RunningTurn
from miles_router.errors import ClientDisconnected, RouterError
from miles_router.middlewares import Message, Receive, Send, spawn

LEFT = "the client left before its answer was complete"


class SeenThrough:
    """Runs one turn to its end, whether its client stays or leaves."""

    def __init__(self, turn: PendingTurn, running: RunningTurn, receive: Receive, send: Send) -> None:
        self._turn = turn
        self._running = running
        self._receive = receive
        self._send = send

    async def run(self, turn: Callable[[Receive, Send], Awaitable[None]]) -> None:
        """Run it.

        Raises:
            ClientDisconnected: the client has left; the turn is recorded, or counted.
        """
        watch = spawn(self._until_gone(), name="watch client of a turn")
        try:
            await turn(_never, self._give)
        except RouterError:
            if not self._turn.left:
                raise
        finally:
            watch.cancel()
            if self._turn.left and not self._turn.recorded and self._running.flight.worker_url is not None:
                self._count()
        if self._turn.left:
            raise ClientDisconnected(LEFT)

    def _count(self) -> None:
        """Count a turn that could not be recorded: what its stream has shown, or what a whole answer may have had."""
        turn, episode = self._turn, self._turn.session.episode
        tokens = turn.seen_tokens if turn.stream else episode.ledger.reserved_by(turn.reservation)
        key = turn.repeat_key if episode.contract.budget.max_turns is not None else None
        turn.session.settle(turn.reservation, tokens, key)

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._turn.left = True
        self._running.stop(ClientDisconnected(LEFT), keep=True)

    async def _give(self, message: Message) -> None:
        if not self._turn.left:
            await self._send(message)


async def _never() -> Message:
    """Say nothing of the client: its leaving ends the turn at the engine, not the connection to that."""
    await asyncio.Event().wait()
    raise AssertionError("nobody sets it")

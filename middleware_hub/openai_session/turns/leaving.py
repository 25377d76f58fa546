"""Turns whose client disconnects, in a session with a budget: the sampled tokens still count.

Otherwise an agent that disconnects right before the end of every answer could sample without limit. The router aborts
the turn at the engine and records the tokens sampled so far. If the engine does not return them, the turn is counted
without being recorded.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from middleware_hub.openai_session.sessions.replies import RepeatKey
from middleware_hub.openai_session.sessions.session import AgentRequest
from middleware_hub.openai_session.turns.keeper import RunningTurn
from middleware_hub.openai_session.turns.plan import TurnGrant
from middleware_hub.openai_session.turns.reply import ReplySender
from miles_router.errors import ClientDisconnected, RouterError
from miles_router.middlewares import Message, Receive, spawn

CLIENT_LEFT = "the client left before its answer was complete"


class RunToEnd:
    """A context that runs one turn to its end even if the client disconnects:

        async with RunToEnd(...) as receive:
            ...  # this `receive` never reports a disconnect

    Raises:
        ClientDisconnected: the client disconnected; the turn is recorded or counted.
    """

    def __init__(
        self,
        request: AgentRequest,
        grant: TurnGrant,
        key: RepeatKey | None,
        running: RunningTurn,
        receive: Receive,
        reply: ReplySender,
    ) -> None:
        self._request = request
        self._grant = grant
        self._key = key
        self._running = running
        self._receive = receive
        self._reply = reply

    async def __aenter__(self) -> Receive:
        self._watch = spawn(self._stop_on_disconnect(), name="watch client of a turn")
        return _wait_forever

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._watch.cancel()
        if not self._reply.client_left:
            return
        if not self._reply.recorded and self._running.routing.worker_url is not None:
            self._count()
        if error is None or isinstance(error, RouterError):
            raise ClientDisconnected(CLIENT_LEFT) from None

    def _count(self) -> None:
        """Count a turn that could not be recorded: the streamed tokens, or for a whole answer all reserved tokens."""
        running, episode = self._running, self._request.session.episode
        tokens = running.streamed_tokens()
        if tokens is None:
            tokens = episode.ledger.reserved_by(self._grant.reservation)
        key = self._key if episode.contract.budget.max_turns is not None else None
        self._request.session.settle(self._grant.reservation, tokens, key)

    async def _stop_on_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._reply.client_left = True
        self._running.stop(ClientDisconnected(CLIENT_LEFT), keep=True)


async def _wait_forever() -> Message:
    """Wait forever: a disconnect aborts the turn at the engine, and must not close the connection to the engine."""
    await asyncio.Event().wait()
    raise AssertionError("the event is never set")

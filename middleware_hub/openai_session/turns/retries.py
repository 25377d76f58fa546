"""A turn that is asked for again under the same `X-Turn-Id` gets the answer that was recorded, not a second one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from middleware_hub.openai_session.sessions.tree import Session
from miles_router.asgi.exchange import Message, Send
from miles_router.asgi.headers import RawHeaders
from miles_router.engines.events import LAST_EVENT

OK = 200
MAX_TURN_ID = 256


@dataclass(frozen=True)
class Recorded:
    """An answer as the agent was given it."""

    headers: RawHeaders
    body: bytes

    async def send(self, send: Send) -> None:
        """Give it again."""
        await send({"type": "http.response.start", "status": OK, "headers": list(self.headers)})
        await send({"type": "http.response.body", "body": self.body})


class Retries:
    """The answers of one router's sessions by turn id, those under way included."""

    async def once(
        self,
        session: Session,
        turn_id: str,
        send: Send,
        run: Callable[[Send], Awaitable[None]],
        account: Callable[[int], None],
    ) -> None:
        """Run a turn, unless it ran already; if it runs at this moment, wait for its answer. A turn that failed, or
        that was not recorded, may be tried again."""
        while (known := session.answers.get(turn_id)) is not None:
            recorded = await asyncio.shield(known)
            if recorded is not None:
                await recorded.send(send)
                return
        future: asyncio.Future[Recorded | None] = asyncio.get_running_loop().create_future()
        session.answers[turn_id] = future
        copy, before = _Copy(send), len(session.turns)
        try:
            await run(copy.send)
        finally:
            held = any(turn.facts.get("turn_id") == turn_id for turn in session.turns[before:])
            answer = copy.recorded if held or session.deleted else None
            if answer is None:
                session.answers.pop(turn_id, None)
            else:
                account(len(answer.body))
            future.set_result(answer)


class _Copy:
    """Gives an answer on and keeps it."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        self._parts: list[bytes] = []
        self._complete = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
        else:
            body = message.get("body", b"")
            self._parts.append(body)
            # Whoever has read the last event may leave before the empty part behind it.
            ended = not message.get("more_body", False) or body.endswith(LAST_EVENT)
            self._complete = self._complete or ended
        await self._send(message)

    @property
    def recorded(self) -> Recorded | None:
        """The answer, if it is a whole one."""
        if self._start is None or not self._complete or self._start["status"] != OK:
            return None
        headers = [pair for pair in self._start["headers"] if pair[0] != b"x-request-id"]
        return Recorded(headers, b"".join(self._parts))

"""A request that is repeated under its `X-Turn-Id` gets the answer that was recorded, not a second one.

Another request under the same id is another step of that turn: harnesses ask the model several times within one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from hashlib import blake2b

from middleware_hub.openai_session.sessions.replies import RecordedReply, RepeatKey
from middleware_hub.openai_session.sessions.session import Session
from miles_router.engines.events import LAST_EVENT
from miles_router.errors import BadRequest
from miles_router.middlewares import Receive, Scope, Send, Tap, Watch, first_header

MAX_TURN_ID = 256


def turn_id_of(scope: Scope) -> str | None:
    """The agent's name for a turn.

    Raises:
        BadRequest: it is too long.
    """
    value = first_header(scope["headers"], b"x-turn-id")
    if value is not None and len(value) > MAX_TURN_ID:
        raise BadRequest(f"X-Turn-Id is longer than {MAX_TURN_ID} bytes")
    return value.decode("latin-1") if value else None


def repeat_key(turn_id: str, path: str, body: bytes) -> RepeatKey:
    """What a request and its repetitions have in common."""
    return turn_id, path, blake2b(body, digest_size=16).digest()


async def once(
    session: Session,
    key: RepeatKey,
    receive: Receive,
    send: Send,
    run: Callable[[Send], Awaitable[None]],
    recorded: Callable[[], bool],
    account: Callable[[int], None],
    *,
    last_event: bytes | tuple[bytes, ...] = LAST_EVENT,
) -> None:
    """Run a turn, unless the same request (`repeat_key`) ran already; if it runs at this moment, wait for its answer. A
    turn that failed, or that was not `recorded`, may be tried again.

    Raises:
        ClientDisconnected: the client has left while it waited.
    """
    while (known := session.replies.get(key)) is not None:
        with Watch(receive):  # it may take long, and an agent that has left must not hold its request for that time
            reply = await asyncio.shield(known)
        if reply is not None:
            await reply.give_to(send)
            return
    future: asyncio.Future[RecordedReply | None] = asyncio.get_running_loop().create_future()
    session.replies[key] = future

    def complete(reply: RecordedReply) -> None:
        if recorded() and key not in session.repeats:
            session.repeats[key] = reply
            account(len(reply.body))

    copy = ReplyCopy(send, last_event, complete)
    try:
        await run(copy.send)
    finally:
        reply = copy.reply if recorded() or session.ending.status.is_forgotten else None
        if reply is None:
            session.replies.pop(key, None)
        future.set_result(reply)


class ReplyCopy(Tap):
    """Gives a reply on and keeps it."""

    layer = "openai_sessions"
    same_length = True
    holds_head = False

    def __init__(
        self,
        send: Send,
        last_event: bytes | tuple[bytes, ...],
        complete: Callable[[RecordedReply], None],
    ) -> None:
        """
        Args:
            complete: is told of the whole reply before its end is given on.
        """
        super().__init__(send)
        self._tell = complete
        self._last_event = last_event
        self._pieces: list[bytes] = []
        self._complete = False

    async def piece(self, data: bytes, *, more: bool) -> bytes:
        """Keep it. Whoever has read the last event may leave before the empty piece behind it."""
        self._pieces.append(data)
        self._complete = self._complete or not more or data.endswith(self._last_event)
        if self.reply is not None:
            self._tell(self.reply)
        return data

    @property
    def reply(self) -> RecordedReply | None:
        """The reply, if it is a whole answer."""
        if not self._complete:
            return None
        headers = [pair for pair in self.start["headers"] if pair[0] != b"x-request-id"]
        return RecordedReply(headers, b"".join(self._pieces))

"""The sender of the reply to one turn, and the repetition of recorded replies.

A request that repeats another with the same `X-Turn-Id` and body gets the recorded reply. A request with the same id
and another body is another step of that turn: harnesses ask the model several times in one turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from middleware_hub.openai_session.sessions.replies import RecordedReply, RepeatKey
from middleware_hub.openai_session.sessions.session import Session
from miles_router.middlewares import Message, Receive, Send, Watch

EVENT_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8")]
JSON = [(b"content-type", b"application/json")]


class ReplySender:
    """The sender of the reply to one turn.

    The end of the reply waits until the session is saved. The head of a reply that is not a stream waits too, so that a
    failure to save becomes an error status.

    Args:
        send: sends to the client.
        save: saves the session; awaited before the end of the reply. Raises StateError.
    """

    def __init__(self, send: Send, save: Callable[[], Awaitable[None]]) -> None:
        self._send = send
        self._save = save
        self._start: Message | None = None
        self._kept: list[bytes] | None = None
        self._is_open = False
        #: The headers of the reply; None before it begins.
        self.headers: list[tuple[bytes, bytes]] | None = None
        #: Called with the complete reply before its end is sent.
        self.when_complete: Callable[[RecordedReply], None] | None = None
        #: True if the client has disconnected: nothing is sent any more.
        self.client_left = False
        #: `recorded`: the turn is recorded. `repeatable`: its answer may also be sent again, because no disconnect of
        #: the client has cut it.
        self.recorded = self.repeatable = False

    def keep(self, when_complete: Callable[[RecordedReply], None]) -> None:
        """Keep the sent parts, and pass the complete reply to `when_complete` before its end is sent."""
        self._kept, self.when_complete = [], when_complete

    async def send(self, message: Message) -> None:
        """Send one ASGI message.

        Raises:
            StateError: the session cannot be saved.
        """
        if self.client_left:
            return
        if message["type"] == "http.response.start":
            self.headers = message["headers"]
            if message["status"] != 200:
                self._kept = None  # an error is not repeated
            if not _is_stream(message):
                self._start = message
                return
        elif not message.get("more_body"):
            await self._end(message)
            return
        else:
            if self._kept is not None:
                self._kept.append(message.get("body", b""))
            if self._start is not None:
                await self._begin()
        await self._send(message)

    async def send_once_begun(self, message: Message) -> None:
        """Send one ASGI message of an attempt, but only the head of the first attempt. Raises like `send`."""
        if message["type"] != "http.response.start" or self.headers is None:
            await self.send(message)

    async def send_part(self, data: bytes) -> None:
        """Send a part of the body; b"" sends nothing."""
        if data:
            await self.send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self, end: bytes, start: Message | None = None, *, stays_open: bool = False) -> None:
        """Save the session, then send the head if given, and the end of the body. Raises like `send`.

        Args:
            stays_open: leave closing the reply to `close`. After the close, `receive` reports a disconnect.
        """
        if start is not None:
            self.headers, self._start = start["headers"], start
        if not self.client_left:
            self._is_open = stays_open
            await self._end({"type": "http.response.body", "body": end, "more_body": stays_open})

    async def close(self) -> None:
        """Close a reply that `finish` left open."""
        if self._is_open and not self.client_left:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _end(self, message: Message) -> None:
        if self._kept is not None and self.when_complete is not None:
            assert self.headers is not None
            headers = [pair for pair in self.headers if pair[0] != b"x-request-id"]
            self.when_complete(RecordedReply(headers, b"".join([*self._kept, message.get("body", b"")])))
        await self._save()
        await self._begin()
        await self._send(message)

    async def _begin(self) -> None:
        if self._start is not None:
            start, self._start = self._start, None
            await self._send(start)


def _is_stream(start: Message) -> bool:
    return any(name.lower() == b"content-type" and b"event-stream" in value for name, value in start["headers"])


@asynccontextmanager
async def run_or_repeat(
    session: Session,
    key: RepeatKey | None,
    receive: Receive,
    reply: ReplySender,
    account: Callable[[int], None],
) -> AsyncIterator[bool]:
    """Yield True if the turn must run, or send the reply of an earlier request with the same key and yield False.

    If the earlier request is still running, wait for its reply. A turn that failed or was not recorded may run again.

    Args:
        key: equal for a request and its repetitions; None if the request cannot be a repetition.
        account: called with the size in bytes of a reply that is kept.

    Raises:
        ClientDisconnected: the client disconnected while it waited.
    """
    if key is None:
        yield True
        return
    while (known := session.replies.get(key)) is not None:
        with Watch(receive):  # this may take long: end the request if the agent disconnects
            recorded = await asyncio.shield(known)
        if recorded is not None:
            await recorded.send_to(reply.send)
            yield False
            return
    future: asyncio.Future[RecordedReply | None] = asyncio.get_running_loop().create_future()
    session.replies[key], complete = future, None

    def keep(recorded: RecordedReply) -> None:
        nonlocal complete
        complete = recorded
        if reply.repeatable and key not in session.repeats:
            session.repeats[key] = recorded
            account(len(recorded.body))

    reply.keep(keep)
    try:
        yield True
    finally:
        reply.when_complete = None  # breaks the reference from the reply to the session
        given = complete if reply.repeatable or session.ending.status.is_forgotten else None
        if given is None:
            session.replies.pop(key, None)
        future.set_result(given)

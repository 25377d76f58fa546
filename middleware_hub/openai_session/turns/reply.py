"""The reply to one turn, and replies that are given again to requests that repeat one.

A request that is repeated under its `X-Turn-Id` gets the answer that was recorded. Another request under the same id is
another step of that turn: harnesses ask the model several times within one.
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
    """Sends the reply to one turn. Its end waits until the session is durable; of a reply that is no stream the head
    waits as well, so that a failure to save can be told with a status.

    Args:
        send: the client's side.
        settle: awaited before the end of the reply. Raises StateError.
    """

    def __init__(self, send: Send, settle: Callable[[], Awaitable[None]]) -> None:
        self._send = send
        self._settle = settle
        self._start: Message | None = None
        self._kept: list[bytes] | None = None
        self._is_open = False
        #: The headers of the reply; None while it has not begun.
        self.headers: list[tuple[bytes, bytes]] | None = None
        #: Called with the whole reply before its end is sent.
        self.when_whole: Callable[[RecordedReply], None] | None = None
        #: The client has left: nothing is sent any more.
        self.left = False
        #: The turn is recorded; `repeatable`: and its answer is not one that the client's leaving has cut.
        self.recorded = self.repeatable = False

    def keep(self, when_whole: Callable[[RecordedReply], None]) -> None:
        """Keep what is sent, and give the whole reply to `when_whole` before its end is sent."""
        self._kept, self.when_whole = [], when_whole

    async def send(self, message: Message) -> None:
        """Send one ASGI message.

        Raises:
            StateError: what the reply tells of cannot be made durable.
        """
        if self.left:
            return
        if message["type"] == "http.response.start":
            self.headers = message["headers"]
            if message["status"] != 200:
                self._kept = None  # a refusal is not given again
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
        """Send one message of one of several replies to the turn: the agent gets the head of the first alone. Raises as
        `send`."""
        if message["type"] != "http.response.start" or self.headers is None:
            await self.send(message)

    async def give(self, data: bytes) -> None:
        """Send a part of the body."""
        if data:
            await self.send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self, end: bytes, start: Message | None = None, *, stays_open: bool = False) -> None:
        """Send the end of the body; with `start`, the head before it, once the session is durable. Raises as `send`.

        Args:
            stays_open: the reply is closed by `close`. Once it is closed, `receive` says that the client has left.
        """
        if start is not None:
            self.headers, self._start = start["headers"], start
        if not self.left:
            self._is_open = stays_open
            await self._end({"type": "http.response.body", "body": end, "more_body": stays_open})

    async def close(self) -> None:
        """Close a reply that `finish` has left open."""
        if self._is_open and not self.left:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _end(self, message: Message) -> None:
        if self._kept is not None and self.when_whole is not None:
            assert self.headers is not None
            headers = [pair for pair in self.headers if pair[0] != b"x-request-id"]
            self.when_whole(RecordedReply(headers, b"".join([*self._kept, message.get("body", b"")])))
        await self._settle()
        await self._begin()
        await self._send(message)

    async def _begin(self) -> None:
        if self._start is not None:
            start, self._start = self._start, None
            await self._send(start)


def _is_stream(start: Message) -> bool:
    return any(name.lower() == b"content-type" and b"event-stream" in value for name, value in start["headers"])


@asynccontextmanager
async def first_of_repeated(
    session: Session,
    key: RepeatKey | None,
    receive: Receive,
    reply: ReplySender,
    account: Callable[[int], None],
) -> AsyncIterator[bool]:
    """Tell whether a request is the first with its `key`. Where another one ran, the reply of that is given; where one
    runs at this moment, its reply is waited for. A turn that failed, or was not recorded, may run again.

    Args:
        account: is told the bytes of a reply that is kept.

    Raises:
        ClientDisconnected: the client has left while it waited.
    """
    if key is None:
        yield True
        return
    while (known := session.replies.get(key)) is not None:
        with Watch(receive):  # it may take long, and an agent that has left must not hold its request for that time
            recorded = await asyncio.shield(known)
        if recorded is not None:
            await recorded.give_to(reply.send)
            yield False
            return
    future: asyncio.Future[RecordedReply | None] = asyncio.get_running_loop().create_future()
    session.replies[key], whole = future, None

    def keep(recorded: RecordedReply) -> None:
        nonlocal whole
        whole = recorded
        if reply.repeatable and key not in session.repeats:
            session.repeats[key] = recorded
            account(len(recorded.body))

    reply.keep(keep)
    try:
        yield True
    finally:
        reply.when_whole = None  # which holds the session, and is held by the reply
        given = whole if reply.repeatable or session.ending.status.is_forgotten else None
        if given is None:
            session.replies.pop(key, None)
        future.set_result(given)

"""Replies that the router changes: translated from an engine's own form to SGLang's, buffered, or rewritten streams.

They have the same reading methods as `Reply` and replace it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from miles_router.asgi.wire import RawHeaders, end_to_end, first_header
from miles_router.engines.answers import UnreadableAnswer
from miles_router.engines.engine import Translation
from miles_router.engines.events import Event, EventReader
from miles_router.engines.pairs.held_rows import RowStrings
from miles_router.errors import UpstreamBroken, UpstreamError
from miles_router.forwarding.reply import END, Observer, Reply, read_whole

logger = logging.getLogger(__name__)

OK, FAILED = 200, 500
#: Larger answers are translated in a thread: a long prompt's likeliest tokens are tens of megabytes.
TRANSLATED_HERE = 1 << 18
EVENTS = b"text/event-stream"
#: Headers about the original bytes, which are wrong for the changed body.
BODY_HEADERS = frozenset({b"content-length", b"transfer-encoding"})

#: Returns a worker's present weight version as far as the router knows it.
Version = Callable[[], str | None]


async def translated(
    reply: Reply, translation: Translation, version: Version, *, sent_under: str | None, limit: int
) -> Reply | HeldReply | RewrittenStream:
    """Translate a reply to SGLang's form.

    A complete answer is read here, so that an unreadable one is refused before the client receives anything. The
    engine's refusals are returned unchanged.

    Args:
        sent_under: the weight version when the request was sent. A complete answer does not show where weights changed,
            so it gets a version only if the version is still the same at its end.
        limit: maximum bytes of an answer, or of one event, to buffer.

    Raises:
        UpstreamError: the answer is incomplete, contradicts itself, or is too large.
        UpstreamBroken: the connection was lost inside the answer.
    """
    if reply.status != OK:
        return reply
    if (first_header(reply.headers, b"content-type") or b"").startswith(EVENTS):
        return RewrittenStream(reply, lambda event: translation.event(event, version()), limit)
    answer = await reply.read_all(limit)
    reply.close()
    now = version()
    try:
        work = partial(translation.whole, answer, now if now == sent_under else None)
        body = await asyncio.to_thread(work) if len(answer) > TRANSLATED_HERE else work()
    except UnreadableAnswer as error:
        raise UpstreamError(f"the worker's answer cannot be read: {error}") from error
    return HeldReply(reply.status, reply.headers, [body])


class HeldReply:
    """A completely buffered reply. `failed` is True if it reports a failure of the engine."""

    def __init__(self, status: int, headers: RawHeaders, pieces: Sequence[bytes], *, failed: bool = False) -> None:
        length = sum(map(len, pieces))
        self.status = status
        self.headers: RawHeaders = [*end_to_end(headers, BODY_HEADERS), (b"content-length", b"%d" % length)]
        self.failed = failed or status >= FAILED
        self._pieces = deque(filter(None, pieces))
        #: The last bytes of the body.
        self.end = self._pieces[-1][-END:] if self._pieces else b""

    @property
    def exhausted(self) -> bool:
        """True when every byte was read."""
        return not self._pieces

    @property
    def beginning(self) -> bytes:
        """The first unread piece; reading it here does not consume it."""
        return self._pieces[0] if self._pieces else b""

    def read_available(self) -> bytes:
        """Return b"": bytes are available only from `read`."""
        return b""

    async def read(self) -> bytes:
        """Return the next piece; b"" after the last. Between pieces, other tasks of the event loop run."""
        if len(self._pieces) > 1:
            await asyncio.sleep(0)
        return self._pieces.popleft() if self._pieces else b""

    async def read_all(self, limit: int) -> bytes:
        """Return the rest of the body.

        Raises:
            UpstreamError: the rest is longer than `limit` bytes.
        """
        if sum(map(len, self._pieces)) > limit:
            raise UpstreamError(f"the reply is longer than {limit} bytes")
        pieces, self._pieces = self._pieces, deque()
        return b"".join(pieces)

    def close(self) -> None:
        """Free the buffered bytes."""
        self._pieces.clear()


class RewrittenStream:
    """A stream whose events are all rewritten.

    Args:
        rewrite: returns the new bytes of an event; may raise UnreadableAnswer.
        limit: maximum bytes of one event.
        rows: extracts row strings (large base64 fields) from the bytes before events are parsed.
    """

    def __init__(
        self, reply: Reply, rewrite: Callable[[Event], bytes], limit: int, rows: RowStrings | None = None
    ) -> None:
        self.status = reply.status
        self.headers: RawHeaders = end_to_end(reply.headers, BODY_HEADERS)
        #: True when every byte was read.
        self.exhausted = False
        self._reply = reply
        self._rewrite = rewrite
        self._limit = limit
        self._rows = RowStrings(()) if rows is None else rows
        self._events = EventReader()

    @property
    def end(self) -> bytes:
        """The last bytes of the engine's original stream (see `Reply.end`)."""
        return self._reply.end

    def observe(self, observer: Observer) -> None:
        """Show the pieces of the engine's original stream to `observer` (see `Reply.observe`)."""
        self._reply.observe(observer)

    def read_available(self) -> bytes:
        """Return b"": events are available only from `read`."""
        return b""

    async def read(self) -> bytes:
        """Wait for the next events and return them rewritten; b"" after the last.

        Raises:
            UpstreamBroken: the connection was lost inside the body, or an event cannot be read or is too large.
        """
        while not self.exhausted:
            events = self._rewrite_events(self._rows.feed(await self._reply.read()))
            if self._reply.exhausted:
                events += self._rewrite_events(self._rows.end()) + self._events.rest
                self.exhausted = True
            if events:
                return events
        return b""

    def _rewrite_events(self, chunk: bytes) -> bytes:
        try:
            events = [self._rewrite(Event.read(raw)) for raw in self._events.feed(chunk)]
        except UnreadableAnswer as error:
            logger.warning("answer_not_translated", extra={"fields": {"reason": str(error)}})
            raise UpstreamBroken(f"the worker's stream cannot be read: {error}") from error
        if self._events.pending > self._limit:
            raise UpstreamBroken(f"an event of the worker's stream is longer than {self._limit} bytes")
        return b"".join(events)

    async def read_all(self, limit: int) -> bytes:
        """Read and return the rest of the body.

        Raises:
            UpstreamError: the rest is longer than `limit` bytes.
        """
        return await read_whole(self.read, limit)

    def close(self) -> None:
        """Close the engine's reply."""
        self._reply.close()

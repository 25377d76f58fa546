"""Replies of engines that are asked otherwise, in the form that SGLang gives, and others that are not as they came.
They come in place of a `Reply`."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence

from miles_router.asgi.headers import RawHeaders, end_to_end, first_header
from miles_router.engines.answers import UnreadableAnswer
from miles_router.engines.engine import Translation
from miles_router.engines.events import Event, EventReader
from miles_router.engines.pairs.held_rows import RowStrings
from miles_router.errors import UpstreamBroken, UpstreamInvalidResponse
from miles_router.forwarding.reply import END, Look, Reply, read_whole

logger = logging.getLogger(__name__)

OK, FAILED = 200, 500
EVENTS = b"text/event-stream"
#: Of the bytes that came, which others take the place of.
OF_THE_BYTES = frozenset({b"content-length", b"transfer-encoding"})

#: The version of a worker's weights, as the router knows it now.
Version = Callable[[], str | None]


async def translated(
    reply: Reply, translation: Translation, version: Version, *, sent_under: str | None, limit: int
) -> Reply | HeldReply | RewrittenStream:
    """A reply as SGLang would have given it. A whole answer is read here, so that one that cannot be read is refused
    before anything of it is given; refusals of the engine's own pass as they are.

    Args:
        sent_under: the version when the request was sent. A whole answer does not tell where another begins: it has a
            version where it began and ended under one.
        limit: the bytes of an answer, or of one event, that are held.

    Raises:
        UpstreamInvalidResponse: the answer lacks something, contradicts itself, or is too large.
        UpstreamBroken: it was cut.
    """
    if reply.status != OK:
        return reply
    if (first_header(reply.headers, b"content-type") or b"").startswith(EVENTS):
        return RewrittenStream(reply, lambda event: translation.event(event, version()), limit)
    answer = await reply.read_all(limit)
    reply.close()
    now = version()
    try:
        body = translation.whole(answer, now if now == sent_under else None)
    except UnreadableAnswer as error:
        raise UpstreamInvalidResponse(f"the worker's answer cannot be read: {error}") from error
    return HeldReply(reply.status, reply.headers, [body])


class HeldReply:
    """A reply that was read whole. `failed`: it says that an engine has failed."""

    def __init__(self, status: int, headers: RawHeaders, pieces: Sequence[bytes], *, failed: bool = False) -> None:
        length = sum(map(len, pieces))
        self.status = status
        self.headers: RawHeaders = [*end_to_end(headers, OF_THE_BYTES), (b"content-length", b"%d" % length)]
        self.failed = failed or status >= FAILED
        self._pieces = deque(filter(None, pieces))
        #: As `Reply.end`.
        self.end = self._pieces[-1][-END:] if self._pieces else b""

    @property
    def exhausted(self) -> bool:
        """Every byte was read."""
        return not self._pieces

    @property
    def beginning(self) -> bytes:
        """The first bytes, which stay to be read."""
        return self._pieces[0] if self._pieces else b""

    def take(self) -> bytes:
        """What is there without waiting: nothing."""
        return b""

    async def read(self) -> bytes:
        """The next piece, of many once others have gone on; b"" after the last."""
        if len(self._pieces) > 1:
            await asyncio.sleep(0)
        return self._pieces.popleft() if self._pieces else b""

    async def read_all(self, limit: int) -> bytes:
        """The rest of the body.

        Raises:
            UpstreamInvalidResponse: it is longer than `limit` bytes.
        """
        if sum(map(len, self._pieces)) > limit:
            raise UpstreamInvalidResponse(f"the reply is longer than {limit} bytes")
        pieces, self._pieces = self._pieces, deque()
        return b"".join(pieces)

    def close(self) -> None:
        """Nothing of it is held any more."""
        self._pieces.clear()


class RewrittenStream:
    """A stream of which each event is written anew.

    Args:
        rewrite: gives an event as it goes on; raises UnreadableAnswer.
        limit: the bytes of one event that are held.
        rows: takes rows out before.
    """

    def __init__(
        self, reply: Reply, rewrite: Callable[[Event], bytes], limit: int, rows: RowStrings | None = None
    ) -> None:
        self.status = reply.status
        self.headers: RawHeaders = end_to_end(reply.headers, OF_THE_BYTES)
        #: Every byte was read.
        self.exhausted = False
        self._reply = reply
        self._rewrite = rewrite
        self._limit = limit
        self._rows = RowStrings(()) if rows is None else rows
        self._events = EventReader()

    @property
    def end(self) -> bytes:
        """As `Reply.end`: as the engine gave it."""
        return self._reply.end

    def show(self, look: Look) -> None:
        """As `Reply.show`: as the engine gave it."""
        self._reply.show(look)

    def take(self) -> bytes:
        """What is there without waiting: nothing."""
        return b""

    async def read(self) -> bytes:
        """The next events; b"" after the last.

        Raises:
            UpstreamBroken: the connection was lost inside the body, or an event cannot be read.
        """
        while not self.exhausted:
            events = self._rewritten(self._rows.feed(await self._reply.read()))
            if self._reply.exhausted:
                events += self._rewritten(self._rows.end()) + self._events.rest
                self.exhausted = True
            if events:
                return events
        return b""

    def _rewritten(self, chunk: bytes) -> bytes:
        try:
            events = [self._rewrite(Event.read(raw)) for raw in self._events.feed(chunk)]
        except UnreadableAnswer as error:
            logger.warning("answer_not_translated", extra={"fields": {"reason": str(error)}})
            raise UpstreamBroken(f"the worker's stream cannot be read: {error}") from error
        if self._events.pending > self._limit:
            raise UpstreamBroken(f"an event of the worker's is longer than {self._limit} bytes")
        return b"".join(events)

    async def read_all(self, limit: int) -> bytes:
        """The rest of the body.

        Raises:
            UpstreamInvalidResponse: it is longer than `limit` bytes.
        """
        return await read_whole(self.read, limit)

    def close(self) -> None:
        """As `Reply.close`."""
        self._reply.close()

"""Replies of engines that are asked otherwise, in the form that SGLang gives. They come in place of a `Reply`."""

from __future__ import annotations

import logging
from collections.abc import Callable

from miles_router.asgi.headers import RawHeaders, end_to_end, first
from miles_router.engines.answers import UnreadableAnswer
from miles_router.engines.events import Event, EventReader
from miles_router.engines.profile import Translation
from miles_router.errors import UpstreamBroken, UpstreamInvalidResponse
from miles_router.forwarding.reply import Reply

logger = logging.getLogger(__name__)

OK = 200
EVENTS = b"text/event-stream"
#: Of the bytes that came, which others take the place of.
OF_THE_BYTES = frozenset({b"content-length", b"transfer-encoding"})

#: The version of a worker's weights, as the router knows it now.
Version = Callable[[], str | None]


async def translated(
    reply: Reply, translation: Translation, version: Version, *, sent_under: str | None, limit: int
) -> Reply | TranslatedReply:
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
    if (first(reply.headers, b"content-type") or b"").startswith(EVENTS):
        return TranslatedReply(reply, translation, version, limit)
    answer = await reply.read_all(limit)
    now = version()
    try:
        body = translation.whole(answer, now if now == sent_under else None)
    except UnreadableAnswer as error:
        raise UpstreamInvalidResponse(f"the worker's answer cannot be read: {error}") from error
    return TranslatedReply(reply, translation, version, limit, body=body)


class TranslatedReply:
    """A reply whose events, or whose whole `body`, are translated."""

    def __init__(
        self, reply: Reply, translation: Translation, version: Version, limit: int, *, body: bytes | None = None
    ) -> None:
        self.status = reply.status
        self.headers: RawHeaders = end_to_end(reply.headers, OF_THE_BYTES)
        if body is not None:
            self.headers.append((b"content-length", b"%d" % len(body)))
        #: Every byte was read.
        self.exhausted = False
        self._reply = reply
        self._translation = translation
        self._version = version
        self._limit = limit
        self._body = body
        self._events = EventReader()

    def take(self) -> bytes:
        """What is there without waiting: nothing."""
        return b""

    async def read(self) -> bytes:
        """The next bytes of the body; b"" after the last.

        Raises:
            UpstreamBroken: the connection was lost inside the body, or an event cannot be read.
        """
        if self._body is not None:
            self.exhausted, body, self._body = True, self._body, b""
            return body
        while not self.exhausted:
            events = self._translated(await self._reply.read())
            if self._reply.exhausted:
                events += self._events.rest
                self.exhausted = True
            if events:
                return events
        return b""

    def _translated(self, chunk: bytes) -> bytes:
        try:
            version = self._version()
            events = [self._translation.event(Event.read(raw), version) for raw in self._events.feed(chunk)]
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
        parts = []
        while chunk := await self.read():
            parts.append(chunk)
            if sum(map(len, parts)) > limit:
                raise UpstreamInvalidResponse(f"the reply is longer than {limit} bytes")
        return b"".join(parts)

    def close(self) -> None:
        """As `Reply.close`."""
        self._reply.close()

"""Relay replies, whole and streamed, and take the rows out of them on the way.

A client that asked for the rows itself gets every byte as the worker sent it; for other clients they are cut out. In
both cases an answer's rows are delivered before the end of the answer is sent. The string of rows is never collected.
"""

from __future__ import annotations

import orjson

from middleware_hub.routed_experts.capture import Capture
from middleware_hub.routed_experts.errors import RowsMissing
from miles_router.engines.answers import UnreadableAnswer
from miles_router.engines.extraction import Extractor
from miles_router.engines.rows import RowAnswer, RowReader
from miles_router.errors import UpstreamError
from miles_router.middlewares import Event, Kind, Send, Tap, first_header, write_event
from miles_router.middlewares.generation import UnreadCounter


class RowReply(Tap):
    """A relay that takes the rows out of one reply."""

    reads_pieces = True

    def __init__(self, capture: Capture, reader: RowReader, send: Send, metrics: UnreadCounter) -> None:
        super().__init__(send, metrics)
        self.layer = capture.fields.kind.name
        self._capture = capture
        self._reader = reader
        self._extractor = Extractor(capture.fields.rows, capture.decoder)

    async def begun(self) -> None:
        """Prepare for a reply. The head of a stream is sent at once."""
        self.holds_head = self.kind is Kind.JSON
        await self._capture.begin()

    def unread(self, reason: str) -> None:
        """Handle a reply that cannot be read.

        Raises:
            RowsMissing: the reply is compressed, and rows are required.
            UpstreamError: the reply is too large, and parts of it have been changed already.
        """
        super().unread(reason)
        if reason == "content_encoding":
            encoding = first_header(self.start["headers"], b"content-encoding") or b""
            self._capture.unread(encoding.decode("latin-1"))
        elif reason == "too_large":
            raise UpstreamError(f"the worker's answer has over {self.max_collected} bytes besides its rows")

    def _take_answers(self, remains: bytes) -> None:
        """Take the rows of every answer in a whole reply.

        Raises:
            RowsMissing: rows are required and missing.
            UpstreamError: the reply has rows, but is not an answer of the engine.
        """
        try:
            answers = self._reader.answers(orjson.loads(remains))
        except (orjson.JSONDecodeError, UnreadableAnswer) as error:
            if self._extractor.consumers:
                raise UpstreamError(f"the worker's answer has rows and cannot be read: {error!r}") from None
            return
        for answer in answers:
            if not self._take_rows(answer):
                self._capture.missing(answer.meta, aborted=answer.aborted)

    def _take_event(self, event: Event) -> None:
        """Take the rows of an event, if it has any; raise the same errors as `_take_answers`."""
        has_rows = self._extractor.has_marks(event.raw)
        try:
            answer = self._reader.event(event, has_rows=has_rows)
        except UnreadableAnswer as error:
            if has_rows:
                raise UpstreamError(f"the worker's event has rows and cannot be read: {error!r}") from None
            return
        if answer is not None and not self._take_rows(answer) and answer.ended:
            self._capture.missing(answer.meta, aborted=answer.aborted)

    def _take_rows(self, answer: RowAnswer) -> bool:
        decoder = self._extractor.consumer_of(self._capture.fields.of(answer.meta))
        if decoder is not None:
            self._capture.take(answer.place, decoder, answer.meta)
        return decoder is not None

    def _error_event(self, error: RowsMissing) -> bytes:
        """Return an error as an event of a stream, in the engine's form, to send in place of the last event."""
        return write_event(error.body(self._capture.exchange.request_id))


class StrippedReply(RowReply):
    """The reply to a client that did not ask for rows: they are cut out."""

    async def piece(self, data: bytes, *, more: bool) -> bytes:
        """Return the chunk without strings of ids."""
        remains = self._extractor.feed(data)
        return remains if more else remains + self._extractor.end()

    async def whole(self, body: bytes) -> bytes:
        """Deliver the rows of all answers; return the body without their fields."""
        self._take_answers(body)
        return self._extractor.without_marks(body)

    async def event(self, event: Event) -> bytes:
        """Deliver the rows of an event; return the event without their field."""
        try:
            self._take_event(event)
        except RowsMissing as error:
            await self.finish(self._error_event(error))
            return b""
        return self._extractor.without_marks(event.raw)

    async def ended(self) -> bytes:
        """Return the bytes after the last event, without rows."""
        return self._extractor.without_marks(self.events.release())


class VerbatimReply(RowReply):
    """The reply to a client that asked for rows itself: its bytes are not changed.

    They are sent as soon as it is certain that the answer has rows. The copy without rows is parsed on the side.
    """

    def __init__(self, capture: Capture, reader: RowReader, send: Send, metrics: UnreadCounter) -> None:
        super().__init__(capture, reader, send, metrics)
        self._remains: list[bytes] = []
        self._length = 0  # of the copy without rows
        self._waiting: list[bytes] = []  # bytes not sent to the client yet
        self._rows_found = False  # rows were found in the current event

    async def begun(self) -> None:
        await super().begun()
        self.same_length = self.kind is Kind.JSON  # a stream may end with an error event of the router

    async def piece(self, data: bytes, *, more: bool) -> bytes:
        """Return the bytes that may be sent now."""
        self._waiting.append(data)
        strings = len(self._extractor.consumers)
        remains = self._extractor.feed(data)
        if not more:
            remains += self._extractor.end()
        if self.kind is Kind.JSON:
            return self._json_piece(remains, more=more)
        for raw in self.events.feed(remains):
            self._rows_found = False
            try:
                self._take_event(Event.read(raw))
            except RowsMissing as error:
                await self._fail(error, raw)
                return b""
        if self.events.pending > self.max_collected:
            self.unread("too_large")
        if len(self._extractor.consumers) > strings and not self._rows_found:
            self._rows_found = self._extractor.has_marks(self.events.rest)
        # Send the beginning of an event only if its end can follow: rows were found in it, or the event is complete.
        return self._take_waiting(0 if self._rows_found or not more else self.events.pending + self._extractor.pending)

    def _json_piece(self, remains: bytes, *, more: bool) -> bytes:
        """Return the bytes to send. Hold all back until it is certain that this worker sends rows."""
        self._remains.append(remains)
        self._length += len(remains)
        if self._length > self.max_collected:
            self.unread("too_large")
        if not more:
            self._take_answers(b"".join(self._remains))
        return self._take_waiting() if self._extractor.consumers or not more else b""

    async def _fail(self, error: RowsMissing, raw: bytes) -> None:
        """Send an error event in place of an event.

        Raises:
            RowsMissing: the client already has a part of the event, so that no error event can be sent.
        """
        waiting = b"".join(self._waiting)
        place = waiting.find(raw)
        if place < 0:
            raise error
        await self.finish(waiting[:place] + self._error_event(error))

    def _take_waiting(self, withheld: int = 0) -> bytes:
        """Return the waiting bytes, except for the last `withheld` ones."""
        waiting = b"".join(self._waiting)
        if not withheld:
            self._waiting = []
            return waiting
        place = len(waiting) - withheld
        self._waiting = [waiting[place:]]
        return waiting[:place]

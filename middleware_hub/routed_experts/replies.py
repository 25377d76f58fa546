"""Replies on their way to the client, whole and streamed, with the rows taken out of them as they go by.

A client that asked for the rows itself gets every byte as the worker sent it; for all others they are cut out. Either
way an answer's rows are where they belong before its end goes on, and the string of them is never collected.
"""

from __future__ import annotations

import orjson

from middleware_hub.routed_experts.capture import Capture
from middleware_hub.routed_experts.errors import RowsMissing
from miles_router.engines.answers import UnreadableAnswer
from miles_router.engines.extraction import Extractor
from miles_router.engines.rows import RowAnswer, RowReader
from miles_router.errors import UpstreamInvalidResponse
from miles_router.middlewares import Event, Kind, Send, Tap, first_header, write_event
from miles_router.middlewares.generation import UnreadCounter


class RowReply(Tap):
    """Takes the rows out of one reply."""

    reads_pieces = True

    def __init__(self, capture: Capture, reader: RowReader, send: Send, metrics: UnreadCounter) -> None:
        super().__init__(send, metrics)
        self.layer = capture.fields.kind.name
        self._capture = capture
        self._reader = reader
        self._extractor = Extractor(capture.fields.rows, capture.decoder)

    async def begun(self) -> None:
        """A worker has begun its answer. A stream's head goes on at once."""
        self.holds_head = self.kind is Kind.JSON
        await self._capture.begin()

    def unread(self, reason: str) -> None:
        """A reply that cannot be read.

        Raises:
            RowsMissing: it is compressed, and rows are required.
            UpstreamInvalidResponse: it is too large, and has been changed already.
        """
        super().unread(reason)
        if reason == "content_encoding":
            encoding = first_header(self.start["headers"], b"content-encoding") or b""
            self._capture.unread(encoding.decode("latin-1"))
        elif reason == "too_large":
            raise UpstreamInvalidResponse(f"the worker's answer has over {self.max_collected} bytes beside its rows")

    def _take_answers(self, remains: bytes) -> None:
        """Take the rows of every answer in a whole reply.

        Raises:
            RowsMissing: they are required, and not there.
            UpstreamInvalidResponse: there were some, in what is none of the engine's answers.
        """
        try:
            answers = self._reader.answers(orjson.loads(remains))
        except (orjson.JSONDecodeError, UnreadableAnswer) as error:
            if self._extractor.consumers:
                raise UpstreamInvalidResponse(f"the worker's answer is none of the engine's: {error!r}") from None
            return
        for answer in answers:
            if not self._take_rows(answer):
                self._capture.missing(answer.meta, aborted=answer.aborted)

    def _take_event(self, event: Event) -> None:
        """Take the rows of an event, if there are some; raises as `_take_answers`."""
        has_rows = self._extractor.has_marks(event.raw)
        try:
            answer = self._reader.event(event, has_rows=has_rows)
        except UnreadableAnswer as error:
            if has_rows:
                raise UpstreamInvalidResponse(f"the worker's event is none of the engine's: {error!r}") from None
            return
        if answer is not None and not self._take_rows(answer) and answer.ended:
            self._capture.missing(answer.meta, aborted=answer.aborted)

    def _take_rows(self, answer: RowAnswer) -> bool:
        decoder = self._extractor.consumer_of(self._capture.fields.of(answer.meta))
        if decoder is not None:
            self._capture.take(answer.place, decoder, answer.meta)
        return decoder is not None

    def _error_event(self, error: RowsMissing) -> bytes:
        """An error inside a stream, as an engine tells one, in place of what looks like an end."""
        return write_event(error.body(self._capture.exchange.request_id))


class StrippedReply(RowReply):
    """The reply to a client that did not ask for rows: they are cut out."""

    async def piece(self, data: bytes, *, more: bool) -> bytes:
        """What remains without the strings of ids."""
        remains = self._extractor.feed(data)
        return remains if more else remains + self._extractor.end()

    async def whole(self, body: bytes) -> bytes:
        """The answers without their fields."""
        self._take_answers(body)
        return self._extractor.without_marks(body)

    async def event(self, event: Event) -> bytes:
        """The event without its field."""
        try:
            self._take_event(event)
        except RowsMissing as error:
            await self.finish(self._error_event(error))
            return b""
        return self._extractor.without_marks(event.raw)

    async def ended(self) -> bytes:
        """What came behind the last event goes on as it is."""
        return self._extractor.without_marks(self.events.release())


class VerbatimReply(RowReply):
    """The reply to a client that asked for rows itself: its bytes go on as they came, as soon as it is clear that rows
    are there. What remains without them is looked at beside."""

    def __init__(self, capture: Capture, reader: RowReader, send: Send, metrics: UnreadCounter) -> None:
        super().__init__(capture, reader, send, metrics)
        self._remains: list[bytes] = []
        self._length = 0  # of what remains
        self._waiting: list[bytes] = []  # of what the client gets
        self._clear = False  # rows are taken out of the event that has begun

    async def begun(self) -> None:
        """A worker has begun its answer."""
        await super().begun()
        self.same_length = self.kind is Kind.JSON  # a stream may end with an error of ours

    async def piece(self, data: bytes, *, more: bool) -> bytes:
        """The bytes that may go on now."""
        self._waiting.append(data)
        strings = len(self._extractor.consumers)
        remains = self._extractor.feed(data)
        if not more:
            remains += self._extractor.end()
        if self.kind is Kind.JSON:
            return self._whole_piece(remains, more=more)
        for raw in self.events.feed(remains):
            self._clear = False
            try:
                self._take_event(Event.read(raw))
            except RowsMissing as error:
                await self._fail(error, raw)
                return b""
        if self.events.pending > self.max_collected:
            self.unread("too_large")
        if len(self._extractor.consumers) > strings and not self._clear:
            self._clear = self._extractor.has_marks(self.events.rest)
        # An event is not begun before it is clear that it can be ended: ids are taken out of it, or it is whole.
        return self._release(0 if self._clear or not more else self.events.pending + self._extractor.pending)

    def _whole_piece(self, remains: bytes, *, more: bool) -> bytes:
        """Nothing goes on before it is clear that this worker has rows."""
        self._remains.append(remains)
        self._length += len(remains)
        if self._length > self.max_collected:
            self.unread("too_large")
        if not more:
            self._take_answers(b"".join(self._remains))
        return self._release() if self._extractor.consumers or not more else b""

    async def _fail(self, error: RowsMissing, raw: bytes) -> None:
        """Give an error in place of an event.

        Raises:
            RowsMissing: the client has some of this event, and an error cannot stand within it.
        """
        waiting = b"".join(self._waiting)
        place = waiting.find(raw)
        if place < 0:
            raise error
        await self.finish(waiting[:place] + self._error_event(error))

    def _release(self, withheld: int = 0) -> bytes:
        """All that waits but its last bytes."""
        waiting = b"".join(self._waiting)
        if not withheld:
            self._waiting = []
            return waiting
        place = len(waiting) - withheld
        self._waiting = [waiting[place:]]
        return waiting[:place]

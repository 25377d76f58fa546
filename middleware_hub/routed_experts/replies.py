"""Answers on their way to the client, whole and streamed, with the expert ids taken out of them as they go by.

A client that asked for the field itself gets every byte as the worker sent it; for all others it is cut out. Either way
an answer's ids are where they belong before its end goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from middleware_hub.routed_experts.capture import ABORT, FIELD, Capture
from middleware_hub.routed_experts.errors import ExpertsMissing
from middleware_hub.routed_experts.extraction import NAME, Extractor, without_marks
from miles_router.asgi.exchange import Message, Send
from miles_router.engines.events import DATA, DONE, END, EventReader
from miles_router.errors import UpstreamInvalidResponse

OK = 200
JSON, EVENTS = b"application/json", b"text/event-stream"
#: What an event of `/generate` has that is not the last of its generation.
RUNNING = b'"finish_reason":null'
ABORTED = b'"finish_reason":"abort"'
#: How the event begins that tells of an error.
ERROR = b'{"error"'
MALFORMED = (KeyError, TypeError, IndexError, AttributeError, ValueError)


class Reply:
    """Stands between a worker's reply and the client; what is no answer passes untouched."""

    def __init__(self, capture: Capture, send: Send, *, native: bool) -> None:
        self._capture = capture
        self._send = send
        self._native = native
        self._answer: Whole | Stream | None = None

    async def send(self, message: Message) -> None:
        """The `send` for the inner app."""
        if message["type"] == "http.response.start":
            headers = dict(message["headers"])
            kind = headers.get(b"content-type", b"")
            if message["status"] == OK and b"content-encoding" not in headers:
                if kind.startswith(JSON):
                    self._answer = Whole(self._capture, self._send, message, native=self._native)
                    return
                if kind.startswith(EVENTS):
                    self._answer = Stream(self._capture, self._send, native=self._native)
                    message = _without_length(message)
            await self._send(message)
        elif self._answer is None:
            await self._send(message)
        else:
            await self._answer.body(message.get("body", b""), more=message.get("more_body", False))


def _without_length(start: Message) -> Message:
    return {**start, "headers": [pair for pair in start["headers"] if pair[0] != b"content-length"]}


class Whole:
    """One JSON answer, or a list of them."""

    def __init__(self, capture: Capture, send: Send, start: Message, *, native: bool) -> None:
        self._capture = capture
        self._send = send
        self._start: Message | None = start
        self._native = native
        self._extractor = Extractor(capture.decoder)
        self._remains: list[bytes] = []
        self._waiting: list[bytes] = []  # of what the client gets as it is

    async def body(self, data: bytes, *, more: bool) -> None:
        """A piece of the worker's answer."""
        self._remains.append(self._extractor.feed(data))
        if not more:
            self._remains.append(self._extractor.end())
            self._take(remains := b"".join(self._remains))
            if not self._capture.asked.wanted:
                await self._give(without_marks(remains) if self._extractor.found else remains)
                return
        if self._capture.asked.wanted:
            self._waiting.append(data)
            if self._extractor.found or not more:  # nothing goes out before it is clear that this worker has them
                await self._pass_on(more=more)

    async def _give(self, body: bytes) -> None:
        assert self._start is not None
        start = _without_length(self._start)
        start["headers"].append((b"content-length", str(len(body)).encode("ascii")))
        await self._send(start)
        await self._send({"type": "http.response.body", "body": body})

    async def _pass_on(self, *, more: bool) -> None:
        if self._start is not None:
            await self._send(self._start)
            self._start = None
        waiting, self._waiting = self._waiting, []
        for place, data in enumerate(waiting):
            await self._send(
                {"type": "http.response.body", "body": data, "more_body": more or place < len(waiting) - 1}
            )

    def _take(self, remains: bytes) -> None:
        """Every answer's ids.

        Raises:
            ExpertsMissing: required, and not there.
            UpstreamInvalidResponse: there were some, in what is no JSON.
        """
        try:
            found = (_of_generate if self._native else _of_chat)(orjson.loads(remains))
            metas = [(place, meta, (meta.get("finish_reason") or {}).get("type")) for place, meta in found]
        except MALFORMED as error:
            if self._extractor.found:
                raise UpstreamInvalidResponse(f"the worker's answer is none of the engine's: {error!r}") from None
            return
        for place, meta, finish in metas:
            decoder = self._extractor.taken(meta.get(FIELD))
            if decoder is not None:
                self._capture.take(place, decoder, meta)
            else:
                self._capture.missing(meta, aborted=finish == ABORT)


def _of_generate(parsed: Any) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Each answer's `meta_info`."""
    answers = parsed if isinstance(parsed, list) else [parsed]
    for place, answer in enumerate(answers):
        yield place, answer["meta_info"]


def _of_chat(parsed: Any) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Each choice's `meta_info`; of an answer without, its own extension, which is about the first choice."""
    choices = parsed["choices"]
    if all(choice.get("meta_info") is None for choice in choices):
        aborted = choices[0].get("finish_reason") == ABORT
        yield 0, {**(parsed.get("sglext") or {}), "finish_reason": {"type": ABORT} if aborted else None}
        return
    for choice in choices:
        yield choice["index"], choice["meta_info"]


class Stream:
    """Server-sent events. The last one of each generation of `/generate`, or one behind the last of a chat, has ids."""

    def __init__(self, capture: Capture, send: Send, *, native: bool) -> None:
        self._capture = capture
        self._send = send
        self._native = native
        self._extractor = Extractor(capture.decoder)
        self._events = EventReader()
        self._waiting = b""
        self._taken = 0  # values of events that are complete
        self._aborted = False
        self._failed = False  # by the engine's own word
        self._ended = False

    async def body(self, data: bytes, *, more: bool) -> None:
        """A piece of the worker's stream."""
        if self._ended:
            return
        shown: list[bytes] = []
        for event in self._events.feed(self._extractor.feed(data)):
            try:
                shown.append(self._event(event))
            except ExpertsMissing as error:
                before = b"".join(shown)
                if self._capture.asked.wanted:
                    came = self._waiting + data
                    before = came[: max(came.find(event), 0)]
                await self._fail(error, before)
                return
        if not self._capture.asked.wanted:
            if not more:
                shown += (self._events.rest, self._extractor.end())
            data = b"".join(shown)
        else:
            # An event is not begun before it is clear that it can be ended: ids are taken out of it, or it is whole.
            data = self._waiting + data
            clear = not more or len(self._extractor.found) > self._taken
            begun = 0 if clear else len(self._events.rest) + self._extractor.pending
            data, self._waiting = data[: len(data) - begun], data[len(data) - begun :]
        if data or not more:
            await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def _fail(self, error: ExpertsMissing, shown: bytes) -> None:
        """An error inside the stream, as SGLang tells one; nothing that looks like an end goes before it."""
        self._ended = True
        data = shown + DATA + orjson.dumps(error.body(self._capture.exchange.request_id)) + END
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    def _event(self, event: bytes) -> bytes:
        """Take the ids of an event; what is left of it."""
        if NAME in event and self._take(event):
            return without_marks(event)
        if not event.startswith(DATA):
            return event
        if self._native:
            if RUNNING not in event and not event.startswith(DONE, len(DATA)):
                self._last_without(event)
        elif event.startswith(DONE, len(DATA)):
            if not self._extractor.found and not self._failed:
                self._capture.missing({}, aborted=self._aborted)
        else:
            self._aborted = self._aborted or ABORTED in event
            self._failed = self._failed or event.startswith(ERROR, len(DATA))
        return event

    def _take(self, event: bytes) -> bool:
        """Take what was taken out of an event, if something was.

        Raises:
            UpstreamInvalidResponse: something was, and the event is none of the engine's.
        """
        at = event.find(DATA)  # behind the event's name, if it has one
        try:
            parsed = orjson.loads(event[at + len(DATA) :])
            place, meta = (parsed.get("index", 0), parsed["meta_info"]) if self._native else (0, parsed["sglext"])
            decoder = self._extractor.taken(meta.get(FIELD))
        except MALFORMED as error:
            if without_marks(event) == event:
                return False
            raise UpstreamInvalidResponse(f"the worker's event is none of the engine's: {error!r}") from None
        if decoder is not None:
            self._taken += 1
            self._capture.take(place, decoder, meta)
        return decoder is not None

    def _last_without(self, event: bytes) -> None:
        """The last event of a generation has come without ids; errors are none."""
        try:
            meta = orjson.loads(event[len(DATA) :])["meta_info"]
            finish = meta["finish_reason"]
        except MALFORMED:
            return
        if isinstance(finish, Mapping):  # however `RUNNING` is spelled
            self._capture.missing(meta, aborted=finish.get("type") == ABORT)

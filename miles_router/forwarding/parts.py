"""One request sent to a worker as several requests, and their answers joined into one reply."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from miles_router import tasks
from miles_router.asgi.wire import RawHeaders
from miles_router.engines.engine import Parts, Translation
from miles_router.engines.events import LAST_EVENT
from miles_router.errors import UpstreamError
from miles_router.forwarding.reply import Observer, Reply, read_whole
from miles_router.forwarding.translated import OK, HeldReply, RewrittenStream

PartReply = Reply | HeldReply | RewrittenStream
#: Sends one part. The second argument is True if it takes a `max_connections` slot. Only the first part takes one:
#: parts that wait for each other's slots would deadlock.
AskPart = Callable[[Translation, bool], Awaitable[PartReply]]


async def ask_parts(parts: Parts, ask: AskPart, limit: int) -> PartReply | MergedStream:
    """Send all parts at the same time, and join their replies into one. If a part is refused, return that refusal.

    Args:
        limit: maximum bytes of a complete answer.

    Raises:
        The first error of `ask`; the other parts are aborted.
        UpstreamError: the joined answer is longer than `limit`, or only some parts are streams.
    """
    replies: dict[int, PartReply] = {}

    async def ask_one(place: int, part: Translation) -> None:
        replies[place] = await ask(part, place == 0)

    answered: PartReply | MergedStream | None = None
    try:
        await tasks.together([ask_one(*each) for each in enumerate(parts.parts)], name="ask part")
        answered = await _join_replies([replies[place] for place in range(len(parts.parts))], limit)
        return answered
    finally:
        if not isinstance(answered, MergedStream):
            for reply in replies.values():
                if reply is not answered:
                    reply.close()


async def _join_replies(replies: Sequence[PartReply], limit: int) -> PartReply | MergedStream:
    refused = next((reply for reply in replies if reply.status != OK), None)
    if refused is not None:
        return refused
    streams = [reply for reply in replies if isinstance(reply, RewrittenStream)]
    if len(streams) == len(replies):
        return MergedStream(streams)
    if streams:
        raise UpstreamError("the worker streamed only some parts of the answer")
    bodies = [await reply.read_all(limit) for reply in replies]
    if sum(map(len, bodies)) > limit:
        raise UpstreamError(f"the reply is longer than {limit} bytes")
    return HeldReply(OK, replies[0].headers, [Parts.joined(bodies)])


class MergedStream:
    """Several streams merged into one: events in order of arrival, one end event."""

    #: Empty, because no stream's last bytes describe the merged reply (compare `Reply.end`).
    end = b""

    def __init__(self, streams: Sequence[RewrittenStream]) -> None:
        self.status = OK
        self.headers: RawHeaders = streams[0].headers
        #: True when every byte was read.
        self.exhausted = False
        self._streams = streams
        self._ended_streams = 0  # streams that sent their last event
        self._reading: dict[asyncio.Task[bytes], RewrittenStream] = {}
        self._idle_streams = [*streams]

    def observe(self, observer: Observer) -> None:
        """Show the first stream's pieces to `observer` (see `Reply.observe`)."""
        self._streams[0].observe(observer)

    def read_available(self) -> bytes:
        """Return b"": events are available only from `read`."""
        return b""

    async def read(self) -> bytes:
        """Wait for the next events and return them; b"" after the last.

        Raises:
            The errors of `RewrittenStream.read`.
        """
        while not self.exhausted:
            for stream in self._idle_streams:
                task = asyncio.get_running_loop().create_task(stream.read(), name="read part")
                self._reading[task] = stream
            self._idle_streams.clear()
            await asyncio.wait(self._reading, return_when=asyncio.FIRST_COMPLETED)
            events = self._collect_events()
            if not self._reading and not self._idle_streams:
                self.exhausted = True
                events += LAST_EVENT if self._ended_streams == len(self._streams) else b""
            if events:
                return events
        return b""

    def _collect_events(self) -> bytes:
        pieces = []
        for task in [each for each in self._reading if each.done()]:
            stream = self._reading.pop(task)
            piece = task.result()
            if not piece:
                continue
            self._idle_streams.append(stream)
            self._ended_streams += piece.endswith(LAST_EVENT)
            pieces.append(piece.removesuffix(LAST_EVENT))
        return b"".join(pieces)

    async def read_all(self, limit: int) -> bytes:
        """Read and return the rest of the body.

        Raises:
            UpstreamError: the rest is longer than `limit` bytes.
        """
        return await read_whole(self.read, limit)

    def close(self) -> None:
        """Close all streams."""
        for task in self._reading:
            task.cancel()
            task.add_done_callback(_retrieve_exception)
        for stream in self._streams:
            stream.close()


def _retrieve_exception(task: asyncio.Task[bytes]) -> None:
    """Mark the exception of a cancelled read as retrieved, or asyncio logs it."""
    if not task.cancelled():
        task.exception()

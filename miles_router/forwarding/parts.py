"""One request that a worker is asked in several parts, and their answers as one reply."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from miles_router import tasks
from miles_router.asgi.headers import RawHeaders
from miles_router.engines.engine import Parts, Translation
from miles_router.engines.events import LAST_EVENT
from miles_router.errors import UpstreamInvalidResponse
from miles_router.forwarding.reply import Look, Reply, read_whole
from miles_router.forwarding.translated import OK, HeldReply, RewrittenStream

PartReply = Reply | HeldReply | RewrittenStream
#: Asks one part; whether it takes a slot of the bound on connections. Only the first does: parts that wait for slots of
#: each other would never end.
AskPart = Callable[[Translation, bool], Awaitable[PartReply]]


async def ask_parts(parts: Parts, ask: AskPart, limit: int) -> PartReply | MergedStream:
    """Ask all parts at once and make one reply of theirs: the first refusal where there is one.

    Args:
        limit: the bytes of a whole answer.

    Raises:
        What `ask` raises for one of them: the others are broken off then.
    """
    replies: dict[int, PartReply] = {}

    async def ask_one(place: int, part: Translation) -> None:
        replies[place] = await ask(part, place == 0)

    answered: PartReply | MergedStream | None = None
    try:
        await tasks.together([ask_one(*each) for each in enumerate(parts.parts)], name="ask part")
        answered = await _joined([replies[place] for place in range(len(parts.parts))], limit)
        return answered
    finally:
        if not isinstance(answered, MergedStream):
            for reply in replies.values():
                if reply is not answered:
                    reply.close()


async def _joined(replies: Sequence[PartReply], limit: int) -> PartReply | MergedStream:
    refused = next((reply for reply in replies if reply.status != OK), None)
    if refused is not None:
        return refused
    streams = [reply for reply in replies if isinstance(reply, RewrittenStream)]
    if len(streams) == len(replies):
        return MergedStream(streams)
    if streams:
        raise UpstreamInvalidResponse("the worker streams some parts of an answer, and others not")
    bodies = [await reply.read_all(limit) for reply in replies]
    if sum(map(len, bodies)) > limit:
        raise UpstreamInvalidResponse(f"the reply is longer than {limit} bytes")
    return HeldReply(OK, replies[0].headers, [Parts.joined(bodies)])


class MergedStream:
    """Streams whose events go on as they come, with one end."""

    #: As `Reply.end`: nothing that is of the whole.
    end = b""

    def __init__(self, streams: Sequence[RewrittenStream]) -> None:
        self.status = OK
        self.headers: RawHeaders = streams[0].headers
        #: Every byte was read.
        self.exhausted = False
        self._streams = streams
        self._ended = 0  # by their last events
        self._reading: dict[asyncio.Task[bytes], RewrittenStream] = {}
        self._unread = [*streams]

    def show(self, look: Look) -> None:
        """As `Reply.show`, of the first."""
        self._streams[0].show(look)

    def take(self) -> bytes:
        """What is there without waiting: nothing."""
        return b""

    async def read(self) -> bytes:
        """The next events; b"" after the last.

        Raises:
            What `RewrittenStream.read` raises.
        """
        while not self.exhausted:
            for stream in self._unread:
                task = asyncio.get_running_loop().create_task(stream.read(), name="read part")
                self._reading[task] = stream
            self._unread.clear()
            await asyncio.wait(self._reading, return_when=asyncio.FIRST_COMPLETED)
            events = self._read()
            if not self._reading and not self._unread:
                self.exhausted = True
                events += LAST_EVENT if self._ended == len(self._streams) else b""
            if events:
                return events
        return b""

    def _read(self) -> bytes:
        pieces = []
        for task in [each for each in self._reading if each.done()]:
            stream = self._reading.pop(task)
            piece = task.result()
            if not piece:
                continue
            self._unread.append(stream)
            self._ended += piece.endswith(LAST_EVENT)
            pieces.append(piece.removesuffix(LAST_EVENT))
        return b"".join(pieces)

    async def read_all(self, limit: int) -> bytes:
        """The rest of the body.

        Raises:
            UpstreamInvalidResponse: it is longer than `limit` bytes.
        """
        return await read_whole(self.read, limit)

    def close(self) -> None:
        """As `Reply.close`, of all of them."""
        for task in self._reading:
            task.cancel()
            task.add_done_callback(_look_at)
        for stream in self._streams:
            stream.close()


def _look_at(task: asyncio.Task[bytes]) -> None:
    """Nobody else looks at the failure of what nobody reads any more."""
    if not task.cancelled():
        task.exception()

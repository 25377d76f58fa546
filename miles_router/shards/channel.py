"""Messages between a leader and a shard on one connection: questions with one answer each, in both directions.

A frame is two lengths (32 bits, big-endian), a JSON object and bytes. Messages that have to be followed in the order in
which they were sent are treated one after the other; all others at the same time.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import struct
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from miles_router import tasks
from miles_router.errors import RouterError

logger = logging.getLogger(__name__)

_LENGTHS = struct.Struct("!II")
#: Bytes of one frame's parts.
MAX_PART = 1 << 30
#: Bytes that may wait for the other side before what is only told is dropped, and before the connection is given up.
MAX_WAITING, MAX_UNREAD = 1 << 20, 1 << 28
#: In place of an answer: what was asked, and this process has failed over.
FAILED = "failed"

Fields = Mapping[str, Any]


class ChannelLost(Exception):
    """The other process has gone, or answers no more."""


class Message(NamedTuple):
    """What was asked, or answered."""

    fields: dict[str, Any]
    blob: bytes = b""


Handler = Callable[[Message], Awaitable["Message | None"]]


class Channel:
    """One connection. `run` reads it until it ends.

    Args:
        handlers: who answers which question.
        ordered: names of the questions that are answered one after the other.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        handlers: Mapping[str, Handler],
        ordered: frozenset[str] = frozenset(),
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._handlers = handlers
        self._ordered = ordered
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Message]] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self.lost = False

    async def run(self) -> None:
        """Read until the other side ends. Whoever waits for an answer is told then."""
        try:
            while True:
                message = await self._read()
                answers = message.fields.pop("answers", None)
                if answers is not None:
                    waiting = self._asked.get(answers)
                    if waiting is not None and not waiting.done():
                        waiting.set_result(message)
                elif message.fields["what"] in self._ordered:
                    await self._answer(message)
                else:
                    task = tasks.spawn(self._answer(message), name=f"answer {message.fields['what']}")
                    self._answering.add(task)
                    task.add_done_callback(self._answering.discard)
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            self.close()
            for task in tuple(self._answering):
                await tasks.cancelled(task)

    async def _read(self) -> Message:
        head, blob = _LENGTHS.unpack(await self._reader.readexactly(_LENGTHS.size))
        if max(head, blob) > MAX_PART:
            raise OSError(f"a frame of {head} and {blob} bytes")
        fields: dict[str, Any] = json.loads(await self._reader.readexactly(head))
        return Message(fields, await self._reader.readexactly(blob) if blob else b"")

    async def _answer(self, message: Message) -> None:
        number, what = message.fields.pop("number", None), message.fields.pop("what")
        frame = _frame({FAILED: what, "answers": number}, b"")
        try:
            fields, blob = await self._handlers[what](message) or Message({})
            frame = _frame({**fields, "answers": number}, blob)
        finally:  # whoever asked must not wait for what this process has failed over, and logs
            if number is not None and not self._gone:
                self._writer.writelines(frame)

    @property
    def _gone(self) -> bool:
        """Whether nothing can be written; a transport that has failed knows it before whoever reads."""
        return self.lost or self._writer.transport.is_closing()

    def tell(self, what: str, **fields: Any) -> None:
        """Say something that nobody answers; dropped where the other side does not read, for it is no order."""
        if not self._gone and self._writer.transport.get_write_buffer_size() <= MAX_WAITING:
            self._writer.writelines(_frame({**fields, "what": what}, b""))

    def order(self, what: str, blob: bytes = b"", **fields: Any) -> None:
        """Say what has to be followed. Where the other side reads nothing for too long, the channel is lost: it is told
        anew on the next one."""
        if self._gone:
            return
        if self._writer.transport.get_write_buffer_size() > MAX_UNREAD:
            logger.warning("channel_unread")
            self.close()
            return
        self._writer.writelines(_frame({**fields, "what": what}, blob))

    async def ask(self, what: str, blob: bytes = b"", **fields: Any) -> Message:
        """Ask something and wait for the answer.

        Raises:
            ChannelLost: none will come.
            RouterError: the other process has failed over it; its log says why.
        """
        if self._gone:
            raise ChannelLost(f"{what}: the channel is lost")
        number = next(self._numbers)
        self._asked[number] = waiting = asyncio.get_running_loop().create_future()
        try:
            self._writer.writelines(_frame({**fields, "what": what, "number": number}, blob))
            answer: Message = await waiting
            if FAILED in answer.fields:
                raise RouterError(f"another process of the router failed: {what}")
            return answer
        finally:
            del self._asked[number]

    def close(self) -> None:
        """End it; harmless when repeated."""
        if self.lost:
            return
        self.lost = True
        for waiting in self._asked.values():
            if not waiting.done():
                waiting.set_exception(ChannelLost("the channel was lost"))
        with suppress(OSError, RuntimeError):
            self._writer.transport.abort()


def _frame(fields: Fields, blob: bytes) -> tuple[bytes, ...]:
    text = json.dumps(fields).encode()
    head = _LENGTHS.pack(len(text), len(blob)) + text
    return (head, blob) if blob else (head,)

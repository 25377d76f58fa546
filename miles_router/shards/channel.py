"""Messages between a leader and a shard on one connection: requests and replies in both directions.

A frame is two lengths (32 bits, big-endian), a JSON object and bytes. Requests are handled concurrently. Messages
without a reply are handled one after the other, in the order sent.
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
from miles_router.shards.topology import clock

logger = logging.getLogger(__name__)

_LENGTHS = struct.Struct("!II")
#: The most bytes in either part of a frame.
MAX_PART = 1 << 30
#: Unsent bytes above which `try_send` drops messages, and above which `send` closes the connection.
MAX_UNSENT, MAX_QUEUED = 1 << 20, 1 << 28
#: The field of a reply that means: the handler in the other process raised an exception.
FAILED = "failed"

Fields = Mapping[str, Any]


class Message(NamedTuple):
    """The fields and bytes of a request or reply."""

    fields: dict[str, Any]
    blob: bytes = b""


Handler = Callable[[Message], Awaitable["Message | None"]]


class Channel:
    """One connection. `run` reads it until it ends.

    Args:
        handlers: by message type.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handlers: Mapping[str, Handler]
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._handlers = handlers
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[Message | None]] = {}
        self._handling: set[asyncio.Task[None]] = set()
        self.lost = False
        #: The time of the last message.
        self.heard_at = clock()

    async def run(self) -> None:
        """Read and handle messages until the connection ends. Pending `ask` calls then return None."""
        try:
            while True:
                message = await self._read()
                self.heard_at = clock()
                answers = message.fields.pop("answers", None)
                if answers is not None:
                    waiting = self._pending.get(answers)
                    if waiting is not None and not waiting.done():
                        waiting.set_result(message)
                elif "request" not in message.fields:
                    await self._handle(message)
                else:
                    task = tasks.spawn(self._handle(message), name=f"handle {message.fields['message_type']}")
                    self._handling.add(task)
                    task.add_done_callback(self._handling.discard)
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            self.close()
            for task in tuple(self._handling):
                await tasks.cancelled(task)

    async def _read(self) -> Message:
        head, blob = _LENGTHS.unpack(await self._reader.readexactly(_LENGTHS.size))
        if max(head, blob) > MAX_PART:
            raise OSError(f"a frame of {head} and {blob} bytes exceeds the limit of {MAX_PART} bytes a part")
        fields: dict[str, Any] = json.loads(await self._reader.readexactly(head))
        return Message(fields, await self._reader.readexactly(blob) if blob else b"")

    async def _handle(self, message: Message) -> None:
        number, message_type = message.fields.pop("request", None), message.fields.pop("message_type")
        frame = _frame({FAILED: message_type, "answers": number}, b"")
        try:
            fields, blob = await self._handlers[message_type](message) or Message({})
            frame = _frame({**fields, "answers": number}, blob)
        finally:  # the caller must get a reply even if the handler raised; this process logs the exception
            if number is not None and not self._gone:
                self._writer.writelines(frame)

    @property
    def _gone(self) -> bool:
        """Whether nothing can be written. A failed transport knows before its reader does."""
        return self.lost or self._writer.transport.is_closing()

    def try_send(self, message_type: str, **fields: Any) -> None:
        """Send a message without a reply. It is dropped while more than `MAX_UNSENT` bytes are unsent."""
        if not self._gone and self._writer.transport.get_write_buffer_size() <= MAX_UNSENT:
            self._writer.writelines(_frame({**fields, "message_type": message_type}, b""))

    def send(self, message_type: str, blob: bytes = b"", **fields: Any) -> None:
        """Send a message that must not be dropped.

        If more than `MAX_QUEUED` bytes are unsent, close the channel instead. The next connection sends the state
        again.
        """
        if self._gone:
            return
        if self._writer.transport.get_write_buffer_size() > MAX_QUEUED:
            logger.warning("shard_channel_stuck")
            self.close()
            return
        self._writer.writelines(_frame({**fields, "message_type": message_type}, blob))

    async def ask(self, message_type: str, blob: bytes = b"", **fields: Any) -> Message | None:
        """Send a request and return its reply, or None if the connection is lost before.

        Raises:
            RouterError: the handler in the other process failed; that process logs the reason.
        """
        if self._gone:
            return None
        number = next(self._numbers)
        self._pending[number] = waiting = asyncio.get_running_loop().create_future()
        try:
            self._writer.writelines(_frame({**fields, "message_type": message_type, "request": number}, blob))
            answer: Message | None = await waiting
            if answer is not None and FAILED in answer.fields:
                raise RouterError(
                    f"another process of the router failed to handle {message_type!r}; its log has the reason"
                )
            return answer
        finally:
            del self._pending[number]

    def close(self) -> None:
        """Close the connection and end pending `ask` calls. May be repeated."""
        if self.lost:
            return
        self.lost = True
        for waiting in self._pending.values():
            if not waiting.done():
                waiting.set_result(None)
        with suppress(OSError, RuntimeError):
            self._writer.transport.abort()


def _frame(fields: Fields, blob: bytes) -> tuple[bytes, ...]:
    text = json.dumps(fields).encode()
    head = _LENGTHS.pack(len(text), len(blob)) + text
    return (head, blob) if blob else (head,)

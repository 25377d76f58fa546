"""The reply to one turn: the relay of an attempt's stream up to the event that ends the answer, the sender, and the
repetition of recorded replies.

A request that repeats another with the same `X-Turn-Id` and body gets the recorded reply. A request with the same id
and another body is another step of that turn: harnesses ask the model several times in one turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from middleware_hub.openai_session.agent_apis.agent_api import ReplyWriter
from middleware_hub.openai_session.errors import UnusableAnswer
from middleware_hub.openai_session.sessions.replies import RecordedReply, RepeatKey
from middleware_hub.openai_session.sessions.session import Session
from middleware_hub.openai_session.turns.stream import TurnStream
from miles_router.engines.events import LAST_EVENT
from miles_router.errors import UpstreamBroken
from miles_router.middlewares import Event, Kind, Message, Receive, Send, Tap, Watch
from miles_router.middlewares.generation import Attempt, UnreadCounter

EVENT_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8")]
JSON = [(b"content-type", b"application/json")]


class ReplySender:
    """The sender of the reply to one turn.

    The end of the reply waits until the session is saved. The head of a reply that is not a stream waits too, so that a
    failure to save becomes an error status.

    Args:
        send: sends to the client.
        save: saves the session; awaited before the end of the reply. Raises StateError.
    """

    def __init__(self, send: Send, save: Callable[[], Awaitable[None]]) -> None:
        self._send = send
        self._save = save
        self._start: Message | None = None
        self._kept: list[bytes] | None = None
        self._is_open = False
        #: The headers of the reply; None before it begins.
        self.headers: list[tuple[bytes, bytes]] | None = None
        #: Called with the complete reply before its end is sent.
        self.when_complete: Callable[[RecordedReply], None] | None = None
        #: True if the client has disconnected: nothing is sent any more.
        self.client_left = False
        #: `recorded`: the turn is recorded. `repeatable`: its answer may also be sent again, because no disconnect of
        #: the client has cut it.
        self.recorded = self.repeatable = False

    def keep(self, when_complete: Callable[[RecordedReply], None]) -> None:
        """Keep the sent parts, and pass the complete reply to `when_complete` before its end is sent."""
        self._kept, self.when_complete = [], when_complete

    async def send(self, message: Message) -> None:
        """Send one ASGI message.

        Raises:
            StateError: the session cannot be saved.
        """
        if self.client_left:
            return
        if message["type"] == "http.response.start":
            self.headers = message["headers"]
            if message["status"] != 200:
                self._kept = None  # an error is not repeated
            if not _is_stream(message):
                self._start = message
                return
        elif not message.get("more_body"):
            await self._end(message)
            return
        else:
            if self._kept is not None:
                self._kept.append(message.get("body", b""))
            if self._start is not None:
                await self._begin()
        await self._send(message)

    async def send_once_begun(self, message: Message) -> None:
        """Send one ASGI message of an attempt, but only the head of the first attempt. Raises like `send`."""
        if message["type"] != "http.response.start" or self.headers is None:
            await self.send(message)

    async def send_part(self, data: bytes) -> None:
        """Send a part of the body; b"" sends nothing."""
        if data:
            await self.send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self, end: bytes, start: Message | None = None, *, stays_open: bool = False) -> None:
        """Save the session, then send the head if given, and the end of the body. Raises like `send`.

        Args:
            stays_open: leave closing the reply to `close`. After the close, `receive` reports a disconnect.
        """
        if start is not None:
            self.headers, self._start = start["headers"], start
        if not self.client_left:
            self._is_open = stays_open
            await self._end({"type": "http.response.body", "body": end, "more_body": stays_open})

    async def close(self) -> None:
        """Close a reply that `finish` left open."""
        if self._is_open and not self.client_left:
            await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _end(self, message: Message) -> None:
        if self._kept is not None and self.when_complete is not None:
            assert self.headers is not None
            headers = [pair for pair in self.headers if pair[0] != b"x-request-id"]
            self.when_complete(RecordedReply(headers, b"".join([*self._kept, message.get("body", b"")])))
        await self._save()
        await self._begin()
        await self._send(message)

    async def _begin(self) -> None:
        if self._start is not None:
            start, self._start = self._start, None
            await self._send(start)


def _is_stream(start: Message) -> bool:
    return any(name.lower() == b"content-type" and b"event-stream" in value for name, value in start["headers"])


@asynccontextmanager
async def run_or_repeat(
    session: Session,
    key: RepeatKey | None,
    receive: Receive,
    reply: ReplySender,
    account: Callable[[int], None],
) -> AsyncIterator[bool]:
    """Yield True if the turn must run, or send the reply of an earlier request with the same key and yield False.

    If the earlier request is still running, wait for its reply. A turn that failed or was not recorded may run again.

    Args:
        key: equal for a request and its repetitions; None if the request cannot be a repetition.
        account: called with the size in bytes of a reply that is kept.

    Raises:
        ClientDisconnected: the client disconnected while it waited.
    """
    if key is None:
        yield True
        return
    while (known := session.replies.get(key)) is not None:
        with Watch(receive):  # this may take long: end the request if the agent disconnects
            recorded = await asyncio.shield(known)
        if recorded is not None:
            await recorded.send_to(reply.send)
            yield False
            return
    future: asyncio.Future[RecordedReply | None] = asyncio.get_running_loop().create_future()
    session.replies[key], complete = future, None

    def keep(recorded: RecordedReply) -> None:
        nonlocal complete
        complete = recorded
        if reply.repeatable and key not in session.repeats:
            session.repeats[key] = recorded
            account(len(recorded.body))

    reply.keep(keep)
    try:
        yield True
    finally:
        reply.when_complete = None  # breaks the reference from the reply to the session
        given = complete if reply.repeatable or session.ending.status.is_forgotten else None
        if given is None:
            session.replies.pop(key, None)
        future.set_result(given)


class TurnTap(Tap):
    """The relay of a turn's stream, up to the event that ends its answer.

    Args:
        end: records the turn and ends the reply. Awaited once, unless a choice was cut: at the last event, or at the
            end of the stream. It must not wait longer: a worker may keep its connection busy for long behind the last
            event, and an agent may disconnect as soon as it has read that event.
        attempt: the attempt that the engine replies to; None if the turn cannot be resumed.
        begun: whether an earlier attempt has sent the head of the stream to the agent.
    """

    layer = "openai_sessions"

    def __init__(
        self,
        send: Send,
        metrics: UnreadCounter,
        stream: TurnStream,
        writer: ReplyWriter,
        end: Callable[[], Awaitable[None]],
        attempt: Attempt | None = None,
        *,
        begun: bool = False,
    ) -> None:
        super().__init__(send, metrics)
        self._begun = begun
        #: True if the worker did not answer with a stream although the agent already has the head of one.
        self.refused = False
        self._stream = stream
        self._writer = writer
        self._end = end
        self._attempt = attempt
        #: True if the turn was read to its end: further errors come from recording, not from the worker.
        self.has_ended = False

    def passes(self, start: Message) -> bool:
        """Return True for an error that is not JSON: it is relayed unchanged, because no agent API can format it.

        Raises:
            UpstreamBroken: the agent has the head of a stream, and this attempt is not one.
        """
        if self._attempt is not None:
            self._attempt.note_engine()
        if self._begun and not (start["status"] == 200 and self.kind is Kind.EVENTS):
            self.refused = True
            raise UpstreamBroken(
                f"the worker was lost, and the next one answered {start['status']} instead of a stream"
            )
        return start["status"] != 200 and self.kind is not Kind.JSON

    def unread(self, reason: str) -> None:
        """Refuse an answer that cannot be read, and let errors pass.

        Raises:
            UnusableAnswer: the status is 200.
        """
        super().unread(reason)
        if self.start["status"] == 200:
            raise UnusableAnswer(f"the worker's answer cannot be read: {reason}")

    async def whole(self, body: bytes) -> bytes:
        """Return an error of the engine in the format of the agent API.

        Raises:
            UnusableAnswer: the body is an answer, but not a stream of events.
        """
        if self.start["status"] == 200:
            raise UnusableAnswer("the worker's answer is not an event stream")
        return self._writer.write_refusal(body, self.start["status"])

    async def event(self, event: Event) -> bytes:
        """Return the bytes that the agent gets for an event."""
        self.keep(self._stream, len(event.raw), more=True)
        shown = self._stream.feed(event)
        if self._stream.undecided:
            shown += await self._show_aborts()
        if not event.is_last:
            return shown
        await self.give(shown)
        await self._finish_turn()
        return b""

    async def ended(self) -> None:
        """Finish the turn at the end of a stream.

        The agent gets `[DONE]` even if the worker did not send it. Bytes behind the last complete event are dropped.
        """
        if self._stream.cut_choices:
            await self._finish_turn()
            return
        if self.events.is_cut:
            self._stream.broken = "the worker's stream ended inside an event"
        else:
            self._stream.is_open = not self.events.rest.strip()
        if self._stream.cut_reason is None and not self._stream.ended_with_error:
            self._stream.feed(Event.read(LAST_EVENT))
        await self._finish_turn()

    async def _show_aborts(self) -> bytes:
        stream, attempt, shown = self._stream, self._attempt, []
        assert attempt is not None
        undecided, stream.undecided = stream.undecided, []
        for chunk, name in undecided:
            cut = await attempt.was_cut(chunk["choices"][0]["finish_reason"])
            if cut:
                await attempt.learn_engine()
            shown.append(stream.show_abort(chunk, name, cut=cut))
        return b"".join(shown)

    async def _finish_turn(self) -> None:
        await self.give_shown()
        self._finished = True  # further bytes are dropped
        if not self._stream.cut_choices:
            self.has_ended = True
            await self._end()

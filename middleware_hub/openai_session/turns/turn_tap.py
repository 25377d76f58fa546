"""The relay of one attempt's stream, up to what ends the answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from middleware_hub.openai_session.errors import UnusableAnswer
from middleware_hub.openai_session.faces.face import ReplyWriter
from middleware_hub.openai_session.turns.stream import TurnStream
from miles_router.engines.events import LAST_EVENT
from miles_router.errors import UpstreamBroken
from miles_router.middlewares import Event, Kind, Message, Send, Tap
from miles_router.middlewares.generation import Attempt, UnreadCounter


class TurnTap(Tap):
    """Relays the stream of a turn up to what ends its answer.

    Args:
        end: awaited once, at the last event or the stream's end, unless a choice was cut: records the turn, and ends
            the reply. A worker may keep its connection busy for long behind the last event, and an agent may leave as
            soon as it has read it.
        attempt: the request that this is the reply to; None where nothing is carried on.
        begun: whether the agent has the head of a stream, of an attempt before this one.
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
        #: Whether what this attempt was answered is no stream, and the agent has the head of one.
        self.refused = False
        self._stream = stream
        self._writer = writer
        self._end = end
        self._attempt = attempt
        #: Whether the turn was read to its end: errors are those of its record, and not the worker's.
        self.has_ended = False

    def passes(self, start: Message) -> bool:
        """A refusal that is no JSON, which has no form of an API's."""
        if self._attempt is not None:
            self._attempt.note_engine()
        if self._begun and not (start["status"] == 200 and self.kind is Kind.EVENTS):
            self.refused = True
            raise UpstreamBroken(f"the worker was lost, and the next one answered {start['status']}, and no stream")
        return start["status"] != 200 and self.kind is not Kind.JSON

    def unread(self, reason: str) -> None:
        """An answer that cannot be read is not given either.

        Raises:
            UnusableAnswer: always, but for refusals.
        """
        super().unread(reason)
        if self.start["status"] == 200:
            raise UnusableAnswer(f"the worker's answer cannot be read: {reason}")

    async def whole(self, body: bytes) -> bytes:
        """A refusal.

        Raises:
            UnusableAnswer: it is an answer, and no stream of events.
        """
        if self.start["status"] == 200:
            raise UnusableAnswer("the worker's answer is no stream of events")
        return self._writer.write_refusal(body, self.start["status"])

    async def event(self, event: Event) -> bytes:
        """Return what the agent is shown of an event."""
        self.keep(self._stream, len(event.raw), more=True)
        shown = self._stream.feed(event)
        if self._stream.undecided:
            shown += await self._decide()
        if not event.is_last:
            return shown
        await self.give(shown)
        await self._finish_turn()
        return b""

    async def ended(self) -> None:
        """Read the end of a stream. Where the worker has not said that it ends, the agent is told so all the same.
        Bytes behind the last whole event are the engine's own, and are not given."""
        if self._stream.cut_choices:
            await self._finish_turn()
            return
        if self.events.is_cut:
            self._stream.broken = "the worker's stream ended inside an event"
        else:
            self._stream.is_open = not self.events.rest.strip()
        if self._stream.cut is None and not self._stream.told_error:
            self._stream.feed(Event.read(LAST_EVENT))
        await self._finish_turn()

    async def _decide(self) -> bytes:
        stream, attempt, shown = self._stream, self._attempt, []
        assert attempt is not None
        undecided, stream.undecided = stream.undecided, []
        for chunk, name in undecided:
            cut = await attempt.was_cut(chunk["choices"][0]["finish_reason"])
            if cut:
                await attempt.learn_engine()
            shown.append(stream.decide(chunk, name, cut=cut))
        return b"".join(shown)

    async def _finish_turn(self) -> None:
        await self.give_shown()
        self._finished = True  # what still comes is dropped
        if not self._stream.cut_choices:
            self.has_ended = True
            await self._end()

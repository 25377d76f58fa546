"""The relay of one attempt's stream to the agent, up to the event that ends the answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from middleware_hub.openai_session.agent_apis.agent_api import ReplyWriter
from middleware_hub.openai_session.errors import UnusableAnswer
from middleware_hub.openai_session.turns.stream import TurnStream
from miles_router.engines.events import LAST_EVENT
from miles_router.errors import UpstreamBroken
from miles_router.middlewares import Event, Kind, Message, Send, Tap
from miles_router.middlewares.generation import Attempt, UnreadCounter


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

"""A turn whose answer is streamed: every chunk goes on as it comes, less what the agent did not ask for.

What ends the answer for the agent (its finish reasons, and all behind the last of them) waits until the turn is
recorded: an agent that knows that its turn has ended may ask for the next, or leave.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from middleware_hub.openai_session.errors import UnusableAnswer
from middleware_hub.openai_session.faces.face import ReplyWriter
from middleware_hub.openai_session.sessions.agent_request import AgentRequest
from middleware_hub.openai_session.turns.raw_turn import RawStream
from miles_router.engines.answers import INCOMPLETE, MALFORMED, UnreadableAnswer, in_words
from miles_router.engines.client_json import is_too_deep
from miles_router.engines.events import LAST_EVENT
from miles_router.engines.openai.chat_stream import OF_A_CHUNK, CallPlaces, GrowingMessage
from miles_router.engines.openai.choices import Choice, OpenAIEndpoint
from miles_router.engines.openai.held_deltas import HeldDelta
from miles_router.errors import RouterError
from miles_router.middlewares import Event, Kind, Message, Send, Tap, write_event
from miles_router.middlewares.generation import ChatTurn, UnreadCounter

#: The fact of a turn whose agent was shown other tool calls than the model wrote: how they differ.
SHOWN_OTHERWISE = "shown_otherwise"


class NamedChunk(NamedTuple):
    """A chunk as the agent asked for it, and the name of its event."""

    chunk: dict[str, Any]
    name: bytes


class TurnStream:
    """Reads a stream's events, gives what the agent is shown of them, and knows at the end what was sampled.

    Args:
        fields: the request as the engine is asked.
        version: tells the weight version of the worker that answers, as the router knows it now; chunks do not say it.
        carried: what the layers inside tell of choices that they carry on.
        raw: reads the stream's texts, where the engine does not.
    """

    def __init__(
        self,
        request: AgentRequest,
        fields: Mapping[str, Any],
        endpoint: OpenAIEndpoint,
        writer: ReplyWriter,
        version: Callable[[], str | None],
        carried: ChatTurn | None = None,
        raw: RawStream | None = None,
    ) -> None:
        #: Whether something was generated.
        self.began = False
        self.first_token_at: float | None = None
        #: Whether the engine itself says that it has the version that was noted throughout.
        self.by_engine = False
        self._fields = fields
        self._endpoint = endpoint
        self._chunk_events = endpoint.chunk_events
        self._writer = writer
        self._version = version
        self._carried = carried or ChatTurn()
        self._raw = raw
        self._growing = endpoint.growing()
        self._failure: UnreadableAnswer | None = None  # why it cannot be recorded, if an event says so
        self._told = False  # the engine says itself that there is no answer
        self._expected = request.choices
        self._calls: dict[int, HeldDelta] = {}
        self._places: dict[int, CallPlaces] = {}
        self._held_back: list[Event | NamedChunk] = []
        #: Why the stream cannot be whole, where its last event is not.
        self.broken: str | None = None
        #: Whether the stream has ended without `[DONE]`: what it does not tell may have been lost.
        self.is_open = False

    @property
    def versions(self) -> set[str]:
        """The weight versions that were noted."""
        return self._growing.versions

    def feed(self, event: Event) -> bytes:
        """What the agent is shown now of one event of the engine's; what ends its answer is kept for `release`."""
        if event.data and event.name in self._chunk_events and not event.is_last:
            try:
                return self._chunk(event)
            except UnreadableAnswer as error:
                self._failure = self._failure or error
                if error.reason != INCOMPLETE:  # its agent gets an error in the end, and nothing internal
                    self.began = True
                    return b""
        if not self._held_back and not event.is_last:
            return self._writer.other(event)
        self._held_back.append(event)
        return b""

    @property
    def told_error(self) -> bool:
        """Whether the engine itself ended it with an error."""
        return self._told

    @property
    def tokens(self) -> int:
        """Return the number of tokens of all choices that have come."""
        return self._growing.tokens

    @property
    def prompt_tokens(self) -> int | None:
        """Tokens of all prompts that the engine says it read; None where it does not say."""
        return self._growing.prompt_tokens

    @property
    def cut(self) -> str | None:
        """Why the stream has ended, and its answer has not; None where the answer has, where the engine says itself
        that there is none, and where what came is invalid."""
        ended = len(self._growing.ended & {*range(self._expected)})
        if self._told or (self._failure is not None and self._failure.reason != INCOMPLETE):
            return None
        if self.broken is not None or ended == self._expected:
            return self.broken
        return f"the worker's stream ended without a finish reason: {ended} of {self._expected} choices have one"

    def failed(self, error: RouterError) -> bytes:
        """Return what the agent is told in place of the end."""
        self._held_back.clear()
        body = {"error": {"message": str(error), "type": error.type, "code": error.status}}
        return self._writer.other(Event.read(write_event(body)))

    def release(self) -> bytes:
        """What was kept back."""
        held, self._held_back = self._held_back, []
        return b"".join(
            self._writer.other(each) if isinstance(each, Event) else self._writer.chunk(*each) for each in held
        )

    def complete(self, choice: Choice, deltas: Sequence[Mapping[str, Any]], *, cut: bool) -> None:
        """Show these deltas of tool calls before the finish reason of a choice, and add them to its message. The finish
        reason of an answer that was cut stays."""
        growing = GrowingMessage.of(choice.message)
        for delta in deltas:
            growing.add(delta)
        choice.message = growing.message()
        if not cut:
            choice.finish, choice.matched = "tool_calls", None
        for place, held in enumerate(self._held_back):
            if isinstance(held, Event):
                continue
            for each in held.chunk["choices"]:
                if each.get("index") == choice.index and each.get("finish_reason") is not None:
                    if not cut:
                        each["finish_reason"], each["matched_stop"] = choice.finish, choice.matched
                    head = {name: held.chunk[name] for name in OF_A_CHUNK if name in held.chunk}
                    blank = {**each, "finish_reason": None, "logprobs": None}
                    new = [{**head, "choices": [{**blank, "delta": delta}]} for delta in deltas]
                    self._held_back[place:place] = [NamedChunk(chunk, b"") for chunk in new]
                    return

    def choices(self) -> list[Choice]:
        """What was sampled.

        Raises:
            UnreadableAnswer: the stream did not tell it all.
        """
        if self._failure is not None:
            raise self._failure
        choices = self._growing.choices()
        for choice in choices:
            known = self._carried.versions.get(choice.index)
            if known is not None:
                choice.versions = known.runs
            source = "engine" if (self.by_engine if known is None else known.by_engine) else "router"
            choice.facts |= {"first_token_at": self.first_token_at, "versions": source}
            if self._raw is not None:
                choice.prompt = self._raw.prompt
                if choice.index in self._raw.unread:
                    choice.facts[SHOWN_OTHERWISE] = self._raw.unread[choice.index]
        return choices

    def _chunk(self, event: Event) -> bytes:
        chunk = event.parse()
        if chunk is None and _is_no_json(event.data):
            raise UnreadableAnswer("not_json", "a chunk that is none: it is no JSON, or has a number that JSON has not")
        if not isinstance(chunk, dict):
            raise UnreadableAnswer("incomplete", "a chunk that is none")
        if is_too_deep(event.data, chunk):
            raise UnreadableAnswer("incomplete", "a chunk is nested too deep")
        if "error" in chunk:
            self._told = True
            raise UnreadableAnswer("incomplete", "the stream ended with an error")
        choices = chunk.get("choices") or ()
        self.began = self.began or bool(choices)
        try:
            pieces = list(self._pieces(chunk, choices))
        except MALFORMED as error:
            raise UnreadableAnswer("incomplete", f"a chunk that is none: {in_words(error)}") from error
        return b"".join(self._shown(piece, event.name) for piece in pieces)

    def _pieces(self, chunk: dict[str, Any], choices: Sequence[Any]) -> Iterator[dict[str, Any]]:
        """A chunk, and what waited for it: of a tool call, the last delta waits."""
        if self._raw is not None:
            yield from self._raw.chunks(chunk)
            return
        if not self._calls and not any((choice.get("delta") or {}).get("tool_calls") for choice in choices):
            yield chunk
            return
        for choice in choices:
            held, one = self._calls.setdefault(choice.get("index"), HeldDelta()), {**chunk, "choices": [choice]}
            self._places.setdefault(choice.get("index"), CallPlaces()).number(choice.get("delta") or {})
            finish = choice.get("finish_reason")
            if choice.get("index") in self._carried.carried:
                yield from (*held.release(), one)
            else:
                yield from held.pieces(one) if finish is None else (*held.at_end(finish), one)
        if not choices:
            yield chunk

    def _shown(self, chunk: dict[str, Any], name: bytes) -> bytes:
        choices = chunk.get("choices") or ()
        if self._growing.add(chunk, self._version()):
            self.first_token_at = self.first_token_at or time.time()
        seen = self._endpoint.chunk_as_asked(chunk, self._fields)
        if seen is None:
            return b""
        if self._ends(choices):
            self._held_back.append(NamedChunk(seen, name))
            return b""
        return self._writer.chunk(seen, name)

    def _ends(self, choices: Sequence[Any]) -> bool:
        """Whether a chunk is part of an answer's end."""
        for choice in choices:
            if choice.get("finish_reason") is not None:
                return True
        return bool(self._held_back) and not choices


def _is_no_json(data: bytes) -> bool:
    """Return False for JSON that is nested too deep to read: such a chunk passes unrecorded, as others do."""
    try:
        orjson.loads(data)
    except orjson.JSONDecodeError as error:
        return not error.msg.startswith("depth limit exceeded")
    return False


class TurnTap(Tap):
    """Relays the stream of a turn up to what ends its answer.

    Args:
        end: awaited once, at the last event or the stream's end: records the turn, and ends the reply. A worker may
            keep its connection busy for long behind the last event, and an agent may leave as soon as it has read it.
    """

    layer = "openai_sessions"

    def __init__(
        self,
        send: Send,
        metrics: UnreadCounter,
        stream: TurnStream,
        writer: ReplyWriter,
        end: Callable[[], Awaitable[None]],
    ) -> None:
        super().__init__(send, metrics)
        self._stream = stream
        self._writer = writer
        self._end = end

    def passes(self, start: Message) -> bool:
        """A refusal that is no JSON, which has no form of an API's."""
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
        return self._writer.refusal(body, self.start["status"])

    async def event(self, event: Event) -> bytes:
        """Return what the agent is shown of an event."""
        self.keep(self._stream, len(event.raw), more=True)
        shown = self._stream.feed(event)
        if not event.is_last:
            return shown
        await self.give(shown)
        await self._finish_turn()
        return b""

    async def ended(self) -> None:
        """Read the end of a stream. Where the worker has not said that it ends, the agent is told so all the same.
        Bytes behind the last whole event are the engine's own, and are not given."""
        if self.events.is_cut:
            self._stream.broken = "the worker's stream ended inside an event"
        else:
            self._stream.is_open = not self.events.rest.strip()
        if self._stream.cut is None and not self._stream.told_error:
            self._stream.feed(Event.read(LAST_EVENT))
        await self._finish_turn()

    async def _finish_turn(self) -> None:
        await self.give_shown()
        self._finished = True  # what still comes is dropped
        await self._end()

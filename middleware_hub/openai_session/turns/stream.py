"""A turn whose answer is streamed: every chunk goes on as it comes, less what the agent did not ask for.

What ends the answer for the agent (its finish reasons, and all behind the last of them) waits until the turn is
recorded: an agent that knows that its turn has ended may ask for the next, or leave.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import methodcaller
from typing import Any, NamedTuple

from middleware_hub.openai_session.faces.face import ReplyWriter
from middleware_hub.openai_session.sessions.agent_request import AgentRequest
from middleware_hub.openai_session.turns.raw_turn import RawStream
from miles_router.engines.answers import INCOMPLETE, MALFORMED, UnreadableAnswer, in_words, is_abort
from miles_router.engines.events import LAST_EVENT
from miles_router.engines.generate import stop_strings
from miles_router.engines.openai.chat_stream import OF_A_CHUNK, CallPlaces, GrowingMessage
from miles_router.engines.openai.choices import Choice, GrowingChoices, OpenAIEndpoint, read_chunk
from miles_router.engines.openai.held_deltas import HeldDelta
from miles_router.errors import RouterError
from miles_router.middlewares import Event, write_event
from miles_router.middlewares.generation import ResumeServices

#: Fields of a delta that have text of the model.
TEXTS = ("content", "reasoning_content")
#: The fact of a turn whose agent was shown other tool calls than the model wrote: how they differ.
SHOWN_OTHERWISE = "shown_otherwise"


_FINISH = methodcaller("get", "finish_reason")


class NamedChunk(NamedTuple):
    """A chunk as the agent asked for it, and the name of its event."""

    chunk: dict[str, Any]
    name: bytes


class TurnStream:
    """Reads a stream's events, gives what the agent is shown of them, and knows at the end what was sampled.

    Args:
        fields: the request as the engine is asked.
        version: tells the weight version of the worker that answers, as the router knows it now; chunks do not say it.
        raw: reads the stream's texts, where the engine does not.
        resume: says what of a stream that is cut is carried on; None where nothing is.
    """

    def __init__(
        self,
        request: AgentRequest,
        fields: Mapping[str, Any],
        endpoint: OpenAIEndpoint,
        writer: ReplyWriter,
        version: Callable[[], str | None],
        raw: RawStream | None = None,
        resume: ResumeServices | None = None,
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
        self._raw = raw
        self._resume = resume
        self._stops = stop_strings(fields.get("stop")) if resume is not None else ()
        #: The choices as they grow.
        self.growing: GrowingChoices[Any] = endpoint.growing(may_be_cut=resume is not None)
        self._failure: UnreadableAnswer | None = None  # why it cannot be recorded, if an event says so
        #: Whether the engine itself ended it with an error.
        self.told_error = False
        self._expected = request.choices
        self._waits = resume is not None or raw is not None  # parts of chunks may wait, or are parsed here
        self._held: dict[int, HeldDelta] = {}
        self._places: dict[int, CallPlaces] = {}
        self._texts: dict[int, Mapping[str, str]] = {}  # the first text of each choice that may be carried on
        #: The chunks of aborts of which it is not known yet whether a pause made them.
        self.undecided: list[NamedChunk] = []
        #: The choices that were cut, each with its finish reason; None where the worker was lost. What the stream tells
        #: of its end is not shown then: the end of what is carried on tells it.
        self.cut_choices: dict[int, str | None] = {}
        #: Whether the weight versions of a choice that was carried on are all the engines' own word.
        self.carried_by_engine: dict[int, bool] = {}
        self._held_back: list[Event | NamedChunk] = []
        #: Why the stream cannot be whole, where its last event is not.
        self.broken: str | None = None
        #: Whether the stream has ended without `[DONE]`: what it does not tell may have been lost.
        self.is_open = False

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
        shown = self._release_held() if event.data else b""
        if not self._held_back and not event.is_last:
            return shown + self._writer.write_other(event)
        if not self.cut_choices:
            self._held_back.append(event)
        return shown

    @property
    def has_come(self) -> bool:
        """Return whether the stream has said something that another one would say again."""
        return self._failure is not None or bool(self.growing.growing)

    @property
    def cut(self) -> str | None:
        """Why the stream has ended, and its answer has not; None where the answer has, where the engine says itself
        that there is none, and where what came is invalid."""
        ended = len(self.growing.ended & {*range(self._expected)})
        if self.told_error or (self._failure is not None and self._failure.reason != INCOMPLETE):
            return None
        if self.broken is not None or ended == self._expected:
            return self.broken
        return f"the worker's stream ended without a finish reason: {ended} of {self._expected} choices have one"

    def failed(self, error: RouterError) -> bytes:
        """Return what the agent is told in place of the end."""
        shown = self._release_held()
        self._held_back.clear()
        body = {"error": {"message": str(error), "type": error.type, "code": error.status}}
        return shown + self._writer.write_other(Event.read(write_event(body)))

    def release(self) -> bytes:
        """What was kept back."""
        held, self._held_back = self._held_back, []
        return b"".join(
            self._writer.write_other(each) if isinstance(each, Event) else self._writer.write_chunk(*each)
            for each in held
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
        choices: list[Choice] = self.growing.choices()
        for choice in choices:
            source = "engine" if self.carried_by_engine.get(choice.index, self.by_engine) else "router"
            choice.facts |= {"first_token_at": self.first_token_at, "versions": source}
            if self._raw is not None:
                choice.prompt = self._raw.prompt
                if choice.index in self._raw.unread:
                    choice.facts[SHOWN_OTHERWISE] = self._raw.unread[choice.index]
        return choices

    def _chunk(self, event: Event) -> bytes:
        chunk = read_chunk(event)
        if "error" in chunk:
            self.told_error = True
            raise UnreadableAnswer("incomplete", "the stream ended with an error")
        choices = chunk.get("choices") or ()
        self.began = self.began or bool(choices)
        try:
            for choice in choices:
                self._waits = self._waits or bool((choice.get("delta") or {}).get("tool_calls"))
            if not self._waits:
                return self._shown(chunk, event.name)
            pieces = self._all_pieces(chunk, choices, event.name)
            return b"".join([self._shown(piece, event.name) for piece in pieces])
        except MALFORMED as error:
            raise UnreadableAnswer("incomplete", f"a chunk that is none: {in_words(error)}") from error

    def _all_pieces(self, chunk: dict[str, Any], choices: Sequence[Any], name: bytes) -> Sequence[dict[str, Any]]:
        try:
            return list(self._pieces(chunk, choices, name))
        except MALFORMED:
            if self._resume is None or self._raw is not None:
                raise
            self._resume = None  # what follows is nothing that can be carried on
            return [*(piece for held in self._held.values() for piece in held.release()), chunk]

    def _pieces(self, chunk: dict[str, Any], choices: Sequence[Any], name: bytes) -> Iterator[dict[str, Any]]:
        """Yield what is shown now of a chunk, and what waited for it: of a tool call, the last delta waits; of a choice
        that may be carried on, also what an engine shows at an abort alone."""
        if self._resume is None and self._raw is not None:
            yield from self._raw.chunks(chunk)
            return
        for choice in choices:
            yield from self._choice_pieces({**chunk, "choices": [choice]}, choice, name)
        if not choices:
            yield chunk

    def _choice_pieces(self, chunk: dict[str, Any], choice: Mapping[str, Any], name: bytes) -> Iterator[dict[str, Any]]:
        index: Any = choice.get("index")
        delta, finish = choice.get("delta") or {}, choice.get("finish_reason")
        held = self._held.get(index)
        if held is None:
            held = self._held[index] = self._new_held(index)
        if self._raw is None:
            self._places.setdefault(index, CallPlaces()).number(delta)
        if self._resume is not None:
            if finish is not None and is_abort(finish) and self._failure is None:
                self.undecided.append(NamedChunk(chunk, name))
                return
            if index not in self._texts and any(map(delta.get, TEXTS)):
                self._texts[index] = {text: delta[text] for text in TEXTS if delta.get(text)}
        pieces = held.pieces(chunk) if finish is None else [*held.at_end(finish), chunk]
        for piece in pieces:
            yield from (piece,) if self._raw is None else self._raw.chunks(piece)

    def _new_held(self, index: object) -> HeldDelta:
        if self._resume is None:
            return HeldDelta()
        if type(index) is not int or not 0 <= index < self._expected:
            raise TypeError("a choice that was not asked for")
        return HeldDelta(texts=True, stops=self._stops, told_only=self._resume.resume_lost)

    def _shown(self, chunk: dict[str, Any], name: bytes) -> bytes:
        if self.growing.add(chunk, self._version):
            self.first_token_at = self.first_token_at or time.time()
        if self.cut_choices and not chunk.get("choices"):
            return b""  # the end of what was carried on tells it
        return self._write(chunk, name)

    def _write(self, chunk: dict[str, Any], name: bytes) -> bytes:
        choices = chunk.get("choices") or ()
        seen = self._endpoint.chunk_as_asked(chunk, self._fields)
        if seen is None:
            return b""
        if any(map(_FINISH, choices)) or (self._held_back and not choices):  # part of an answer's end
            self._held_back.append(NamedChunk(seen, name))
            return b""
        return self._writer.write_chunk(seen, name)

    # Choices that are cut

    def decide(self, chunk: dict[str, Any], name: bytes, *, cut: bool) -> bytes:
        """Return what the agent is shown of an abort, now that it is known whether a pause made it."""
        choice = chunk["choices"][0]
        index, finish = choice["index"], choice["finish_reason"]
        blank = {each: value for each, value in chunk.items() if each not in ("sglext", "usage")}
        if cut:
            self._held[index].drop()
            self.cut_choices[index] = finish
            # It may be the first that is said of the choice.
            self.growing.add({**blank, "choices": [{"index": index, "delta": {}}]}, self._version)
            return b""
        try:
            return self._show_pieces([*self._held[index].at_end(finish), chunk], name)
        except (UnreadableAnswer, *MALFORMED) as error:
            unread = UnreadableAnswer("incomplete", f"a chunk that is none: {in_words(error)}")
            self._failure = self._failure or (error if isinstance(error, UnreadableAnswer) else unread)
            self._held_back.append(NamedChunk({**blank, "choices": [{**choice, "logprobs": None}]}, name))
            return b""

    def _show_pieces(self, pieces: Sequence[dict[str, Any]], name: bytes = b"") -> bytes:
        if self._raw is not None:
            pieces = [part for piece in pieces for part in self._raw.chunks(piece)]
        return b"".join(self._shown(piece, name) for piece in pieces)

    def _release_held(self) -> bytes:
        """Return what waited for a next chunk that does not come."""
        if self._resume is None or self.cut_choices:
            return b""
        try:
            return self._show_pieces([piece for held in self._held.values() for piece in held.release()])
        except (UnreadableAnswer, *MALFORMED):
            return b""  # of a stream that is unreadable

    def lose(self) -> bool:
        """Note that the worker was lost: choices without an end are cut. Return False where what has come is nothing to
        go on from."""
        if self._resume is None or self._failure is not None or not self.growing.growing:
            return False
        for index, choice in self.growing.growing.items():
            if choice.finish is None:
                self._held[index].drop()
                self.cut_choices[index] = None
        return True

    def shown(self, index: int) -> dict[str, Any]:
        """Return the message of a choice as far as it was shown; its text alone where it is parsed here. Raises one of
        `MALFORMED`."""
        if self._raw is not None:
            return {"role": "assistant", "content": self._raw.text(index)}
        message: dict[str, Any] = self.growing.growing[index].message.message()
        return message

    def begun(self, index: int) -> dict[str, Any]:
        """Return the same; while it has no text, the first text of the choice stands there, shown or held back: whether
        that is reasoning tells how the rest is read. Raises one of `MALFORMED`."""
        message = self.shown(index)
        return message if any(map(message.get, TEXTS)) else {**message, **self._texts.get(index, {})}

    def show(self, index: int, delta: Mapping[str, Any], **fields: Any) -> bytes:
        """Return what the agent is shown of a delta of a choice that is carried on.

        Args:
            fields: further fields of the chunk's choice.
        """
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": None,
            "matched_stop": None,
            **fields,
        }
        if fields.get("logprobs"):
            self.first_token_at = self.first_token_at or time.time()
        chunk = {**self.growing.envelope, "choices": [choice]}
        shown = []
        for piece in (chunk,) if self._raw is None else self._raw.chunks(chunk):
            (part,) = piece["choices"]
            self.growing.growing[index].see(part)
            shown.append(self._write(piece, b""))
        return b"".join(shown)

    def show_of_all(self, **fields: Any) -> None:
        """Show at the end what a chunk tells of all choices."""
        self._write({**self.growing.envelope, "choices": [], "usage": None, **fields}, b"")

    def end_carried(self) -> None:
        """Note that what was cut has ended."""
        self._held_back.append(Event.read(LAST_EVENT))

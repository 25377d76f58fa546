"""The reader of a streamed answer: it relays each chunk at once, without the fields that the agent did not ask for.

The end of the answer (finish reasons, and everything behind the last one) waits until the turn is recorded: an agent
that has seen the end may send its next request, or disconnect.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import methodcaller
from typing import Any, NamedTuple

from middleware_hub.openai_session.agent_apis.agent_api import ReplyWriter
from middleware_hub.openai_session.sessions.session import AgentRequest
from middleware_hub.openai_session.turns.raw_turn import RawStream
from miles_router.engines.answers import INCOMPLETE, MALFORMED, UnreadableAnswer, in_words, is_abort
from miles_router.engines.events import LAST_EVENT
from miles_router.engines.generate import stop_strings
from miles_router.engines.openai.chat_stream import CHUNK_FIELDS, CallIndices, GrowingMessage
from miles_router.engines.openai.choices import Choice, GrowingChoices, OpenAIEndpoint, read_chunk
from miles_router.engines.openai.held_deltas import HeldDelta
from miles_router.errors import RouterError
from miles_router.middlewares import Event, write_event
from miles_router.middlewares.generation import ResumeServices

#: Fields of a delta that contain the model's text.
TEXTS = ("content", "reasoning_content")
#: The fact of a turn whose agent saw other tool calls than the model wrote; its value tells how they differ.
SHOWN_OTHERWISE = "shown_otherwise"


_FINISH = methodcaller("get", "finish_reason")


class NamedChunk(NamedTuple):
    """A chunk in the form that the agent asked for, and the name of its event."""

    chunk: dict[str, Any]
    name: bytes


class TurnStream:
    """A reader of the engine's events: it returns the agent's bytes for each, and the sampled choices at the end.

    Args:
        fields: the request to the engine.
        version: returns the weight version of the answering worker, as the router knows it now; chunks do not have it.
        raw: parses the text of the stream; None if the engine parses it.
        resume: the services that resume a cut stream; None if it cannot be resumed.
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
        #: True after the first chunk with a choice.
        self.began = False
        self.first_token_at: float | None = None
        #: Whether the engine itself confirms the one weight version that the router noted.
        self.version_confirmed = False
        self._fields = fields
        self._endpoint = endpoint
        self._chunk_events = endpoint.chunk_events
        self._writer = writer
        self._version = version
        self._raw = raw
        self._resume = resume
        self._stops = stop_strings(fields.get("stop")) if resume is not None else ()
        #: The choices so far.
        self.growing: GrowingChoices[Any] = endpoint.growing(may_be_cut=resume is not None)
        self._failure: UnreadableAnswer | None = None  # the first reason why the stream cannot be recorded
        #: Whether the engine ended the stream with an error.
        self.ended_with_error = False
        self._expected = request.choices
        self._may_hold_parts = resume is not None or raw is not None  # parts of chunks may wait, or are parsed here
        self._held: dict[int, HeldDelta] = {}
        self._places: dict[int, CallIndices] = {}
        self._first_texts: dict[int, Mapping[str, str]] = {}  # the first text of each choice that can be resumed
        #: Aborts that may be cuts: it is not known yet whether a pause caused them.
        self.undecided: list[NamedChunk] = []
        #: The finish reason of each cut choice; None if the worker was lost. Once a choice is cut, the end of this
        #: stream is not shown: the resumed choices end the answer.
        self.cut_choices: dict[int, str | None] = {}
        #: For each resumed choice, whether the engines themselves confirm all its weight versions.
        self.resumed_confirmed: dict[int, bool] = {}
        self._answer_end: list[Event | NamedChunk] = []
        #: Why the stream is incomplete; None if its last event is complete.
        self.broken: str | None = None
        #: Whether the stream ended without `[DONE]`: missing data may be lost rather than never sent.
        self.is_open = False

    def feed(self, event: Event) -> bytes:
        """Return the bytes that the agent gets now for an event; the end of the answer waits for `release`."""
        if event.data and event.name in self._chunk_events and not event.is_last:
            try:
                return self._chunk(event)
            except UnreadableAnswer as error:
                self._failure = self._failure or error
                if error.reason != INCOMPLETE:  # the agent gets an error at the end, and not this chunk
                    self.began = True
                    return b""
        shown = self._release_held() if event.data else b""
        if not self._answer_end and not event.is_last:
            return shown + self._writer.write_other(event)
        if not self.cut_choices:
            self._answer_end.append(event)
        return shown

    @property
    def has_content(self) -> bool:
        """True if the stream has sent anything that a new stream would repeat."""
        return self._failure is not None or bool(self.growing.growing)

    @property
    def cut_reason(self) -> str | None:
        """The reason why a stream ended before its answer.

        None if the answer is complete, if the engine reported an error, or if the stream is invalid.
        """
        ended = len(self.growing.ended & {*range(self._expected)})
        if self.ended_with_error or (self._failure is not None and self._failure.reason != INCOMPLETE):
            return None
        if self.broken is not None or ended == self._expected:
            return self.broken
        return f"the worker's stream ended without a finish reason: {ended} of {self._expected} choices have one"

    def error_part(self, error: RouterError) -> bytes:
        """Return the bytes of an error in place of the answer's end."""
        shown = self._release_held()
        self._answer_end.clear()
        body = {"error": {"message": str(error), "type": error.type, "code": error.status}}
        return shown + self._writer.write_other(Event.read(write_event(body)))

    def release(self) -> bytes:
        """Return the bytes of the answer's end, which `feed` kept back."""
        held, self._answer_end = self._answer_end, []
        return b"".join(
            self._writer.write_other(each) if isinstance(each, Event) else self._writer.write_chunk(*each)
            for each in held
        )

    def add_calls(self, choice: Choice, deltas: Sequence[Mapping[str, Any]], *, cut: bool) -> None:
        """Insert deltas of tool calls before the finish reason of a choice, and add them to its message.

        Args:
            cut: whether the answer ended early: its finish reason then stays, else it becomes `tool_calls`.
        """
        growing = GrowingMessage.from_message(choice.message)
        for delta in deltas:
            growing.add(delta)
        choice.message = growing.message()
        if not cut:
            choice.finish, choice.matched = "tool_calls", None
        for place, held in enumerate(self._answer_end):
            if isinstance(held, Event):
                continue
            for each in held.chunk["choices"]:
                if each.get("index") == choice.index and each.get("finish_reason") is not None:
                    if not cut:
                        each["finish_reason"], each["matched_stop"] = choice.finish, choice.matched
                    head = {name: held.chunk[name] for name in CHUNK_FIELDS if name in held.chunk}
                    blank = {**each, "finish_reason": None, "logprobs": None}
                    new = [{**head, "choices": [{**blank, "delta": delta}]} for delta in deltas]
                    self._answer_end[place:place] = [NamedChunk(chunk, b"") for chunk in new]
                    return

    def choices(self) -> list[Choice]:
        """Return the sampled choices.

        Raises:
            UnreadableAnswer: the stream is invalid, or lacks data that recording needs.
        """
        if self._failure is not None:
            raise self._failure
        choices: list[Choice] = self.growing.choices()
        for choice in choices:
            source = "engine" if self.resumed_confirmed.get(choice.index, self.version_confirmed) else "router"
            choice.facts |= {"first_token_at": self.first_token_at, "versions": source}
            if self._raw is not None:
                choice.prompt = self._raw.prompt
                if choice.index in self._raw.unread:
                    choice.facts[SHOWN_OTHERWISE] = self._raw.unread[choice.index]
        return choices

    def _chunk(self, event: Event) -> bytes:
        chunk = read_chunk(event)
        if "error" in chunk:
            self.ended_with_error = True
            raise UnreadableAnswer("incomplete", "the stream ended with an error")
        choices = chunk.get("choices") or ()
        self.began = self.began or bool(choices)
        try:
            for choice in choices:
                self._may_hold_parts = self._may_hold_parts or bool((choice.get("delta") or {}).get("tool_calls"))
            if not self._may_hold_parts:
                return self._add_and_write(chunk, event.name)
            pieces = self._all_pieces(chunk, choices, event.name)
            return b"".join([self._add_and_write(piece, event.name) for piece in pieces])
        except MALFORMED as error:
            raise UnreadableAnswer("incomplete", f"a malformed chunk: {in_words(error)}") from error

    def _all_pieces(self, chunk: dict[str, Any], choices: Sequence[Any], name: bytes) -> Sequence[dict[str, Any]]:
        try:
            return list(self._pieces(chunk, choices, name))
        except MALFORMED:
            if self._resume is None or self._raw is not None:
                raise
            self._resume = None  # a malformed stream cannot be resumed
            return [*(piece for held in self._held.values() for piece in held.release()), chunk]

    def _pieces(self, chunk: dict[str, Any], choices: Sequence[Any], name: bytes) -> Iterator[dict[str, Any]]:
        """Yield the chunks to show now: parts that waited for this chunk, then the part of it that need not wait.

        The last delta of a tool call waits for the next chunk. In a choice that can be resumed, text that may be a stop
        token or stop string waits too: an engine shows such text only in an aborted answer.
        """
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
            self._places.setdefault(index, CallIndices()).renumber(delta)
        if self._resume is not None:
            if finish is not None and is_abort(finish) and self._failure is None:
                self.undecided.append(NamedChunk(chunk, name))
                return
            if index not in self._first_texts and any(map(delta.get, TEXTS)):
                self._first_texts[index] = {text: delta[text] for text in TEXTS if delta.get(text)}
        pieces = held.pieces(chunk) if finish is None else [*held.at_end(finish), chunk]
        for piece in pieces:
            yield from (piece,) if self._raw is None else self._raw.chunks(piece)

    def _new_held(self, index: object) -> HeldDelta:
        if self._resume is None:
            return HeldDelta()
        if type(index) is not int or not 0 <= index < self._expected:
            raise TypeError("a choice that was not asked for")
        return HeldDelta(texts=True, stops=self._stops, until_logprobs=self._resume.resume_lost)

    def _add_and_write(self, chunk: dict[str, Any], name: bytes) -> bytes:
        if self.growing.add(chunk, self._version):
            self.first_token_at = self.first_token_at or time.time()
        if self.cut_choices and not chunk.get("choices"):
            return b""  # the resumed choices end the answer
        return self._write(chunk, name)

    def _write(self, chunk: dict[str, Any], name: bytes) -> bytes:
        choices = chunk.get("choices") or ()
        seen = self._endpoint.chunk_for_client(chunk, self._fields)
        if seen is None:
            return b""
        if any(map(_FINISH, choices)) or (self._answer_end and not choices):  # part of an answer's end
            self._answer_end.append(NamedChunk(seen, name))
            return b""
        return self._writer.write_chunk(seen, name)

    # Cut choices

    def show_abort(self, chunk: dict[str, Any], name: bytes, *, cut: bool) -> bytes:
        """Return the bytes that the agent gets for an abort, once it is known whether a pause caused it (`cut`)."""
        choice = chunk["choices"][0]
        index, finish = choice["index"], choice["finish_reason"]
        blank = {each: value for each, value in chunk.items() if each not in ("sglext", "usage")}
        if cut:
            self._held[index].drop()
            self.cut_choices[index] = finish
            # This may be the first chunk of the choice.
            self.growing.add({**blank, "choices": [{"index": index, "delta": {}}]}, self._version)
            return b""
        try:
            return self._show_pieces([*self._held[index].at_end(finish), chunk], name)
        except (UnreadableAnswer, *MALFORMED) as error:
            unread = UnreadableAnswer("incomplete", f"a malformed chunk: {in_words(error)}")
            self._failure = self._failure or (error if isinstance(error, UnreadableAnswer) else unread)
            self._answer_end.append(NamedChunk({**blank, "choices": [{**choice, "logprobs": None}]}, name))
            return b""

    def _show_pieces(self, pieces: Sequence[dict[str, Any]], name: bytes = b"") -> bytes:
        if self._raw is not None:
            pieces = [part for piece in pieces for part in self._raw.chunks(piece)]
        return b"".join(self._add_and_write(piece, name) for piece in pieces)

    def _release_held(self) -> bytes:
        """Return the bytes of parts that waited for a next chunk, which will not come."""
        if self._resume is None or self.cut_choices:
            return b""
        try:
            return self._show_pieces([piece for held in self._held.values() for piece in held.release()])
        except (UnreadableAnswer, *MALFORMED):
            return b""  # the stream is unreadable

    def mark_lost(self) -> bool:
        """Mark all choices without a finish reason as cut, because the worker was lost.

        Return False if the stream cannot be resumed, or has no choice yet.
        """
        if self._resume is None or self._failure is not None or not self.growing.growing:
            return False
        for index, choice in self.growing.growing.items():
            if choice.finish is None:
                self._held[index].drop()
                self.cut_choices[index] = None
        return True

    def shown_message(self, index: int) -> dict[str, Any]:
        """Return the message of a choice as the agent has seen it; only its raw text if the router parses it.

        Raises:
            One of `MALFORMED`: the deltas do not make a message.
        """
        if self._raw is not None:
            return {"role": "assistant", "content": self._raw.text(index)}
        message: dict[str, Any] = self.growing.growing[index].message.message()
        return message

    def message_start(self, index: int) -> dict[str, Any]:
        """Return `shown_message`; if it has no text yet, with the first text of the choice, even if held back.

        The parser of the rest needs to know whether the text began with reasoning. Raises like `shown_message`.
        """
        message = self.shown_message(index)
        return message if any(map(message.get, TEXTS)) else {**message, **self._first_texts.get(index, {})}

    def show(self, index: int, delta: Mapping[str, Any], **fields: Any) -> bytes:
        """Return the bytes that the agent gets for a delta of a resumed choice.

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
            self.growing.growing[index].add_shown(part)
            shown.append(self._write(piece, b""))
        return b"".join(shown)

    def show_totals(self, **fields: Any) -> None:
        """Write a chunk without choices, with these fields, at the end of the answer."""
        self._write({**self.growing.envelope, "choices": [], "usage": None, **fields}, b"")

    def end_resumed(self) -> None:
        """End the answer after the cut choices were resumed."""
        self._answer_end.append(Event.read(LAST_EVENT))

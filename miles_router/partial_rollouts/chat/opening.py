"""Streams of chat: what they say of each choice; and the one that a turn began with, whose chunks pass as they come."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from miles_router.asgi.exchange import Send
from miles_router.asgi.replies import TOO_LARGE, Kind, Tap
from miles_router.engines.answers import LOGPROBS, MALFORMED, VERSIONS, is_abort
from miles_router.engines.events import Event, write_event
from miles_router.engines.openai.chat_stream import GrowingMessage
from miles_router.engines.openai.choices import VersionTrack
from miles_router.engines.openai.held_deltas import TOKEN_ID, HeldDelta, token_bytes
from miles_router.errors import UpstreamBroken
from miles_router.middlewares.chat import ChatTurn
from miles_router.partial_rollouts.generation import CannotResume
from miles_router.partial_rollouts.joining import ROWS
from miles_router.partial_rollouts.leg import LAYER, Leg, ResumeContext

#: Fields of a delta that have text of the model.
TEXTS = ("content", "reasoning_content")


class ShownChoice:
    """What a stream's client has of one choice."""

    def __init__(self, *, stops: Sequence[str] = (), told_only: bool = False) -> None:
        self.message = GrowingMessage()
        #: Chat's entries for the logprobs of all tokens.
        self.entries: list[dict[str, Any]] = []
        self.versions = VersionTrack()
        self.finish: str | None = None
        #: Whether a pause has cut it.
        self.cut = False
        self.held = HeldDelta(texts=True, stops=stops, told_only=told_only)
        self._first: dict[str, str] = {}

    def add(self, chunk: dict[str, Any], version: str | None) -> Sequence[Mapping[str, Any]]:
        """Take a chunk with this choice alone; gives the chunks that are shown now."""
        logprobs = chunk["choices"][0].get("logprobs")
        if logprobs and logprobs.get("content"):
            self.entries += logprobs["content"]
            self.versions.reach(len(self.entries), version)
        delta = chunk["choices"][0].get("delta") or {}
        self._first = self._first or {name: delta[name] for name in TEXTS if delta.get(name)}
        return self.show(self.held.pieces(chunk))

    def begun(self) -> dict[str, Any]:
        """Return the message as far as it was shown. While it has no text, its first text stands there, shown or held
        back: whether that is reasoning tells how the rest is read. Raises one of `MALFORMED` as `GrowingMessage`."""
        shown = self.message.message()
        return shown if any(shown.get(name) for name in TEXTS) else {**shown, **self._first}

    def show(self, chunks: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """These are shown."""
        for chunk in chunks:
            self.message.add(chunk["choices"][0].get("delta") or {})
        return chunks


def write_all(chunks: Iterable[Mapping[str, Any]]) -> bytes:
    """Chunks as events."""
    return b"".join(map(write_event, chunks))


def _told_of_all(chunk: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a chunk tells of all choices, beside their usage. Raises one of `MALFORMED` where it is no such chunk."""
    told, usage = chunk.get("sglext") or {}, chunk.get("usage") or {}
    lists = [told.get("input_ids") or [], *(told.get("output_ids") or [])]
    counts = [usage.get("prompt_tokens") or 0]
    if not all(isinstance(ids, list) for ids in lists) or not all(
        type(each) is int for each in [*counts, *chain(*lists)]
    ):
        raise TypeError("ids or counts that are none")
    return told


class ChatStreamTap(Tap):
    """A stream of chat."""

    layer: str = LAYER

    def __init__(self, send: Send, context: ResumeContext, leg: Leg) -> None:
        super().__init__(send, context.router.metrics)
        self.leg = leg
        self.choices: dict[int, ShownChoice] = {}
        #: Names and times that every chunk has.
        self.envelope: dict[str, Any] = {}
        #: What the last chunks say: ids and rows, and the usage of all.
        self.extension: dict[str, Any] = {}
        self.usage: dict[str, Any] | None = None
        self._pool = context.router.pool

    @abstractmethod
    async def choice(self, chunk: dict[str, Any], choice: Mapping[str, Any]) -> bytes:
        """One choice of a chunk; gives what is shown of it."""

    @abstractmethod
    async def finished(self, event: Event, choice: Mapping[str, Any]) -> bytes:
        """A choice has ended."""

    @abstractmethod
    def opaque(self, event: Event) -> bytes:
        """An event that is no chunk: an error, say."""

    def told(self, event: Event) -> bytes:
        """An event that tells of all choices."""
        return b""

    async def take(self, event: Event) -> bytes:
        """Take an event; gives what is shown of it."""
        chunk = event.parse()
        try:
            choices = chunk["choices"]
            self.keep(0, len(event.raw), more=True)
            for choice in choices:
                if choice.get("finish_reason") is not None:
                    return await self.finished(event, choice)
            if not choices:
                told = _told_of_all(chunk)
                self.extension |= {name: value for name, value in told.items() if value is not None}
                self.usage = chunk.get("usage") or self.usage
                return self.told(event)
            self.envelope = {name: value for name, value in chunk.items() if name not in ("choices", "usage", "sglext")}
            return b"".join([await self.choice(chunk, choice) for choice in choices])
        except MALFORMED:
            return self.opaque(event)

    def version(self) -> str | None:
        """The weight version of the worker that answers, as the router knows it now."""
        return self._pool.version_of(self.leg.exchange.flight.worker_url)

    async def name_ids(self, turn: ChatTurn) -> None:
        """Know the ids of a stream that has told none, by the bytes of its tokens.

        Raises:
            CannotResume: they may be those of other tokens.
        """
        indices = sorted(self.choices)
        named = [await self._named(self.choices[index], turn) for index in indices]
        self.extension["output_ids"] = [
            named[indices.index(at)] if at in indices else [] for at in range(max(indices) + 1)
        ]

    async def _named(self, choice: ShownChoice | None, turn: ChatTurn) -> list[int]:
        entries = choice.entries if choice is not None else []
        told = [token for entry in entries if type(token := entry.get(TOKEN_ID)) is int]
        if told and len(told) == len(entries):
            return told
        spelled = [token_bytes(entry) for entry in entries]
        ids = await turn.ids(spelled) if turn.ids is not None else None
        if ids is None:
            raise CannotResume("the ids of a stream that did not end are not certain by the bytes of its tokens")
        return ids

    def leg_of_choice(self, index: int, prompt: int) -> dict[str, Any]:
        """A choice in the form of `/generate`, as far as its stream told it; its text is not known.

        Args:
            prompt: how many ids it was given.

        Raises:
            CannotResume: the stream did not tell its ids.
        """
        choice, told = self.choices[index], self.extension.get("output_ids") or []
        ids = told[index] if index < len(told) else None
        if ids is None or len(ids) != len(choice.entries):
            raise CannotResume("the worker's stream did not tell the ids and logprobs of what it sampled")
        try:
            triples = [[entry["logprob"], token, entry] for token, entry in zip(ids, choice.entries, strict=True)]
        except MALFORMED as error:
            raise CannotResume(f"a logprob that is none: {error!r}") from error
        runs = choice.versions.runs
        meta = {
            "id": self.envelope.get("id"),
            "finish_reason": {"type": choice.finish} if choice.finish is not None else None,
            "prompt_tokens": prompt,
            "completion_tokens": len(ids),
            LOGPROBS: triples,
        }
        if runs:
            meta[VERSIONS] = [{"version": run.version, "start": run.start, "end": run.end} for run in runs]
        meta |= {name: value for name, value in self.extension.items() if name in ROWS}
        return {"text": "", "output_ids": list(ids), "meta_info": meta}


class OpeningChatStream(ChatStreamTap):
    """The stream that a turn began with. What a cut brought is held back.

    Args:
        most: how many choices it may have.
        stops: the turn's stop strings.
    """

    def __init__(self, send: Send, context: ResumeContext, leg: Leg, most: int, stops: Sequence[str] = ()) -> None:
        super().__init__(send, context, leg)
        self._most = most
        self._stops = stops
        self._opaque = False  # it has said something that cannot be read
        self._told_only = context.resume_lost

    @property
    def is_cut(self) -> bool:
        """Whether a pause has cut one of the choices."""
        return any(choice.cut for choice in self.choices.values())

    def passes(self, start: Any) -> bool:
        self.leg.note_engine()
        return super().passes(start) or self.kind is not Kind.EVENTS

    def lose(self) -> bool:
        """The worker was lost; gives whether what it has not said can be asked of another."""
        if self.passing or self._opaque or not self.choices:
            return False
        for choice in self.choices.values():
            choice.cut = choice.finish is None
            choice.held.drop()
        return True

    async def event(self, event: Event) -> bytes:
        if event.is_last:
            return b"" if self.is_cut else self._release() + event.raw
        return event.raw if self._opaque or not event.data else await self.take(event)

    async def ended(self) -> bytes | None:
        return None if self.is_cut else self._release()

    def unread(self, reason: str) -> None:
        super().unread(reason)
        if reason == TOO_LARGE and self.is_cut:
            raise UpstreamBroken("the worker's stream is too large, and some of it was held back")
        self._shown.append(self._release())

    def opaque(self, event: Event) -> bytes:
        self._opaque = True  # what follows is nothing that can be carried on
        return self._release() + event.raw

    def told(self, event: Event) -> bytes:
        return b"" if self.is_cut else event.raw

    async def choice(self, chunk: dict[str, Any], choice: Mapping[str, Any]) -> bytes:
        state = self._state(choice["index"], ShownChoice(stops=self._stops, told_only=self._told_only))
        return write_all(state.add({**chunk, "choices": [choice]}, self.version()))

    def _state(self, index: Any, new: ShownChoice) -> ShownChoice:
        if type(index) is not int or not 0 <= index < self._most:
            raise TypeError("a choice that was not asked for")
        return self.choices.setdefault(index, new)

    async def finished(self, event: Event, choice: Mapping[str, Any]) -> bytes:
        state = self._state(choice["index"], ShownChoice())
        state.finish = choice["finish_reason"]
        if is_abort(state.finish) and await self.leg.was_cut(state.finish):
            await self.leg.learn_engine()
            state.cut = True
            state.held.drop()
            return b""
        return write_all(state.show(state.held.release())) + event.raw

    def _release(self) -> bytes:
        return b"".join(write_all(choice.show(choice.held.release())) for choice in self.choices.values())

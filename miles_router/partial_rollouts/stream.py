"""Resume the generations of a streamed request."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from miles_router.asgi.exchange import Message
from miles_router.asgi.replies import TOO_LARGE, Kind, Tap
from miles_router.engines.answers import (
    OUTPUT_LISTS,
    VERSIONS,
    UnreadableAnswer,
    finish_of,
    finish_reasons,
    index_of,
    is_abort,
    progress_of,
)
from miles_router.engines.events import LAST_EVENT, Event, write_event
from miles_router.errors import UpstreamBroken
from miles_router.generation.attempt import LAYER, Attempt, FollowingStream
from miles_router.generation.generation import ENDED, OPAQUE, RUNNING, CannotResume, ResumableGeneration
from miles_router.generation.joining import ROWS
from miles_router.generation.seam import Seam
from miles_router.partial_rollouts.request import ResumableRequest

#: Fields of the last event only.
LAST_EVENT_FIELDS = (VERSIONS, *ROWS)
#: An incomplete event is searched for its finish reason between these sizes, in bytes. Shorter ones arrive at once.
MIN_SEARCHED, MAX_SEARCHED = 256 * 1024, 4 * 1024 * 1024


class ResumableStream(ResumableRequest):
    """A request whose answers arrive event by event."""

    async def run(self, body: bytes) -> None:
        self.opening = opening = _OpeningStream(self, self.attempt(self.exchange))
        lost = False
        with self.in_flight(self.exchange, body):
            try:
                await opening.attempt.ask(opening, self.scope, self.receive, body)
            except UpstreamBroken:
                running = [each for each in self.generations if each.state in (RUNNING, OPAQUE)]
                unknown = any(each.state is OPAQUE for each in running)
                if opening.passing or (running and not self.services.resume_lost) or unknown:
                    raise
                self._prepare_lost(running, opening.attempt)
                lost = True
        if lost or opening.is_cut:
            await self.resume_generations([each for each in self.generations if each.is_cut])
            await opening.finish(LAST_EVENT)

    def _prepare_lost(self, generations: list[ResumableGeneration], attempt: Attempt) -> None:
        """Prepare generations for resuming after their worker was lost; the client has all events that arrived.

        Raises:
            UpstreamBroken: the events cannot be read, so that the generation cannot be resumed.
        """
        for generation in generations:
            try:
                generation.read_kept()
            except UnreadableAnswer as error:
                self.give_up(error)
                raise UpstreamBroken("the worker was lost, and its events cannot be read") from error
            generation.mark_all_shown()
            generation.cut(attempt.facts)

    async def sample(self, attempt: Attempt, generation: ResumableGeneration, seam: Seam, body: bytes) -> None:
        """Relay the events of a continuation."""
        following = _CarriedOnStream(self, attempt, generation, seam)
        with suppress(_StreamNotNeeded):
            await attempt.ask(following, self.scope, self.receive, body)
        if not following.has_end and not generation.has_ended:
            raise CannotResume("the worker's stream ended without a finish reason")

    async def end(self, generation: ResumableGeneration, answer: dict[str, Any]) -> None:
        """Send the answer of a generation that no worker continues as its last event."""
        await self.emit(generation, answer)

    async def emit(
        self, generation: ResumableGeneration, answer: Mapping[str, Any], *, until: int | None = None
    ) -> None:
        """Send one event to the client, with the text up to `until`; in an incremental stream only the new part."""
        text = answer["text"][:until]
        shown = {**answer, "text": text}
        if generation.streams_deltas:
            meta = {**answer["meta_info"]}
            for name in OUTPUT_LISTS:
                if meta.get(name) is not None:
                    meta[name] = meta[name][generation.shown_ids :]
            ids = answer["output_ids"][generation.shown_ids :]
            shown |= {"text": text[generation.shown_text :], "output_ids": ids, "meta_info": meta}
        generation.shown_ids = len(answer["output_ids"])
        generation.shown_text = max(generation.shown_text, len(text))
        if self.indexed:
            shown["index"] = generation.index
        await self.opening.give(write_event(shown))


class _StreamNotNeeded(Exception):
    """Raised inside a stream that is not needed any further, so that its worker stops generating."""


class _OpeningStream(Tap):
    """The first stream. Its events are relayed unchanged, and parsed only where needed."""

    layer: str = LAYER

    def __init__(self, request: ResumableStream, attempt: Attempt) -> None:
        super().__init__(request.send, request.services.router.metrics)
        self.attempt: Attempt = attempt
        self._generations = request.generations
        self._request = request

    @property
    def is_cut(self) -> bool:
        """Whether a pause has cut one of the generations."""
        return any(generation.is_cut for generation in self._generations)

    def passes(self, start: Message) -> bool:
        self.attempt.note_engine()
        if self.kind is Kind.JSON and not super().passes(start):
            self.unread("content_type")
            return True
        return super().passes(start)

    async def send(self, message: Message) -> None:
        await super().send(message)
        if MIN_SEARCHED < self.events.pending <= MAX_SEARCHED and self._is_ending():
            await self.let_go()

    def _is_ending(self) -> bool:
        """Return whether the incomplete event is the last one of the only generation, and the generation was not cut.

        The event may contain the expert ids of a long rollout, so collecting it here is avoided.
        """
        generation = self._generations[0]
        if self.passing or generation.has_ended or self._request.indexed:
            return False
        (finish,) = finish_reasons(self.events.rest, 1, beginning=True) or (None,)
        if finish is None or is_abort(finish):
            return False
        generation.end()
        return True

    async def event(self, event: Event) -> bytes:
        """Return the bytes for the client. Hold back the event of a cut, and the stream's end after one."""
        if event.is_last:
            return b"" if self.is_cut else event.raw
        generation = self._generation(index_of(event.data) if self._request.indexed else 0)
        progress = progress_of(event.data)
        if generation is not None and generation.state in (OPAQUE, ENDED):
            if progress is not None and progress.finish is not None and not generation.has_ended:
                generation.end()
            return event.raw
        if generation is None or progress is None or is_abort(progress.finish):
            return b"" if await self._read(event) else event.raw
        if progress.finish is not None:
            generation.end()
        elif generation.incremental is False:
            generation.keep(event.data, progress.version)
        else:
            await self._read(event)
        self.keep(generation.index, len(event.data), more=generation.incremental is not False)
        return event.raw

    async def ended(self) -> bytes | None:
        return None if self.is_cut else b""

    def unread(self, reason: str) -> None:
        super().unread(reason)
        if reason == TOO_LARGE and self.is_cut:
            raise UpstreamBroken("the worker's stream is over --max-answer-bytes and cannot be resumed")

    def _generation(self, index: object) -> ResumableGeneration | None:
        return self._generations[index] if isinstance(index, int) and index in range(len(self._generations)) else None

    async def _read(self, event: Event) -> bool:
        """Read an event; return whether its generation is cut."""
        answer, generation = event.parse(), None
        if isinstance(answer, dict) and "output_ids" in answer:
            generation = self._generation(answer.get("index") if self._request.indexed else 0)
        if generation is None:
            if event.data:  # for example an error: later events cannot be resumed
                for each in self._generations:
                    each.mark_unreadable()
            return False
        if generation.state in (OPAQUE, ENDED):
            return False
        finish = finish_of(answer)
        try:
            if finish is not None:
                await self.attempt.learn_engine()
                generation.read_kept()
                generation.mark_all_shown()
            generation.add(answer)
        except UnreadableAnswer as error:
            generation.mark_unreadable(ended=finish is not None)
            if await self.attempt.was_cut(finish):
                self._request.give_up(error)
            else:
                self.unread(error.reason)
            return False
        self.attempt.exchange.routing.rids.update(generation.rids)
        if finish is not None:
            await self._request.note_end(self.attempt, generation, finish)
        return generation.is_cut


class _CarriedOnStream(FollowingStream):
    """The stream of a continuation: its events are sent as the client's own."""

    def __init__(self, request: ResumableStream, attempt: Attempt, generation: ResumableGeneration, seam: Seam) -> None:
        super().__init__(attempt)
        #: Whether the worker has sent a finish reason.
        self.has_end = False
        self._request = request
        self._generation = generation
        self._seam = seam

    async def event(self, event: Event) -> bytes:
        if event.data and not event.is_last:
            await self._continue(event.parse(), len(event.data))
        return b""

    async def _continue(self, answer: object, nbytes: int) -> None:
        generation = self._generation
        if self.has_end:
            raise CannotResume("the worker's stream continues after its finish reason")
        finish = generation.add(answer).get("finish_reason")
        self.keep(generation.index, nbytes, more=generation.incremental is not False)
        self.attempt.exchange.routing.rids.update(generation.rids)
        self.has_end = finish is not None
        joined, stopped = generation.so_far(), False
        if generation.answer is not None:
            joined, stopped = await self._seam.mend(finished=self.has_end)
        assert joined is not None
        if self.has_end or stopped:
            generation.verify(joined)
        if self.has_end and not stopped:
            await self.attempt.learn_engine()
            await self._request.note_end(self.attempt, generation, finish)
            if generation.is_cut:
                return  # the next continuation shows these tokens
        elif stopped:
            generation.end()
        if generation.has_ended:
            await self._request.emit(generation, joined)
        else:
            await self._emit_certain(joined)
        if stopped and not self.has_end:
            raise _StreamNotNeeded

    async def _emit_certain(self, joined: Mapping[str, Any]) -> None:
        """Send an event with what has arrived; hold back text that the next tokens may still change."""
        generation = self._generation
        until = generation.shown_text if generation.forming or generation.halved else None
        meta = {name: value for name, value in joined["meta_info"].items() if name not in LAST_EVENT_FIELDS}
        await self._request.emit(generation, {**joined, "meta_info": meta}, until=until)

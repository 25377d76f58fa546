"""A request whose answers come event by event."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from miles_router.asgi.exchange import Exchange, Message
from miles_router.asgi.headers import first
from miles_router.engines.events import DATA, LAST_EVENT, EventReader, event, payload
from miles_router.errors import UpstreamBroken
from miles_router.partial_rollouts import glance
from miles_router.partial_rollouts.continuation import check_prompt
from miles_router.partial_rollouts.engine import OK, CannotResume, Engine
from miles_router.partial_rollouts.joining import CONCATENATED, EXPERTS, VERSIONS
from miles_router.partial_rollouts.parts import Part, understood
from miles_router.partial_rollouts.run import Go, Run
from miles_router.partial_rollouts.seam import mend

#: What a stream says at its end.
OF_THE_LAST_EVENT = (VERSIONS, EXPERTS)


#: Bytes of an event that is still coming between which it is looked at. Shorter ones come at once.
LONG, LOOKED_AT = 256 * 1024, 4 * 1024 * 1024


class Enough(Exception):
    """Raised into a stream that is not wanted any further; its worker stops generating."""


class Stream(Run):
    """A request whose answers come event by event."""

    async def run(self, body: bytes) -> None:
        opening, lost = _Opening(self, self.exchange), False
        with self.in_flight(self.exchange, body):
            try:
                await opening.ask(body)
            except UpstreamBroken:
                lost = True
                if not opening.streaming or opening.within or (self._going() and not self.shared.resume_lost):
                    raise
        if not opening.streaming:
            return
        cut = [part for part in self.parts if part.abort is not None]
        if lost:
            for part in self._going():
                part.read_up()
                part.all_shown()
                cut.append(part)
        await self.carry_on(cut)
        await self.give(LAST_EVENT if cut or lost else opening.rest)
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    def _going(self) -> list[Part]:
        return [part for part in self.parts if not part.done and part.abort is None]

    async def go(self, part: Part, engine: Engine, body: bytes) -> None:
        """The events that follow."""
        if part.incremental is None:
            part.incremental = await engine.incremental()
        following = _Following(self, engine.exchange, engine, part)
        with suppress(Enough):
            await following.ask(body)
        if not following.ended and not part.done:
            raise CannotResume("the worker's stream had no end")

    async def end(self, part: Part, answer: dict[str, Any]) -> None:
        """One more event."""
        await self.emit(part, answer)

    async def give(self, data: bytes) -> None:
        """Send something as it is."""
        if data:
            await self.send({"type": "http.response.body", "body": data, "more_body": True})

    async def emit(self, part: Part, answer: Mapping[str, Any], *, until: int | None = None) -> None:
        """Give one event to the client, with the text `until` there; in an incremental stream only what is new."""
        text = answer["text"][:until]
        shown = {**answer, "text": text}
        if part.incremental:
            meta = {**answer["meta_info"]}
            for name in CONCATENATED:
                if meta.get(name) is not None:
                    meta[name] = meta[name][part.shown_ids :]
            shown |= {"text": text[part.shown_text :], "output_ids": answer["output_ids"][part.shown_ids :]}
            shown["meta_info"] = meta
        part.shown_ids, part.shown_text = len(answer["output_ids"]), max(part.shown_text, len(text))
        if part.streamed_index:
            shown["index"] = part.index
        await self.give(event(shown))


class _Opening(Go):
    """The stream that the request began with. Its events pass as they came, and are read only where that is of use."""

    def __init__(self, run: Stream, exchange: Exchange) -> None:
        super().__init__(run, exchange)
        self.stream = run
        self.streaming = False
        self.rest = b""  # what came behind the last answer
        self._events = EventReader()

    @property
    def within(self) -> bool:
        """Whether the client has the beginning of an event, and not its end."""
        return self._events.within

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            kind = first(message["headers"], b"content-type") or b""
            self.streaming = message["status"] == OK and kind.startswith(b"text/event-stream")
        if message["type"] == "http.response.start" or not self.streaming:
            await self.stream.send(message)
            return
        shown = []
        for each in self._events.feed(message.get("body", b"")):
            if each == LAST_EVENT:
                self.rest = each
            elif not await self._is_cut(each):  # what a cut brought is shown with what follows it
                shown.append(each)
        if LONG < self._events.pending <= LOOKED_AT and self._has_ended():
            shown.append(self._events.let_go())
        await self.stream.give(b"".join(shown))
        if not message.get("more_body", False):
            self.rest += self._events.rest

    async def _is_cut(self, raw: bytes) -> bool:
        part, finish = self._part(raw), glance.finish(raw)
        going_on = finish.startswith(glance.RUNNING)
        if part is None or not finish or glance.ABORT in finish or (going_on and part.incremental is not False):
            return await self._read(raw)
        if going_on:
            part.keep(raw)
        else:
            part.done = True
        return False

    def _has_ended(self) -> bool:
        """Whether the event that is still coming is the last of the only generation, which was not cut. The expert ids
        of a long rollout may stand in it: nobody has to hold them here."""
        part, data = self.stream.parts[0], self._events.rest
        if part.done or part.streamed_index or not glance.none_aborted(data, 1):
            return False
        part.done = not glance.finish(data).startswith(glance.RUNNING)
        return part.done

    def _part(self, raw: bytes) -> Part | None:
        index = glance.index(raw) if self.stream.parts[0].streamed_index else 0
        return self.stream.parts[index] if index is not None and index < len(self.stream.parts) else None

    async def _read(self, raw: bytes) -> bool:
        answer = understood(payload(raw))
        if answer is None or answer.get("index", 0) not in range(len(self.stream.parts)):
            for part in self.stream.parts:  # an error, say: what follows is nothing that can be carried on
                part.done = part.done or raw.startswith(DATA)
            return False
        part = self.stream.parts[answer.get("index", 0)]
        if answer["meta_info"].get("finish_reason") is not None:
            part.read_up()
            part.all_shown()
            part.absorb(answer)
            await self.note_end(part)
            return not part.done
        part.absorb(answer)
        self.exchange.flight.rids.update(part.ids)
        return False


class _Following(Go):
    """A stream that carries one on."""

    def __init__(self, run: Stream, exchange: Exchange, engine: Engine, part: Part) -> None:
        super().__init__(run, exchange)
        self.stream = run
        self.engine = engine
        self.part = part
        self.ended = False
        self._events = EventReader()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            kind = first(message["headers"], b"content-type") or b""
            if message["status"] != OK or not kind.startswith(b"text/event-stream"):
                raise CannotResume(f"the worker answered {message['status']}")
            return
        for each in self._events.feed(message.get("body", b"")):
            if each.startswith(DATA) and each != LAST_EVENT:
                await self._event(understood(payload(each)))

    async def _event(self, answer: dict[str, Any] | None) -> None:
        part = self.part
        if answer is None or self.ended:
            raise CannotResume("the worker refused to carry it on")
        check_prompt(part, answer)
        part.absorb(answer)
        assert part.current is not None
        self.exchange.flight.rids.update(part.ids)
        self.ended = answer["meta_info"].get("finish_reason") is not None
        joined, stopped = part.current, False
        if part.answer is not None:
            joined, stopped = await mend(part, self.engine, finished=self.ended)
        if self.ended and not stopped:
            await self.note_end(part)
            if not part.done:
                return  # what it brought is shown with what follows
        if self.ended or stopped:
            part.done = True
            await self.stream.emit(part, joined)
        else:
            await self._more(joined)
        if stopped and not self.ended:
            raise Enough

    async def _more(self, joined: Mapping[str, Any]) -> None:
        """Show what has come, but for a text of which it is not certain that it stays."""
        until = self.part.shown_text if self.part.forming or self.part.halved else None
        meta = {name: value for name, value in joined["meta_info"].items() if name not in OF_THE_LAST_EVENT}
        await self.stream.emit(self.part, {**joined, "meta_info": meta}, until=until)

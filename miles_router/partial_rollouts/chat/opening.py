"""The stream that a turn began with: its chunks pass as they come, and what a cut brought is held back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_router.asgi.replies import TOO_LARGE, Kind, Tap
from miles_router.engines.answers import LOGPROBS, VERSIONS, is_abort
from miles_router.engines.chat_stream import GrowingMessage
from miles_router.engines.choices import MALFORMED, VersionTrack
from miles_router.engines.events import Event, write_event
from miles_router.engines.rows import ROW_FIELDS
from miles_router.errors import UpstreamBroken
from miles_router.partial_rollouts.generation import CannotResume
from miles_router.partial_rollouts.leg import LAYER, Leg


class ShownChoice:
    """What a stream's client has of one choice."""

    def __init__(self) -> None:
        self.message = GrowingMessage()
        #: Chat's entries for the logprobs of all tokens.
        self.entries: list[dict[str, Any]] = []
        self.versions = VersionTrack()
        self.finish: str | None = None
        #: Whether a pause has cut it.
        self.cut = False
        self._held = b""
        self._held_delta: Mapping[str, Any] = {}

    def add(self, chunk: Mapping[str, Any], choice: Mapping[str, Any], version: str | None) -> bytes:
        """Take a chunk; gives what is shown now. The last delta of a tool call waits for what comes behind it: where a
        call is cut, the engine closes its arguments by itself."""
        delta, logprobs = choice.get("delta") or {}, choice.get("logprobs")
        if logprobs and logprobs.get("content"):
            self.entries += logprobs["content"]
            self.versions.reach(len(self.entries), version)
        if not any(delta.values()):
            return write_event(chunk)
        before = self.release()
        if not delta.get("tool_calls"):
            self.message.add(delta)
            return before + write_event(chunk)
        if logprobs:
            before += write_event({**chunk, "choices": [{**choice, "delta": {}}]})
        self._held, self._held_delta = write_event({**chunk, "choices": [{**choice, "logprobs": None}]}), delta
        return before

    def release(self) -> bytes:
        """What waited is shown."""
        held, self._held = self._held, b""
        self.message.add(self._held_delta)
        self._held_delta = {}
        return held

    def drop_held(self) -> None:
        """What waited is not shown."""
        self._held, self._held_delta = b"", {}


class OpeningChatStream(Tap):
    """The stream."""

    layer: str = LAYER

    def __init__(self, request: Any, leg: Leg) -> None:
        super().__init__(request.send, request.context.router.metrics)
        self.leg = leg
        self.choices: dict[int, ShownChoice] = {}
        #: Names and times that every chunk has.
        self.envelope: dict[str, Any] = {}
        #: What the last chunks say: ids and rows, and the usage of all.
        self.extension: dict[str, Any] = {}
        self.usage: dict[str, Any] | None = None
        self._pool = request.context.router.pool
        self._opaque = False  # it has said something that cannot be read

    @property
    def is_cut(self) -> bool:
        """Whether a pause has cut one of the choices."""
        return any(choice.cut for choice in self.choices.values())

    def passes(self, start: Any) -> bool:
        return super().passes(start) or self.kind is not Kind.EVENTS

    async def event(self, event: Event) -> bytes:
        if event.is_last:
            return b"" if self.is_cut else self._release() + event.raw
        chunk = event.parse() if event.data and not self._opaque else None
        try:
            return event.raw if chunk is None else await self._chunk(event, chunk)
        except MALFORMED:  # an error, say: what follows is nothing that can be carried on
            self._opaque = True
            return self._release() + event.raw

    async def ended(self) -> bytes | None:
        return None if self.is_cut else self._release()

    def unread(self, reason: str) -> None:
        super().unread(reason)
        if reason == TOO_LARGE and self.is_cut:
            raise UpstreamBroken("the worker's stream is too large, and some of it was held back")
        self._shown.append(self._release())

    async def _chunk(self, event: Event, chunk: dict[str, Any]) -> bytes:
        for choice in chunk["choices"]:
            if choice.get("finish_reason") is not None:
                return await self._finish(event, choice)
        if not chunk["choices"]:
            self.extension |= {name: value for name, value in (chunk.get("sglext") or {}).items() if value is not None}
            self.usage = chunk.get("usage") or self.usage
            return b"" if self.is_cut else event.raw
        self.envelope = {name: value for name, value in chunk.items() if name not in ("choices", "usage", "sglext")}
        self.keep(0, len(event.raw), more=True)
        shown, version = b"", self._version()
        for choice in chunk["choices"]:
            state = self.choices.setdefault(choice["index"], ShownChoice())
            shown += state.add({**chunk, "choices": [choice]}, choice, version)
        return shown

    async def _finish(self, event: Event, choice: Mapping[str, Any]) -> bytes:
        state = self.choices.setdefault(choice["index"], ShownChoice())
        state.finish = choice["finish_reason"]
        if is_abort(state.finish) and await self.leg.was_cut(state.finish):
            await self.leg.learn_engine()
            state.cut = True
            state.drop_held()
            return b""
        return state.release() + event.raw

    def _release(self) -> bytes:
        return b"".join(choice.release() for choice in self.choices.values())

    def _version(self) -> str | None:
        worker = self._pool.find(self.leg.exchange.flight.worker_url or "")
        return worker.weight_version if worker is not None else None

    def leg_of_choice(self, index: int, prompt: int) -> dict[str, Any]:
        """A choice that was cut, in the form of `/generate`, as far as its stream told it; its text is not known.

        Args:
            prompt: how many ids it was given.

        Raises:
            CannotResume: the stream did not tell its ids.
        """
        choice, told = self.choices[index], self.extension.get("output_ids") or []
        ids = told[index] if index < len(told) else None
        if ids is None or len(ids) != len(choice.entries):
            raise CannotResume("the worker's stream did not tell the ids and logprobs of what it sampled")
        triples = [[entry["logprob"], token, entry] for token, entry in zip(ids, choice.entries, strict=True)]
        runs = choice.versions.runs
        meta = {
            "id": self.envelope.get("id"),
            "finish_reason": {"type": choice.finish},
            "prompt_tokens": prompt,
            "completion_tokens": len(ids),
            LOGPROBS: triples,
            **(
                {VERSIONS: [{"version": run.version, "start": run.start, "end": run.end} for run in runs]}
                if runs
                else {}
            ),
        }
        rows = {each.rows.name for each in ROW_FIELDS.values()}
        meta |= {name: value for name, value in self.extension.items() if name in rows}
        return {"text": "", "output_ids": list(ids), "meta_info": meta}

"""A stream of chat that carries one choice on, raw, while its client reads what it says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from miles_router.asgi.replies import OK, Kind, drop
from miles_router.engines.answers import is_abort
from miles_router.engines.events import Event
from miles_router.engines.openai.held_deltas import may_end
from miles_router.middlewares.chat import ChatTurn
from miles_router.partial_rollouts.chat.generation import ChatGeneration
from miles_router.partial_rollouts.chat.opening import ChatStreamTap, ShownChoice
from miles_router.partial_rollouts.generation import CannotResume
from miles_router.partial_rollouts.leg import Leg, ResumeContext


class Watcher(Protocol):
    """Who shows what comes."""

    async def more(self, generation: ChatGeneration, text: str, entries: Sequence[Any]) -> None:
        """A part has said so much: its text, and the entries of its logprobs."""
        ...


class FollowingChat(ChatStreamTap):
    """The stream of one part."""

    def __init__(self, context: ResumeContext, leg: Leg, generation: ChatGeneration, watcher: Watcher) -> None:
        super().__init__(drop, context, leg)
        self._generation = generation
        self._watcher = watcher
        self._text: list[str] = []
        self._stops = generation.stops
        #: How it ended, in the form of `/generate`.
        self.end_reason: dict[str, Any] | None = None

    def passes(self, start: Any) -> bool:
        if start["status"] != OK or self.kind is not Kind.EVENTS:
            raise CannotResume(f"the worker answered {start['status']}, and no stream")
        self.leg.note_engine()
        return False

    def unread(self, reason: str) -> None:
        raise CannotResume(f"the worker's stream cannot be read: {reason}")

    async def event(self, event: Event) -> bytes:
        if event.data and not event.is_last:
            await self.take(event)
        return b""

    def opaque(self, event: Event) -> bytes:
        raise CannotResume("the worker's stream says something that is no chunk")

    async def choice(self, chunk: dict[str, Any], choice: Mapping[str, Any]) -> bytes:
        state = self.choices.setdefault(0, ShownChoice())
        state.add({**chunk, "choices": [choice]}, self.version())
        new = (choice.get("delta") or {}).get("content") or ""
        self._text.append(new)
        shown = self._text[:-1] if may_end(new, self._stops) else self._text
        await self._watcher.more(self._generation, "".join(shown), state.entries)
        return b""

    async def finished(self, event: Event, choice: Mapping[str, Any]) -> bytes:
        state, finish = self.choices.setdefault(0, ShownChoice()), choice["finish_reason"]
        state.finish = finish
        self.end_reason = {"type": finish, "matched": choice.get("matched_stop")}
        if finish == "length":
            self.end_reason = {"type": finish, "length": len(state.entries)}
        if is_abort(finish):
            self.end_reason = {"type": finish}
        await self.leg.learn_engine()
        return b""

    def part(self) -> dict[str, Any]:
        """All of it, in the form of `/generate`.

        Raises:
            CannotResume: it had no end, or did not tell its ids.
        """
        if self.end_reason is None:
            raise CannotResume("the worker's stream had no end")
        part = self.leg_of_choice(0, self._generation.given)
        part["meta_info"]["finish_reason"] = self.end_reason
        return {**part, "text": "".join(self._text)}

    async def lost_part(self, turn: ChatTurn) -> dict[str, Any] | None:
        """What there is of it where its worker was lost; None for nothing.

        Raises:
            CannotResume: its ids are not certain.
        """
        if not self.choices:
            return None
        await self.name_ids(turn)
        return {**self.leg_of_choice(0, self._generation.given), "text": "".join(self._text)}

"""All histories that a session holds, as one tree of messages: what a request goes on from is found by walking along
its messages once, however many branches there are.

    root ── system ── user ── answer ── tool ── answer       a turn ends at each answer
                       │        └────── user ── answer
                       └───── answer                         a retry
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import orjson

from middleware_hub.openai_session.sessions.equality import Equality
from middleware_hub.openai_session.sessions.messages import Message

if TYPE_CHECKING:
    from middleware_hub.openai_session.sessions.tree import Turn


class Walk(NamedTuple):
    """The places that a request's messages lead to, message by message, the beginning first."""

    places: Sequence[Sequence[HeldMessage]]
    messages: Sequence[Message]

    @property
    def whole(self) -> bool:
        """Whether all of the messages lead somewhere."""
        return len(self.places) > len(self.messages)

    def stops_at_calls(self) -> bool:
        """Return whether the first message that leads nowhere calls tools."""
        count = len(self.places) - 1
        return count < len(self.messages) and bool(self.messages[count].get("tool_calls"))

    def turns(self) -> Iterator[Turn]:
        """Those whose history the messages begin with."""
        return (place.turn for places in self.places[1:] for place in places if place.turn is not None)

    def asked(self) -> Iterator[Turn]:
        """Those that were asked just these messages."""
        return (turn for place in self.places[-1] for turn in place.asked) if self.whole else iter(())

    def departure(self) -> tuple[int, Message | None, Message | None]:
        """How many messages lead somewhere, the held message behind them that came last, and the one that was sent."""
        count = len(self.places) - 1
        held = [child.message for place in self.places[-1] for child in place.children]
        return count, held[-1] if held else None, self.messages[count] if count < len(self.messages) else None


class HeldMessage:
    """A message behind those before it. `turn`: whose answer it is; `asked`: turns whose request it ends."""

    __slots__ = ("asked", "children", "message", "spelling", "turn")

    def __init__(self, message: Message, turn: Turn | None = None) -> None:
        self.message = message
        self.turn = turn
        self.asked: tuple[Turn, ...] = ()
        self.children: tuple[HeldMessage, ...] = ()
        self.spelling: int | None = None  # the other one in which it came back last

    def walk(self, messages: Sequence[Message], equal: Equality) -> Walk:
        """Where messages lead from here."""
        found = [[self]]
        for message in messages:
            places = [
                child
                for place in found[-1]
                for child in place.children
                if child.message == message or child._is(message, equal)
            ]
            if not places:
                break
            found.append(places)
        return Walk(found, messages)

    def grow(self, turn: Turn) -> HeldMessage:
        """Put what a turn was asked and answered behind this place; gives where it ends."""
        place = self
        for message in turn.appended:
            place = place._behind(message)
        place.asked += (turn,)
        end = HeldMessage(turn.answer, turn)
        place.children += (end,)
        return end

    def leads_here(self, message: Message, equal: Equality) -> bool:
        """Whether a message that was sent is this one."""
        return self.message == message or self._is(message, equal)

    def clear(self) -> None:
        """Let go of all places behind this one."""
        self.asked, self.children = (), ()

    def _behind(self, message: Message) -> HeldMessage:
        """The place of a message, which is the session's own object."""
        for child in self.children:
            if child.message is message and child.turn is None:
                return child
        child = HeldMessage(message)
        self.children += (child,)
        return child

    def _is(self, sent: Message, equal: Equality) -> bool:
        """Whether a message is this one in another spelling. An agent uses the same each time: it is remembered."""
        spelling = hash(orjson.dumps(sent))
        if spelling != self.spelling:
            if not equal(self.message, sent):
                return False
            self.spelling = spelling
        return True

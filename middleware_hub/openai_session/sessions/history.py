"""All that a session has been asked and has answered: its turns as a tree, and their messages, each stored once.

    request   messages ──────────────────────────────────► the deepest turn whose history they extend, or none

Messages form a tree of their own. What a request goes on from is found by walking along its messages once, however many
branches there are:

    root ── system ── user ── answer ── tool ── answer       a turn ends at each answer
                       │        └────── user ── answer
                       └───── answer                         a retry

Agents edit, compact and retry their history, change tools, and run sub-agents in the same session. None of this is an
error: what does not extend a held turn begins a root of its own. Pure.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import orjson

from middleware_hub.openai_session.sessions.answers import RecordedAnswers
from middleware_hub.openai_session.sessions.call_ids import SameId, as_held
from middleware_hub.openai_session.sessions.classify import classify
from middleware_hub.openai_session.sessions.equality import Equality, equality_on
from middleware_hub.openai_session.sessions.messages import Message, message_bytes
from middleware_hub.openai_session.sessions.turn import Classification, Turn


class HistoryMatch(NamedTuple):
    """The nodes that a request's messages lead to, message by message, the beginning first. `before`: the number of the
    first turn that does not count."""

    places: Sequence[Sequence[HistoryNode]]
    messages: Sequence[Message]
    before: int = sys.maxsize

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
        if not self.whole:
            return iter(())
        return (turn for place in self.places[-1] for turn in place.asked if turn.number < self.before)

    def departure(self) -> tuple[int, Message | None, Message | None]:
        """How many messages lead somewhere, the held message behind them that came last, and the one that was sent."""
        count = len(self.places) - 1
        held = [child.message for place in self.places[-1] for child in place.children if child.since < self.before]
        return count, held[-1] if held else None, self.messages[count] if count < len(self.messages) else None


class HistoryNode:
    """A message behind those before it.

    Attributes:
        turn: whose answer it is.
        since: the number of the turn that brought it.
        asked: turns whose request it ends.
    """

    __slots__ = ("asked", "children", "message", "since", "spelling", "turn")

    def __init__(self, message: Message, since: int, turn: Turn | None = None) -> None:
        self.message = message
        self.since = since
        self.turn = turn
        self.asked: tuple[Turn, ...] = ()
        self.children: tuple[HistoryNode, ...] = ()
        self.spelling: tuple[int, Equality] | None = None  # the other one in which it came back last, and who took it

    def match(self, messages: Sequence[Message], equal: Equality, before: int = sys.maxsize) -> HistoryMatch:
        """Return where messages lead from here, by the turns with a smaller number than `before`."""
        found = [[self]]
        for message in messages:
            places = [
                child
                for place in found[-1]
                for child in place.children
                if child.since < before and child.leads_here(message, equal)
            ]
            if not places:
                break
            found.append(places)
        return HistoryMatch(found, messages, before)

    def append(self, turn: Turn) -> HistoryNode:
        """Put what a turn was asked and answered behind this node; return the node of its answer."""
        place = self
        for message in turn.appended:
            place = place._behind(message, turn.number)
        place.asked += (turn,)
        end = HistoryNode(turn.answer, turn.number, turn)
        place.children += (end,)
        return end

    def leads_here(self, message: Message, equal: Equality) -> bool:
        """Return whether a message that was sent is this one."""
        return self.message == message or self._is(message, equal)

    def clear(self) -> None:
        """Let go of all nodes behind this one."""
        self.asked, self.children = (), ()

    def _behind(self, message: Message, since: int) -> HistoryNode:
        """Return the node of a message, which is the session's own object."""
        for child in self.children:
            if child.message is message and child.turn is None:
                return child
        child = HistoryNode(message, since)
        self.children += (child,)
        return child

    def _is(self, sent: Message, equal: Equality) -> bool:
        """Return whether a message is this one in another spelling. An agent uses the same each time: it is
        remembered."""
        spelling = hash(orjson.dumps(sent)), equal
        if spelling != self.spelling:
            if not equal(self.message, sent):
                return False
            self.spelling = spelling
        return True


@dataclass(frozen=True)
class ParentMatch:
    """Where in the tree a request's turns belong, and the messages that it adds there."""

    parent: Turn | None
    appended: tuple[Message, ...]
    context: bytes


class SessionHistory:
    """The turns of a session.

    Args:
        equal: whether a message that was sent is one that is held, for `classify`.
    """

    def __init__(self, equal: Equality) -> None:
        self.turns: list[Turn] = []
        self.roots: list[Turn] = []
        self.answers = RecordedAnswers()
        self._equal = equal
        self._children: list[list[Turn]] = []  # by the number of their parent
        self._classified: list[Classification] = []  # of the first turns, up to the last one that somebody read
        self._root = HistoryNode({}, 0)
        self._ends: dict[Turn, HistoryNode] = {}
        self._messages: dict[bytes, Message] = {}  # every one that was sent, by digest
        self._contexts: dict[bytes, bytes] = {}
        self._tools: dict[bytes, bytes] = {}  # as they were sent, by digest

    def find_parent(
        self,
        messages: Sequence[Message],
        contexts: Sequence[bytes],
        equal: Equality,
        same_id: SameId | None = None,
    ) -> ParentMatch:
        """Return the deepest turn that a request's messages extend in one of these contexts, the latest of several.
        `same_id`: whether two ids of a call are one; by default those that are equal."""
        best: Turn | None = None
        held, match = messages, self._root.match(messages, equal)
        if same_id is not None and match.stops_at_calls():
            held = as_held(self._root, messages, equal, same_id)
            match = self._root.match(held, equal)
        for turn in match.turns():
            if turn.context in contexts and (
                best is None or (turn.messages, turn.number) > (best.messages, best.number)
            ):
                best = turn
        if best is None:
            return ParentMatch(None, tuple(messages), contexts[0])
        return ParentMatch(best, tuple(held[best.messages :]), best.context)

    def match_behind(
        self, parent: Turn | None, messages: Sequence[Message], equal: Equality, *, before: int
    ) -> HistoryMatch:
        """Return where messages lead behind a turn, by the turns with a smaller number than `before`."""
        return self._end_of(parent).match(messages, equal, before)

    def intern(self, place: ParentMatch) -> tuple[ParentMatch, int]:
        """Return `place` with the session's own object for each message and context that it has already, and the bytes
        of those that are new.

        Retries and new roots send again what other branches hold: it is stored once.
        """
        nbytes = 0 if place.context in self._contexts else len(place.context)
        context = self._contexts.setdefault(place.context, place.context)
        appended = []
        for message in place.appended:
            digest = blake2b(orjson.dumps(message), digest_size=16).digest()
            if digest not in self._messages:
                self._messages[digest] = message
                nbytes += message_bytes(message)
            appended.append(self._messages[digest])
        return ParentMatch(place.parent, tuple(appended), context), nbytes

    def intern_tools(self, tools: Sequence[Any] | None) -> tuple[bytes, int]:
        """Return the session's own object for the tools of a root, as they were sent, and its bytes if it is new."""
        if not tools:
            return b"", 0
        written = orjson.dumps(tools)
        digest = blake2b(written, digest_size=16).digest()
        if digest in self._tools:
            return self._tools[digest], 0
        held = self._tools[digest] = zlib.compress(written, 1)
        return held, len(held)

    def append(self, turn: Turn) -> None:
        """Add a finished turn, as the next one."""
        assert turn.number == len(self.turns)
        self.siblings(turn).append(turn)
        self.turns.append(turn)
        self._children.append([])
        self._ends[turn] = self._end_of(turn.parent).append(turn)

    def restore(self, turn: Turn) -> None:
        """Put back a turn that was in this tree, as the next one, with its messages."""
        for message in turn.appended:
            self._messages[blake2b(orjson.dumps(message), digest_size=16).digest()] = message
        self._contexts[turn.context] = turn.context
        self.append(turn)

    def _end_of(self, turn: Turn | None) -> HistoryNode:
        return self._root if turn is None else self._ends[turn]

    def children(self, turn: Turn) -> Sequence[Turn]:
        """Return the turns that extend a turn, in the order in which they were recorded."""
        return self._children[turn.number]

    def siblings(self, turn: Turn) -> list[Turn]:
        """Return the turns with the same parent, the turn among them once it is in the tree."""
        return self.roots if turn.parent is None else self._children[turn.parent.number]

    def below(self, turn: Turn) -> Iterator[Turn]:
        """Iterate over a turn and all behind it."""
        turns = [turn]
        while turns:
            turn = turns.pop()
            yield turn
            turns.extend(self._children[turn.number])

    def leaves(self) -> list[Turn]:
        """Return the turns that nothing extends, in the order in which they were recorded."""
        return [turn for turn in self.turns if not self._children[turn.number]]

    def classify(self, turn: Turn) -> Classification:
        """Classify a turn of the tree. Each turn is looked at once, when somebody first reads it or a later one."""
        known = self._classified
        for each in self.turns[len(known) : turn.number + 1]:
            known.append(self._classification(each))
        return known[turn.number]

    def _classification(self, turn: Turn) -> Classification:
        above = None if turn.parent is None else self.classify(turn.parent)
        conversation = None if above is None else above.conversation
        if self.siblings(turn)[0] is turn:
            found = Classification(turn if conversation is None else conversation)
        else:
            found = classify(self, turn, equality_on(turn.path, self._equal), conversation)
        answers, side_call = turn.sent_answers, turn.side_call or (above is not None and above.side_call)
        if answers or side_call:
            unrecorded = bool(answers) and not self.answers.have(answers, self, turn.number)
            found = found._replace(unrecorded=unrecorded, side_call=side_call)
        return above if found == above else found  # one object for all turns of a line

    def classified(self) -> Sequence[Classification]:
        """Return the classification of each turn. The list stays readable when the session is deleted meanwhile."""
        if self.turns:
            self.classify(self.turns[-1])
        return self._classified

    def clear(self) -> None:
        """Let go of all turns at once: children and parents hold each other, and the garbage collector would take its
        time. Requests in flight keep what they extend."""
        self._root.clear()
        self.answers.clear()
        self._classified = []
        for held in (self.turns, self.roots, self._children, self._ends, self._messages, self._contexts, self._tools):
            held.clear()

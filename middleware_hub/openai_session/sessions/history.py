"""The history of one session: its turns as a tree, and their messages, each stored once.

    messages of a request ─────────► the deepest recorded turn whose history they extend, or None

The messages form a tree too. The parent of a request is found in one walk along its messages, however many branches
there are:

    root ── system ── user ── answer ── tool ── answer       a turn ends at each answer
                       │        └────── user ── answer
                       └───── answer                         a retry

Agents edit, compact and retry their history, change tools, and run sub-agents in the same session. None of this is an
error: a request that extends no recorded turn begins a new root. Pure.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from operator import attrgetter
from typing import Any, NamedTuple

import orjson

from middleware_hub.openai_session.sessions.answers import RecordedAnswers
from middleware_hub.openai_session.sessions.call_ids import SameId, restore_ids
from middleware_hub.openai_session.sessions.classify import classify
from middleware_hub.openai_session.sessions.equality import Equality, equality_on
from middleware_hub.openai_session.sessions.messages import Message, message_bytes
from middleware_hub.openai_session.sessions.turn import Classification, Turn


class HistoryMatch(NamedTuple):
    """The nodes that match a request's messages.

    Attributes:
        nodes: the start node, then the matching nodes of each message; shorter than `messages` if matching stopped.
        messages: the messages of the request.
        before: only turns with a smaller number count.
    """

    nodes: Sequence[Sequence[HistoryNode]]
    messages: Sequence[Message]
    before: int = sys.maxsize

    @property
    def is_complete(self) -> bool:
        """True if every message has a matching node."""
        return len(self.nodes) > len(self.messages)

    def stops_at_calls(self) -> bool:
        """Return True if the first message without a matching node calls tools."""
        count = len(self.nodes) - 1
        return count < len(self.messages) and bool(self.messages[count].get("tool_calls"))

    def turns(self) -> Iterator[Turn]:
        """Yield the turns whose whole history, answer included, begins the messages."""
        return (node.turn for nodes in self.nodes[1:] for node in nodes if node.turn is not None)

    def turns_asked(self) -> Iterator[Turn]:
        """Yield the turns whose request was exactly these messages."""
        if not self.is_complete:
            return iter(())
        return (turn for node in self.nodes[-1] for turn in node.asked if turn.number < self.before)

    def divergence(self) -> tuple[int, Message | None, Message | None]:
        """Find the first message that differs from the recorded messages.

        Returns:
            The number of matching messages, the latest recorded message behind them, and the message sent there. Either
            message may be missing (None).
        """
        count = len(self.nodes) - 1
        held = [child.message for node in self.nodes[-1] for child in node.children if child.added_by < self.before]
        return count, held[-1] if held else None, self.messages[count] if count < len(self.messages) else None


class HistoryNode:
    """One message in the tree of messages.

    Attributes:
        turn: the turn whose answer the message is; None for a message of a request.
        added_by: the number of the turn that added the message.
        asked: the turns whose request ends with the message.
    """

    __slots__ = ("added_by", "asked", "children", "message", "spelling", "turn")

    def __init__(self, message: Message, added_by: int, turn: Turn | None = None) -> None:
        self.message = message
        self.added_by = added_by
        self.turn = turn
        self.asked: tuple[Turn, ...] = ()
        self.children: tuple[HistoryNode, ...] = ()
        self.spelling: tuple[int, Equality] | None = None  # hash of the last other spelling, and the equality for it

    def match(self, messages: Sequence[Message], equal: Equality, before: int = sys.maxsize) -> HistoryMatch:
        """Match messages from this node on, among the turns with a smaller number than `before`."""
        found = [[self]]
        for message in messages:
            nodes = [
                child
                for node in found[-1]
                for child in node.children
                if child.added_by < before and child.matches(message, equal)
            ]
            if not nodes:
                break
            found.append(nodes)
        return HistoryMatch(found, messages, before)

    def append(self, turn: Turn) -> HistoryNode:
        """Add a turn's new messages and its answer behind this node; return the node of the answer."""
        node = self
        for message in turn.appended:
            node = node._child_for(message, turn.number)
        node.asked += (turn,)
        end = HistoryNode(turn.answer, turn.number, turn)
        node.children += (end,)
        return end

    def matches(self, message: Message, equal: Equality) -> bool:
        """Return True if a sent message is this node's message."""
        return self.message == message or self._is_respelled(message, equal)

    def clear(self) -> None:
        """Drop the references to all nodes behind this one."""
        self.asked, self.children = (), ()

    def _child_for(self, message: Message, added_by: int) -> HistoryNode:
        """Return the child node of a message, which must be the interned object; add the node if it is missing."""
        for child in self.children:
            if child.message is message and child.turn is None:
                return child
        child = HistoryNode(message, added_by)
        self.children += (child,)
        return child

    def _is_respelled(self, sent: Message, equal: Equality) -> bool:
        """Return True if a sent message is this node's message in another spelling.

        The last spelling is remembered, because an agent sends the same one with every turn.
        """
        spelling = hash(orjson.dumps(sent)), equal
        if spelling != self.spelling:
            if not equal(self.message, sent):
                return False
            self.spelling = spelling
        return True


@dataclass(frozen=True)
class ParentMatch:
    """The parent of a request's turns, the messages that the request adds to it, and the context they share."""

    parent: Turn | None
    appended: tuple[Message, ...]
    context: bytes


class SessionHistory:
    """The turns of a session.

    Args:
        equal: the equality that `classify` compares sent and recorded messages with.
    """

    def __init__(self, equal: Equality) -> None:
        self.turns: list[Turn] = []
        self.roots: list[Turn] = []
        self.answers = RecordedAnswers()
        self._equal = equal
        self._children: list[list[Turn]] = []  # by the number of their parent
        self._classified: list[Classification] = []  # of the first turns, up to the last turn that was classified
        self._root = HistoryNode({}, 0)
        self._ends: dict[Turn, HistoryNode] = {}
        self._messages: dict[bytes, Message] = {}  # every message of a request, by digest
        self._contexts: dict[bytes, bytes] = {}
        self._tools: dict[bytes, bytes] = {}  # compressed JSON of the tools as sent, by digest

    def find_parent(
        self,
        messages: Sequence[Message],
        contexts: Sequence[bytes],
        equal: Equality,
        same_id: SameId | None = None,
    ) -> ParentMatch:
        """Return the deepest turn that a request's messages extend; of several equally deep ones the latest.

        Args:
            contexts: the contexts that the parent may have; the first is the context of a new root.
            same_id: returns True if the chat template cannot tell two call ids apart; by default ids must be equal.
        """
        best: Turn | None = None
        held, match = messages, self._root.match(messages, equal)
        if same_id is not None and match.stops_at_calls():
            held = restore_ids(self._root, messages, equal, same_id)
            match = self._root.match(held, equal)
        for nodes in reversed(match.nodes[1:]):
            turns = [node.turn for node in nodes if node.turn is not None and node.turn.context in contexts]
            if turns:
                best = max(turns, key=attrgetter("number"))
                break
        if best is None:
            return ParentMatch(None, tuple(messages), contexts[0])
        return ParentMatch(best, tuple(held[best.messages :]), best.context)

    def match_after(
        self, parent: Turn | None, messages: Sequence[Message], equal: Equality, *, before: int
    ) -> HistoryMatch:
        """Match messages from the end of a turn on, among the turns with a smaller number than `before`."""
        return self._end_of(parent).match(messages, equal, before)

    def intern(self, match: ParentMatch) -> tuple[ParentMatch, int]:
        """Replace known messages and the context by the session's own objects, and store new ones.

        Retries and new roots repeat messages of other branches, which are stored only once.

        Returns:
            The match with the stored objects, and the number of bytes that are new.
        """
        nbytes = 0 if match.context in self._contexts else len(match.context)
        context = self._contexts.setdefault(match.context, match.context)
        appended = []
        for message in match.appended:
            digest = blake2b(orjson.dumps(message), digest_size=16).digest()
            if digest not in self._messages:
                self._messages[digest] = message
                nbytes += message_bytes(message)
            appended.append(self._messages[digest])
        return ParentMatch(match.parent, tuple(appended), context), nbytes

    def intern_tools(self, tools: Sequence[Any] | None) -> tuple[bytes, int]:
        """Store the tools of a root as sent.

        Returns:
            The compressed JSON of the tools (b"" without tools), and its number of bytes if it is new, else 0.
        """
        if not tools:
            return b"", 0
        written = orjson.dumps(tools)
        digest = blake2b(written, digest_size=16).digest()
        if digest in self._tools:
            return self._tools[digest], 0
        held = self._tools[digest] = zlib.compress(written, 1)
        return held, len(held)

    def append(self, turn: Turn) -> None:
        """Add a recorded turn, whose number must be the next."""
        assert turn.number == len(self.turns)
        self.siblings(turn).append(turn)
        self.turns.append(turn)
        self._children.append([])
        self._ends[turn] = self._end_of(turn.parent).append(turn)

    def restore(self, turn: Turn) -> None:
        """Add a turn from the archive, whose number must be the next, and store its messages."""
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
        """Return the turns with the same parent, including the turn itself if it is in the tree."""
        return self.roots if turn.parent is None else self._children[turn.parent.number]

    def descendants(self, turn: Turn) -> Iterator[Turn]:
        """Yield a turn and all its descendants."""
        turns = [turn]
        while turns:
            turn = turns.pop()
            yield turn
            turns.extend(self._children[turn.number])

    def leaves(self) -> list[Turn]:
        """Return the turns without children, in the order in which they were recorded."""
        return [turn for turn in self.turns if not self._children[turn.number]]

    def classify(self, turn: Turn) -> Classification:
        """Return the classification of a turn in the tree, computed once, together with all turns before it."""
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
            unrecorded = bool(answers) and not self.answers.contains_all(answers, self, turn.number)
            found = found._replace(unrecorded=unrecorded, side_call=side_call)
        return above if found == above else found  # the turns of one line share an object

    def classified(self) -> Sequence[Classification]:
        """Return the classification of every turn. The list stays valid if the session is deleted afterwards."""
        if self.turns:
            self.classify(self.turns[-1])
        return self._classified

    def clear(self) -> None:
        """Drop all turns at once, without waiting for the garbage collector: children and parents refer to each other.

        Requests in flight keep the turns that they extend.
        """
        self._root.clear()
        self.answers.clear()
        self._classified = []
        for held in (self.turns, self.roots, self._children, self._ends, self._messages, self._contexts, self._tools):
            held.clear()

"""A turn: one generation and what it was asked. Turns refer to their parents alone, and never change.

turn      parent's tokens (but for `dropped` at their end) + given + sampled
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import orjson

from middleware_hub.openai_session.sessions.messages import Message
from miles_router.middlewares.rows import NO_ROWS, RowPrefix, RowsByKind, first_prefix
from miles_router.trajectory import Piece, Trajectory
from miles_router.trajectory.rows import RowKind

#: Facts of a turn for audits, where there is something to say: what its request said of settings that an engine assumes
#: else; the setting that made its logprobs those of another distribution; the adapter that sampled it (None: not
#: known); what of its prompt no messages say.
SAMPLING, RESHAPED_BY, ADAPTER, UNRENDERED = "sampling", "reshaped_by", "adapter", "unrendered"


@dataclass(frozen=True, eq=False)
class Turn:
    """One generation. Two turns are equal only if they are one object.

    Attributes:
        path: where the agent asked, such as "/v1/chat/completions".
        parent: the turn whose tokens this one extends; None for a root.
        appended: messages that the request added to the parent's; all of them for a root.
        context: tools and template settings.
        answer: the message that was sampled.
        given: tokens that the engine was given behind the parent's.
        dropped: tokens at the parent's end that the engine was not given again.
        sampled: the sampled tokens.
        finish_reason: why the engine ended it.
        ended_itself: its last token is a stop token.
        number: its place in the order in which turns were recorded.
        request: the number of the first turn that answers the same prompt of the same request; its own by default.
        choice: its index in the answer.
        segment: for a root that continues a held history in words: why not in tokens.
        facts: for records: ids, times, counts.
        rows: of all its tokens but the last, where they are captured.
        tools: of a root, for `sent_tools`.
        side_call: its agent says that it does not belong to the main line.
        cache: the prefix cache that the engine sampled it with, which the next turn keeps.
        prompt_tokens, tokens: how many tokens stand in front of the sampled ones, and how many there are in all.
        messages: how many messages its whole history has, the answer included.
    """

    path: str
    parent: Turn | None = field(repr=False)
    appended: tuple[Message, ...]
    context: bytes
    answer: Message
    given: Piece
    dropped: int
    sampled: tuple[Piece, ...]
    finish_reason: str
    ended_itself: bool
    number: int
    request: int = -1
    choice: int = 0
    segment: str | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    rows: RowsByKind = field(default_factory=lambda: NO_ROWS)
    tools: bytes = b""
    side_call: bool = False
    cache: int | None = None
    prompt_tokens: int = field(init=False)
    tokens: int = field(init=False)
    messages: int = field(init=False)

    def __post_init__(self) -> None:
        before = self.parent.tokens - self.dropped if self.parent is not None else 0
        history = self.parent.messages if self.parent is not None else 0
        derived = {
            "request": self.number if self.request < 0 else self.request,
            "prompt_tokens": before + len(self.given),
            "tokens": before + len(self.given) + sum(map(len, self.sampled)),
            "messages": history + len(self.appended) + 1,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)  # the class is frozen

    @property
    def sent_answers(self) -> list[Message]:
        """The answers in the messages that its request added."""
        return [message for message in self.appended if message.get("role") == "assistant"]

    @property
    def sent_tools(self) -> Sequence[Any] | None:
        """The tools of a root with the names of their objects in the order in which they were sent, which `context`
        does not tell and templates write."""
        tools: Sequence[Any] | None = orjson.loads(zlib.decompress(self.tools)) if self.tools else None
        return tools

    def line(self) -> list[Turn]:
        """The turns from the root to this one."""
        line = [self]
        while (parent := line[-1].parent) is not None:
            line.append(parent)
        return line[::-1]

    def trajectory(self) -> Trajectory:
        """Everything the engine was given and sampled up to this turn's end."""
        return line_trajectory(self.line())

    def held_rows(self, kind: RowKind, tokens: int) -> RowPrefix | None:
        """The rows held of its first `tokens` tokens, or of as many of them as possible."""
        line = self.line()
        ends = accumulate((min(end, tokens) for end in reversed(line_ends(line))), min)
        return first_prefix((turn.rows.get(kind), end) for turn, end in zip(reversed(line), ends, strict=True))

    @property
    def last_id(self) -> int | None:
        """The last sampled token."""
        return int(self.sampled[-1].tokens[-1]) if self.sampled and len(self.sampled[-1]) else None


class Classification(NamedTuple):
    """What the turns before one say of it: a pure function of them, computed when it is read.

    Attributes:
        conversation: the root that began its conversation.
        reason: why it is not simply the next turn of its parent; None if it is.
        edit: what its request changed in what was held.
        first: the first turn that was asked the same; None for that turn itself.
        unrecorded: an answer in its request is none that this session recorded.
        side_call: its agent says of it, or of a turn above it, that it does not belong to the main line.
    """

    conversation: Turn
    reason: str | None = None
    edit: Mapping[str, Any] | None = None
    first: Turn | None = None
    unrecorded: bool = False
    side_call: bool = False


def line_trajectory(line: Sequence[Turn], *, elsewhere: Mapping[Turn, int] | None = None) -> Trajectory:
    """The tokens along a line of turns. `elsewhere`: how many of a turn's first sampled tokens are out of the loss,
    because another sample has them in it."""
    pieces: list[Piece] = []
    for turn in line:
        _drop(pieces, turn.dropped)
        pieces.append(turn.given)
        pieces += _out_of_the_loss(turn.sampled, elsewhere[turn]) if elsewhere is not None else turn.sampled
    return Trajectory(pieces)


def line_ends(line: Sequence[Turn]) -> list[int]:
    """Where in the tokens of a line each turn ends: what the next one dropped is no part of it."""
    return [turn.prompt_tokens - len(turn.given) for turn in line[1:]] + [line[-1].tokens]


def _drop(pieces: list[Piece], count: int) -> None:
    while count > 0:
        last = pieces.pop()
        if len(last) > count:
            pieces.append(last.cut(0, len(last) - count))
        count -= len(last)


def _out_of_the_loss(pieces: Iterable[Piece], count: int) -> Iterator[Piece]:
    for piece in pieces:
        out = min(count, len(piece))
        yield piece.cut(0, out).untrained()
        yield piece.cut(out, len(piece))
        count -= out

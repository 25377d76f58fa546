"""A turn: one generation with its request. Turns are immutable and refer to their parents only.

The tokens of a turn: the parent's without the last `dropped`, then `given`, then `sampled`.
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

#: Names of facts for audits, each present only if it has a value: the request's own sampling settings; the setting
#: that made the logprobs those of another distribution; the adapter that sampled the turn (None: not known); the reason
#: why the messages do not determine the prompt.
SAMPLING, RESHAPED_BY, ADAPTER, UNRENDERED = "sampling", "reshaped_by", "adapter", "unrendered"


@dataclass(frozen=True, eq=False)
class Turn:
    """One recorded generation. Two turns are equal only if they are the same object.

    Attributes:
        path: the path of the agent's request, such as "/v1/chat/completions".
        parent: the turn whose tokens this turn extends; None for a root.
        appended: the messages that the request added to the parent's history; all messages for a root.
        context: the key of the tools and template settings (`prompting.Context.key`).
        answer: the sampled message.
        given: the prompt tokens behind the parent's tokens.
        dropped: the number of tokens at the parent's end that the prompt leaves out.
        sampled: the sampled tokens.
        finish_reason: the finish reason that the engine reported.
        ended_itself: whether the last token is the model's own stop token.
        number: the index of the turn, in the order in which turns were recorded.
        request: the number of the first turn for the same prompt of the same request; the turn's own by default.
        choice: the index of the choice in the answer.
        segment: for a root that continues a recorded history as text: the reason why not as tokens.
        facts: ids, times and counts, for records.
        rows: the captured rows of all tokens but the last.
        tools: of a root, compressed JSON for `sent_tools`.
        side_call: whether the agent reports that the turn does not belong to its main line.
        cache: the prefix cache that the engine sampled the turn with, which the next turn reuses.
        prompt_tokens, tokens: the number of prompt tokens, and of all tokens.
        messages: the number of messages in the whole history, including the answer.
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
        """The assistant messages among the messages that the request added."""
        return [message for message in self.appended if message.get("role") == "assistant"]

    @property
    def sent_tools(self) -> Sequence[Any] | None:
        """The tools of a root exactly as sent; None without tools.

        Templates render the names of an object in the order sent, which `context` does not keep.
        """
        tools: Sequence[Any] | None = orjson.loads(zlib.decompress(self.tools)) if self.tools else None
        return tools

    def line(self) -> list[Turn]:
        """Return the turns from the root to this one."""
        line = [self]
        while (parent := line[-1].parent) is not None:
            line.append(parent)
        return line[::-1]

    def trajectory(self) -> Trajectory:
        """Return all tokens from the root to the end of this turn."""
        return line_trajectory(self.line())

    def held_rows(self, kind: RowKind, tokens: int) -> RowPrefix | None:
        """Return the recorded rows of the first `tokens` tokens, or of as many of them as possible."""
        line = self.line()
        ends = accumulate((min(end, tokens) for end in reversed(line_ends(line))), min)
        return first_prefix((turn.rows.get(kind), end) for turn, end in zip(reversed(line), ends, strict=True))

    @property
    def last_id(self) -> int | None:
        """The id of the last sampled token; None if none was sampled."""
        return int(self.sampled[-1].tokens[-1]) if self.sampled and len(self.sampled[-1]) else None


class Classification(NamedTuple):
    """The relation of a turn to the turns before it: a pure function of those, computed when it is first read.

    Attributes:
        conversation: the root that began the turn's conversation.
        reason: why the turn is a branch; None if it is simply the next turn of its parent.
        edit: what the request changed in the recorded history; None if nothing.
        first: the first turn with the same request; None for that turn itself.
        unrecorded: whether the request contains an answer that this session did not record.
        side_call: whether the agent reports that the turn, or an ancestor, does not belong to its main line.
    """

    conversation: Turn
    reason: str | None = None
    edit: Mapping[str, Any] | None = None
    first: Turn | None = None
    unrecorded: bool = False
    side_call: bool = False


def line_trajectory(line: Sequence[Turn], *, elsewhere: Mapping[Turn, int] | None = None) -> Trajectory:
    """Return the tokens along a line of turns.

    Args:
        elsewhere: for each turn, how many of its first sampled tokens the loss of another sample already includes; the
            loss of this trajectory excludes them. By default it includes all sampled tokens.
    """
    pieces: list[Piece] = []
    for turn in line:
        _drop(pieces, turn.dropped)
        pieces.append(turn.given)
        pieces += _out_of_the_loss(turn.sampled, elsewhere[turn]) if elsewhere is not None else turn.sampled
    return Trajectory(pieces)


def line_ends(line: Sequence[Turn]) -> list[int]:
    """Return the end of each turn in the tokens of a line, without the tokens that the next turn dropped."""
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

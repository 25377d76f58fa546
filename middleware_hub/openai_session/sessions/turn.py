"""A turn: one generation with its request; and the tools and template settings of a request. Turns are immutable and
refer to their parents only.

The tokens of a turn: the parent's without the last `dropped`, then `given`, then `sampled`.

Tools and settings are those that SGLang passes to the chat template (0.5.23, `protocol.py`). Only this module reads
them, because they decide both how a turn is rendered and which turn it may continue.
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

#: Named reasoning efforts; any other effort is a number.
EFFORTS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max"})
#: Fields of a function that SGLang's request model keeps; the first three are always present, null if not sent.
REQUIRED_FUNCTION_FIELDS = ("description", "name", "parameters")
FUNCTION_FIELDS = (*REQUIRED_FUNCTION_FIELDS, "strict", "defer_loading")
#: Fields of a request that set template settings.
SETTINGS = frozenset({"chat_template_kwargs", "reasoning", "reasoning_effort"})
TRUE_WORDS = frozenset({"1", "true", "yes", "y", "on"})


class Context:
    """The tools and template settings that a conversation is rendered with.

    Contexts that a template cannot tell apart are equal and have equal keys. The order of names in an object does
    not matter.
    """

    __slots__ = ("key", "template_kwargs", "tools")

    def __init__(self, tools: Sequence[Any] | None, template_kwargs: Mapping[str, Any]) -> None:
        self.tools = tools
        self.template_kwargs = template_kwargs
        read = [[prepared_tool(tool) for tool in tools] if tools else None, template_kwargs]
        self.key = orjson.dumps(read, option=orjson.OPT_SORT_KEYS) if tools or template_kwargs else b""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Context) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


def read_key(key: bytes) -> tuple[Sequence[Any] | None, Mapping[str, Any]]:
    """Return the tools and template settings of a `Context.key`; (None, {}) for the key of a completion."""
    tools, template_kwargs = orjson.loads(key) if key.startswith(b"[") else (None, {})
    return tools and [_sent_tool(tool) for tool in tools], template_kwargs


def shows_tools(key: bytes) -> bool:
    """Return True if the context with this key has tools."""
    return key.startswith(b"[[")


def _sent_tool(tool: Any) -> Any:
    """Return a prepared tool without its null fields, which the client need not have sent."""
    return {name: value for name, value in tool.items() if value is not None} if isinstance(tool, Mapping) else tool


def contexts_of(request: Mapping[str, Any]) -> tuple[Context, ...]:
    """Return the contexts in which a request may continue a recorded turn.

    The first is the context that the engine renders for this request, without tools that `tool_choice` excludes. If
    some are excluded, the second context has all tools: the request may also continue a turn that showed them all.
    """
    settings, shown, every_tool = settings_of(request), tools_of(request), _all_tools(request)
    own = Context(shown, settings)
    if shown is every_tool:
        return (own,)
    every = Context(every_tool, settings)
    return (own,) if own == every else (own, every)


def prepared_tool(tool: Any) -> Any:
    """Return a tool as SGLang's request model writes it, with the function's fields in the order in which they came."""
    if not isinstance(tool, Mapping) or not isinstance(tool.get("function"), Mapping):
        return tool
    sent = tool["function"]
    known = {name: sent[name] for name in sent if name in FUNCTION_FIELDS}
    function = {**known, **{name: None for name in REQUIRED_FUNCTION_FIELDS if name not in known}}
    kept = {name: value for name, value in function.items() if value is not None or name in REQUIRED_FUNCTION_FIELDS}
    return {"type": tool.get("type", "function"), "function": kept, "defer_loading": tool.get("defer_loading")}


def tools_of(request: Mapping[str, Any]) -> list[Any] | None:
    """Return the tools that the template renders: None if `tool_choice` is "none", or only the tool that it names."""
    tools, choice = _all_tools(request), request.get("tool_choice")
    if tools is None or choice == "none":
        return None
    if isinstance(choice, Mapping):
        return [tool for tool in tools if _name(tool) == _name(choice)] or None
    return tools


def _all_tools(request: Mapping[str, Any]) -> list[Any] | None:
    """Return the tools of a request; None without tools. The engine refuses tools that are not a list."""
    tools = request.get("tools")
    return tools if isinstance(tools, list) and tools else None


def _name(tool: object) -> object:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return function.get("name") if isinstance(function, Mapping) else None


def settings_of(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template settings of `chat_template_kwargs`, `reasoning_effort` and `reasoning`."""
    if SETTINGS.isdisjoint(request):  # the common case
        return {}
    reasoning = request.get("reasoning")
    reasoning = reasoning if isinstance(reasoning, Mapping) else {}
    named = (reasoning.get("effort"), reasoning.get("reasoning_effort"), request.get("reasoning_effort"))
    effort = _effort(next((each for each in named if each is not None), None))
    thinking = effort != "none" if effort is not None else True if _enabled(reasoning) else None
    given = request.get("chat_template_kwargs")
    settings = dict(given) if isinstance(given, Mapping) else {}
    if thinking is not None:
        settings = {"thinking": thinking, "enable_thinking": thinking, **settings}
    return settings if effort is None else {"reasoning_effort": effort, **settings}


def _effort(value: object) -> str | float | None:
    if isinstance(value, str) and value in EFFORTS:
        return value
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return None  # missing, or invalid and refused by the engine
    try:
        return float(value)
    except ValueError:
        return None


def _enabled(reasoning: Mapping[str, Any]) -> bool:
    enabled = reasoning.get("enabled")
    if enabled is None:
        enabled = reasoning.get("enable", False)
    return enabled.strip().lower() in TRUE_WORDS if isinstance(enabled, str) else bool(enabled)


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

"""Small conversations that a template is tried on: shapes of what is appended, and histories in front of it.

Every message says a word of its own, so that it is found in what the template writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from middleware_hub.openai_session.continuing.endings import SYSTEM, USER, AnswerShape
from middleware_hub.openai_session.sessions.messages import Message

#: So many equal roles in a row, or calls in an answer, stand for more.
MANY = 3
CALLING = "assistant with calls"
BESIDE = "qz7beside7zq"  # said beside tool calls
TOOL_WORD = "qz7tool7zq"
#: The content of each message of `probe_of`.
CONTENT = re.compile("qz7appended[0-9]+7zq")
#: Words by which some templates switch reasoning for all that follows.
SWITCHES = ("/no_think", "/think")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "probe",
            "description": TOOL_WORD,
            "parameters": {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]},
        },
    }
]


class Shape(NamedTuple):
    """What decides how a template writes the messages behind an answer, as far as anyone can see from outside."""

    roles: tuple[str, ...]
    calls: int = 0
    tools: bool = False
    reasoning: bool = False


#: What agents append. Tool calls come with tools.
STANDARD: Mapping[str, Shape] = {
    "user": Shape(("user",)),
    "user, with tools given": Shape(("user",), tools=True),
    "tool": Shape(("tool",), calls=1, tools=True),
    "two tools": Shape(("tool", "tool"), calls=2, tools=True),
    "tool, user": Shape(("tool", "user"), calls=1, tools=True),
    "system": Shape(("system",)),
    "assistant, user": Shape(("assistant", "user")),
    "nothing": Shape(()),
}


def shape_of(answer: AnswerShape, appended: Sequence[Message], tools: Sequence[Any] | None) -> Shape:
    """The shape of a continuation."""
    labels = (CALLING if message.get("tool_calls") else str(message.get("role")) for message in appended)
    roles = tuple(label for label, run in groupby(labels) for _ in range(min(MANY, sum(1 for _ in run))))
    return Shape(roles, min(MANY, len(answer.calls)), bool(tools), answer.reasoning)


def probe_of(shape: Shape) -> tuple[AnswerShape, list[Message]]:
    """An answer and messages of a shape, each message with a content of its own."""
    answer = AnswerShape(tuple((f"call_{place}", "probe") for place in range(shape.calls)), shape.reasoning)
    pending = iter([f"call_{place}" for place in range(shape.calls)])
    messages: list[Message] = []
    for place, role in enumerate(shape.roles):
        message: dict[str, Any] = {"role": role, "content": f"qz7appended{place}7zq"}
        if role == "tool":
            message["tool_call_id"] = next(pending, f"call_{place}")
            message["name"] = "probe"
        elif role == CALLING:
            results = max(1, _run(shape.roles, place + 1, "tool"))
            calls = [f"call_{place}_{each}" for each in range(results)]
            pending = iter(calls)
            function = {"name": "probe", "arguments": '{"q": "again"}'}
            message["role"] = "assistant"
            message["tool_calls"] = [{"id": each, "type": "function", "function": function} for each in calls]
        messages.append(message)
    return answer, messages


def _run(roles: Sequence[str], start: int, role: str) -> int:
    return next((place for place in range(start, len(roles)) if roles[place] != role), len(roles)) - start


class History(NamedTuple):
    """A conversation that an answer may stand behind, and what it is there for."""

    name: str
    messages: Sequence[Message]


def histories() -> Iterator[History]:
    """Longer conversations; templates differ in which of them they take."""
    question = _user("qz7earlier7zq")
    answered: Message = {"role": "assistant", "content": "qz7answered7zq", "reasoning_content": "qz7thought7zq"}
    call = {"id": "call_9", "type": "function", "function": {"name": "probe", "arguments": '{"q": "9"}'}}
    called: Message = {"role": "assistant", "content": "", "reasoning_content": "qz7plan7zq", "tool_calls": [call]}
    result: Message = {"role": "tool", "tool_call_id": "call_9", "name": "probe", "content": "qz7result7zq"}
    for system in ([], [SYSTEM]):
        name = "the system message" if system else "the conversation before it"
        yield History(name, [*system, question, called, result, answered, USER])
        yield History(name, [*system, question, answered, USER, answered, USER])
    plain: Message = {"role": "assistant", "content": "qz7answered7zq"}
    for switch in SWITCHES:
        yield History(f"{switch} said before", [_user(f"qz7earlier7zq {switch}"), plain, USER])
        switched = {"role": "system", "content": f"{SYSTEM['content']} {switch}"}
        yield History(f"{switch} said before", [switched, question, plain, USER])


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def given(before: Sequence[Message]) -> Iterator[tuple[str, str]]:
    """What of a history no answer is: tools, questions, results."""
    yield "the tools", TOOL_WORD
    for message in before:
        if message["role"] != "assistant":
            yield f"a {message['role']} message of before", str(message["content"])

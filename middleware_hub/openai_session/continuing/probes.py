"""Small conversations on which a template is tried: shapes of appended messages, and histories in front of them. Every
message contains a unique word, so that it can be found in the rendered text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from middleware_hub.openai_session.continuing.endings import SYSTEM, USER, AnswerShape
from middleware_hub.openai_session.sessions.messages import Message

#: Runs of more equal roles, and answers with more calls, are reduced to this number.
MANY = 3
CALLING = "assistant with calls"
BESIDE = "qz7beside7zq"  # the text of an answer with tool calls
TOOL_WORD = "qz7tool7zq"
#: The content of each message of `probe_of`.
CONTENT = re.compile("qz7appended[0-9]+7zq")
#: Words that switch reasoning off or on in some templates, for all that follows.
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
    """The properties of a continuation that can decide how a template writes it, as far as visible from outside."""

    roles: tuple[str, ...]
    calls: int = 0
    tools: bool = False
    reasoning: bool = False


#: Shapes that agents usually append. Shapes with tool calls have tools.
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
    labels = (CALLING if message.get("tool_calls") else str(message.get("role")) for message in appended)
    roles = tuple(label for label, run in groupby(labels) for _ in range(min(MANY, sum(1 for _ in run))))
    return Shape(roles, min(MANY, len(answer.calls)), bool(tools), answer.reasoning)


def probe_of(shape: Shape) -> tuple[AnswerShape, list[Message]]:
    """Return an answer and messages of a shape, each message with unique content."""
    answer = AnswerShape(tuple((f"call_{place}", "probe") for place in range(shape.calls)), shape.reasoning)
    pending = iter([f"call_{place}" for place in range(shape.calls)])
    messages: list[Message] = []
    for place, role in enumerate(shape.roles):
        message: dict[str, Any] = {"role": role, "content": f"qz7appended{place}7zq"}
        if role == "tool":
            message["tool_call_id"] = next(pending, f"call_{place}")
            message["name"] = "probe"
        elif role == CALLING:
            results = max(1, _run_length(shape.roles, place + 1, "tool"))
            calls = [f"call_{place}_{each}" for each in range(results)]
            pending = iter(calls)
            function = {"name": "probe", "arguments": '{"q": "again"}'}
            message["role"] = "assistant"
            message["tool_calls"] = [{"id": each, "type": "function", "function": function} for each in calls]
        messages.append(message)
    return answer, messages


def _run_length(roles: Sequence[str], start: int, role: str) -> int:
    return next((place for place in range(start, len(roles)) if roles[place] != role), len(roles)) - start


class History(NamedTuple):
    """A conversation in front of an answer; `name` is the part that a tail must not depend on."""

    name: str
    messages: Sequence[Message]


def histories() -> Iterator[History]:
    """Yield longer conversations. Each template accepts some of them."""
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
        yield History(f"{switch} in an earlier message", [_user(f"qz7earlier7zq {switch}"), plain, USER])
        switched = {"role": "system", "content": f"{SYSTEM['content']} {switch}"}
        yield History(f"{switch} in an earlier message", [switched, question, plain, USER])


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def history_texts(before: Sequence[Message]) -> Iterator[tuple[str, str]]:
    """Yield a name and a text for each part of a history that is not an answer: tools, questions, results."""
    yield "the tools", TOOL_WORD
    for message in before:
        if message["role"] != "assistant":
            yield f"an earlier {message['role']} message", str(message["content"])

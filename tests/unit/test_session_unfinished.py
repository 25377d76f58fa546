"""Tool calls that a whole answer ends within."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from middleware_hub.openai_session.turns.unfinished import with_unfinished_calls
from miles_router.engines.facts import Facts
from miles_router.engines.parsers import Parsers
from tests.support.sessions import assistant, call, user
from tests.support.written_turns import TOOLS

TEXT = '<|tool_calls_section_begin|><|tool_call_begin|>functions.add:1<|tool_call_argument_begin|>{"a": 1'


def decode(ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    """Every id is a character."""
    return "".join(map(chr, ids))


def answer_of(text: str, reasoning: str | None = None) -> dict[str, Any]:
    message = {"role": "assistant", "content": "", "reasoning_content": reasoning}
    meta = {"output_token_logprobs": [[-0.5, ord(each), None] for each in text]}
    return {"choices": [{"finish_reason": "length", "message": message, "meta_info": meta}]}


def test_a_call_that_is_shown_unfinished_is_named_as_its_engine_names_calls() -> None:
    history = [user("Add."), {**assistant(""), "tool_calls": [call("add", "{}", "functions.add:0")]}]
    fields = {"messages": history, "tools": TOOLS}
    facts = Facts(tool_call_parser="kimi_k2")
    answer = with_unfinished_calls(answer_of(TEXT), fields, Parsers("local", "kimi"), facts, decode)
    (unfinished,) = answer["choices"][0]["message"]["tool_calls"]
    function = {"name": "add", "arguments": '{"a": 1'}
    assert unfinished == {"id": "functions.add:1", "index": 0, "type": "function", "function": function}


WRITING = '<think>I might write <tool_call>\n{"name": "add", "arguments": {"a": '
HARMONY = "<|channel|>analysis<|message|>Why?<|end|><|start|>assistant<|channel|>commentary to=functions.add "


@pytest.mark.parametrize(
    ("calls", "thinking", "text", "arguments"),
    [
        ("qwen25", "qwen3", f"{WRITING}1</think>So I d", None),
        ("qwen25", "qwen3", f"{WRITING}1", '{"a": 1'),
        ("gpt-oss", "gpt-oss", f"{HARMONY}<|constrain|>json", None),
        ("gpt-oss", "gpt-oss", f'{HARMONY}<|constrain|>json<|message|>{{"a": 1', '{"a": 1'),
    ],
)
def test_a_call_that_reasoning_only_speaks_of_is_none(
    calls: str, thinking: str, text: str, arguments: str | None
) -> None:
    fields, facts = {"messages": [], "tools": TOOLS}, Facts(tool_call_parser=calls, reasoning_parser=thinking)
    answer = with_unfinished_calls(answer_of(text, "Why?"), fields, Parsers("hybrid"), facts, decode)
    shown = [each["function"]["arguments"] for each in answer["choices"][0]["message"].get("tool_calls", [])]
    assert shown == ([] if arguments is None else [arguments])

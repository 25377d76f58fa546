"""Tool calls that a whole answer ends within."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from middleware_hub.openai_session.turns.unfinished import with_unfinished
from miles_router.engines.facts import Facts
from miles_router.engines.parsers import Parsers
from tests.support.sessions import assistant, call, user
from tests.support.written_turns import TOOLS

TEXT = '<|tool_calls_section_begin|><|tool_call_begin|>functions.add:1<|tool_call_argument_begin|>{"a": 1'


def decode(ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    """Every id is a character."""
    return "".join(map(chr, ids))


def test_a_call_that_is_shown_unfinished_is_named_as_its_engine_names_calls() -> None:
    history = [user("Add."), {**assistant(""), "tool_calls": [call("add", "{}", "functions.add:0")]}]
    fields = {"messages": history, "tools": TOOLS}
    choice: dict[str, Any] = {
        "finish_reason": "length",
        "message": {"role": "assistant", "content": ""},
        "meta_info": {"output_token_logprobs": [[-0.5, ord(each), None] for each in TEXT]},
    }
    facts = Facts(tool_call_parser="kimi_k2")
    answer = with_unfinished({"choices": [choice]}, fields, Parsers("local", "kimi"), facts, decode)
    (unfinished,) = answer["choices"][0]["message"]["tool_calls"]
    function = {"name": "add", "arguments": '{"a": 1'}
    assert unfinished == {"id": "functions.add:1", "index": 0, "type": "function", "function": function}

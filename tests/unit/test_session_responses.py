"""The Responses API: requests as chat requests, and answers whole and as events."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from middleware_hub.openai_session.agent_apis.responses.agent_api import page
from middleware_hub.openai_session.agent_apis.responses.errors import InvalidParameter
from middleware_hub.openai_session.agent_apis.responses.open_items import TextOfInput
from tests.support.responses import asked, messages
from tests.support.sessions import Scene


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_the_text_of_an_input_comes_as_its_json_does(size: int) -> None:
    arguments = '{ "input" :"a\\n\\"b\\" \\\\ \\u00e9\\ud83d\\ude00 c"}'
    reader = TextOfInput()
    pieces = [reader.feed(arguments[at : at + size]) for at in range(0, len(arguments), size)]
    assert "".join(pieces) == 'a\n"b" \\ é\U0001f600 c'


FUNCTION: Any = {"type": "function", "name": "add", "parameters": {"type": "object"}}


def test_items_that_this_session_has_not_said_are_grouped_by_their_order() -> None:
    """As of an episode that began elsewhere."""
    given = [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        {"type": "function_call", "call_id": "1", "name": "add", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "find", "namespace": "crm", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "c"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "d"}]},
        {"type": "custom_tool_call", "call_id": "3", "name": "patch", "input": "e"},
        {"type": "custom_tool_call_output", "call_id": "3", "output": "f"},
        {"type": "shell_call", "call_id": "4", "action": {"commands": ["ls"], "timeout_ms": None}},
        {"type": "shell_call_output", "call_id": "4", "output": [{"stdout": "g", "outcome": {"type": "exit"}}]},
        {"type": "apply_patch_call", "call_id": "5", "operation": {"type": "delete_file", "path": "a"}},
        {"type": "apply_patch_call_output", "call_id": "5", "status": "failed"},
        {"type": "local_shell_call", "call_id": "6", "action": {"type": "exec", "command": ["ls"], "env": {}}},
        {"type": "local_shell_call_output", "id": "6", "output": "h"},
    ]  # fmt: skip
    _, first, *rest = messages(Scene(), given)
    calls = [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in first.pop("tool_calls")]
    assert first == {"role": "assistant", "content": "b", "reasoning_content": "t"}
    assert calls == [("1", "add", "{}"), ("2", "crm__find", "{}")]
    assert [message["content"] for message in rest if message["role"] == "tool"][:3] == ["c", "d", "f"]
    arguments = [call["function"]["arguments"] for message in rest for call in message.get("tool_calls", ())]
    assert list(map(orjson.loads, arguments)) == [
        {"input": "e"},
        {"commands": ["ls"]},
        {"type": "delete_file", "path": "a"},
        {"command": ["ls"]},
    ]
    assert [(message["tool_call_id"], message["content"]) for message in rest if message["role"] == "tool"][3:] == [
        ("4", '[{"stdout":"g","outcome":{"type":"exit"}}]'),
        ("5", "failed"),
        ("6", "h"),
    ]


def test_tools_are_shown_as_functions() -> None:
    tools = [
        {**FUNCTION, "strict": True, "description": "Adds."},
        {"type": "custom", "name": "plain"},
        {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: x"}},
        {"type": "namespace", "name": "mcp__db__", "description": "", "tools": [{**FUNCTION, "name": "q"}]},
        *({"type": kind} for kind in ("local_shell", "shell", "apply_patch", "web_search", "tool_search")),
        {**FUNCTION, "name": "later", "defer_loading": True},
    ]
    read = asked(Scene(), tools=tools)
    shown = {tool["function"]["name"]: tool["function"] for tool in read.fields["tools"]}
    assert list(shown) == ["add", "plain", "patch", "mcp__db__q", "local_shell", "shell", "apply_patch"]
    assert shown["add"] == {"name": "add", "description": "Adds.", "parameters": {"type": "object"}, "strict": True}
    assert shown["plain"]["parameters"]["required"] == ["input"]
    assert "lark grammar:\nstart: x" in shown["patch"]["parameters"]["properties"]["input"]["description"]
    assert read.settings.tools.left_out == ["web_search", "tool_search", "later"]
    assert [tool["type"] for tool in read.settings.tools.given] == [tool["type"] for tool in tools[:7]]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [FUNCTION, {**FUNCTION, "description": "Another."}]}, "tools[1].name"),
        ({"tools": [{"type": "custom", "name": "a", "format": {"type": "x"}}]}, "tools[0].format.type"),
        ({"tools": [{**FUNCTION, "parameters": 1}]}, "tools[0].parameters"),
        ({"tools": [{"type": "namespace", "name": "a"}]}, "tools[0].tools"),
        ({"tools": {}}, "tools"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "gone"}}, "tool_choice"),
        ({"given": []}, "input"),
        ({"given": [3]}, "input[0]"),
        ({"given": [{"role": "user"}]}, "input[0].content"),
        ({"given": [{"role": "user", "content": 3}]}, "input[0].content"),
        ({"given": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"given": [{"role": "boss", "content": "a"}]}, "input[0].role"),
        ({"given": [{"type": "function_call", "call_id": {}, "name": "a", "arguments": "{}"}]}, "input[0].call_id"),
        ({"given": [{"type": "function_call", "call_id": "1", "name": "a", "arguments": 7}]}, "input[0].arguments"),
        ({"given": [{"type": "shell_call", "call_id": "1"}]}, "input[0].action"),
        ({"given": [{"type": "function_call_output", "output": "a"}]}, "input[0].call_id"),
        ({"given": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0].type"),
        ({"instructions": []}, "instructions"),
        ({"model": None}, "model"),
        ({"stream": "yes"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"reasoning": "high"}, "reasoning"),
        ({"truncation": "middle"}, "truncation"),
        ({"include": "all"}, "include"),
        ({"include": [{}]}, "include[0]"),
        ({"tools": [{"type": {}}]}, "tools[0].type"),
        ({"tools": [{"type": ["function"]}]}, "tools[0].type"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", "tools": 1}}, "tool_choice.tools"),
        ({"given": [{"type": ["message"]}]}, "input[0].type"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ],
)
def test_what_is_no_request_is_refused_and_says_where(fields: Any, param: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        asked(Scene(), **fields)
    assert refused.value.param == param


@pytest.mark.parametrize("limit", ["0", "101", "0000000019999", "000000001" + "9" * 5_000, "-1", "1.0", ""])
def test_a_limit_beyond_a_page_is_refused(limit: str) -> None:
    with pytest.raises(InvalidParameter, match="limit"):
        page([{"id": str(number)} for number in range(500)], {"limit": limit})

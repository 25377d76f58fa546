"""Answers in the Responses API: whole, and as events."""

from __future__ import annotations

from typing import Any

import pytest

from middleware_hub.openai_session.faces.responses.envelope import Responses
from middleware_hub.openai_session.faces.responses.open_items import TextOfInput
from tests.support.responses import Written
from tests.support.sessions import Scene, call

TOOLS: Any = [
    {"type": "function", "name": "add", "parameters": {"type": "object"}},
    {"type": "custom", "name": "patch"},
    {"type": "shell"},
    {"type": "apply_patch"},
]


def said(content: str | None = None, *calls: Any, thought: str | None = None) -> dict[str, Any]:
    fields = {"tool_calls": list(calls)} if calls else {}
    return {"role": "assistant", "content": content, "reasoning_content": thought, **fields}


def test_an_answer_is_reasoning_a_message_and_calls() -> None:
    calls = [
        call("add", '{"a": 1}', "1"),
        call("patch", '{"input": "x"}', "2"),
        call("shell", '{"commands": ["ls"]}', "3"),
        call("apply_patch", '{"type": "delete_file", "path": "a"}', "4"),
    ]
    response = Written(Scene(), said("Now.", *calls, thought="Hm."), tools=TOOLS).whole()
    assert [(item["type"], item.get("call_id")) for item in response["output"]] == [
        ("reasoning", None),
        ("message", None),
        ("function_call", "1"),
        ("custom_tool_call", "2"),
        ("shell_call", "3"),
        ("apply_patch_call", "4"),
    ]
    shell, patch = response["output"][-2:]
    assert shell["action"] == {"commands": ["ls"], "timeout_ms": None, "max_output_length": None}
    assert patch["operation"] == {"type": "delete_file", "path": "a"}
    assert (response["status"], response["usage"]["total_tokens"]) == ("completed", 7)


@pytest.mark.parametrize("arguments", ["ls", '"ls"', "{}", '{"commands": "ls"}'])
def test_a_call_that_is_none_of_its_tool_is_shown_as_what_was_sampled(arguments: str) -> None:
    (item,) = Written(Scene(), said(None, call("shell", arguments)), tools=TOOLS).whole()["output"]
    assert (item["type"], item["name"], item["arguments"]) == ("function_call", "shell", arguments)


@pytest.mark.parametrize("arguments", ["plain text", '{"patch": "x"}', '{"input": 3}', ""])
def test_a_custom_tool_that_is_called_with_no_input_gets_all_that_was_sampled(arguments: str) -> None:
    scene = Scene()
    (item,) = Written(scene, said(None, call("patch", arguments)), tools=TOOLS).whole()["output"]
    assert item["input"] == arguments
    held = Responses.of(scene.session).calls("call_1")
    assert [one["function"]["arguments"] for _, one in held] == [arguments]


def test_an_answer_that_says_nothing_is_an_empty_message() -> None:
    (item,) = Written(Scene(), said("")).whole()["output"]
    events = Written(Scene(), said("")).events([])
    assert item["content"][0]["text"] == events[-1]["response"]["output"][0]["content"][0]["text"] == ""


def test_white_space_between_calls_is_no_message() -> None:
    deltas: list[dict[str, Any]] = [
        {"content": " \n"},
        {"content": "Now."},
        {"content": "\n\n"},
        {"tool_calls": [{"index": 0, "id": "1", "function": {"name": "add", "arguments": "{}"}}]},
        {"content": "\n"},
        {"tool_calls": [{"index": 1, "id": "2", "function": {"name": "add", "arguments": "{}"}}]},
        {"content": "\n"},
    ]
    written = Written(Scene(), said(), tools=TOOLS)
    response = written.events(deltas)[-1]["response"]
    assert [item["type"] for item in response["output"]] == ["message", "function_call", "function_call"]
    assert response["output"][0]["content"][0]["text"] == " \nNow."
    assert written.envelope.finished() == response


@pytest.mark.parametrize("finish", ["length", "abort"])
@pytest.mark.parametrize(("name", "shown"), [("add", True), ("patch", False), ("shell", False)])
def test_a_call_that_was_cut_stays_open(finish: str, name: str, shown: bool) -> None:
    """The engine closes its arguments by itself."""
    deltas: list[dict[str, Any]] = [
        {"tool_calls": [{"index": 0, "id": "1", "function": {"name": "add", "arguments": '{"a": {}}'}}]},
        {"tool_calls": [{"index": 1, "id": "2", "function": {"name": name, "arguments": ""}}]},
        {"tool_calls": [{"index": 1, "function": {"arguments": '{"input": "x'}}]},
        {"tool_calls": [{"index": 1, "function": {"arguments": '"}'}}]},
    ]
    written = Written(Scene(), said(), finish, tools=TOOLS)
    events = written.events(deltas)
    done = [event["item"]["call_id"] for event in events if event["type"] == "response.output_item.done"]
    assert done == ["1"]
    assert sum(event["type"].endswith(("arguments.done", "input.done")) for event in events) == 1
    last = events[-1]
    status = "incomplete" if finish == "length" else "failed"
    assert (last["type"], last["response"]["status"]) == (f"response.{status}", status)
    calls = [(item["call_id"], item["status"], item["arguments"]) for item in last["response"]["output"]]
    assert calls == [("1", "completed", '{"a": {}}'), ("2", "incomplete", '{"input": "x"')][: 1 + shown]
    assert written.envelope.finished() == last["response"]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_the_text_of_an_input_comes_as_its_json_does(size: int) -> None:
    arguments = '{ "input" :"a\\n\\"b\\" \\\\ \\u00e9\\ud83d\\ude00 c"}'
    reader = TextOfInput()
    pieces = [reader.feed(arguments[at : at + size]) for at in range(0, len(arguments), size)]
    assert "".join(pieces) == 'a\n"b" \\ é\U0001f600 c'


@pytest.mark.parametrize("arguments", ['{"patch": "x"}', "x" * 100 + '{"input": "y"}', '["input"]'])
def test_other_arguments_are_not_shown_before_they_are_whole(arguments: str) -> None:
    reader = TextOfInput()
    assert [reader.feed(letter) for letter in arguments] == [""] * len(arguments)

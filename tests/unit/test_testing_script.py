"""The simulated worker's scripts: which step answers a request, and the tokens of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from miles_router.testing import ToyTokenizer
from miles_router.testing.worker.model.script import Script
from miles_router.testing.worker.model.tool_calls import ToolCallStream, parse_calls

TOOLS = [{"type": "function", "function": {"name": "read"}}, {"type": "function", "function": {"name": "write"}}]
ASKED: dict[str, Any] = {"role": "user", "content": "Go"}
READ = {"reasoning": "I look.", "calls": [{"name": "read", "arguments": {"path": "a.txt", "n": 17}}]}


def request(*messages: dict[str, Any], tools: object = TOOLS, **fields: Any) -> dict[str, Any]:
    return {"messages": list(messages), "tools": tools, **fields}


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def texts(script: Script, *requests: dict[str, Any]) -> list[str | None]:
    steps = [script.step(each) for each in requests]
    return [None if step is None else step.text for step in steps]


def test_a_step_answers_what_has_as_many_answers_before_it_however_often_it_comes() -> None:
    script = Script(["first", "second"])
    first, second, third = request(ASKED), request(ASKED, answer("x"), ASKED), request(answer("x"), ASKED, answer("y"))
    assert texts(script, second, first, first, third) == ["second", "first", "first", None]


def test_a_step_with_a_text_answers_what_has_it_behind_the_last_answer() -> None:
    script = Script(["in order", {"text": "matched", "when": "no such file"}])
    error = {"role": "tool", "content": [{"type": "text", "text": "Error: no such file."}]}
    reminder = {"role": "user", "content": "Mind the rules."}
    assert texts(script, request(ASKED, answer("x"), error, reminder)) == ["matched"]
    assert texts(script, request(ASKED, error, answer("x"), reminder), request(ASKED)) == [None, "in order"]


def test_a_step_with_calls_is_not_for_side_calls_without_these_tools() -> None:
    script = Script([READ])
    assert script.step(request(ASKED)) is not None
    assert script.step(request(ASKED, tools=None)) is None
    assert script.step(request(ASKED, tools=TOOLS[1:])) is None


def test_a_step_is_written_as_the_family_writes_it_and_ends_with_a_stop_token() -> None:
    tokenizer = ToyTokenizer()
    script = Script([{**READ, "text": "Now:"}])
    ids = script.play(request(ASKED), tokenizer.encode("<|im_start|>assistant\n"), tokenizer)
    written = '<tool_call>\n{"name": "read", "arguments": {"path": "a.txt", "n": 17}}\n</tool_call>'
    expected = f"<think>\nI look.\n</think>\n\nNow:\n{written}"
    assert ids is not None
    assert ids[:-1] == tokenizer.encode(expected)
    assert ids[-1] in tokenizer.eos_token_ids


def test_what_a_prompt_ends_with_of_its_step_is_not_sampled_again() -> None:
    tokenizer = ToyTokenizer()
    script = Script([READ])
    prompt = tokenizer.encode("<|im_start|>assistant\n")
    ids = script.play(request(ASKED), prompt, tokenizer)
    assert ids is not None
    for cut in (2, 9, len(ids) - 2):
        assert script.play(request(ASKED), [*prompt, *ids[:cut]], tokenizer) == ids[cut:]
    begun = request(ASKED, answer("I lo"), continue_final_message=True)
    assert script.play(begun, [*prompt, *ids[:3]], tokenizer) == ids[3:]


@pytest.mark.parametrize(
    "step",
    [7, {}, {"say": "x"}, {"text": 1}, {"calls": "read"}, {"calls": [{"arguments": {}}]}],
)
def test_what_is_no_step_is_refused(step: object) -> None:
    with pytest.raises(ValueError, match="a step"):
        Script([step])


@pytest.mark.parametrize(("text", "complaint"), [("{", "is no JSON"), ('{"text": "a"}', "must hold a list of steps")])
def test_what_is_no_script_is_refused(text: str, complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "script.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=complaint):
        Script.from_file(str(file))


SPELLED = [
    '{"a":17}',
    '{ "a" :  [1,2 , {"b":null}],"c": "x: y, z"}',
    r'{"a":"q\" \\ \/ \u00e9 \ud83d\ude80 \n \u0001","\u0041":""}',
    "{}",
]


@pytest.mark.parametrize("arguments", SPELLED)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_arguments_have_the_engines_spaces_whole_and_streamed(arguments: str, size: int) -> None:
    text = f'<tool_call>\n{{"name":"read", "arguments":{arguments}}}\n</tool_call>'
    expected = json.dumps(json.loads(arguments), ensure_ascii=False)
    _, calls = parse_calls(text, ["read"])
    assert calls is not None
    assert calls[0]["function"]["arguments"] == expected
    stream = ToolCallStream(["read"])
    parts = [stream.push(text[at : at + size], last=at + size >= len(text)) for at in range(0, len(text), size)]
    pieces = [part for each in parts for part in each if isinstance(part, dict)]
    assert "".join(piece["function"]["arguments"] for piece in pieces) == expected

"""Faults are planned by path and number; tool calls are found in text however it is cut."""

import random
from typing import Any

import orjson
import pytest

from miles_router.testing.worker.faults import Faults
from miles_router.testing.worker.model.tool_calls import ToolCallStream, parse_calls, required_call
from miles_router.testing.worker.model.vocabulary import ToyTokenizer


def test_a_fault_is_used_as_often_as_planned() -> None:
    faults = Faults()
    faults.hang(times=2)
    assert [taken.name if (taken := faults.take("/x")) else None for _ in range(3)] == ["hang", "hang", None]


def test_a_fault_without_number_lasts_until_it_is_cleared() -> None:
    faults = Faults()
    faults.close(times=None)
    assert all(faults.take("/x") for _ in range(100))
    faults.clear()
    assert faults.take("/x") is None


def test_a_fault_for_a_path_leaves_others_alone() -> None:
    faults = Faults()
    faults.status(503, path="/generate")
    assert faults.take("/health") is None
    fault = faults.take("/generate")
    assert fault is not None
    assert fault.status == 503


def test_faults_are_used_in_the_order_they_were_planned() -> None:
    faults = Faults()
    faults.hang()
    faults.garbage()
    assert [fault.name for _ in range(2) if (fault := faults.take("/"))] == ["hang", "garbage"]


def test_no_times_at_all_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="times must be at least 1"):
        Faults().hang(times=0)


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "}"}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}]


def test_a_text_without_calls_is_left_alone() -> None:
    assert parse_calls(" <tool_call> no\n", ["add"]) == (" <tool_call> no\n", None)


def test_calls_are_taken_out_of_the_text() -> None:
    text, calls = parse_calls(f"Adding. {CALL}\n{CALL}", ["add"])
    assert text == "Adding."
    assert calls is not None
    assert [call["index"] for call in calls] == [0, 1]
    assert [orjson.loads(call["function"]["arguments"]) for call in calls] == [{"a": 1, "b": "}"}] * 2
    assert len({call["id"] for call in calls}) == 2


@pytest.mark.parametrize(
    "broken", ["<tool_call>\nno json\n</tool_call>", CALL[:-5], CALL[:-13], CALL.replace("add", "other")]
)
def test_what_is_no_call_of_a_known_tool_is_dropped(broken: str) -> None:
    assert parse_calls("x " + broken, ["add"]) == ("x", None)


def collect(parts: list[Any]) -> tuple[str, list[tuple[str, str]]]:
    """Visible text, and (name, joined arguments) of every call."""
    text, calls = "", dict[int, list[str]]()
    for part in parts:
        if isinstance(part, str):
            text += part
        else:
            call = calls.setdefault(part["index"], ["", ""])
            call[0] += part["function"]["name"] or ""
            call[1] += part["function"]["arguments"]
    return text, [(name, arguments) for name, arguments in calls.values()]


@pytest.mark.parametrize("seed", range(30))
def test_a_stream_cut_anywhere_gives_the_same_text_and_calls(seed: int) -> None:
    source, whole = random.Random(seed), f"before {CALL}{CALL} after <tool"
    stream, parts, start = ToolCallStream(["add"]), [], 0
    while start < len(whole):
        end = start + source.randint(1, 9)
        parts += stream.push(whole[start:end], last=end >= len(whole))
        start = end
    text, calls = collect(parts)
    assert text == "before  after <tool"
    assert calls == [("add", '{"a": 1, "b": "}"}')] * 2
    assert stream.calls == 2


def test_a_required_call_is_well_formed_and_oddly_spelled() -> None:
    toy = ToyTokenizer()
    ids = required_call(TOOLS, "required", toy, seed=3)
    text = toy.decode(ids[:-1])
    assert ids[-1] in toy.eos_token_ids
    assert ids[:-1] != toy.encode(text)
    _, calls = parse_calls(text, ["add"])
    assert calls is not None
    assert calls[0]["function"]["name"] == "add"

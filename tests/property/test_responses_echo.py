"""What an agent sends back of a response is the answer that its session holds, however it is spelled and streamed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from hypothesis import given
from hypothesis import strategies as st

from miles_router.engines.openai.chat_stream import GrowingMessage
from tests.support.responses import Written, messages
from tests.support.sessions import Scene

TOOLS: Any = [
    {"type": "function", "name": "add"},
    {"type": "custom", "name": "patch"},
    {"type": "local_shell"},
    {"type": "namespace", "name": "crm", "tools": [{"type": "function", "name": "find"}]},
]
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
BLANK = st.sampled_from(["", " ", "\n\n"])
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | TEXT,
    lambda each: st.lists(each, max_size=2) | st.dictionaries(TEXT, each, max_size=2),
    max_leaves=4,
)
ARGUMENTS = {
    "add": VALUE,
    "crm__find": VALUE,
    "patch": st.fixed_dictionaries({"input": TEXT}) | VALUE,
    "local_shell": st.fixed_dictionaries({"command": st.lists(TEXT)}, optional={"user": TEXT}) | VALUE,
}


@st.composite
def sampled_calls(draw: st.DrawFn) -> list[tuple[str, str]]:
    """Names and arguments, as an engine or a model writes them."""
    names = draw(st.lists(st.sampled_from(sorted(ARGUMENTS)), max_size=3))
    calls = []
    for name in names:
        arguments = orjson.dumps(draw(ARGUMENTS[name])).decode()
        calls.append((name, arguments.replace('":', '": ') if draw(st.booleans()) else arguments))
    return calls


def cut(draw: st.DrawFn, text: str) -> list[str]:
    """A text in pieces."""
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=3)))
    return [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]


@st.composite
def answers(draw: st.DrawFn) -> list[dict[str, Any]]:
    """An answer in deltas."""
    deltas: list[dict[str, Any]] = [{"reasoning_content": piece} for piece in cut(draw, draw(TEXT))]
    deltas += [{"content": piece} for piece in cut(draw, draw(BLANK) + draw(TEXT) + draw(BLANK))]
    for index, (name, arguments) in enumerate(draw(sampled_calls())):
        function = {"name": name, "arguments": ""}
        deltas.append({"tool_calls": [{"index": index, "id": f"call_{index}", "function": function}]})
        deltas += [
            {"tool_calls": [{"index": index, "function": {"arguments": piece}}]} for piece in cut(draw, arguments)
        ]
        deltas.append({"content": draw(BLANK)})
    return deltas


def said(deltas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    growing = GrowingMessage()
    for delta in deltas:
        growing.add(delta)
    return growing.message()


def results(items: Sequence[Any]) -> list[Any]:
    calls = (item["call_id"] for item in items if "call_id" in item)
    return [{"type": "function_call_output", "call_id": call_id, "output": "ok"} for call_id in calls]


@given(deltas=answers(), live=st.booleans(), stored=st.booleans(), data=st.data())
def test_it_is_the_same_answer(deltas: Any, live: bool, stored: bool, data: st.DataObject) -> None:
    scene, held = Scene(), said(deltas)
    written = Written(scene, held, tools=TOOLS, store=stored)
    if live:
        events = written.events(deltas)
        response = events[-1]["response"]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == response["output"]
        for done, name in (
            ("output_text", "text"),
            ("function_call_arguments", "arguments"),
            ("custom_tool_call_input", "input"),
        ):
            for end in (event for event in events if event["type"] == f"response.{done}.done"):
                grown = (event for event in events if event["type"] == f"response.{done}.delta")
                pieces = [event["delta"] for event in grown if event["output_index"] == end["output_index"]]
                assert "".join(pieces) == end[name]
    else:
        response = written.whole()
    assert written.envelope.written()["output"] == response["output"]
    items = response["output"]
    if data.draw(st.booleans(), "reasoning is left out"):
        items = [item for item in items if item["type"] != "reasoning"] if len(items) > 1 else items
    elif data.draw(st.booleans(), "its text is left out"):
        items = [{**item, "content": []} if item["type"] == "reasoning" else item for item in items]
    back = [*items, *results(items)]
    if data.draw(st.booleans(), "each result stands behind its call"):
        between = [[item, *results([item])] for item in items]
        back = [each for pair in between for each in pair]
    user, answer, *rest = messages(scene, [{"role": "user", "content": "Hi"}, *back, {"role": "user", "content": "Go"}])
    assert scene.equal(held, answer), (held, answer)
    assert [message["role"] for message in (user, *rest)] == ["user", *["tool"] * len(results(items)), "user"]

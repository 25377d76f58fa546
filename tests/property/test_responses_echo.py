"""What an agent sends back of a response is the answer that its session holds, however it is spelled and streamed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from miles_router.engines.openai.chat_stream import GrowingMessage
from tests.support.responses import Written, messages
from tests.support.sessions import Scene
from tests.support.tiers import examples

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
    assert written.envelope.finished()["output"] == response["output"]
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


@st.composite
def episodes(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Answers of which each calls tools, whose ids may be the same in each."""
    counted, answers = draw(st.booleans()), []
    for turn in range(draw(st.integers(2, 4))):
        names = draw(st.lists(st.sampled_from(["add", "local_shell"]), min_size=1, max_size=3))
        calls = []
        for place, name in enumerate(names):
            value = draw(st.sampled_from(['{"command": ["ls"]}', '{"command":["pwd"]}']))
            call_id = f"{name}:{place}" if counted else f"call_{turn}_{place}"
            calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": value}})
        said = {"content": draw(st.sampled_from(["", "Hm.", "Let me see.\n"])), "tool_calls": calls}
        thought = draw(st.sampled_from(["", "First.\n", f"Thought {turn}."]))
        answers.append({"role": "assistant", **said, **({"reasoning_content": thought} if thought else {})})
    return answers


def without_ids(draw: st.DrawFn, items: Sequence[Any], turn: int) -> list[Any]:
    """The items of an answer and its results as some agent sends them back, in an order of its own."""
    calls = [{key: item[key] for key in item if key != "id"} for item in items if "call_id" in item]
    text = [{"role": "assistant", "content": item["content"]} for item in items if item["type"] == "message"]
    thoughts = [item["content"][0]["text"] for item in items if item["type"] == "reasoning"]
    how = draw(st.sampled_from(["kept", "dropped", "a message", "a part of the text"]))
    if how == "a part of the text" and thoughts:
        parts = [{"type": "output_text", "text": each} for each in thoughts]
        text = [{"role": "assistant", "content": [*parts, *(text[0]["content"] if text else ())]}]
    reasoning = {
        "kept": [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": each}]} for each in thoughts],
        "a message": [{"type": "message", "role": "assistant", "content": each.strip()} for each in thoughts],
    }.get(how, [])
    given = [
        {"type": "function_call_output", "call_id": call["call_id"], "output": f"{turn}.{place}"}
        for place, call in enumerate(calls)
    ]
    if draw(st.booleans()) and how != "a part of the text":
        return [*reasoning, *calls, *text, *given]
    if draw(st.booleans()):
        return [*reasoning, *text, *(each for pair in zip(calls, given, strict=True) for each in pair)]
    return [*reasoning, *text, *calls, *given]


@settings(max_examples=examples(300))
@given(answers=episodes(), data=st.data())
def test_an_episode_without_item_ids_is_one_line(answers: Sequence[Any], data: st.DataObject) -> None:
    """Also where the same call comes in two turns, under the same id."""
    scene, sent = Scene(), [{"role": "user", "content": "Hi"}]
    for turn, answer in enumerate(answers):
        response = Written(scene, answer, given=sent, tools=TOOLS).whole()
        sent += data.draw(st.composite(without_ids)(response["output"], turn))
    assert [turn.parent for turn in scene.session.turns] == [None, *scene.session.turns[:-1]]
    held = [
        message["content"] for turn in scene.session.turns for message in turn.appended if message["role"] == "tool"
    ]
    results = [
        f"{turn}.{place}" for turn, answer in enumerate(answers[:-1]) for place in range(len(answer["tool_calls"]))
    ]
    assert held == results

"""Requests of Anthropic's Messages API as chat requests: what is translated, what says nothing, what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
import pytest

from middleware_hub.openai_session.faces.messages.echo import Echo, input_of, signature
from middleware_hub.openai_session.faces.messages.request import MessagesRequest, read
from middleware_hub.openai_session.faces.responses.forms import FORMS
from middleware_hub.openai_session.sessions.equality import MEANING
from miles_router.errors import BadRequest
from tests.support.sessions import Scene, assistant, call, user

SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "all": {"type": "boolean", "default": False},
        "n": {"type": "integer"},
        "more": {"type": "array", "items": {"type": "object", "properties": {"n": {"default": 1}}}},
    },
    "required": ["path"],
}
EDIT: dict[str, Any] = {"name": "edit", "description": "Edits.", "input_schema": SCHEMA}
FETCH: dict[str, Any] = {"name": "fetch", "input_schema": {"type": "object"}, "defer_loading": True}
EMPTY = {"role": "system", "content": ""}
HI = {"role": "user", "content": "Hi"}


def asked(*messages: Any, echo: Echo | None = None, system_anywhere: bool = True, **fields: Any) -> MessagesRequest:
    request = {"model": "m", "max_tokens": 9, "messages": list(messages) or [HI], **fields}
    return read(request, echo or Echo(), system_anywhere=system_anywhere)


def said(*messages: Any, **options: Any) -> list[Any]:
    return list(asked(*messages, **options).fields["messages"])


def blocks(role: str, *content: Any) -> dict[str, Any]:
    return {"role": role, "content": [text(each) if isinstance(each, str) else each for each in content]}


def text(words: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **fields}


def use(name: str = "edit", call_id: str = "c1", **given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": given}


def result(call_id: str, content: Any = "ok", **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content, **fields}


def refusal(*messages: Any, **fields: Any) -> str:
    with pytest.raises(BadRequest) as refused:
        asked(*messages, **fields)
    return str(refused.value)


# Words


@pytest.mark.parametrize(
    "content",
    ["one\ntwo", [text("one"), text("two", cache_control={"type": "ephemeral"})], [text("one\ntwo", citations=None)]],
)
def test_the_blocks_of_a_text_say_what_the_text_says(content: Any) -> None:
    assert said({"role": "user", "content": content}) == [{"role": "user", "content": "one\ntwo"}]


def test_what_one_side_says_in_a_row_is_one_message() -> None:
    spoken = [HI, blocks("user", "there"), {"role": "assistant", "content": "A"}, blocks("assistant", "B", "C"), HI]
    assert said(*spoken) == [user("Hi\nthere"), assistant("ABC"), user("Hi")]


@pytest.mark.parametrize("system", ["Be brief.\nBe kind.", [text("Be brief."), text("Be kind.", cache_control={})]])
def test_a_system_prompt_comes_first(system: Any) -> None:
    assert said(HI, system=system) == [{"role": "system", "content": "Be brief.\nBe kind."}, user("Hi")]


def test_the_line_for_anthropics_accounts_is_no_part_of_the_prompt() -> None:
    billed = [text("x-anthropic-billing-header: cc_version=2.1; cch=af3;"), text("Be brief.")]
    assert said(HI, system=billed)[0]["content"] == "Be brief."
    assert said(HI, system=billed[:1]) == [user("Hi")]


def test_system_messages_stay_in_their_place_or_become_the_users_words() -> None:
    spoken = [HI, {"role": "system", "content": [text("Mind the gap.")]}, {"role": "assistant", "content": "ok"}, HI]
    system = {"role": "system", "content": "Mind the gap."}
    assert said(*spoken) == [user("Hi"), system, assistant("ok"), user("Hi")]
    assert said(*spoken, system_anywhere=False) == [user("Hi\nMind the gap."), assistant("ok"), user("Hi")]


def test_an_answer_that_is_begun_is_gone_on_from() -> None:
    fields = asked(HI, {"role": "assistant", "content": "The answer is ("}).fields
    assert (fields["messages"][-1]["content"], fields["continue_final_message"]) == ("The answer is (", True)
    assert "continue_final_message" not in asked(HI).fields


# Calls and results


def test_calls_and_results_are_messages_of_their_own() -> None:
    answer = blocks("assistant", "Now:", use(path="a"), use(call_id="c2", path="b"))
    first, second, *rest = said(HI, answer, blocks("user", result("c1"), result("c2"), "Go on"))[1:]
    assert [(each["id"], each["function"]["arguments"]) for each in first["tool_calls"]] == [
        ("c1", '{"path":"a"}'),
        ("c2", '{"path":"b"}'),
    ]
    assert (first["role"], first["content"]) == ("assistant", "Now:")
    assert [second, *rest] == [
        {"role": "tool", "tool_call_id": "c1", "content": "ok"},
        {"role": "tool", "tool_call_id": "c2", "content": "ok"},
        user("Go on"),
    ]


def test_results_come_in_the_order_of_the_calls() -> None:
    answer = blocks("assistant", use(path="a"), use(call_id="c2", path="b"))
    one = said(HI, answer, blocks("user", result("c2", "second"), result("c1", "first")))
    other = said(HI, answer, blocks("user", result("c1", "first")), blocks("user", result("c2", "second")))
    assert [each["content"] for each in one[-2:]] == ["first", "second"]
    assert one == other


@pytest.mark.parametrize(
    ("content", "expected"),
    [("a\nb", "a\nb"), ([text("a"), text("b", cache_control={})], "a\nb"), ([], ""), (None, "")],
)
def test_the_blocks_of_a_result_are_one_text(content: Any, expected: str) -> None:
    spoken = [HI, blocks("assistant", use(path="a")), blocks("user", result("c1", content, is_error=True))]
    assert said(*spoken)[-1] == {"role": "tool", "tool_call_id": "c1", "content": expected}


def test_a_tool_that_is_loaded_later_is_told_in_the_result_that_names_it() -> None:
    before = asked(tools=[EDIT, FETCH])
    assert [tool["function"]["name"] for tool in before.fields["tools"]] == ["edit"]
    reference = [{"type": "tool_reference", "tool_name": "fetch"}]
    spoken = [HI, blocks("assistant", use(path="a")), blocks("user", result("c1", reference))]
    after = asked(*spoken, tools=[EDIT, FETCH])
    assert [tool["function"]["name"] for tool in after.fields["tools"]] == ["edit", "fetch"], "it may be called"
    assert '"name":"fetch"' in after.fields["messages"][-1]["content"]
    keys = [context.key for context in after.contexts(after.fields)]
    assert before.contexts(before.fields)[0].key in keys[1:], "what stood before was rendered without it"
    assert "not found" in refusal(*spoken, tools=[EDIT])


def test_tools_that_come_and_go_on_the_way_are_told_where_they_do() -> None:
    by_value = {"type": "tool_definition", "definition": {"name": "late", "input_schema": {"type": "object"}}}
    changes = [
        {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "fetch"}},
        {"type": "tool_addition", "tool": by_value},
        {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "edit"}},
    ]
    found = asked(HI, {"role": "system", "content": changes}, tools=[EDIT, FETCH])
    assert [tool["function"]["name"] for tool in found.fields["tools"]] == ["edit", "fetch", "late"]
    words = found.fields["messages"][-1]["content"].split("\n")
    assert words[:2] == ["The tool edit is not available any more.", "<functions>"]
    assert [each.count('"name":"') for each in words] == [0, 0, 1, 1, 0]
    assert len(found.contexts(found.fields)) == 3, "rendered with none, the first, or both of those that were added"


def test_tools_beyond_number_cost_no_more_than_a_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    tools = [{**FETCH, "name": f"t{number}"} for number in range(50)]
    references = [{"type": "tool_reference", "tool_name": tool["name"]} for tool in tools]
    found = asked(HI, blocks("assistant", use()), blocks("user", result("c1", references)), tools=[EDIT, *tools])
    assert len(found.contexts(found.fields)) == 51
    monkeypatch.setattr("middleware_hub.openai_session.faces.messages.request.MAX_CONTEXTS", 1000)
    assert len(found.contexts(found.fields)) == 2, "with all of them, and with none"


# What comes back of an answer


def recorded(*calls: Any, **fields: Any) -> Echo:
    scene = Scene()
    scene.turn([user("Hi")], assistant("", tool_calls=list(calls), **fields))
    return Echo.of(scene.session)


@pytest.mark.parametrize(
    ("sampled", "given"),
    [
        ('{"path":  "a"}', {"path": "a"}),
        ('{"path": "a"}', {"all": False, "path": "a"}),
        ('{"path": "a", "all": false}', {"path": "a"}),
        ('{"path": "a", "n": "5", "all": "true"}', {"path": "a", "n": 5, "all": True}),
        ('{"path": "a", "more": [{"text": "b"}]}', {"path": "a", "more": [{"text": "b", "n": 1}], "all": False}),
        ('{"path": "one  \\n\\ttwo \\n\\n"}', {"path": "one\n\ttwo\n\n"}),
        ('{"command": "cd /work/a && ls"}', {"command": "ls"}),
        ('{"command": "find . -exec rm {} \\\\\\\\;"}', {"command": "find . -exec rm {} \\;"}),
    ],
)
def test_a_call_that_says_the_same_is_the_one_that_was_sampled(sampled: str, given: Any) -> None:
    held = call("edit", sampled, "c1")
    (message,) = said(HI, blocks("assistant", use(**given)), echo=recorded(held), tools=[EDIT])[1:]
    assert message["tool_calls"] == [held]


@pytest.mark.parametrize(
    "block",
    [
        *(use(path="b"), use(path="a", all=True), use("look", path="a"), use(call_id="c2", path="a"), use(path=True)),
        *(use(path="a", n=5), use(path="\na"), use(path=" a"), use(path="cd /work && a"), use(), use(path=["a"])),
    ],
    ids=repr,
)
def test_a_call_that_says_something_else_is_an_edit(block: Any) -> None:
    held = call("edit", '{"path": "a"}', "c1")
    (message,) = said(HI, blocks("assistant", block), echo=recorded(held), tools=[EDIT])[1:]
    assert message["tool_calls"] != [held]


@pytest.mark.parametrize(("held", "sent"), [('{"n": 1}', {"n": True}), ('{"n": [0]}', {"n": [False]})])
def test_true_is_not_one(held: str, sent: Any) -> None:
    echo = recorded(call("edit", held, "c1"))
    assert echo.match_call("c1", "edit", sent, None)["function"]["arguments"] != held
    assert recorded(call("edit", '{"n": 1.0}', "c1")).match_call("c1", "edit", {"n": 1}, None)["function"]["arguments"]


def test_calls_without_arguments_and_with_what_is_no_json_come_back() -> None:
    empty, broken = call("edit", "", "c1"), call("edit", '{"a', "c2")
    echo = recorded(empty, broken)
    assert echo.match_call("c1", "edit", {}, None) is empty
    assert echo.match_call("c2", "edit", {"INVALID_JSON": '{"a'}, None) is broken


def test_calls_nested_deeper_than_can_be_written_are_texts() -> None:
    deep, wide = "[" * 1000 + "1" + "]" * 1000, "[" * 1000 + " 1" + "]" * 1000
    sampled = call("edit", f'{{"a": {deep}}}', "c1")
    shown = input_of(sampled["function"]["arguments"])
    assert orjson.loads(orjson.dumps(shown)) == {"INVALID_JSON": sampled["function"]["arguments"]}
    assert recorded(sampled).match_call("c1", "edit", shown, None) is sampled
    assert recorded(sampled).match_call("c1", "edit", {"a": 1}, None) is not sampled
    lists = {"properties": {"a": {"type": "array"}}}
    assert recorded(call("edit", orjson.dumps({"a": deep}).decode(), "c1")).match_call("c1", "edit", {"a": wide}, lists)
    assert not MEANING(assistant("", tool_calls=[call("edit", deep)]), assistant("", tool_calls=[call("edit", wide)]))
    form = FORMS["shell"]
    assert form.fields(f'{{"commands": ["ls"], "a": {deep}}}') is None


def test_reasoning_comes_back_as_text_or_by_its_signature() -> None:
    echo = recorded(reasoning_content="Hm.")

    def reasoning(**block: Any) -> Any:
        answer = blocks("assistant", {"type": "thinking", **block}, "ok")
        return said(HI, answer, HI, echo=echo)[1].get("reasoning_content")

    assert reasoning(thinking="Hm.", signature=signature("Hm.")) == "Hm."
    assert reasoning(thinking="", signature=signature("Hm.")) == "Hm."
    assert reasoning(thinking="Edited.", signature=signature("Hm.")) == "Edited."
    assert reasoning(thinking="Somebody's.", signature="EqQB...") == "Somebody's."
    assert reasoning(thinking="", signature="EqQB...") is None
    assert said(HI, blocks("assistant", {"type": "redacted_thinking", "data": "x"}, "ok"), HI)[1] == assistant("ok")


# Settings


def test_settings_go_to_the_fields_of_a_chat_request() -> None:
    fields = asked(temperature=0.5, top_p=0.9, top_k=5, stop_sequences=["#"], stream=True, min_p=0.1).fields
    expected = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "stop": ["#"], "stream": True, "min_p": 0.1}
    assert {name: fields[name] for name in expected} == expected
    assert (fields["model"], fields["max_tokens"]) == ("m", 9)


def test_what_says_nothing_to_a_model_is_ignored() -> None:
    harmless: Any = {
        "metadata": {"user_id": "u"},
        "cache_control": {"type": "ephemeral"},
        "service_tier": "auto",
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "mcp_servers": [],
        "container": None,
    }
    assert asked(**harmless).fields == asked().fields


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [
        ({"type": "enabled", "budget_tokens": 2000}, {"thinking": True, "enable_thinking": True}),
        ({"type": "disabled"}, {"thinking": False, "enable_thinking": False}),
        ({"type": "adaptive", "display": "omitted"}, None),
        (None, None),
    ],
)
def test_thinking_is_the_templates_setting(thinking: Any, expected: Any) -> None:
    assert asked(thinking=thinking).fields.get("chat_template_kwargs") == expected


def test_the_templates_own_settings_count_more() -> None:
    kwargs = asked(thinking={"type": "enabled"}, chat_template_kwargs={"thinking": False}).fields[
        "chat_template_kwargs"
    ]
    assert kwargs == {"thinking": False, "enable_thinking": True}


def test_effort_and_form() -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    fields = asked(output_config={"effort": "high", "format": form, "task_budget": {"type": "tokens"}}).fields
    assert fields["reasoning_effort"] == "high"
    assert fields["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert asked(output_format=form).fields["response_format"] == fields["response_format"]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "tool", "name": "edit"}, {"tool_choice": {"type": "function", "function": {"name": "edit"}}}),
        (
            {"type": "auto", "disable_parallel_tool_use": True},
            {"tool_choice": "auto", "parallel_tool_calls": False},
        ),
        (None, {}),
    ],
)
def test_the_choice_of_a_tool(choice: Any, expected: Any) -> None:
    fields = asked(tools=[EDIT], tool_choice=choice).fields
    assert {name: fields[name] for name in ("tool_choice", "parallel_tool_calls") if name in fields} == expected


def test_a_tool_is_a_function() -> None:
    tool = {**EDIT, "type": "custom", "cache_control": {}, "strict": True, "input_examples": [{"path": "a"}]}
    (function,) = asked(tools=[tool]).fields["tools"]
    assert function == {
        "type": "function",
        "function": {
            "name": "edit",
            "description": "Edits.",
            "parameters": {**SCHEMA, "examples": [{"path": "a"}]},
            "strict": True,
        },
    }


# Refused


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"model": None}, "model"),
        ({"system": [{"type": "image"}]}, "system.0"),
        ({"system": 7}, "system"),
        ({"stop_sequences": "#"}, "stop_sequences"),
        ({"stream": "yes"}, "stream"),
        ({"stream": 1}, "stream"),
        ({"thinking": {"type": "always"}}, "thinking.type"),
        ({"thinking": "enabled"}, "thinking.type"),
        ({"output_config": {"mood": "good"}}, "output_config.mood"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"tools": {}}, "tools"),
        ({"tools": [7]}, "tools.0"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0"),
        ({"tools": [EDIT, {**EDIT, "description": "Others."}]}, "tools.1"),
        ({"tools": [{"name": "a"}]}, "tools.0"),
        ({"tools": [{**EDIT, "description": 7}]}, "tools.0.description"),
        ({"tools": [{**EDIT, "mood": 7}]}, "tools.0.mood"),
        ({"tools": [{**EDIT, "allowed_callers": ["code_execution_20250825"]}]}, "tools.0.allowed_callers"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "look"}, "tools": [EDIT]}, "tool_choice"),
        ({"tool_choice": {"type": "maybe"}, "tools": [EDIT]}, "tool_choice.type"),
        ({"tool_choice": "any", "tools": [EDIT]}, "tool_choice"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"surprise": 1}, "surprise"),
    ],
    ids=repr,
)
def test_what_cannot_be_traced_is_refused_by_name(fields: Any, where: str) -> None:
    assert refusal(**fields).split(": ")[0] == where


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        ([7], "messages.0"),
        ([{"role": "tool", "content": "x"}], "messages.0.role"),
        ([{"role": "user"}], "messages.0.content"),
        ([{"role": "user", "content": [7]}], "messages.0.content.0"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0.text"),
        ([blocks("user", {"type": "image", "source": {}})], "messages.0.content.0"),
        ([blocks("user", {"type": "document", "source": {}})], "messages.0.content.0"),
        ([blocks("user", {"type": ["text"]})], "messages.0.content.0"),
        ([HI, blocks("assistant", {"type": "server_tool_use", "id": "s"})], "messages.1.content.0"),
        ([HI, blocks("assistant", {"type": "thinking"})], "messages.1.content.0.thinking"),
        ([HI, blocks("assistant", {"type": "tool_use", "id": 1})], "messages.1.content.0"),
        ([blocks("user", {"type": "tool_result"})], "messages.0.content.0.tool_use_id"),
        ([blocks("user", result("c1", [{"type": "image"}]))], "messages.0.content.0.content.0"),
        ([HI, {"role": "system", "content": [{"type": "tool_addition"}]}], "messages.1.content.0.tool"),
        ([HI, {"role": "system", "content": [{"type": "tool_removal"}]}], "messages.1.content.0"),
        ([HI, {"role": "system", "content": [{"type": "image"}]}], "messages.1.content.0"),
    ],
    ids=repr,
)
def test_a_message_that_cannot_be_traced_is_refused_by_its_place(messages: Sequence[Any], where: str) -> None:
    assert refusal(*messages).split(": ")[0] == where


@pytest.mark.parametrize(
    "request_", [None, [], {"messages": []}, {"messages": "Hi"}, {"messages": {}}, {"messages": [EMPTY]}]
)
def test_what_is_no_request_is_refused(request_: Any) -> None:
    with pytest.raises(BadRequest):
        read(request_, Echo(), system_anywhere=True)

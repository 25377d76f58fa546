"""What of a chat request makes its prompt beside the messages. `tests/contract/test_chat_templates.py` holds it against
SGLang."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from itertools import combinations
from typing import Any

import pytest

from middleware_hub.openai_session.sessions.prompting import contexts_of, settings_of, tools_of
from tests.support.chat import TOOLS

NAMED = {"type": "function", "function": {"name": "add"}}
#: Requests that the engine's template is given alike, in groups.
ALIKE: Mapping[str, list[dict[str, Any]]] = {
    "nothing": [
        {},
        {"tools": []},
        {"tools": None, "tool_choice": "none"},
        {"tools": [], "tool_choice": "none"},
        {"tools": "add", "tool_choice": NAMED},
        {"tools": {"a": 1}},
        {"tools": TOOLS, "tool_choice": "none"},
        {"tools": TOOLS, "tool_choice": {"function": {"name": "none such"}}},
        {"reasoning": {"enabled": False}},
        {"reasoning_effort": "enormous"},
        {"chat_template_kwargs": {}, "temperature": 0, "n": 2},
    ],
    "tools": [{"tools": TOOLS}, {"tools": copy.deepcopy(TOOLS), "tool_choice": "required"}],
    "one tool": [{"tools": TOOLS[1:]}, {"tools": TOOLS, "tool_choice": NAMED}],
    "settings": [{"chat_template_kwargs": {"a": 1, "b": 2}}, {"chat_template_kwargs": {"b": 2, "a": 1}}],
    "fewer settings": [{"chat_template_kwargs": {"a": 1}}],
    "effort": [{"reasoning_effort": "high"}, {"reasoning": {"effort": "high"}, "reasoning_effort": "low"}],
    "half the effort": [{"reasoning_effort": 0.5}, {"reasoning_effort": "0.5"}],
    "no effort": [{"reasoning_effort": 0}, {"reasoning": {"reasoning_effort": "0"}}],
    "effort of none": [{"reasoning_effort": "none"}],
    "reasoning": [
        {"reasoning": {"enabled": True}},
        {"chat_template_kwargs": {"thinking": True, "enable_thinking": True}},
    ],
}


@pytest.mark.parametrize("group", ALIKE)
def test_what_the_template_is_given_alike_is_one_context(group: str) -> None:
    first, *others = (contexts_of(request)[0] for request in ALIKE[group])
    assert all(each == first and each.key == first.key and hash(each) == hash(first) for each in others)


@pytest.mark.parametrize(("one", "other"), list(combinations(ALIKE, 2)))
def test_what_the_template_is_given_differently_is_another_context(one: str, other: str) -> None:
    contexts = [contexts_of(request)[0] for group in (one, other) for request in ALIKE[group]]
    assert len(set(contexts)) == len({each.key for each in contexts}) == 2


def test_tools_shown_to_the_model_but_not_allowed_stay_in_the_request() -> None:
    every, one, none = (contexts_of({"tools": tools})[0] for tools in (TOOLS, TOOLS[1:], None))
    assert contexts_of({"tools": TOOLS, "tool_choice": "required"}) == (every,)
    assert contexts_of({"tools": TOOLS, "tool_choice": "none"}) == (none, every)
    assert contexts_of({"tools": TOOLS, "tool_choice": NAMED}) == (one, every)
    assert contexts_of({"tools": TOOLS[1:], "tool_choice": NAMED}) == (one,)
    assert [each.tools for each in contexts_of({"tools": TOOLS, "tool_choice": "none"})] == [None, TOOLS]


@pytest.mark.parametrize("tools", ["add", 3, [1], [{"function": "add"}], {"a": 1}])
@pytest.mark.parametrize("choice", [{}, {"function": "add"}, {"function": {"name": "add"}}, 3])
def test_tools_that_are_none_are_left_for_the_engine_to_refuse(tools: object, choice: object) -> None:
    assert contexts_of({"tools": tools, "tool_choice": choice})


def test_tools_are_those_that_may_be_called() -> None:
    assert tools_of({"tools": TOOLS}) == TOOLS == tools_of({"tools": TOOLS, "tool_choice": "required"})
    assert tools_of({"tools": TOOLS, "tool_choice": "none"}) is None
    assert tools_of({"tools": TOOLS, "tool_choice": NAMED}) == TOOLS[1:]
    assert tools_of({"tools": [*TOOLS, "x"], "tool_choice": {"function": {"name": "none such"}}}) is None
    assert tools_of({"tools": "all", "tool_choice": NAMED}) is None
    assert tools_of({"tools": []}) is tools_of({}) is None


@pytest.mark.parametrize(
    ("request_fields", "expected"),
    [
        ({}, {}),
        ({"chat_template_kwargs": None}, {}),
        ({"chat_template_kwargs": [1]}, {}),
        ({"chat_template_kwargs": {"a": 1}}, {"a": 1}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "thinking": False, "enable_thinking": False}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"thinking": False, "reasoning_effort": "x"}},
            {"reasoning_effort": "x", "thinking": False, "enable_thinking": True},
        ),
        (
            {"reasoning": {"effort": "0.5"}, "reasoning_effort": "low"},
            {"reasoning_effort": 0.5, "thinking": True, "enable_thinking": True},
        ),
        (
            {"reasoning": {"reasoning_effort": "max"}},
            {"reasoning_effort": "max", "thinking": True, "enable_thinking": True},
        ),
        ({"reasoning": {"enabled": " ON "}}, {"thinking": True, "enable_thinking": True}),
        ({"reasoning": {"enable": True}}, {"thinking": True, "enable_thinking": True}),
        ({"reasoning": {"enabled": False, "enable": True}}, {}),
        ({"reasoning": "high"}, {}),
        ({"reasoning": {"effort": "enormous"}}, {}),
        ({"reasoning": {"effort": ["low"]}}, {}),
        ({"reasoning_effort": "1"}, {"reasoning_effort": 1.0, "thinking": True, "enable_thinking": True}),
        ({"reasoning_effort": 0}, {"reasoning_effort": 0.0, "thinking": True, "enable_thinking": True}),
    ],
)
def test_settings_are_what_the_engine_makes_of_a_request(
    request_fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert settings_of(request_fields) == expected

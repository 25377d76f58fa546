"""Odd chat bodies, and nulls in chat and completions: what SGLang refuses, the simulated worker refuses too, and what
it takes is taken."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.contract.client import WorkerClient

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER: dict[str, Any] = {"role": "user", "content": "Hi"}
CALL: dict[str, Any] = {"id": "c0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def calling(**changes: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [{**CALL, **changes}]}


def said(role: str, content: Any, **fields: Any) -> list[Any]:
    return [USER, {"role": role, "content": content, **fields}, USER]


def function(**changes: Any) -> list[Any]:
    return [USER, calling(function={**CALL["function"], **changes}), USER]


MESSAGES: dict[str, Any] = {
    "a tool result that is an object": said("tool", {"a": 1}, tool_call_id="c0"),
    "a tool result that is a number": said("tool", 7, tool_call_id="c0"),
    "a tool result of no content": said("tool", None, tool_call_id="c0"),
    "a tool result of parts": said("tool", [{"type": "text", "text": "a"}], tool_call_id="c0"),
    "a tool result without an id": said("tool", "a"),
    "an id that is a number": said("tool", "a", tool_call_id=7),
    "user content that is null": said("user", None),
    "user content that is an object": said("user", {"type": "text", "text": "a"}),
    "user content of strings": said("user", ["a"]),
    "user content of nothing": said("user", []),
    "a part without a type": said("user", [{"text": "a"}]),
    "a part without its text": said("user", [{"type": "text"}]),
    "a part whose text is a number": said("user", [{"type": "text", "text": 7}]),
    "a part of another type": said("user", [{"type": "input_text", "text": "a"}]),
    "a refusal part": said("assistant", [{"type": "refusal", "refusal": "a"}]),
    "thinking of a user": said("user", [{"type": "thinking", "thinking": "a"}]),
    "thinking of an assistant": said("assistant", [{"type": "thinking", "thinking": "a"}]),
    "thinking of nothing": said("assistant", [{"type": "thinking"}]),
    "a role in capitals": said("Assistant", "a"),
    "a user in capitals": [{"role": "USER", "content": "a"}],
    "an unknown role": said("robot", "a"),
    "a role that is null": said(None, "a"),  # type: ignore[arg-type]
    "no role": [{"content": "a"}],
    "a developer": said("developer", "a"),
    "a function": said("function", "a", name="f"),
    "no content of a user": [{"role": "user"}],
    "no content of an assistant": [USER, {"role": "assistant"}, USER],
    "a name that is a number": [{**USER, "name": 7}],
    "an assistant's name that is a number": said("assistant", "a", name=7),
    "reasoning that is a list": said("assistant", "a", reasoning_content=["a"]),
    "an unknown field": said("assistant", "a", refusal=None, audio={"id": 1}),
    "a message that is text": ["Hi"],
    "calls that are an object": said("assistant", None, tool_calls={}),
    "no calls": said("assistant", "a", tool_calls=[]),
    "calls that are null": said("assistant", "a", tool_calls=None),
    "a call of null": said("assistant", None, tool_calls=[None]),
    "a call without a function": said("assistant", None, tool_calls=[{"id": "c0", "type": "function"}]),
    "a call of another type": [USER, calling(type="custom"), USER],
    "a call whose type is null": [USER, calling(type=None), USER],
    "a call without an id": [USER, calling(id=None), USER],
    "a call whose id is a number": [USER, calling(id=7), USER],
    "a call whose index is text": [USER, calling(index="0"), USER],
    "a call whose index is no number": [USER, calling(index="a"), USER],
    "arguments that are an object": function(arguments={"a": 1}),
    "arguments that are a list": function(arguments=[1]),
    "arguments that are a list in text": function(arguments="[1]"),
    "arguments that are null": function(arguments=None),
    "arguments that are null in text": function(arguments="null"),
    "arguments of no text": function(arguments=""),
    "arguments that are no JSON": function(arguments="{"),
    "arguments with half of a pair": function(arguments='{"a": "\\ud83d"}'),
    "arguments of NaN": function(arguments='{"a": NaN}'),
    "a called name that is null": function(name=None),
    "a called name that is a number": function(name=7),
    "half of a pair": [{"role": "user", "content": "\ud83d"}],
    "a whole pair": [{"role": "user", "content": "\ud83d\ude00"}],
}
TOOLS: dict[str, Any] = {
    "tools that are an object": {},
    "no tools": [],
    "tools that are null": None,
    "a tool that is null": [None],
    "a tool without a function": [{"type": "function"}],
    "a flat tool": [{"type": "function", "name": "f", "parameters": {}}],
    "a tool without a type": [{"function": {"name": "f"}}],
    "a tool of another type": [{**TOOL, "type": "custom"}],
    "a tool whose type is null": [{**TOOL, "type": None}],
    "a tool without a name": [{"type": "function", "function": {"parameters": {}}}],
    "a tool whose name is a number": [{"type": "function", "function": {"name": 7}}],
    "a tool without parameters": [{"type": "function", "function": {"name": "f"}}],
    "parameters that are null": [{"type": "function", "function": {"name": "f", "parameters": None}}],
    "parameters that are text": [{"type": "function", "function": {"name": "f", "parameters": "{}"}}],
    "parameters that are a list": [{"type": "function", "function": {"name": "f", "parameters": []}}],
    "a description that is null": [{"type": "function", "function": {**TOOL["function"], "description": None}}],
    "a description that is a number": [{"type": "function", "function": {**TOOL["function"], "description": 7}}],
    "a strict tool": [{"type": "function", "function": {**TOOL["function"], "strict": True}}],
    "a tool that is strict in words": [{"type": "function", "function": {**TOOL["function"], "strict": "true"}}],
    "a tool that is strict otherwise": [{"type": "function", "function": {**TOOL["function"], "strict": "perhaps"}}],
    "an unknown field": [{**TOOL, "cache_control": {}, "function": {**TOOL["function"], "examples": []}}],
    "a tool that waits": [{**TOOL, "defer_loading": True}],
}
BODIES = {
    **{name: {"messages": each} for name, each in MESSAGES.items()},
    **{f"tools: {name}": {"messages": [USER], "tools": each} for name, each in TOOLS.items()},
}
#: What SGLang 0.5.23 takes of them.
TAKEN = {
    "a tool result of no content",
    "a tool result of parts",
    "a tool result without an id",
    "user content of nothing",
    "thinking of an assistant",
    "a role in capitals",
    "a developer",
    "a function",
    "no content of an assistant",
    "a name that is a number",
    "an unknown field",
    "no calls",
    "calls that are null",
    "a call without an id",
    "a call whose index is text",
    "arguments that are an object",
    "arguments that are null",
    "a called name that is null",
    "a whole pair",
    "tools: no tools",
    "tools: tools that are null",
    "tools: a tool without a type",
    "tools: a tool of another type",
    "tools: a tool without parameters",
    "tools: parameters that are null",
    "tools: a description that is null",
    "tools: a strict tool",
    "tools: a tool that is strict in words",
    "tools: an unknown field",
    "tools: a tool that waits",
}


@pytest.mark.parametrize("name", BODIES)
async def test_an_odd_chat_body_is_taken_or_refused_as_by_sglang(worker: WorkerClient, name: str) -> None:
    asked = {"model": "m", "max_tokens": 1, "temperature": 0, **BODIES[name]}
    data = json.dumps(asked).encode()
    answer = await worker.ask("POST", CHAT, data=data, headers={"content-type": "application/json"})
    assert answer.status == (200 if name in TAKEN else 400), answer.body
    assert name in TAKEN or answer.json["message"]


async def test_a_template_is_shown_fields_of_tools_as_sglang_shows_them(worker: WorkerClient) -> None:
    async def prompt(**fields: Any) -> list[int]:
        tool = {"type": "function", "function": {"name": "f", **fields}}
        body = {"model": "m", "max_tokens": 1, "messages": [USER], "tools": [tool], "return_prompt_token_ids": True}
        answer = await worker.ask("POST", CHAT, body)
        return list(answer.json["choices"][0]["prompt_token_ids"])

    plain = await prompt(parameters={})
    assert await prompt(parameters={}, description=None) == plain
    assert await prompt(parameters={}, strict=None, examples=["unknown"]) == plain
    assert await prompt() == await prompt(description=None, parameters=None)
    assert plain not in (await prompt(parameters={}, strict=True), await prompt(description=None, parameters={}))


#: Fields that may be left out, by the route, and what it takes as null.
NULLABLE = {
    CHAT: ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop", "seed", "tool_choice"),
    COMPLETIONS: ("logprobs", "stop", "seed", "stream_options", "logit_bias", "rid", "lora_path"),
}
NOT_NULL = {
    CHAT: ("model", "n", "stream", "logprobs", "frequency_penalty", "presence_penalty", "parallel_tool_calls"),
    COMPLETIONS: ("model", "n", "stream", "echo", "max_tokens", "temperature", "top_p", "top_k", "frequency_penalty"),
}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_null_is_taken_or_refused_as_by_sglang(worker: WorkerClient, path: str) -> None:
    asked = {"model": "m", "max_tokens": 1, **({"messages": [USER]} if path == CHAT else {"prompt": "Hi"})}
    for name in (*NULLABLE[path], *NOT_NULL[path]):
        answer = await worker.ask("POST", path, {**asked, "stop": "\n", name: None})
        assert answer.status == (400 if name in NOT_NULL[path] else 200), (name, answer.body)

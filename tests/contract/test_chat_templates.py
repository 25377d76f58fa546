"""What SGLang hands to a chat template, and the ids it makes of the text, are what sessions make, by the functions that
they make them with: `contexts_of` reads what stands beside the messages, the renderer writes, `after` continues a turn.

A template that writes its messages out as JSON shows all of it; one that looks for pictures is given parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import aiohttp
import pytest

from middleware_hub.openai_session.continuing.continuation import HeldEnd, build
from middleware_hub.openai_session.continuing.templates import Renderer, from_tokenizer
from middleware_hub.openai_session.sessions.turn import contexts_of
from tests.sglang_worker import RealWorker
from tests.support.chat import TOOLS, whole, with_template
from tests.support.tokenizers import tokenizer

pytestmark = pytest.mark.sglang

#: transformers adds other names for reasoning in some versions.
SHOWS = """
{%- for m in messages -%}
{{ (m | dictsort | rejectattr(0, 'in', ['thinking', 'reasoning']) | list | tojson) + '\\n' }}
{%- endfor -%}
{{ (tools | tojson) if tools else 'none' }} {{ kind }} {{ reasoning_effort }}
{{- ' ' }}{{ thinking }} {{ enable_thinking }} {{ add_generation_prompt }}
"""
BARE = SHOWS + "{%- for tool in tools or [] -%}{{ tool.name + '' }}{%- endfor -%}"
TEMPLATES = {"text": SHOWS, "parts": SHOWS + "{# vision #}", "bare tools": BARE}


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def calling(*arguments: Any, **fields: Any) -> dict[str, Any]:
    calls = [
        {"id": f"c{place}", "type": "function", "function": {"name": "add", "arguments": each}}
        for place, each in enumerate(arguments)
    ]
    return {"role": "assistant", "tool_calls": calls, **fields}


USER = {"role": "user", "content": "Hi", "name": "me"}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "plain": [{"role": "system", "content": "S"}, USER, {"role": "assistant", "content": "Ho"}, USER],
    "unicode and special tokens": [{"role": "user", "content": " naïve 世界 🚀\n<|im_end|>\n<think>é</think> "}],
    "parts": [{"role": "system", "content": [text("a")]}, {"role": "user", "content": [text("a"), text("b")]}],
    "no parts": [{"role": "user", "content": []}],
    "calls": [
        USER,
        calling('{"b": 1, "a": "é"}', '{ "q" : [1,  2.50, null] }', content=None, reasoning_content="Thought"),
        {"role": "tool", "tool_call_id": "c1", "name": "add", "content": [text("1"), text("2")]},
        {"role": "tool", "tool_call_id": "c0", "content": "3"},
    ],
    "arguments as an object": [USER, calling({"a": 1}, content=""), {"role": "tool", "content": "", "extra": 1}],
    "an assistant last": [USER, {"role": "assistant", "content": "Well"}],
    "an assistant last, in parts": [USER, {"role": "assistant", "content": [text("Well"), text("so")]}],
    "an assistant's call last": [USER, calling("{}")],
    "other roles": [{"role": "developer", "content": "D"}, USER, {"role": "function", "name": "f", "content": "x"}],
}
#: What stands beside the messages.
SPARSE: list[Any] = [
    {"type": "function", "function": {"strict": True, "parameters": None, "name": "f", "extra": 1}, "extra": 2},
    {"type": "function", "function": {"name": "g"}},
]
BESIDE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "tools": {"tools": TOOLS},
    "sparse tools": {"tools": SPARSE},
    "tools that are not to be used": {"tools": TOOLS, "tool_choice": "none"},
    "one tool": {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "add"}}},
    "settings": {"chat_template_kwargs": {"kind": "x", "reasoning_effort": "low"}},
    "thinking": {"chat_template_kwargs": {"enable_thinking": False}},
    "no effort": {"reasoning_effort": "none"},
    "effort": {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}},
    "effort in text": {"reasoning_effort": "0.5"},
    "effort in numbers": {"reasoning_effort": 0.5},
    "effort of nothing": {"reasoning_effort": 0},
    "reasoning": {"reasoning": {"effort": "low"}, "reasoning_effort": "high"},
    "reasoning in numbers": {"reasoning": {"reasoning_effort": "0.25"}},
    "reasoning wanted": {"reasoning": {"enabled": "Yes"}},
    "reasoning, whole numbers": {"reasoning": {"effort": 0, "enable": True}},
    "reasoning unwanted": {"reasoning": {"enabled": False}},
    "effort as reasoning": {"reasoning": {"effort": "none"}},
    "tools that are none": {"tools": []},
}


@pytest.fixture(scope="module", params=TEMPLATES)
def shown(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A worker with one of `TEMPLATES`."""
    path = tmp_path_factory.mktemp("template") / "template.jinja"
    path.write_text(TEMPLATES[request.param], encoding="utf-8")
    with RealWorker.start("--chat-template", str(path), moe=False) as worker:
        yield worker.url, request.param


async def prompt_ids(url: str, messages: list[dict[str, Any]], beside: dict[str, Any]) -> Any:
    path = f"{url}/v1/chat/completions"
    body = {"model": "m", "messages": messages, "max_tokens": 1, "return_prompt_token_ids": True, **beside}
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(timeout=timeout) as session, session.post(path, json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
    return answer["choices"][0]["prompt_token_ids"]


def rendered(made: Renderer, messages: list[dict[str, Any]], beside: dict[str, Any]) -> list[int]:
    return whole(made, messages, contexts_of(beside)[0])


#: Each conversation by itself and with tools, and one conversation with everything else.
CASES = [(each, beside) for each in CONVERSATIONS for beside in ("nothing", "tools")]
CASES += [("plain", beside) for beside in BESIDE if ("plain", beside) not in CASES]


@pytest.mark.parametrize(("conversation", "beside"), CASES)
async def test_messages_reach_the_template_as_in_the_engine(
    shown: tuple[str, str], conversation: str, beside: str
) -> None:
    url, template = shown
    made = from_tokenizer(with_template(TEMPLATES[template]))
    messages = CONVERSATIONS[conversation]
    ids = await prompt_ids(url, messages, BESIDE[beside])
    decode = tokenizer("qwen3").decode
    assert decode(rendered(made, messages, BESIDE[beside])) == decode(ids)
    assert rendered(made, messages, BESIDE[beside]) == ids


@pytest.mark.parametrize(("conversation", "beside"), [each for each in CASES if each[0] != "other roles"])
async def test_qwen3s_own_template_gives_the_same_ids(
    sglang_workers: list[RealWorker], conversation: str, beside: str
) -> None:
    messages = CONVERSATIONS[conversation]
    ids = await prompt_ids(sglang_workers[0].url, messages, BESIDE[beside])
    assert rendered(from_tokenizer(tokenizer("qwen3")), messages, BESIDE[beside]) == ids


#: What agents append behind an answer.
BEHIND: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "a question": ({"role": "assistant", "content": "Ho"}, [USER]),
    "an answer of the agent's own, and a question": (
        {"role": "assistant", "content": "Ho", "reasoning_content": "Thought"},
        [{"role": "assistant", "content": "Hm"}, {"role": "user", "content": [text("a"), text("b")]}],
    ),
    "a result": (calling('{"q": 1}', content=""), [{"role": "tool", "tool_call_id": "c0", "content": "3"}]),
    "results and a question": (
        calling('{"b": 1}', "{}", content="I look."),
        [
            {"role": "tool", "tool_call_id": "c1", "name": "add", "content": [text("1"), text("2")]},
            {"role": "tool", "tool_call_id": "c0", "content": "naïve 世界<|im_end|>"},
            USER,
        ],
    ),
}


@pytest.mark.parametrize("beside", ["nothing", "tools", "tools that are not to be used", "thinking", "no effort"])
@pytest.mark.parametrize("behind", BEHIND)
async def test_what_is_given_behind_a_held_turn_is_what_the_engine_would_write_there(
    sglang_workers: list[RealWorker], behind: str, beside: str
) -> None:
    answer, appended = BEHIND[behind]
    made, context = build(tokenizer("qwen3"), None), contexts_of(BESIDE[beside])[0]
    (end,) = tokenizer("qwen3").convert_tokens_to_ids(["<|im_end|>"])
    calls = tuple((each["id"], each["function"]["name"]) for each in answer.get("tool_calls", ()))
    held = HeldEnd(end, ended=True, tool_calls=calls, reasoning="reasoning_content" in answer)
    extension = await made.after(held, appended, context)
    ids = await prompt_ids(sglang_workers[0].url, [USER, answer, *appended], BESIDE[beside])
    assert extension.drop == 0
    assert [end, *extension.ids.tolist()] == ids[-len(extension.ids) - 1 :]


async def test_requests_share_a_context_exactly_when_the_template_renders_the_same(
    shown: tuple[str, str],
) -> None:
    url, _ = shown
    ids = {name: await prompt_ids(url, CONVERSATIONS["plain"], beside) for name, beside in BESIDE.items()}
    contexts = {name: contexts_of(beside)[0] for name, beside in BESIDE.items()}
    for one, other in combinations(BESIDE, 2):
        assert (contexts[one] == contexts[other]) == (ids[one] == ids[other]), (one, other)

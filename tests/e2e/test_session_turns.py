"""One turn of a session, whole and streamed: agents see what OpenAI's own client expects, and what they asked for."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from miles_router.testing import SimulatedWorker
from tests.support.http import RawReply, ask
from tests.support.session_apis import case
from tests.support.session_trial import (
    ADD,
    CHAT,
    JSON,
    SessionTrial,
    chunks_of,
    qwen3,
    simulated_sessions,
    user,
)
from tests.support.stage import staged

HI: list[Any] = [user("Hi")]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "add"}}
#: What agents ask for.
ASKED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "max_completion_tokens": {"max_tokens": None, "max_completion_tokens": 5},
    "logprobs": {"logprobs": True},
    "top_logprobs": {"logprobs": True, "top_logprobs": 3},
    "top_logprobs without logprobs": {"logprobs": False, "top_logprobs": 3},
    "n": {"n": 3},
    "n, logprobs": {"n": 2, "logprobs": True},
    "tools": {"tools": [ADD]},
    "no tool": {"tools": [ADD], "tool_choice": "none"},
    "some tool": {"tools": [ADD], "tool_choice": "required", "max_tokens": 200},
    "one tool": {"tools": [ADD], "tool_choice": NAMED, "max_tokens": 200, "logprobs": True},
    "response_format": {"response_format": FORMAT, "max_tokens": 200},
    "stop": {"stop": ["e", "a"], "max_tokens": 200},
    "unknown": {"priority": 7, "bogus": {"a": [1.5, None, "é"]}},
    "parameters": {"temperature": 0.5, "top_p": 0.9, "seed": 3, "presence_penalty": 0.1, "user": "me"},
    "ids": {"return_input_ids_in_sglext": True, "return_output_ids_in_sglext": True},
    "cached tokens": {"return_cached_tokens_details": True},
}
OF_WHOLE: dict[str, dict[str, Any]] = {
    "prompt ids": {"return_prompt_token_ids": True},
    "meta": {"return_meta_info": True},
    "meta, logprobs": {"return_meta_info": True, "logprobs": True, "top_logprobs": 1},
    "token ids": {"return_token_ids": True},
}
OF_STREAM: dict[str, dict[str, Any]] = {
    "usage": {"stream_options": {"include_usage": True}},
    "usage, n": {"stream_options": {"include_usage": True}, "n": 2},
    "usage all along": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "usage, ids": {"stream_options": {"include_usage": True}, **ASKED["ids"]},
    "prompt ids refused": {"return_prompt_token_ids": True},
}


Pair = tuple[SessionTrial, SimulatedWorker]


@pytest.fixture(scope="module")
async def pair() -> AsyncIterator[Pair]:
    """A router with sessions and, beside it, a worker with the same weights that is asked for the same."""
    async with (
        staged() as stage,
        simulated_sessions(stage) as made,
        SimulatedWorker(tokenizer=qwen3(), weight_version="1") as other,
    ):
        yield made, other


#: What ends one request, when its client has left, must not end the next.
rids = (f"r-{number}" for number in itertools.count())


async def both(pair: Pair, session: str, body: dict[str, Any]) -> tuple[RawReply, RawReply]:
    """The router's reply and the other worker's."""
    through = await pair[0].ask("POST", f"/sessions/{session}{CHAT}", body)
    direct = await ask(pair[1].url, "POST", CHAT, JSON, json.dumps(body).encode())
    return through, direct


def steady(answer: Any) -> Any:
    """Without times and ids that are made up."""
    if isinstance(answer, list):
        return [steady(each) for each in answer]
    if not isinstance(answer, dict):
        return answer
    passing = ("created", "id", "e2e_latency", "response_sent_to_client_ts")
    return {name: None if name in passing else steady(value) for name, value in answer.items()}


def in_order(chunks: list[Any]) -> list[Any]:
    """By choice, and what tells logprobs apart: choices of one request interleave as they come, and a piece of a call
    waits until it is known that the answer does not end there."""
    return [steady(chunk) for chunk in sorted(chunks, key=_place)]


def _place(chunk: Any) -> tuple[int, bool]:
    if not chunk["choices"]:
        return 99, False
    choice = chunk["choices"][0]
    return choice["index"], choice.get("logprobs") is not None


async def test_an_agent_is_given_the_worker_s_answer_and_nothing_it_did_not_ask_for(pair: Pair) -> None:
    cases = [
        *((each, False) for each in (ASKED | OF_WHOLE).items()),
        *((each, True) for each in (ASKED | OF_STREAM).items()),
    ]
    for (name, asked), stream in cases:
        with case(name, stream):
            asking = {"temperature": 0, "rid": next(rids), "max_tokens": 8, **({"stream": True} if stream else {})}
            body = {"model": "m", "messages": HI, **asking, **asked}
            through, direct = await both(pair, await pair[0].create(), body)
            assert through.status == direct.status
            assert through.value("content-type") == direct.value("content-type")
            if direct.status != 200:
                assert through.body == direct.body
            elif stream:
                assert in_order(chunks_of(through.body)) == in_order(chunks_of(direct.body))
            else:
                told = direct.json()["metadata"]  # with a text, as the API has it
                told["weight_versions"] = json.dumps(told["weight_versions"], separators=(",", ":"))
                assert steady(through.json()) == steady({**direct.json(), "metadata": told})
                ChatCompletion.model_validate(through.json(), strict=True)

"""The official Anthropic client in a session before a real SGLang: counted as the engine renders it, exact and in one
segment, whole and streamed."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic import AsyncAnthropic

from tests.sglang_worker import RealWorker
from tests.support.agents import arguments_for, usual_tokens
from tests.support.real_sessions import real_sessions

pytestmark = pytest.mark.sglang

GO: Any = {
    "name": "go",
    "description": "Goes.",
    "input_schema": {
        "type": "object",
        "properties": {"n": {"type": "string"}, "far": {"type": "boolean", "default": False}},
        "required": ["n"],
    },
}
#: What makes random weights call the tool twice: settings of the engine's own, which may be in any request.
TWO_CALLS: Any = {**arguments_for("two calls")["extra_body"], "logit_bias": usual_tokens()}
FIELDS: Any = {"model": "m", "tools": [GO], "system": [{"type": "text", "text": "Be brief."}]}


@pytest.mark.parametrize("thinking", [{"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024}])
async def test_turns_are_counted_and_continued_exactly(sglang_workers: list[RealWorker], thinking: Any) -> None:
    asked = {**FIELDS, "thinking": thinking}
    async with real_sessions(sglang_workers[0]) as (trial, proxy):
        session = await trial.create()
        url = f"{trial.router.url}/sessions/{session}"
        async with AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
            history: list[Any] = [{"role": "user", "content": "Go."}]
            counts = []
            for live in (False, True, True):
                counted = await client.messages.count_tokens(messages=history, **asked)
                counts.append(counted.input_tokens)
                given: Any = {"messages": history, "max_tokens": 400, **asked, "extra_body": TWO_CALLS}
                if live:
                    async with client.messages.stream(**given) as stream:
                        answer = await stream.get_final_message()
                else:
                    answer = await client.messages.create(**given)
                usage = answer.usage
                assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counts[-1]
                assert answer.stop_reason == "tool_use"
                calls: list[Any] = [block.to_dict() for block in answer.content if block.type == "tool_use"]
                echo: list[Any] = [{**call, "input": {"far": False, **call["input"]}} for call in calls]
                done = [
                    {"type": "tool_result", "tool_use_id": call["id"], "content": "done"} for call in reversed(calls)
                ]
                history += [{"role": "assistant", "content": echo}, {"role": "user", "content": done}]
        generations = list(proxy.chats(version="default"))
        assert [len(each.prompt) for each in generations] == counts
        assert await trial.reasons(session) == [None, None, None]
        (sample,) = await trial.samples(session)
        assert sample["tokens"] == [*generations[-1].prompt, *generations[-1].sampled]
        assert sum(sample["loss_mask"]) == sum(len(each.sampled) for each in generations)

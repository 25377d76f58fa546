"""The simulated worker as its users know it: seeds, planned answers and scripts (`docs/simulated-worker.md`)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from miles_router.testing import SimulatedWorker
from miles_router.testing.worker.model.script import Script
from tests.support.events import events_of

CHAT = "/v1/chat/completions"
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("read", "write")]
ASKED: dict[str, Any] = {"role": "user", "content": "Go"}
SPELLED = '{ "a" :  [1,2 , {"b":null}],"c": "x: y \\ud83d\\ude80"}'
READ = {"reasoning": "I look.", "text": "Now:", "calls": [{"name": "read", "arguments": SPELLED}]}


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as made:
        yield made


async def post(session: aiohttp.ClientSession, worker: SimulatedWorker, path: str, **body: Any) -> bytes:
    async with session.post(worker.url + path, json=body) as response:
        assert response.status == 200, await response.text()
        return await response.read()


async def answered(session: aiohttp.ClientSession, worker: SimulatedWorker, *messages: Any, **fields: Any) -> Any:
    """The message that answers a chat with tools."""
    body = await post(session, worker, CHAT, **{"messages": messages, "tools": TOOLS, "max_tokens": 200, **fields})
    return orjson.loads(body)["choices"][0]["message"]


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


async def test_workers_with_one_seed_sample_the_same(session: aiohttp.ClientSession) -> None:
    async with SimulatedWorker(seed=1) as one, SimulatedWorker(seed=1, replica=1) as same, SimulatedWorker() as other:
        body = {"text": "Hi", "rid": "mine", "sampling_params": {"max_new_tokens": 16, "ignore_eos": True}}
        for worker in (one, same, other):
            await post(session, worker, "/generate", **body)
        first, second, third = (worker.log.last.generation for worker in (one, same, other))
        assert (first.output_ids, first.logprobs) == (second.output_ids, second.logprobs)
        assert first.output_ids != third.output_ids


async def test_a_request_determines_its_step_of_a_script(session: aiohttp.ClientSession) -> None:
    steps = ["first", "second", {"text": "matched", "when": "no such file"}]
    async with SimulatedWorker(script=steps) as worker:
        error = {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "Error: no such file."}]}
        for expected, messages in (
            ("second", [ASKED, answer("x"), ASKED]),
            ("first", [ASKED]),
            ("first", [ASKED]),
            ("matched", [ASKED, answer("x"), error, ASKED]),
            ("second", [ASKED, error, answer("x"), ASKED]),
        ):
            assert (await answered(session, worker, *messages))["content"] == expected
        third = await answered(session, worker, ASKED, answer("x"), ASKED, answer("y"), ASKED)
        assert third["content"] not in ("first", "second", "matched"), "it is sampled"
        worker.say("said")
        assert (await answered(session, worker, ASKED))["content"] == "said"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_step_with_calls_is_for_requests_with_its_tools(session: aiohttp.ClientSession, stream: bool) -> None:
    async with SimulatedWorker(script=[READ], reasoning_parser="qwen3") as worker:
        if stream:
            body = {"messages": [ASKED], "tools": TOOLS, "stream": True}
            choices = [each["choices"][0] for each in events_of(await post(session, worker, CHAT, **body))]
            calls = [call for each in choices for call in each["delta"].get("tool_calls") or ()]
            reasoning = "".join(each["delta"].get("reasoning_content") or "" for each in choices)
            name, arguments = (
                "".join(call["function"].get(part) or "" for call in calls) for part in ("name", "arguments")
            )
        else:
            message = await answered(session, worker, ASKED)
            (call,) = message["tool_calls"]
            reasoning, function = message["reasoning_content"], call["function"]
            name, arguments = function["name"], function["arguments"]
        # Arguments have the spaces with which SGLang's parser writes them again.
        assert (name, arguments) == ("read", '{"a": [1, 2, {"b": null}], "c": "x: y 🚀"}')
        assert reasoning.strip() == "I look."
        assert not (await answered(session, worker, ASKED, tools=TOOLS[1:], max_tokens=9)).get("tool_calls")


@pytest.mark.parametrize("step", [7, {}, {"say": "x"}, {"text": 1}, {"calls": "read"}, {"calls": [{"arguments": {}}]}])
def test_a_malformed_step_is_refused(step: object) -> None:
    with pytest.raises(ValueError, match="a step"):
        SimulatedWorker(script=[step])


@pytest.mark.parametrize(("text", "complaint"), [("{", "is no JSON"), ('{"text": "a"}', "must hold a list of steps")])
def test_a_file_that_is_no_script_is_refused(text: str, complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "script.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=complaint):
        Script.from_file(str(file))

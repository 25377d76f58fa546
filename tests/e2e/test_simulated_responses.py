"""The simulated worker's `/v1/responses`, read by the official client: whole and streamed the same."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from miles_router.testing import SimulatedWorker

READ: Any = {"type": "function", "name": "read", "parameters": {"type": "object", "properties": {}}}
SCRIPT = [
    {"reasoning": "I look.", "text": "I read it.", "calls": [{"name": "read", "arguments": {"path": "é", "n": 1}}]},
    "It says 17.",
]
ASKED: list[Any] = [{"role": "user", "content": "What does it say?"}]


@pytest.fixture
async def worker() -> AsyncIterator[SimulatedWorker]:
    async with SimulatedWorker(script=SCRIPT, reasoning_parser="qwen3") as started:
        yield started


@pytest.fixture
async def client(worker: SimulatedWorker) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{worker.url}/v1", api_key="none", max_retries=0) as made:
        yield made


async def whole(client: AsyncOpenAI, stream: bool, **fields: Any) -> Any:
    if not stream:
        return await client.responses.create(model="m", tools=[READ], **fields)
    async with client.responses.stream(model="m", tools=[READ], **fields) as events:
        return [event async for event in events][-1].response  # type: ignore[union-attr]  # the last one has it


def shown(item: Any) -> Any:
    if item.type == "function_call":
        return item.name, item.arguments
    return item.type, item.content[0].text.strip()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_response_has_reasoning_text_and_calls_and_its_history_goes_on(
    client: AsyncOpenAI, worker: SimulatedWorker, stream: bool
) -> None:
    first = await whole(client, stream, input=ASKED, instructions="Be brief.")
    assert [shown(item) for item in first.output] == [
        ("reasoning", "I look."),
        ("message", "I read it."),
        ("read", '{"path": "é", "n": 1}'),
    ]
    assert (first.status, first.usage.output_tokens) == ("completed", len(worker.log.generations[0].output_ids))
    output = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "17"}
    history = [*ASKED, *(item.model_dump() for item in first.output), output]
    second = await whole(client, stream, input=history, instructions="Be brief.")
    assert [shown(item) for item in second.output] == [("message", "It says 17.")]
    cut = await whole(client, stream, input="Hi", max_output_tokens=7)
    assert (cut.status, cut.incomplete_details.reason, cut.usage.output_tokens) == (
        "incomplete",
        "max_output_tokens",
        5,
    )


async def test_what_is_stored_nowhere_is_refused(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="Response store is disabled"):
        await client.responses.create(model="m", input="Hi", previous_response_id="resp_1")
    with pytest.raises(openai.BadRequestError, match="input"):
        await client.responses.create(model="m")

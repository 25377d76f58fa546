"""Agents that know a `base_url` and nothing else, unmodified: a tool loop over the official `openai` client, and the
agents of `openai-agents`, with tools and handoffs, whole and streamed. Their samples are what the engine saw."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
from agents import Agent, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool
from openai import AsyncOpenAI

from miles_router.testing.worker.exchange_log import GenerationRecord
from miles_router.testing.worker.model.constrained import spelled
from tests.support.session_trial import IM_END, SessionTrial, exactly, qwen3, simulated_sessions
from tests.support.stage import staged

#: Nothing of a run is reported to anybody.
QUIET = RunConfig(tracing_disabled=True)
THOUGHT = "<think>\nWhat now?\n</think>\n\n"


@pytest.fixture(scope="module")
async def shared() -> AsyncIterator[SessionTrial]:
    async with staged() as stage, simulated_sessions(stage, reasoning_parser="qwen3") as made:
        yield made


@pytest.fixture
def trial(shared: SessionTrial) -> SessionTrial:
    shared.worker.log.clear()
    return shared


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def say(trial: SessionTrial, *answers: str) -> None:
    """What the model answers, one turn each, behind a thought; in tokens that encoding the text would not give."""
    source = random.Random(7)
    for answer in answers:
        trial.worker.say([*spelled(f"{THOUGHT}{answer}", qwen3(), source), IM_END])


def generations(trial: SessionTrial) -> list[GenerationRecord]:
    return [generation for exchange in trial.log for generation in exchange.generations]


# The official client


# openai-agents


def model_in(trial: SessionTrial, client: AsyncOpenAI) -> OpenAIChatCompletionsModel:
    return OpenAIChatCompletionsModel(model="m", openai_client=client)


@function_tool
def look_up(city: str) -> str:
    """The weather in a city."""
    return f"Rain in {city}."


@function_tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_framework_s_tool_agent_is_traced_exactly(trial: SessionTrial, streamed: bool) -> None:
    session = await trial.create()
    say(
        trial,
        call("look_up", city="Köln"),
        f"{call('add', a=17, b=25)}\n{call('look_up', city='Rom')}",
        "Rain, and 42.",
    )
    async with trial.agent(session) as client:
        agent = Agent(name="a", instructions="Be brief.", model=model_in(trial, client), tools=[look_up, add])
        if streamed:
            result: Any = Runner.run_streamed(agent, "Weather?", run_config=QUIET)
            kinds = {event.type async for event in result.stream_events()}
            assert "raw_response_event" in kinds
        else:
            result = await Runner.run(agent, "Weather?", run_config=QUIET)
    assert str(result.final_output).strip() == "Rain, and 42."
    (sample,) = await trial.samples(session)
    exactly(sample, *generations(trial))
    assert await trial.reasons(session) == [None] * 3
    assert [each["streamed"] for each in await trial.records(session)] == [streamed] * 3
    assert "Rain in Köln." in sample["response"]

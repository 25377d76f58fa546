"""An agent of `openai-agents`, unmodified, with tools, whole and streamed: its samples are what the engine saw."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from agents import Agent, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool

from miles_router.testing.worker.model.constrained import spelled
from tests.support.session_trial import IM_END, SessionTrial, exactly, qwen3, simulated_sessions
from tests.support.stage import Stage

#: Nothing of a run is reported to anybody.
QUIET = RunConfig(tracing_disabled=True)
THOUGHT = "<think>\nWhat now?\n</think>\n\n"


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def say(trial: SessionTrial, *answers: str) -> None:
    """What the model answers, one turn each, behind a thought; in tokens that encoding the text would not give."""
    source = random.Random(7)
    for answer in answers:
        trial.worker.say([*spelled(f"{THOUGHT}{answer}", qwen3(), source), IM_END])


@function_tool
def look_up(city: str) -> str:
    """The weather in a city."""
    return f"Rain in {city}."


@function_tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_framework_s_tool_agent_is_traced_exactly(stage: Stage, streamed: bool) -> None:
    async with simulated_sessions(stage, reasoning_parser="qwen3") as trial:
        session = await trial.create()
        say(
            trial,
            call("look_up", city="Köln"),
            f"{call('add', a=17, b=25)}\n{call('look_up', city='Rom')}",
            "Rain, and 42.",
        )
        async with trial.agent(session) as client:
            model = OpenAIChatCompletionsModel(model="m", openai_client=client)
            agent = Agent(name="a", instructions="Be brief.", model=model, tools=[look_up, add])
            if streamed:
                result: Any = Runner.run_streamed(agent, "Weather?", run_config=QUIET)
                kinds = {event.type async for event in result.stream_events()}
                assert "raw_response_event" in kinds
            else:
                result = await Runner.run(agent, "Weather?", run_config=QUIET)
        assert str(result.final_output).strip() == "Rain, and 42."
        (sample,) = await trial.samples(session)
        exactly(sample, *(exchange.generation for exchange in trial.log))
        assert await trial.reasons(session) == [None] * 3
        assert [each["streamed"] for each in await trial.records(session)] == [streamed] * 3
        assert "Rain in Köln." in sample["response"]

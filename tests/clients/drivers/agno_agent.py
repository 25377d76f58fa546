"""Agno's agent over its model for endpoints like OpenAI's."""

import sys

from agno.agent import Agent
from agno.models.openai.like import OpenAILike


def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


def look(name: str) -> str:
    """Looks something up."""
    return f"{name}: nothing"


def main(base_url: str, mode: str) -> None:
    model = OpenAILike(id="m", base_url=base_url, api_key="none", max_retries=0)
    agent = Agent(model=model, tools=[add, look], instructions="Be brief.", telemetry=False)
    if mode == "whole":
        print(agent.run("What is 17 plus 25?").content)
        return
    for event in agent.run("What is 17 plus 25?", stream=True, stream_events=True):
        if event.event == "RunCompleted":
            print(event.content)


main(*sys.argv[1:])

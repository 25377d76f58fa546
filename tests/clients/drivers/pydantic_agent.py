"""Pydantic AI's agent."""

import asyncio
import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


def look(name: str) -> str:
    """Looks something up."""
    return f"{name}: nothing"


async def main(base_url: str, mode: str) -> None:
    model = OpenAIChatModel("m", provider=OpenAIProvider(base_url=base_url, api_key="none"))
    agent = Agent(model, tools=[add, look], instructions="Be brief.", retries=0)
    if mode == "whole":
        print((await agent.run("What is 17 plus 25?")).output)
        return
    async with agent.iter("What is 17 plus 25?") as run:
        async for node in run:
            if Agent.is_model_request_node(node):
                async with node.stream(run.ctx) as stream:
                    async for _ in stream:
                        pass
    print(run.result.output)


asyncio.run(main(*sys.argv[1:]))

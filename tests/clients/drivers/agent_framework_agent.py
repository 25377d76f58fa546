"""Microsoft's Agent Framework over its OpenAI chat client."""

import asyncio
import sys

from agent_framework import Agent
from agent_framework.openai import OpenAIChatCompletionClient


def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


def look(name: str) -> str:
    """Looks something up."""
    return f"{name}: nothing"


async def main(base_url: str, mode: str) -> None:
    client = OpenAIChatCompletionClient(model="m", base_url=base_url, api_key="none")
    agent = Agent(client=client, instructions="Be brief.", tools=[add, look])
    if mode == "whole":
        print((await agent.run("What is 17 plus 25?")).text)
        return
    stream = agent.run("What is 17 plus 25?", stream=True)
    async for _ in stream:
        pass
    print((await stream.get_final_response()).text)


asyncio.run(main(*sys.argv[1:]))

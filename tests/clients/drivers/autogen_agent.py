"""AutoGen's assistant over its OpenAI client."""

import asyncio
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient


def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


def look(name: str) -> str:
    """Looks something up."""
    return f"{name}: nothing"


async def main(base_url: str, mode: str) -> None:
    info = {
        "vision": False,
        "function_calling": True,
        "json_output": False,
        "family": "unknown",
        "structured_output": False,
    }
    client = OpenAIChatCompletionClient(model="m", base_url=base_url, api_key="none", model_info=info, max_retries=0)
    agent = AssistantAgent(
        "calculator",
        client,
        tools=[add, look],
        system_message="Be brief.",
        model_client_stream=mode == "streamed",
        max_tool_iterations=20,
    )
    result = await agent.run(task="What is 17 plus 25?")
    print(result.messages[-1].content)


asyncio.run(main(*sys.argv[1:]))

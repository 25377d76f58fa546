"""Strands' agent over its OpenAI model."""

import sys

from strands import Agent, tool
from strands.models.openai import OpenAIModel


@tool
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


@tool
def look(name: str) -> str:
    """Looks something up."""
    return f"{name}: nothing"


def main(base_url: str, mode: str) -> None:
    client = {"base_url": base_url, "api_key": "none", "max_retries": 0}
    model = OpenAIModel(client_args=client, model_id="m", streaming=mode == "streamed")
    agent = Agent(model=model, tools=[add, look], system_prompt="Be brief.", callback_handler=None)
    print(agent("What is 17 plus 25?"))


main(*sys.argv[1:])

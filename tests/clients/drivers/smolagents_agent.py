"""smolagents' agent that calls tools."""

import sys

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> str:
    """Adds two numbers.

    Args:
        a: one
        b: the other
    """
    return str(a + b)


@tool
def look(name: str) -> str:
    """Looks something up.

    Args:
        name: of what
    """
    return f"{name}: nothing"


def main(base_url: str, mode: str) -> None:
    model = OpenAIModel(model_id="m", api_base=base_url, api_key="none")
    agent = ToolCallingAgent(
        tools=[add, look], model=model, verbosity_level=0, stream_outputs=mode == "streamed", max_tool_threads=1
    )
    print(agent.run("What is 17 plus 25?", max_steps=20))


main(*sys.argv[1:])

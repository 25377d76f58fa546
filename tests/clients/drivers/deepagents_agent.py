"""deepagents over langchain-openai: a harness with tools of its own for files, plans and sub-agents."""

import sys

from deepagents import create_deep_agent
from langchain_openai import ChatOpenAI


def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


def look(name: str) -> str:
    """Looks something up."""
    return f"{name}: nothing"


def main(base_url: str, mode: str) -> None:
    model = ChatOpenAI(base_url=base_url, api_key="none", model="m", streaming=mode == "streamed", max_retries=0)
    agent = create_deep_agent(model=model, tools=[add, look], system_prompt="Be brief.")
    asked = {"messages": [{"role": "user", "content": "What is 17 plus 25?"}]}
    print(agent.invoke(asked, {"recursion_limit": 100})["messages"][-1].content)


main(*sys.argv[1:])

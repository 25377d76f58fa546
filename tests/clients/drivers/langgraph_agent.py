"""LangGraph's agent over langchain-openai."""

import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


@tool
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


@tool
def look(name: str) -> str:
    """Looks something up."""
    return f"{name}: nothing"


def main(base_url: str, mode: str) -> None:
    model = ChatOpenAI(base_url=base_url, api_key="none", model="m", streaming=mode == "streamed", max_retries=0)
    agent = create_react_agent(model, [add, look], prompt="Be brief.", name="calculator")
    state = agent.invoke({"messages": [("user", "What is 17 plus 25?")]}, {"recursion_limit": 50})
    print(state["messages"][-1].content)


main(*sys.argv[1:])

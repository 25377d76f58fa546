"""Google's Agent Development Kit over litellm."""

import asyncio
import sys

from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types


def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


def look(name: str) -> str:
    """Looks something up."""
    return f"{name}: nothing"


async def main(base_url: str, mode: str) -> None:
    model = LiteLlm(model="openai/m", api_base=base_url, api_key="none", num_retries=0)
    agent = LlmAgent(model=model, name="calculator", instruction="Be brief.", tools=[add, look])
    runner = InMemoryRunner(agent=agent, app_name="calculator")
    session = await runner.session_service.create_session(app_name="calculator", user_id="u")
    config = RunConfig(streaming_mode=StreamingMode.SSE if mode == "streamed" else StreamingMode.NONE)
    asked = types.Content(role="user", parts=[types.Part(text="What is 17 plus 25?")])
    said = ""
    async for event in runner.run_async(user_id="u", session_id=session.id, new_message=asked, run_config=config):
        if event.is_final_response() and event.content and event.content.parts:
            said = "".join(part.text or "" for part in event.content.parts)
    print(said)


asyncio.run(main(*sys.argv[1:]))

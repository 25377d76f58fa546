"""OpenHands' agent in a shell."""

import os
import sys

os.environ["OPENHANDS_SUPPRESS_BANNER"] = "1"

from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.sdk.conversation.response_utils import get_agent_final_response
from openhands.tools.terminal import TerminalTool


def main(base_url, mode):
    streamed = mode == "streamed"
    model = LLM(model="openai/m", base_url=base_url, api_key="none", usage_id="agent", num_retries=0, stream=streamed)
    agent = Agent(llm=model, tools=[Tool(name=TerminalTool.name)])
    callbacks = [lambda chunk: None] if streamed else []
    conversation = Conversation(agent=agent, workspace=os.getcwd(), visualizer=None, token_callbacks=callbacks)
    conversation.send_message("What is 17 plus 25?")
    conversation.run()
    print(get_agent_final_response(conversation.state.events))
    conversation.close()


main(*sys.argv[1:])

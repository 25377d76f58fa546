"""Rollouts with verl's calls and fields (`verl/experimental/agent_loop`, `verl/workers/rollout/llm_server.py`), through
a router in place of Ray actors.

ServerManager       replaces `LLMServerClient`: `generate(request_id, prompt_ids=..., sampling_params=...)`
AgentLoop           replaces `AgentLoopBase`; `register("name")` adds a loop to `single_turn_agent` and `tool_agent`
AgentLoopWorker     runs loops by their names, many at a time
RouterLoadBalancer  is loaded by `rollout.router_config_path`: verl's own loops and servers, with a router between them
"""

from miles_router.client.dialects.verl.agent_loop import (
    AgentLoop,
    AgentLoopMetrics,
    AgentLoopOutput,
    AgentLoopWorker,
    SingleTurnAgentLoop,
    register,
)
from miles_router.client.dialects.verl.chat_template import ChatTemplate, UnusableTemplate
from miles_router.client.dialects.verl.load_balancer import RouterLoadBalancer
from miles_router.client.dialects.verl.server_manager import RolloutConfig, ServerManager, TokenOutput
from miles_router.client.dialects.verl.tool_agent_loop import ToolAgentLoop
from miles_router.client.dialects.verl.tools import FunctionCall, FunctionTool, ToolError, hermes_calls

__all__ = [
    "AgentLoop",
    "AgentLoopMetrics",
    "AgentLoopOutput",
    "AgentLoopWorker",
    "ChatTemplate",
    "FunctionCall",
    "FunctionTool",
    "RolloutConfig",
    "RouterLoadBalancer",
    "ServerManager",
    "SingleTurnAgentLoop",
    "TokenOutput",
    "ToolAgentLoop",
    "ToolError",
    "UnusableTemplate",
    "hermes_calls",
    "register",
]

"""The APIs that agents speak. Each translates a request to messages, tools and settings, and the answer back. Larger
ones are folders."""

from __future__ import annotations

from collections.abc import Sequence

from middleware_hub.openai_session.agent_apis.agent_api import AgentApi
from middleware_hub.openai_session.agent_apis.chat import ChatApi
from middleware_hub.openai_session.agent_apis.completions import CompletionsApi
from middleware_hub.openai_session.agent_apis.messages.agent_api import MessagesApi
from middleware_hub.openai_session.agent_apis.responses.agent_api import ResponsesApi

AGENT_APIS: Sequence[type[AgentApi]] = (ChatApi, CompletionsApi, MessagesApi, ResponsesApi)

"""The paths of the router's own API for generation: `/generate`, and those of the APIs that agents speak. Pure.

All else that an engine answers is spelled in its folder.
"""

from __future__ import annotations

GENERATE = "/generate"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
EMBEDDINGS = "/v1/embeddings"
MODELS = "/v1/models"
COUNT_TOKENS = "/v1/messages/count_tokens"
#: Those whose requests generate.
AGENTS = frozenset({GENERATE, CHAT, COMPLETIONS, MESSAGES, RESPONSES})

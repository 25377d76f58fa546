"""The paths of the router's generation API: `/generate`, and the APIs that agents use. No I/O.

Other paths of an engine are defined in its subpackage.
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
#: The paths whose requests generate.
AGENTS = frozenset({GENERATE, CHAT, COMPLETIONS, MESSAGES, RESPONSES})

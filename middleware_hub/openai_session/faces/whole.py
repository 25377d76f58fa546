"""A turn whose answer comes in one piece: recorded before the agent has it, and stripped of what it did not ask for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from middleware_hub.openai_session.errors import UnusableAnswer
from middleware_hub.openai_session.faces.answers import Generated, chat_choice
from middleware_hub.openai_session.turns.asking import Asked
from miles_router.asgi.exchange import Message

OK = 200
JSON = b"application/json"
#: Of `meta_info`, what it has for `logprobs` alone.
OF_LOGPROBS = frozenset(
    {
        "output_token_logprobs",
        "output_token_logprobs_length",
        "output_top_logprobs",
        "input_token_logprobs",
        "input_top_logprobs",
    }
)


class Collector:
    """Keeps a reply; a `send` for the inner app."""

    def __init__(self) -> None:
        self.start: Message | None = None
        self._parts: list[bytes] = []

    async def send(self, message: Message) -> None:
        """One ASGI message of the reply."""
        if message["type"] == "http.response.start":
            self.start = message
        else:
            self._parts.append(message.get("body", b""))

    @property
    def body(self) -> bytes:
        """The whole body."""
        return b"".join(self._parts)

    @property
    def is_answer(self) -> bool:
        """Whether it is the engine's answer, and no refusal."""
        if self.start is None or self.start["status"] != OK:
            return False
        headers = dict(self.start["headers"])
        return headers.get(b"content-type", b"").startswith(JSON) and b"content-encoding" not in headers


def was_aborted(body: bytes) -> bool:
    """Whether some choice of an answer was cut off."""
    choices = read_answer(body)["choices"]
    return any(isinstance(choice, dict) and choice.get("finish_reason") == "abort" for choice in choices)


def read_answer(body: bytes) -> dict[str, Any]:
    """The engine's answer.

    Raises:
        UnusableAnswer: it is none.
    """
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise UnusableAnswer(f"the worker's answer is not valid JSON: {error}") from None
    if not isinstance(answer, dict) or not isinstance(answer.get("choices"), list) or not answer["choices"]:
        raise UnusableAnswer("the worker's answer has no choices")
    return answer


def generated(answer: Mapping[str, Any]) -> list[Generated]:
    """What was sampled, choice by choice. Raises as `chat_choice`."""
    return [chat_choice(choice) for choice in answer["choices"]]


def shown(answer: dict[str, Any], asked: Asked) -> dict[str, Any]:
    """The answer with the fields that the agent asked for itself."""
    return {**answer, "choices": [_shown_choice(choice, asked) for choice in answer["choices"]]}


def _shown_choice(choice: Mapping[str, Any], asked: Asked) -> dict[str, Any]:
    kept = dict(choice)
    if not (asked.wants("return_prompt_token_ids") or asked.wants("return_token_ids")):
        kept.pop("prompt_token_ids", None)
    if not asked.wants("logprobs"):
        kept["logprobs"] = None
    if not asked.wants("return_meta_info"):
        kept.pop("meta_info", None)
    elif not asked.wants("logprobs"):
        kept["meta_info"] = {name: value for name, value in kept["meta_info"].items() if name not in OF_LOGPROBS}
    return kept

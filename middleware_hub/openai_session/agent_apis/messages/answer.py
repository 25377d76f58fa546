"""Answers of the Messages API that are not streamed, and what they share with streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from middleware_hub.openai_session.agent_apis.messages.echo import input_of, signature
from middleware_hub.openai_session.errors import AnswerCut
from miles_router.engines.openai.chat_stream import cached_tokens

#: `stop_reason` by the engine's finish reason. `abort` is missing: this API cannot express it, so it becomes an error.
STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens", "content_filter": "refusal"}
CUT = "the engine cut the answer off"


class AnswerEnd:
    """The finish reason and token counts of one answer, as far as they are known.

    Args:
        stops: the stop sequences of the request.
        most: the request's `max_tokens`.
        prompt_tokens: the length of the prompt, if the router knows it before the engine reports usage.
    """

    def __init__(self, stops: Sequence[str], most: int, prompt_tokens: int | None) -> None:
        self.finish: str | None = None
        self._stops = stops
        self._most = most
        self._prompt_tokens = prompt_tokens
        self._matched: object = None
        self._output_tokens = 0
        self._cached: int | None = None

    def read(self, part: Mapping[str, Any]) -> None:
        """Read the usage of an answer, or of a chunk of one."""
        usage = part.get("usage")
        if isinstance(usage, Mapping):
            self._prompt_tokens = usage.get("prompt_tokens", self._prompt_tokens)
            self._output_tokens = usage.get("completion_tokens", self._output_tokens)
            details = usage.get("prompt_tokens_details")
            if isinstance(details, Mapping):
                self._cached = details.get("cached_tokens")
        if (cached := cached_tokens(part.get("sglext"))) is not None:
            self._cached = cached

    def read_finish(self, choice: Mapping[str, Any]) -> None:
        """Read the finish reason of a choice."""
        self.finish, self._matched = choice.get("finish_reason"), choice.get("matched_stop")

    @property
    def knows_prompt(self) -> bool:
        """True if the length of the prompt is known."""
        return self._prompt_tokens is not None

    @property
    def is_cut(self) -> bool:
        """True if this API has no stop reason for the engine's finish reason."""
        return self.finish not in STOP_REASONS

    @property
    def last_call_complete(self) -> bool:
        """True if the last call of the answer was sampled to its end."""
        return self.finish in ("stop", "tool_calls")

    def stop_fields(self, *, calls: bool) -> dict[str, Any]:
        """Return `stop_reason` and `stop_sequence`. `calls`: whether the answer contains tool calls."""
        reason, sequence = STOP_REASONS.get(self.finish or "", "end_turn"), None
        if self.finish == "stop" and calls:
            reason = "tool_use"
        elif self.finish == "stop" and isinstance(self._matched, str) and self._matched in self._stops:
            reason, sequence = "stop_sequence", self._matched
        elif self.finish == "length" and self._output_tokens < self._most:
            reason = "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def usage(self) -> dict[str, int]:
        """Return the token counts. Tokens from the prefix cache are apart, if the engine reports them."""
        prompt = self._prompt_tokens or 0
        tokens = {"output_tokens": self._output_tokens}
        if self._cached is None:
            return {"input_tokens": prompt, **tokens}
        cached = min(self._cached, prompt)
        caches = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": cached}
        return {"input_tokens": prompt - cached, **caches, **tokens}


def message(answer: Mapping[str, Any], content: Sequence[Any], ending: AnswerEnd, **stop_fields: Any) -> dict[str, Any]:
    """Return a message object: a complete answer, or the one in `message_start`, which has no content yet."""
    return {
        "id": f"msg_{answer.get('id')}",
        "type": "message",
        "role": "assistant",
        "model": answer.get("model"),
        "content": list(content),
        "stop_reason": None,
        "stop_sequence": None,
        **stop_fields,
        "usage": ending.usage(),
    }


def complete_message(answer: Mapping[str, Any], ending: AnswerEnd, *, omits_thinking: bool) -> dict[str, Any]:
    """Return the message for an answer that is not streamed.

    Raises:
        AnswerCut: the engine cut the answer off.
    """
    (choice,) = answer["choices"]
    ending.read(answer)
    ending.read_finish(choice)
    if ending.is_cut:
        raise AnswerCut(CUT)
    content = list(blocks(choice["message"], omits_thinking=omits_thinking))
    calls = any(block["type"] == "tool_use" for block in content)
    return message(answer, content, ending, **ending.stop_fields(calls=calls))


def blocks(message: Mapping[str, Any], *, omits_thinking: bool) -> list[dict[str, Any]]:
    """Return the content blocks of an assistant's message. Text that is only white space gets no block."""
    content: list[dict[str, Any]] = []
    thinking, text = message.get("reasoning_content"), message.get("content")
    if thinking:
        shown = "" if omits_thinking else thinking
        content.append({"type": "thinking", "thinking": shown, "signature": signature(thinking)})
    if text and not text.isspace():
        content.append({"type": "text", "text": text})
    for call in message.get("tool_calls") or ():
        function = call["function"]
        given = input_of(function.get("arguments"))
        content.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": given})
    return content

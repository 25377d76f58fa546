"""Normalise messages and tools as SGLang does before it renders the chat template."""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from miles_router.testing.worker.model.vocabulary import Tokenizer


def chat_prompt_ids(body: Mapping[str, Any], tokenizer: Tokenizer) -> list[int]:
    """Return the ids of a chat request's prompt.

    Raises:
        ValueError: the prompt cannot be rendered.
    """
    if body.get("input_ids") is not None:
        return list(body["input_ids"])
    messages = [_normalised(message) for message in body["messages"]]
    prefix = ""
    if body.get("continue_final_message") and messages[-1]["role"] == "assistant":
        prefix = messages.pop()["content"]
    tools = None if body.get("tool_choice") == "none" else _template_tools(body.get("tools"))
    options = body.get("chat_template_kwargs") or {}
    ids = tokenizer.encode(tokenizer.render_chat(messages, tools=tools, **options))
    return ids + tokenizer.encode(prefix) if prefix else ids


def _normalised(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with its content as one string, call arguments as objects, and no null fields."""
    normalised = {name: value for name, value in message.items() if value is not None}
    content = normalised.setdefault("content", "")
    if isinstance(content, list):
        texts = [part if isinstance(part, str) else part.get("text", "") for part in content]
        normalised["content"] = " ".join(text for text in texts if text)
    if message.get("role") == "assistant" and isinstance(message.get("tool_calls"), list):
        normalised["tool_calls"] = [_normalised_call(call) for call in message["tool_calls"]]
    return normalised


def _normalised_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function", {}))
    if isinstance(function.get("arguments"), str):
        function["arguments"] = _parsed_arguments(function["arguments"])
    return {**call, "function": function}


def _parsed_arguments(arguments: str) -> dict[str, Any]:
    try:
        parsed = orjson.loads(arguments)
    except orjson.JSONDecodeError as error:
        raise ValueError("Assistant tool call function.arguments must be valid JSON.") from error
    if not isinstance(parsed, dict):
        raise ValueError("Assistant tool call function.arguments must be a JSON object.")
    return parsed


def _template_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return tools as SGLang passes them to the template (`protocol.py`, `Function._serialize`).

    Known fields keep the request's order. A missing description or missing parameters become null, and SGLang adds
    `defer_loading`.
    """
    if not tools:
        return None
    return [
        {
            "type": tool.get("type", "function"),
            "function": _template_function(tool),
            "defer_loading": tool.get("defer_loading"),
        }
        for tool in tools
    ]


def _template_function(tool: Mapping[str, Any]) -> dict[str, Any]:
    given: Mapping[str, Any] = tool["function"]
    waits = given.get("defer_loading")
    known = {
        "description": given.get("description"),
        "name": given["name"],
        "parameters": given.get("parameters"),
        "strict": given.get("strict"),
        "defer_loading": tool.get("defer_loading") if waits is None else waits,
    }
    kept = {name: value for name, value in known.items() if value is not None or name in ("description", "parameters")}
    return {name: kept[name] for name in (*given, *kept) if name in kept}

"""Convert messages to the form that SGLang's chat endpoint passes to a chat template (0.5.23, `serving_chat.py`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from middleware_hub.openai_session.sessions.messages import Message
from miles_router.engines import json_bytes
from miles_router.errors import RouterError

#: Fields of a message that SGLang's request model keeps, by role.
USER_FIELDS = ("role", "content")
OTHER_FIELDS = ("role", "content", "tool_call_id", "name", "phase", "reasoning_content", "tool_calls", "tools")
TEXT_PARTS = ("text", "input_text")
#: Renders `(messages, tools, generation_prompt, template_kwargs)` to text.
Write = Callable[[list[dict[str, Any]], list[Any] | None, bool, Mapping[str, Any]], str]

#: Errors of a template that cannot write some messages, besides `jinja2.TemplateError`.
FAILURES = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError, NotImplementedError)
#: A tag that only transformers knows; it writes nothing.
GENERATION_TAG = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")


class CannotRender(RouterError):
    """A template refuses the messages. The reason contains no text of theirs."""


def prepared(message: Message, *, parts: bool, json: bool = False) -> dict[str, Any]:
    """Return one message in the form that SGLang passes to a template.

    Args:
        parts: lists of text parts stay lists.
        json: arguments of tool calls stay text.

    Raises:
        CannotRender: the arguments of a tool call are no JSON object, or a text part has no text.
    """
    names = USER_FIELDS if message.get("role") == "user" else OTHER_FIELDS
    kept = {name: message[name] for name in names if message.get(name) is not None}
    kept["content"] = _content(kept.get("role"), kept.get("content", ""), parts=parts)
    if isinstance(kept.get("tool_calls"), list):
        arguments = _as_json if json else _as_object
        kept["tool_calls"] = [
            _call(call, arguments if kept["role"] == "assistant" else None) for call in kept["tool_calls"]
        ]
    return kept


def _content(role: object, content: Any, *, parts: bool) -> Any:
    if not isinstance(content, list):
        return content
    found = [part for part in content if isinstance(part, Mapping) and part.get("type") in TEXT_PARTS]
    texts: list[Any] = [part.get("text") for part in found]
    if not all(isinstance(text, str) for text in texts):
        raise CannotRender("a part of a message has no text")
    if not parts or role == "tool":
        return " ".join(texts)
    return [{"type": "text", "text": text} for text in texts]


def _call(call: Any, arguments: Callable[[Any], Any] | None) -> dict[str, Any]:
    """Return a tool call with the fields, and their order, of SGLang's request model."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise CannotRender("a tool call has no function")
    function = call["function"]
    value = function.get("arguments")
    return {
        "id": call.get("id"),
        "index": call.get("index"),
        "type": "function",
        "function": {"name": function.get("name"), "arguments": arguments(value) if arguments else value},
    }


def _as_object(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json_bytes.loads(arguments.encode())
    except orjson.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise CannotRender("the arguments of a tool call are not a JSON object")
    return value


def _as_json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else orjson.dumps(arguments or {}).decode()


def loops_over_parts(template: str) -> bool:
    """Return whether a template loops over a content as a list of parts; SGLang then passes a list instead of text."""
    if any(word in template for word in ("image", "audio", "video", "vision")):
        return True
    from jinja2 import Environment, TemplateError, nodes
    from jinja2.ext import loopcontrols

    try:
        tree = Environment(extensions=[loopcontrols]).parse(GENERATION_TAG.sub("", template))
    except TemplateError:
        return False
    return any(_is_content(loop.iter) for loop in tree.find_all(nodes.For))


def _is_content(node: Any) -> bool:
    """Return whether a node is `message.content` in any spelling, with filters, tests and slices."""
    from jinja2 import nodes

    if isinstance(node, (nodes.Filter, nodes.Test)):
        return node.node is not None and _is_content(node.node)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _is_content(node.node)
    if isinstance(node, nodes.Getitem):
        key = node.arg.value if isinstance(node.arg, nodes.Const) else None
    elif isinstance(node, nodes.Getattr):
        key = node.attr
    else:
        return False
    return key == "content" and isinstance(node.node, nodes.Name) and node.node.name in ("message", "msg", "m")

"""Render messages to text, with the model's own chat template or a family's, and encode text to ids.

Messages are prepared as SGLang prepares them (preparing.py), so a text rendered here equals the engine's own. The
engine's template renders a session's first turn; appended messages are rendered here.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import orjson

from middleware_hub.openai_session.continuing.preparing import FAILURES, CannotRender, Write, loops_over_parts, prepared
from middleware_hub.openai_session.sessions.messages import Message, function_of
from middleware_hub.openai_session.sessions.turn import prepared_tool
from middleware_hub.tokenizing.encoding import TextEncoder
from miles_router.engines import json_bytes
from miles_router.errors import ConfigError

#: The key of the object that wraps invalid arguments; Anthropic's documentation names it for this purpose.
INVALID_JSON = "INVALID_JSON"
#: The most places of wrapped arguments that are reported.
MAX_NAMED = 64
SHORT = 9
ENGINE_ID = re.compile(r"call_[0-9a-f]{24}")


def wrap_arguments(messages: Sequence[Message]) -> tuple[Sequence[Message], list[str]]:
    """Return messages in which the arguments of every tool call are an object, and the places of invalid ones. Invalid
    arguments are wrapped in an object; empty arguments become `{}`. Returns the same list if nothing changed."""
    changed: dict[int, Message] = {}
    where: list[str] = []
    for place, message in enumerate(messages):
        calls = message.get("tool_calls") if message.get("role") == "assistant" else None
        if not isinstance(calls, list):
            continue
        now = [_wrap_call(call) for call in calls]
        others = [number for number, (one, other) in enumerate(zip(calls, now, strict=True)) if one is not other]
        if others:
            changed[place] = {**message, "tool_calls": now}
            where += [f"messages[{place}].tool_calls[{each}]" for each in others if _is_wrapped(now[each])]
    if not changed:
        return messages, []
    return [changed.get(place, message) for place, message in enumerate(messages)], where[:MAX_NAMED]


def _wrap_call(call: Any) -> Any:
    function = function_of(call)
    arguments = function.get("arguments")
    if not function or isinstance(arguments, Mapping) or _is_object(arguments):
        return call
    if arguments is None or (isinstance(arguments, str) and arguments.strip() in ("", "null", "[]")):
        object_text = "{}"
    else:
        text = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
        object_text = orjson.dumps({INVALID_JSON: text}).decode()
    return {**call, "function": {**function, "arguments": object_text}}


def _is_wrapped(call: Mapping[str, Any]) -> bool:
    return bool(call["function"]["arguments"] != "{}")


def _is_object(arguments: object) -> bool:
    if not isinstance(arguments, str):
        return False
    try:
        return isinstance(json_bytes.loads(arguments.encode()), dict)
    except ValueError:
        return False


def shorten_ids(message: Message) -> Message:
    """Return a message whose call ids are shortened by `short_id`."""
    calls, call_id = message.get("tool_calls"), message.get("tool_call_id")
    if isinstance(calls, list):
        short = [
            {**call, "id": short_id(call["id"])}
            if isinstance(call, Mapping) and isinstance(call.get("id"), str)
            else call
            for call in calls
        ]
        message = {**message, "tool_calls": short}
    return {**message, "tool_call_id": short_id(call_id)} if isinstance(call_id, str) else message


def short_id(call_id: str) -> str:
    """Return 9 letters and digits for a call id, always the same for the same id. An engine's id is truncated as
    opencode truncates it."""
    if len(call_id) == SHORT and call_id.isascii() and call_id.isalnum():
        return call_id
    if ENGINE_ID.fullmatch(call_id):
        return call_id.replace("_", "")[:SHORT]
    return blake2b(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:SHORT]


__all__ = ["CannotRender", "Renderer", "from_tokenizer"]

#: Parameters of `apply_chat_template` that are not settings of a template; a request must not set them.
RESERVED = frozenset(
    (
        *("conversation", "messages", "tools", "chat_template", "add_generation_prompt", "tokenize"),
        *("continue_final_message", "return_assistant_tokens_mask", "return_dict", "return_tensors"),
        *("padding", "truncation", "max_length", "tokenizer_kwargs"),
    )
)
#: A call id that every template accepts, and that occurs nowhere by chance.
PROBE_ID = "qz7id7zq0"
#: The number of characters that determine the first token of a text.
LOOKAHEAD = 64


class Renderer:
    """One way to render messages. `origin` is its name for logs; `subject` is everything except code that it depends
    on."""

    def __init__(
        self,
        tokenizer: Any,
        write: Write,
        *,
        origin: str,
        subject: Mapping[str, object],
        parts: bool = False,
        json: bool = False,
        family: str = "",
    ) -> None:
        self.origin = origin
        self.tokenizer = tokenizer
        #: The library's name of the family; empty without one.
        self.family = family
        self.subject = {"origin": origin, "tokenizer": str(type(tokenizer)), **subject}
        self._encoder = TextEncoder(tokenizer)
        self._backend = tokenizer.backend_tokenizer
        self._write = write
        self._parts = parts
        self._json = json
        self._short_ids = False
        added = self._backend.get_added_tokens_decoder()
        self._added: dict[int, str] = {token: each.content for token, each in added.items()}
        self._special = frozenset(token for token, each in added.items() if each.special)
        self._short_ids = self._wants_short_ids()

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        *,
        generation_prompt: bool,
        template_kwargs: Mapping[str, Any],
    ) -> str:
        """Return the text of a conversation.

        Raises:
            CannotRender: the template refuses the messages, or the request sets a reserved parameter.
        """
        foreign = sorted(RESERVED & template_kwargs.keys())
        if foreign:
            raise CannotRender(f"chat_template_kwargs: {foreign[0]} is not a template's setting")
        prepared = [self._prepared(message) for message in messages]
        written = [prepared_tool(tool) for tool in tools] if tools else None
        return self._write(prepared, written, generation_prompt, template_kwargs)

    def as_engine_reads(self, appended: Sequence[Message]) -> Sequence[Message]:
        """Return the messages as SGLang reads them: an assistant's message at the end becomes a user's. SGLang does so
        in order to have a message to answer."""
        if not appended or appended[-1].get("role") != "assistant":
            return appended
        content = self._prepared(appended[-1])["content"]
        return [*appended[:-1], {"role": "user", "content": content}] if isinstance(content, str) else appended

    def readable(self, messages: Sequence[Message]) -> tuple[Sequence[Message], list[str]]:
        """Return messages in a form that the template accepts, and the places of arguments that were wrapped."""
        taken, where = (messages, []) if self._json else wrap_arguments(messages)
        return [shorten_ids(message) for message in taken] if self._short_ids else taken, where

    def same_id(self, held: object, sent: object) -> bool:
        """Return whether the template cannot distinguish two ids of a tool call."""
        if not self.writes_ids:
            return True
        short = self._short_ids and isinstance(held, str) and isinstance(sent, str)
        return short and short_id(str(held)) == short_id(str(sent))

    @functools.cached_property
    def writes_ids(self) -> bool:
        """Whether the template writes the ids of tool calls."""
        try:
            return PROBE_ID in self._render_call(PROBE_ID)
        except CannotRender:
            return True

    def _wants_short_ids(self) -> bool:
        """Return whether the template accepts only call ids of 9 characters."""
        for call_id, is_taken in (("call_0", False), (PROBE_ID, True)):
            try:
                self._render_call(call_id)
            except CannotRender:
                if is_taken:
                    return False
            else:
                if not is_taken:
                    return False
        return True

    def _render_call(self, call_id: str) -> str:
        messages: list[Message] = [
            {"role": "user", "content": "a"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": call_id, "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": call_id, "name": "f", "content": "b"},
        ]
        return self.render(messages, None, generation_prompt=True, template_kwargs={})

    def _prepared(self, message: Message) -> dict[str, Any]:
        message = shorten_ids(message) if self._short_ids else message
        return prepared(message, parts=self._parts, json=self._json)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text from its beginning, without special tokens added."""
        # Unlike `encode`, a batch releases the interpreter's lock.
        return list(self._backend.encode_batch([text], add_special_tokens=False)[0].ids)

    def encode_behind(self, text: str, token: int | None) -> list[int]:
        return list(map(int, self._encoder.encode_behind(text, token)))

    def begins_with(self, text: str, token: int | None) -> bool:
        """Return whether `token` is the first token of a text."""
        if token is not None and token in self._added:
            return text.startswith(self._added[token])
        return self.encode(text[:LOOKAHEAD])[:1] == [token]

    def spelling(self, token_id: int) -> str:
        """Return the text that a template writes for one token; empty for an id without text."""
        if token_id in self._added:
            return self._added[token_id]
        return str(self._backend.decode([token_id], skip_special_tokens=False))

    def is_added(self, token_id: int | None) -> bool:
        """Return whether a token is an added token, special or not: the tokenizer matches these before any other."""
        return token_id in self._added

    def is_special(self, token_id: int | None) -> bool:
        """Return True for special tokens such as `<|im_end|>`."""
        return token_id in self._special


def from_tokenizer(
    tokenizer: Any,
    *,
    template: str | None = None,
    settings: Mapping[str, Any] | None = None,
    origin: str | None = None,
    family: str = "",
) -> Renderer:
    """Return a renderer with the tokenizer's chat template, or with `template` if given. `settings` apply unless a
    request overrides them.

    Raises:
        ConfigError: there is no template, or jinja2 is not installed.
    """
    own = template or tokenizer.chat_template
    if not own:
        raise ConfigError("hf_checkpoint: the tokenizer has no chat template; set --chat-template-path")
    try:
        from jinja2 import TemplateError

        from middleware_hub.openai_session.continuing.compiled import make_writer
    except ImportError:
        raise ConfigError("hf_checkpoint: chat templates need jinja2; pip install 'miles-router[tito]'") from None
    source = own if isinstance(own, str) else tokenizer.get_chat_template()

    apply = make_writer(tokenizer, template, settings or {})

    def write(messages: list[Any], tools: list[Any] | None, generation_prompt: bool, kwargs: Mapping[str, Any]) -> str:
        try:
            try:
                return apply(messages, tools, generation_prompt, kwargs)
            except (TemplateError, *FAILURES):
                if not tools:
                    raise
                bare = [tool.get("function", tool) for tool in tools if isinstance(tool, Mapping)]
                return apply(messages, bare, generation_prompt, kwargs)
        except (TemplateError, *FAILURES) as error:
            raise CannotRender(_reason(error, source)) from None

    return Renderer(
        tokenizer,
        write,
        origin=origin or "the tokenizer's chat template",
        subject={"template": own, "settings": settings, "special tokens": tokenizer.special_tokens_map},
        parts=loops_over_parts(source),
        family=family,
    )


def _reason(error: Exception, source: str) -> str:
    """Return a reason without text of a prompt. A message that occurs in the template's source is quoted. Any other
    message may quote a prompt, so only the type of the error is reported."""
    message = str(error).strip()
    if message and "\n" not in message and message in source:
        return f"the template raises an error: {message}"
    return f"the template fails with {type(error).__name__}"

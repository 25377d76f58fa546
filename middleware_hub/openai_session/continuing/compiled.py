"""Render a chat template without the library's overhead at every turn, which costs as much as a short conversation.

`apply_chat_template` copies and checks its arguments, and its sandbox checks the safety of each attribute again at
every access. Messages that were prepared here are plain JSON, and safety depends only on types. At the start, the
direct path is compared with the library's: once with a template that prints its arguments, once with the model's own.
If they differ, every turn uses the library, and the log contains the reason.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers import PreTrainedTokenizerBase
from transformers.utils import chat_template_utils

from middleware_hub.openai_session.continuing.preparing import FAILURES, Write

logger = logging.getLogger(__name__)

#: Template settings of ordinary turns; the library renders a turn with any other setting.
SETTINGS = frozenset(("enable_thinking", "thinking", "reasoning_effort"))
#: A template that prints its arguments, and the variables with the inserted names.
MIRROR = "{{ [messages, tools, documents, add_generation_prompt, %s] | tojson }}"
#: Answers that a sandbox caches.
MAX_ANSWERS = 1024
DICT_ATTRIBUTES = frozenset(dir(dict))
_CALL = {"name": "f", "arguments": {"a": [1, None, {"b": 0.5}], "c": True}}
TRIAL: list[dict[str, Any]] = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "r",
        "tool_calls": [{"id": "c", "index": None, "type": "function", "function": _CALL}],
    },
    {"role": "tool", "content": "t", "tool_call_id": "c", "name": "f"},
    {"role": "assistant", "content": "<think>\na\n</think>\n\nb"},
    {"role": "user", "content": "v"},
]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "description": None, "parameters": {}},
    "defer_loading": None,
}


class Sandbox(ImmutableSandboxedEnvironment):
    """The library's sandbox, with a cache of which attributes are safe."""

    answers: dict[tuple[type, str], bool]

    @classmethod
    def copy_of(cls, sandbox: ImmutableSandboxedEnvironment) -> Sandbox:
        """Return a sandbox with the same settings, filters and globals."""
        own = sandbox.overlay()
        own.__class__ = cls
        assert isinstance(own, Sandbox)
        own.answers = {}
        return own

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return an attribute as the library does, but skip its failing attribute look-up on a dictionary. Templates
        mostly read items of dictionaries by attribute syntax."""
        if type(obj) is not dict or attribute in DICT_ATTRIBUTES:
            return super().getattr(obj, attribute)
        try:
            return obj[attribute]
        except KeyError:
            return self.undefined(obj=obj, name=attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return the library's answer, which depends only on the type and the name."""
        known = self.answers.get((type(obj), attr))
        if known is None:
            known = super().is_safe_attribute(obj, attr, value)
            if len(self.answers) < MAX_ANSWERS:
                self.answers[type(obj), attr] = known
        return known


class RenderingDiffers(ValueError):
    """The reason why the library may pass other arguments to a template, or render it in another way."""


def make_writer(tokenizer: Any, template: str | None, settings: Mapping[str, Any]) -> Write:
    """Return a function that renders `template`, or the tokenizer's own if it is None. `settings` apply unless a turn
    overrides them."""
    library = _library_writer(tokenizer, template, settings)
    try:
        direct = _direct_writer(tokenizer, template or tokenizer.chat_template, settings)
        _require_same(library, direct)
        mirror = MIRROR % ", ".join(sorted({*tokenizer.special_tokens_map, *settings, "messages"}))
        _require_same(_library_writer(tokenizer, mirror, settings), _direct_writer(tokenizer, mirror, settings))
    except RenderingDiffers as reason:
        logger.warning("chat_template_by_the_library", extra={"fields": {"reason": str(reason)}})
        return library

    def write(
        messages: list[dict[str, Any]], tools: list[Any] | None, generation_prompt: bool, kwargs: Mapping[str, Any]
    ) -> str:
        known = messages and kwargs.keys() <= SETTINGS and all(type(tool) is dict for tool in tools or ())
        return (direct if known else library)(messages, tools, generation_prompt, kwargs)

    return write


def _library_writer(tokenizer: Any, template: str | None, settings: Mapping[str, Any]) -> Write:
    """Return a function that renders with `apply_chat_template`."""
    named = {} if template is None else {"chat_template": template}

    def write(
        messages: list[dict[str, Any]], tools: list[Any] | None, generation_prompt: bool, kwargs: Mapping[str, Any]
    ) -> str:
        given = {**settings, **kwargs, **named}
        text = tokenizer.apply_chat_template(
            messages, tools=tools, add_generation_prompt=generation_prompt, tokenize=False, **given
        )
        return str(text)

    return write


def _direct_writer(tokenizer: Any, source: object, settings: Mapping[str, Any]) -> Write:
    """Return a function that renders the template as the library finally does.

    Raises:
        RenderingDiffers: the library may render it differently.
    """
    if not isinstance(source, str):
        raise RenderingDiffers("the tokenizer has several templates")
    if type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
        raise RenderingDiffers("the tokenizer overrides apply_chat_template")
    compile_template = getattr(chat_template_utils, "_compile_jinja_template", None)
    try:
        sandbox = compile_template(source).environment if compile_template is not None else None
    except TemplateError as error:
        raise RenderingDiffers(f"the template cannot be compiled: {type(error).__name__}") from None
    if type(sandbox) is not ImmutableSandboxedEnvironment:
        raise RenderingDiffers("transformers compiles templates differently")
    template = Sandbox.copy_of(sandbox).from_string(source)
    template.globals = {**template.globals}  # each rendering copies them, which is slow for Jinja's `ChainMap`
    before = {**tokenizer.special_tokens_map, **settings}

    def write(
        messages: list[dict[str, Any]], tools: list[Any] | None, generation_prompt: bool, kwargs: Mapping[str, Any]
    ) -> str:
        aliased = [
            {"thinking": message["reasoning_content"], **message} if "reasoning_content" in message else message
            for message in messages
        ]
        given = {"messages": aliased, "tools": tools, "documents": None, "add_generation_prompt": generation_prompt}
        return template.render({**before, **kwargs, **given})

    return write


def _require_same(library: Write, direct: Write) -> None:
    """Render the trial conversations with both.

    Raises:
        RenderingDiffers: the two render different texts.
    """
    for count in range(1, len(TRIAL) + 1):
        for tools in (None, [TOOL]):
            for begin, generation_prompt in ((0, True), (count - 1, False)):
                trial = TRIAL[begin:count], tools, generation_prompt, {"enable_thinking": False}
                if _outcome(library, *trial) != _outcome(direct, *trial):
                    raise RenderingDiffers(
                        "transformers passes other arguments to templates, or renders them differently"
                    )


def _outcome(
    write: Write,
    messages: list[dict[str, Any]],
    tools: list[Any] | None,
    generation_prompt: bool,
    kwargs: Mapping[str, Any],
) -> str:
    try:
        return write(messages, tools, generation_prompt, kwargs)
    except (TemplateError, *FAILURES) as error:
        return repr(error)

"""Messages to text as SGLang writes them, families by name, and templates that are rendered directly."""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

from middleware_hub.openai_session.continuing import compiled
from middleware_hub.openai_session.continuing.compiled import make_writer
from middleware_hub.openai_session.continuing.families import for_family
from middleware_hub.openai_session.continuing.preparing import FAILURES, CannotRender, Write, loops_over_parts, prepared
from middleware_hub.openai_session.continuing.templates import from_tokenizer
from middleware_hub.openai_session.sessions.turn import prepared_tool
from miles_router.errors import ConfigError
from tests.support.chat import CHATML, TEMPLATES, TOOLS, checkpoint, conversation, family_tokenizer, with_template
from tests.support.tokenizers import tokenizer


def rendered(template: str, *messages: dict[str, Any]) -> str:
    renderer = from_tokenizer(with_template(template))
    return renderer.render(messages, None, generation_prompt=False, template_kwargs={})


def called(arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": arguments}}]}


@pytest.mark.parametrize("arguments", ["{private", "[1]", '"private"', ""])
def test_arguments_that_are_no_object_cannot_be_rendered(arguments: str) -> None:
    with pytest.raises(CannotRender, match="not a JSON object") as error:
        prepared(called(arguments), parts=False)
    assert "private" not in str(error.value)


def test_arguments_of_a_call_are_an_object() -> None:
    (call,) = prepared(called('{"b": 1, "a": [2]}'), parts=False)["tool_calls"]
    function = {"name": "f", "arguments": {"b": 1, "a": [2]}}
    assert call == {"id": "a", "index": None, "type": "function", "function": function}
    assert list(call) == ["id", "index", "type", "function"]
    assert prepared(called({"a": 1}), parts=False)["tool_calls"][0]["function"]["arguments"] == {"a": 1}


def test_a_tokenizer_without_a_template_is_a_mistake_of_configuration() -> None:
    with pytest.raises(ConfigError, match="--chat-template-path"):
        from_tokenizer(tokenizer("llama2"))


@pytest.mark.parametrize(
    "template",
    [
        "{% for part in message.content %}{% endfor %}",
        "{% for part in msg.content is iterable %}{% endfor %}",
        "{# vision #}",
        "{% generation %}{% for part in m.content %}{% break %}{% endfor %}{% endgeneration %}",
    ],
)
def test_a_template_that_loops_over_contents_is_given_parts(template: str) -> None:
    assert loops_over_parts(template)


@pytest.mark.parametrize(
    "template",
    [
        CHATML,
        "{% for part in item.content %}{% endfor %}",
        "{% for part in message[0] %}{% endfor %}{% for c in message[x] %}{% endfor %}",
        "{% unheard of %}",
    ],
)
def test_any_other_template_is_given_text(template: str) -> None:
    assert not loops_over_parts(template)


@pytest.mark.parametrize("name", ["chat_template", "tools", "tokenize", "continue_final_message", "return_dict"])
def test_what_is_no_setting_of_a_template_cannot_be_set(name: str) -> None:
    renderer = from_tokenizer(with_template(CHATML))
    with pytest.raises(CannotRender, match=name):
        renderer.render([{"role": "user"}], None, generation_prompt=True, template_kwargs={name: None})


def test_a_reason_quotes_no_message() -> None:
    secret = {"role": "user", "content": "my password"}
    for template in (
        "{{ raise_exception('No ' + messages[0].content) }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[0][messages[0].content].x }}",
        "{{ 1 // 0 }}",
        "{{ messages[0].content.format(*[]) % 1 }}",
    ):
        with pytest.raises(CannotRender, match="fails with") as error:
            rendered(template, secret)
        assert "password" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "origin"),
    [
        ("qwen3", "qwen3_fixed.jinja of miles-tito-tokenizers (qwen3)"),
        ("Qwen3.5", "qwen3.5_fixed.jinja of miles-tito-tokenizers (qwen35)"),
        ("qwen3-next", "qwen3_thinking_2507_and_next_fixed.jinja of miles-tito-tokenizers (qwennext)"),
        (" glm-4.7 ", "the tokenizer's chat template (glm47)"),
        ("kimi", "kimi_k25_fixed.jinja of miles-tito-tokenizers (kimi25)"),
        ("minimax", "minimax_m25_fixed.jinja of miles-tito-tokenizers (minimax_m25)"),
        ("gpt-oss", "the tokenizer's chat template (gpt-oss: not in the library)"),
        ("deepseek", "the tokenizer's chat template (deepseek, before V3.2)"),
        ("deepseekv32", "the encoder of miles-tito-tokenizers (deepseekv32)"),
    ],
)
def test_a_family_is_found_by_its_name(name: str, origin: str) -> None:
    assert for_family(with_template(CHATML), name).origin == origin


def test_the_newer_of_two_families_is_told_by_its_template() -> None:
    kimi = with_template(CHATML + "{# preserve_thinking #}")
    minimax = with_template(CHATML + "{# MiniMax-M2.7 #}")
    assert for_family(kimi, "kimi").origin == "the tokenizer's chat template (kimi26)"
    assert for_family(minimax, "minimax").origin.startswith("minimax_m27_fixed.jinja")


@pytest.mark.parametrize(("model_type", "family"), [("deepseek_v32", "deepseekv32"), ("deepseek_v4", "deepseekv4")])
def test_a_deepseek_is_told_by_its_checkpoint(model_type: str, family: str, tmp_path: Path) -> None:
    made = copy.copy(family_tokenizer("deepseekv32"))
    made.name_or_path = checkpoint(tmp_path, model_type)
    assert for_family(made, "deepseek").origin == f"the encoder of miles-tito-tokenizers ({family})"


def test_an_encoders_failure_quotes_no_message() -> None:
    renderer = for_family(family_tokenizer("deepseekv32"), "deepseekv32")
    for role, settings in (("critic", {}), ("tool", {}), ("assistant", {"thinking": True})):
        messages = [{"role": "user", "content": ""}, {"role": role, "content": "secret"}]
        with pytest.raises(CannotRender, match="the encoder fails with") as error:
            renderer.render(messages, None, generation_prompt=True, template_kwargs=settings)
        assert "secret" not in str(error.value)


@pytest.mark.parametrize(("name", "near"), [("qwen-3", "qwen3"), ("glm4.7", "glm-4.7"), ("deepsek", "deepseek")])
def test_an_unknown_family_is_a_mistake_that_names_the_nearest(name: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown model family '{name}'; did you mean '{near}'"):
        for_family(tokenizer("qwen3"), name)


SOURCES: Mapping[str, str] = {**TEMPLATES, "chatml": CHATML, "qwen3": tokenizer("qwen3").chat_template}
SAID = [{"role": "user", "content": "u"}]


def asked(
    monkeypatch: pytest.MonkeyPatch, made: Any, template: str | None = None, **settings: Any
) -> tuple[Write, Any]:
    """A writer, and the calls of the library's front proxy from here on."""
    write, calls = make_writer(made, template, settings), []

    def apply(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return type(made).apply_chat_template(made, *args, **kwargs)

    monkeypatch.setattr(made, "apply_chat_template", apply)
    return write, calls


def outcome(write: Callable[..., str], *args: Any) -> str:
    try:
        return write(*args)
    except (TemplateError, *FAILURES) as error:
        return repr(error)


@pytest.mark.parametrize("name", SOURCES)
def test_a_template_writes_what_it_writes_by_its_library(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, rng = with_template(SOURCES[name]), random.Random(name)
    write, calls = asked(monkeypatch, made, clear_thinking=False)
    for turns in (*range(5), *range(5), *range(5)):
        messages = [prepared(each, parts=False) for each in conversation(rng, turns, tools=True)]
        tools = rng.choice((None, [prepared_tool(each) for each in TOOLS]))
        kwargs = rng.choice(({}, {"enable_thinking": False}, {"reasoning_effort": "low", "thinking": True}))
        asks = rng.random() < 0.7
        written = outcome(write, messages, tools, asks, kwargs)
        assert not calls
        given = {"tools": tools, "add_generation_prompt": asks, "tokenize": False, "clear_thinking": False, **kwargs}
        assert written == outcome(partial(made.apply_chat_template, messages, **given))
        calls.clear()


class OtherSandbox(ImmutableSandboxedEnvironment):
    """Not the library's."""


def another_name(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given = made.apply_chat_template
    made.apply_chat_template = lambda *args, **kwargs: given(*args, **{**kwargs, "documents": [{"title": "t"}]})


COMPILER, MOVED = "_compile_jinja_template", "the library's compiler has moved"
CHANGES: Mapping[str, Callable[[Any, pytest.MonkeyPatch], object]] = {
    "a way of its own": lambda made, patch: setattr(
        made, "__class__", type("Own", (type(made),), {"apply_chat_template": lambda self, *args, **kwargs: "own"})
    ),
    "several templates": lambda made, patch: setattr(made, "chat_template", {"default": CHATML, "tool_use": CHATML}),
    "no template": lambda made, patch: setattr(made, "chat_template", "{% if %}"),
    MOVED: lambda made, patch: patch.delattr(chat_template_utils, COMPILER),
    "another sandbox": lambda made, patch: patch.setattr(chat_template_utils, COMPILER, OtherSandbox().from_string),
    "another name": another_name,
    "another text": lambda made, patch: patch.setattr(compiled.Sandbox, "getattr", lambda self, obj, name: "other"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_where_the_library_may_write_something_else_it_is_asked_and_the_log_says_so(
    change: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = with_template(CHATML)
    CHANGES[change](made, monkeypatch)
    with caplog.at_level(logging.WARNING):
        write, calls = asked(monkeypatch, made)
    if change == MOVED:
        monkeypatch.undo()
        monkeypatch.setattr(made, "apply_chat_template", lambda *args, **kwargs: calls.append(kwargs))
    (told,) = [each.fields for each in caplog.records if each.message == "chat_template_by_the_library"]  # type: ignore[attr-defined]
    assert told["reason"]
    outcome(write, SAID, None, True, {})
    assert len(calls) == 1


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ messages[0].content.__class__.__mro__ }}",
        "{{ '{0.__class__.a}'.format(messages) }}",
    ],
)
def test_the_sandbox_still_refuses_what_is_not_safe(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write, calls = asked(monkeypatch, with_template(source))
    for _ in range(2):  # asked again, and answered from memory
        with pytest.raises(SecurityError):
            write(SAID, None, True, {})
    assert not calls

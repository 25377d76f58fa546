"""A template that is rendered directly writes what its library writes, or the library is asked."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
from jinja2 import TemplateError
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils import chat_template_utils

from middleware_hub.openai_session.continuing import compiled
from middleware_hub.openai_session.continuing.compiled import make_writer
from middleware_hub.openai_session.continuing.preparing import FAILURES, Write, prepared
from middleware_hub.openai_session.sessions.prompting import prepared_tool
from tests.support.chat import CHATML, TEMPLATES, TOOLS, conversation, with_template
from tests.support.tokenizers import tokenizer

SOURCES: Mapping[str, str] = {**TEMPLATES, "chatml": CHATML, "qwen3": tokenizer("qwen3").chat_template}
SAID = [{"role": "user", "content": "u"}]


def asked(
    monkeypatch: pytest.MonkeyPatch, made: Any, template: str | None = None, **settings: Any
) -> tuple[Write, Any]:
    """A writer, and the calls of the library's front door from here on."""
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


@pytest.mark.parametrize(
    ("messages", "tools", "kwargs"),
    [
        ([], None, {}),
        (SAID, ["tool"], {}),
        (SAID, None, {"documents": [{"title": "t"}]}),
        (SAID, None, {"sanitize_control_tokens": True}),
        (SAID, None, {"own": 1}),
    ],
)
def test_what_turns_seldom_have_is_left_to_the_library(
    messages: list[Any], tools: list[Any] | None, kwargs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    write, calls = asked(monkeypatch, with_template(CHATML))
    outcome(write, messages, tools, True, kwargs)
    assert len(calls) == 1


def own_way(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made.__class__ = type("Own", (type(made),), {"apply_chat_template": lambda self, *args, **kwargs: "own"})


def several(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made.chat_template = {"default": CHATML, "tool_use": CHATML}


def no_template(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made.chat_template = "{% if %}"


def moved(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(chat_template_utils, "_compile_jinja_template")


def another_sandbox(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(ImmutableSandboxedEnvironment):
        pass

    monkeypatch.setattr(chat_template_utils, "_compile_jinja_template", Other().from_string)


def another_name(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given = made.apply_chat_template
    made.apply_chat_template = lambda *args, **kwargs: given(*args, **{**kwargs, "documents": [{"title": "t"}]})


def other_text(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled.Sandbox, "getattr", lambda self, obj, attribute: "other")


@pytest.mark.parametrize("change", [own_way, several, no_template, moved, another_sandbox, another_name, other_text])
def test_where_the_library_may_write_something_else_it_is_asked_and_the_log_says_so(
    change: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = with_template(CHATML)
    change(made, monkeypatch)
    with caplog.at_level(logging.WARNING):
        write, calls = asked(monkeypatch, made)
    if change is moved:
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
        "{{ messages[0].update(a=1) }}",
        "{{ messages[0].__class__.a }}",
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


def test_a_sandbox_remembers_no_more_than_it_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "MAX_ANSWERS", 3)
    sandbox = compiled.Sandbox.copy_of(ImmutableSandboxedEnvironment())
    assert all(sandbox.is_safe_attribute("", f"name{place}", None) for place in range(9))
    assert not sandbox.is_safe_attribute("", "__class__", None)
    assert len(sandbox.answers) == 3

"""Messages to text as SGLang's chat endpoint writes them, and families by name."""

from __future__ import annotations

import builtins
import copy
from pathlib import Path
from typing import Any

import pytest

from middleware_hub.openai_session.continuing.families import FAMILIES, LIBRARY, for_family
from middleware_hub.openai_session.continuing.preparing import CannotRender, loops_over_parts, prepared
from middleware_hub.openai_session.continuing.templates import from_tokenizer
from middleware_hub.openai_session.sessions.prompting import prepared_tool
from miles_router.errors import ConfigError
from tests.support.chat import CHATML, GLM, TOOLS, checkpoint, family_tokenizer, with_template
from tests.support.tokenizers import tokenizer


def rendered(template: str, *messages: dict[str, Any], tools: list[Any] | None = None, **settings: Any) -> str:
    renderer = from_tokenizer(with_template(template))
    return renderer.render(messages, tools, generation_prompt=False, template_kwargs=settings)


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def called(arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": arguments}}]}


# Preparing.


def test_no_content_is_an_empty_one() -> None:
    assert prepared({"role": "assistant", "content": None}, parts=False) == {"role": "assistant", "content": ""}
    assert prepared({"role": "assistant"}, parts=True) == {"role": "assistant", "content": ""}


def test_text_parts_are_joined_by_a_space_for_a_template_that_wants_text() -> None:
    message = {"role": "user", "content": [text("a"), {"type": "input_text", "text": "b"}, {"type": "image_url"}]}
    assert prepared(message, parts=False)["content"] == "a b"


def test_text_parts_stay_parts_for_a_template_that_loops_over_them() -> None:
    message = {"role": "user", "content": [text("a"), {"type": "input_text", "text": "b"}]}
    assert prepared(message, parts=True)["content"] == [text("a"), text("b")]


def test_what_a_tool_says_is_text_always() -> None:
    assert prepared({"role": "tool", "content": [text("a"), text("b")]}, parts=True)["content"] == "a b"


def test_fields_that_the_engine_does_not_know_are_left_out() -> None:
    assert prepared({"role": "user", "content": "x", "name": "me", "cache_control": {}}, parts=False) == {
        "role": "user",
        "content": "x",
    }
    assert prepared({"role": "tool", "content": "x", "name": "f", "extra": 1}, parts=False) == {
        "role": "tool",
        "content": "x",
        "name": "f",
    }


def test_arguments_of_a_call_are_an_object() -> None:
    (call,) = prepared(called('{"b": 1, "a": [2]}'), parts=False)["tool_calls"]
    function = {"name": "f", "arguments": {"b": 1, "a": [2]}}
    assert call == {"id": "a", "index": None, "type": "function", "function": function}
    assert list(call) == ["id", "index", "type", "function"]
    assert prepared(called({"a": 1}), parts=False)["tool_calls"][0]["function"]["arguments"] == {"a": 1}


def test_arguments_stay_text_for_an_encoder() -> None:
    for arguments, given in (('{"b":1}', '{"b":1}'), ({"a": 1}, '{"a":1}'), (None, "{}")):
        assert prepared(called(arguments), parts=False, json=True)["tool_calls"][0]["function"]["arguments"] == given


def test_a_tool_has_the_fields_of_the_engines_request_in_the_order_they_were_sent() -> None:
    sent = {"type": "function", "function": {"strict": True, "name": "f", "extra": 1, "defer_loading": None}, "x": 2}
    tool = prepared_tool(sent)
    function = {"strict": True, "name": "f", "description": None, "parameters": None}
    assert tool == {"type": "function", "function": function, "defer_loading": None}
    assert list(tool["function"]) == list(function)
    assert prepared_tool({"type": "browser"}) == {"type": "browser"}
    assert prepared_tool("tool") == "tool"


@pytest.mark.parametrize("arguments", ["{private", "[1]", '"private"', ""])
def test_arguments_that_are_no_object_cannot_be_rendered(arguments: str) -> None:
    with pytest.raises(CannotRender, match="not a JSON object") as error:
        prepared(called(arguments), parts=False)
    assert "private" not in str(error.value)


@pytest.mark.parametrize("call", [None, {}, {"function": None}])
def test_a_call_without_a_function_cannot_be_rendered(call: Any) -> None:
    with pytest.raises(CannotRender, match="no function"):
        prepared({"role": "assistant", "tool_calls": [call]}, parts=False)


@pytest.mark.parametrize(
    "template",
    [
        "{% for part in message.content %}{% endfor %}",
        "{% for part in message['content'] | list %}{% endfor %}",
        "{% for part in m.content[1:] %}{% endfor %}",
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
        GLM,
        "{% for part in item.content %}{% endfor %}",
        "{% for part in message.tool_calls %}{% endfor %}",
        "{% for part in message[0] %}{% endfor %}{% for c in message[x] %}{% endfor %}",
        "{% for x in range(3) %}{% endfor %}",
        "{% unheard of %}",
    ],
)
def test_any_other_template_is_given_text(template: str) -> None:
    assert not loops_over_parts(template)


# Rendering.


def test_the_template_gets_messages_tools_and_settings() -> None:
    template = "{{ messages | length }} {{ tools | length if tools else 0 }} {{ kind }} {{ add_generation_prompt }}"
    hello = {"role": "user", "content": "Hi"}
    assert rendered(template, hello, hello, tools=TOOLS, kind="x") == "2 2 x False"
    assert rendered(template, hello, tools=[], kind="y") == "1 0 y False"


def test_settings_of_a_family_yield_to_those_of_a_request() -> None:
    renderer = from_tokenizer(with_template("{{ a }}{{ b }}"), settings={"a": 1, "b": 2})
    message = [{"role": "user", "content": ""}]
    assert renderer.render(message, None, generation_prompt=True, template_kwargs={"b": 3}) == "13"


def test_tools_are_unwrapped_for_a_template_that_fails_on_them() -> None:
    template = "{%- for tool in tools -%}{{ tool.name + ' ' }}{%- endfor -%}"
    assert rendered(template, {"role": "user", "content": ""}, tools=TOOLS) == "search add "


@pytest.mark.parametrize("name", ["chat_template", "tools", "tokenize", "continue_final_message", "return_dict"])
def test_what_is_no_setting_of_a_template_cannot_be_set(name: str) -> None:
    renderer = from_tokenizer(with_template(CHATML))
    with pytest.raises(CannotRender, match=name):
        renderer.render([{"role": "user"}], None, generation_prompt=True, template_kwargs={name: None})


def test_what_a_template_says_is_the_reason() -> None:
    template = "{{ raise_exception('Roles must alternate') }}"
    with pytest.raises(CannotRender, match="the template raises an error: Roles must alternate"):
        rendered(template, {"role": "user", "content": ""}, tools=TOOLS)


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


def test_a_tokenizer_without_a_template_is_a_mistake_of_configuration() -> None:
    with pytest.raises(ConfigError, match="--chat-template-path"):
        from_tokenizer(tokenizer("llama2"))


def test_of_several_templates_the_default_is_taken() -> None:
    made = copy.copy(tokenizer("qwen3"))
    made.chat_template = {"default": "{{ raise_exception('The default') }}", "other": CHATML}
    with pytest.raises(CannotRender, match="the template raises an error: The default"):
        from_tokenizer(made).render([{"role": "user"}], None, generation_prompt=False, template_kwargs={})


def test_without_jinja2_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "jinja2")
    with pytest.raises(ConfigError, match=r"miles-router\[tito\]"):
        from_tokenizer(with_template(CHATML))


# Ids.


def test_a_text_is_encoded_without_special_tokens_of_the_tokenizers_own() -> None:
    renderer = from_tokenizer(with_template(CHATML, "gemma3"))
    assert tokenizer("gemma3").encode("Hi")[0] == tokenizer("gemma3").bos_token_id
    assert renderer.encode("Hi") == tokenizer("gemma3").encode("Hi")[1:]


@pytest.mark.parametrize("name", ["qwen3", "llama2", "gemma3"])
def test_a_token_is_spelled_and_known_as_special(name: str) -> None:
    renderer = from_tokenizer(with_template(CHATML, name))
    eos = tokenizer(name).eos_token_id
    assert renderer.spelling(eos) == tokenizer(name).eos_token
    assert renderer.is_special(eos)
    (hello,) = renderer.encode("Hello")[-1:]
    assert renderer.spelling(hello).strip() == "Hello"
    assert not renderer.is_special(hello)
    assert renderer.spelling(10**7) == ""
    assert not renderer.is_special(None)
    assert renderer.is_added(eos)
    assert not renderer.is_added(hello)


def test_a_text_begins_with_a_token_not_with_its_characters() -> None:
    renderer = from_tokenizer(with_template(CHATML))
    (less,) = renderer.encode("<")
    (end,) = renderer.encode("<|im_end|>")
    assert renderer.begins_with("<|im_end|>\n", end)
    assert not renderer.begins_with("<|im_end|>\n", less)
    assert renderer.begins_with("< b", less)
    assert not renderer.begins_with("", less)


def test_ids_behind_a_special_token_are_encoded_behind_it() -> None:
    renderer = from_tokenizer(with_template(CHATML, "llama2"))
    eos = tokenizer("llama2").eos_token_id
    assert [eos, *renderer.encode_behind("Hello", eos)] == renderer.encode("</s>Hello")
    assert renderer.encode_behind("", eos) == []
    hello = renderer.encode("Hello")
    assert renderer.encode_behind("Hello", hello[0]) != hello  # no space in front


# Families.


def hide(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    real = builtins.__import__

    def importing(asked: str, *rest: Any, **kwargs: Any) -> Any:
        if asked.split(".")[0] == name:
            raise ImportError(asked)
        return real(asked, *rest, **kwargs)

    monkeypatch.setattr(builtins, "__import__", importing)


@pytest.mark.parametrize(
    ("name", "origin"),
    [
        ("qwen3", "qwen3_fixed.jinja of miles-tito-tokenizers (qwen3)"),
        ("Qwen3.5", "qwen3.5_fixed.jinja of miles-tito-tokenizers (qwen35)"),
        ("QWEN35", "qwen3.5_fixed.jinja of miles-tito-tokenizers (qwen35)"),
        ("qwen3-next", "qwen3_thinking_2507_and_next_fixed.jinja of miles-tito-tokenizers (qwennext)"),
        (" glm-4.7 ", "the tokenizer's chat template (glm47)"),
        ("kimi", "kimi_k25_fixed.jinja of miles-tito-tokenizers (kimi25)"),
        ("kimi26", "the tokenizer's chat template (kimi26)"),
        ("minimax", "minimax_m25_fixed.jinja of miles-tito-tokenizers (minimax_m25)"),
        ("minimax_m27", "minimax_m27_fixed.jinja of miles-tito-tokenizers (minimax_m27)"),
        ("nemotron", "the tokenizer's chat template (nemotron3)"),
        ("gpt-oss", "the tokenizer's chat template (gpt-oss: not in the library)"),
        ("deepseek", "the tokenizer's chat template (deepseek, before V3.2)"),
        ("deepseekv32", "the encoder of miles-tito-tokenizers (deepseekv32)"),
        ("deepseekv4", "the encoder of miles-tito-tokenizers (deepseekv4)"),
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


def test_settings_of_a_family_keep_its_history() -> None:
    renderer = for_family(tokenizer("qwen3"), "qwen3")
    thought = {"role": "assistant", "content": "x", "reasoning_content": "thought"}
    hello = {"role": "user", "content": "Hi"}
    kept = renderer.render([hello, thought, hello], None, generation_prompt=True, template_kwargs={})
    assert "thought" in kept


def test_an_encoders_failure_quotes_no_message() -> None:
    renderer = for_family(family_tokenizer("deepseekv32"), "deepseekv32")
    for role, settings in (("critic", {}), ("tool", {}), ("assistant", {"thinking": True})):
        messages = [{"role": "user", "content": ""}, {"role": role, "content": "secret"}]
        with pytest.raises(CannotRender, match="the encoder fails with") as error:
            renderer.render(messages, None, generation_prompt=True, template_kwargs=settings)
        assert "secret" not in str(error.value)


def test_every_name_of_the_option_is_known() -> None:
    assert {*FAMILIES, *LIBRARY} >= {
        *("qwen3", "qwen3.5", "qwen3-next", "glm-4.7", "kimi", "minimax", "deepseek", "nemotron", "gpt-oss"),
        *("qwen35", "qwennext", "glm47", "kimi25", "kimi26", "minimax_m25", "minimax_m27"),
        *("deepseekv32", "deepseekv4", "nemotron3"),
    }


def test_the_librarys_families_are_all_here() -> None:
    from miles_tito_tokenizers.tokenizer_type import TITOTokenizerType

    assert {each.value for each in TITOTokenizerType} - {"default"} == set(LIBRARY)


@pytest.mark.parametrize(("name", "near"), [("qwen-3", "qwen3"), ("glm4.7", "glm-4.7"), ("deepsek", "deepseek")])
def test_an_unknown_family_is_a_mistake_that_names_the_nearest(name: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown model family '{name}'; did you mean '{near}'"):
        for_family(tokenizer("qwen3"), name)


def test_a_family_like_no_other_is_a_mistake_that_names_them_all() -> None:
    with pytest.raises(ConfigError, match=r"unknown model family 'xyzzy' \(families: qwen3, "):
        for_family(tokenizer("qwen3"), "xyzzy")


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "miles_tito_tokenizers")
    with pytest.raises(ConfigError, match=r"pip install 'miles-router\[tito\]'"):
        for_family(tokenizer("qwen3"), "qwen3")
    assert for_family(with_template(CHATML), "gpt-oss").origin.endswith("not in the library)")

"""The ids behind a held turn: what the template writes there, joined to what the engine sampled, and nothing else."""

from __future__ import annotations

import random
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from middleware_hub.openai_session.continuing.continuation import Continuation, HeldEnd, NotAppendOnly, build
from middleware_hub.openai_session.continuing.families import ROLES
from middleware_hub.openai_session.sessions.prompting import Context
from tests.support.chat import (
    CHATML,
    TOOLS,
    Message,
    answer,
    checkpoint,
    conversation,
    family_tokenizer,
    results,
    with_template,
)
from tests.support.chat import whole as whole_of
from tests.support.tiers import examples
from tests.support.waiting import at_once

LIBRARY = (
    *("qwen3", "qwen35", "qwennext", "glm47", "kimi25", "kimi26", "minimax_m25", "minimax_m27"),
    *("deepseekv32", "deepseekv4", "nemotron3"),
)
STOPS = {"glm47": ("<|user|>", "<|observation|>"), "minimax_m25": ("[e~[",), "minimax_m27": ("[e~[",)}
STOPS |= dict.fromkeys(("deepseekv32", "deepseekv4"), ("<｜end▁of▁sentence｜>",))


@cache
def continuation(family: str) -> Continuation:
    made = family_tokenizer(family)
    if family == "kimi26":  # the template of K2.5 has the same setting
        from miles_tito_tokenizers import resolve_fixed_chat_template

        path, _ = resolve_fixed_chat_template("kimi25", ["tool", "user"])
        assert path is not None
        made.chat_template = Path(path).read_text(encoding="utf-8")
    return build(made, family)


@cache
def over(template: str, name: str = "qwen3") -> Continuation:
    return build(with_template(template, name), None)


def ids_of(made: Any, *spellings: str) -> list[int]:
    return [made.convert_tokens_to_ids(each) for each in spellings]


def token(spelling: str, family: str = "qwen3") -> int:
    return ids_of(family_tokenizer(family), spelling)[0]


def user(text: str = "More") -> Message:
    return {"role": "user", "content": text}


def tool(text: str = "42", call_id: str = "c1", name: str = "search") -> Message:
    return {"role": "tool", "tool_call_id": call_id, "name": name, "content": text}


def held_end(message: Message, last_id: int | None, *, ended: bool = True) -> HeldEnd:
    calls = tuple((each["id"], each["function"]["name"]) for each in message.get("tool_calls") or ())
    return HeldEnd(last_id, ended, calls, bool(message.get("reasoning_content")))


CALLED = (("c1", "search"),)


def given(
    made: Continuation, end: HeldEnd, *appended: Message, family: str = "qwen3", **settings: Any
) -> tuple[int, str]:
    """How much is dropped, and the text of what is given."""
    extension = at_once(made.after(end, appended, Context(TOOLS if end.tool_calls else None, settings)))
    return extension.drop, family_tokenizer(family).decode(extension.ids.tolist(), skip_special_tokens=False)


def joined(held: list[int], made: Continuation, end: HeldEnd, appended: list[Message], **kwargs: Any) -> list[int]:
    tools = kwargs.pop("tools", None)
    extension = at_once(made.after(end, appended, Context(tools, kwargs)))
    return [*held[: len(held) - extension.drop], *extension.ids.tolist()]


def library(family: str, directory: Path, roles: tuple[str, ...], thinking: bool) -> Any:
    """The library's own joining, over the same tokenizer and template."""
    from miles_tito_tokenizers import get_tito_tokenizer, resolve_fixed_chat_template

    made = family_tokenizer(family)
    path, _ = resolve_fixed_chat_template(family, roles)
    if path is not None:
        made.chat_template = Path(path).read_text(encoding="utf-8")
    kwargs: dict[str, Any] = {} if thinking else {"enable_thinking": False}
    if family.startswith("deepseek"):
        made.name_or_path = checkpoint(directory, {"deepseekv32": "deepseek_v32", "deepseekv4": "deepseek_v4"}[family])
    return get_tito_tokenizer(made, family, chat_template_kwargs=kwargs, allowed_append_roles=list(roles))


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("family", LIBRARY)
def test_joins_as_the_library_does(family: str, thinking: bool, tmp_path: Path) -> None:
    from miles_tito_tokenizers.tokenizer_type import TITOTokenizerType

    ours = continuation(family)
    rows = TITOTokenizerType.get_tokenizer_class(TITOTokenizerType(family)).SUPPORTED_TEMPLATES
    roles = next(each for each in ROLES if any(row.allowed_roles.issuperset(each) for row in rows))
    theirs = library(family, tmp_path, roles, thinking)
    made = family_tokenizer(family)
    deepseek = family.startswith("deepseek")
    settings = {"thinking": thinking} if deepseek else {} if thinking else {"enable_thinking": False}
    rng = random.Random(family)
    for _ in range(examples(40)):
        history = conversation(rng, rng.randint(0, 3), tools=True)
        calls = rng.randint(1 if roles == ("tool",) else 0, 3)
        message = answer(rng, calls=calls, turn=9)
        appended = results(rng, message) if calls else []
        if "user" in roles and (not calls or rng.random() < 0.3):
            appended.append({"role": "user", "content": rng.choice(("More", "  <|im_end|> 世界\n", "x\n\n"))})
        if "system" in roles and rng.random() < 0.2:
            appended.append({"role": "system", "content": "Be brief."})
        stop = rng.choice(STOPS.get(family, ("<|im_end|>",)))
        held = [rng.randrange(1000, 50000) for _ in range(9)] + ids_of(made, stop)
        end = held_end(message, held[-1])
        expected = theirs.merge_tokens([*history, message], [*history, message, *appended], held, TOOLS)
        assert joined(held, ours, end, appended, tools=TOOLS, **settings) == expected, (message, appended)


QWEN = "<|im_end|>"
NEXT = "<|im_start|>assistant\n"


def test_what_the_stop_token_says_is_not_given_again() -> None:
    end = HeldEnd(token(QWEN), ended=True)
    assert given(over(CHATML), end, user()) == (0, f"\n<|im_start|>user\nMore{QWEN}\n{NEXT}")


@pytest.mark.parametrize("last", [None, 9707])
def test_behind_a_cut_answer_its_end_is_given(last: int | None) -> None:
    end = HeldEnd(last, ended=False)
    assert given(over(CHATML), end, user()) == (0, f"{QWEN}\n<|im_start|>user\nMore{QWEN}\n{NEXT}")


def test_a_cut_answer_that_ends_with_a_special_token_gets_the_whole_end() -> None:
    end = HeldEnd(token(QWEN), ended=False)
    assert given(over(CHATML), end, user())[1].startswith(f"{QWEN}\n<|im_start|>user")


def test_behind_a_cut_answer_with_calls_the_end_of_the_answer_is_given() -> None:
    end = HeldEnd(9707, ended=False, tool_calls=CALLED)
    assert given(over(CHATML), end, tool()) == (0, f"{QWEN}\n<|im_start|>tool\n42{QWEN}\n{NEXT}")


@pytest.mark.parametrize("stop", ["<|endoftext|>", "Hello", "\n", "<", "|"])
def test_a_stop_token_that_the_template_does_not_write_is_dropped(stop: str) -> None:
    (stop_id,) = family_tokenizer("qwen3").encode(stop, add_special_tokens=False)
    end = HeldEnd(stop_id, ended=True)
    assert given(over(CHATML), end, user()) == (1, f"{QWEN}\n<|im_start|>user\nMore{QWEN}\n{NEXT}")


def test_an_id_behind_the_vocabulary_is_dropped_as_a_stop_token() -> None:
    assert given(over(CHATML), HeldEnd(10**6, ended=True), user())[0] == 1


def test_a_stop_token_that_ends_the_calls_is_kept_and_the_answer_ended() -> None:
    closed = CHATML.replace("</tool_call>", "<|fim_suffix|>")
    end = HeldEnd(token("<|fim_suffix|>"), ended=True, tool_calls=CALLED)
    assert given(over(closed), end, tool()) == (0, f"{QWEN}\n<|im_start|>tool\n42{QWEN}\n{NEXT}")


def test_nothing_appended_asks_for_another_answer() -> None:
    assert given(over(CHATML), HeldEnd(token(QWEN), ended=True)) == (0, f"\n{NEXT}")


def test_an_assistants_message_in_between_is_rendered() -> None:
    end = HeldEnd(token(QWEN), ended=True)
    _, text = given(over(CHATML), end, {"role": "assistant", "content": "I said"}, user())
    assert text == f"\n<|im_start|>assistant\nI said{QWEN}\n<|im_start|>user\nMore{QWEN}\n{NEXT}"


def test_an_assistants_message_that_comes_last_is_a_users_as_in_the_engine() -> None:
    end = HeldEnd(token(QWEN), ended=True)
    _, text = given(over(CHATML), end, user(), {"role": "assistant", "content": "Well"})
    assert text == f"\n<|im_start|>user\nMore{QWEN}\n<|im_start|>user\nWell{QWEN}\n{NEXT}"


def test_calls_of_an_injected_assistant_and_their_results_are_rendered() -> None:
    call = {"id": "c2", "type": "function", "function": {"name": "add", "arguments": '{"n":1}'}}
    injected = {"role": "assistant", "content": "", "tool_calls": [call]}
    _, text = given(over(CHATML), HeldEnd(token(QWEN), ended=True), user(), injected, tool(call_id="c2"))
    assert '<tool_call>{"n": 1}</tool_call>' in text


def test_settings_of_a_request_reach_the_template() -> None:
    end = HeldEnd(token(QWEN), ended=True)
    thinking = given(continuation("qwen3"), end, user())[1]
    silent = given(continuation("qwen3"), end, user(), enable_thinking=False)[1]
    assert silent == thinking + "<think>\n\n</think>\n\n"


def test_what_is_no_setting_of_a_template_is_refused() -> None:
    for name in ("chat_template", "add_generation_prompt", "tokenize"):
        with pytest.raises(NotAppendOnly, match=name):
            at_once(over(CHATML).after(HeldEnd(token(QWEN), ended=True), [user()], Context(None, {name: False})))


def test_a_setting_that_spoils_the_proof_is_refused() -> None:
    spoilt = CHATML + "{%- if count -%}{{ messages | length }}{%- endif -%}"
    end = HeldEnd(token(QWEN), ended=True)
    assert given(over(spoilt), end, user())[0] == 0
    with pytest.raises(NotAppendOnly, match="depends on the conversation before it"):
        at_once(over(spoilt).after(end, [user()], Context(None, {"count": True})))


def test_a_shape_nobody_foresaw_is_proved_when_it_comes() -> None:
    picky = CHATML + """{%- if messages | length > 6 and messages[-1].role == 'critic' -%}{{ 'late' }}{%- endif -%}"""
    made = over(picky)
    end = HeldEnd(token(QWEN), ended=True)
    assert "critic" not in str(made.proof.describe())
    with pytest.raises(NotAppendOnly, match="depends on the conversation"):
        at_once(made.after(end, [{"role": "critic", "content": "Hm"}], Context(None, {})))
    assert given(made, end, {"role": "poet", "content": "O"})[0] == 0


def test_a_message_that_the_template_refuses_is_not_given() -> None:
    refusing = CHATML.replace(
        "{%- for m in messages -%}",
        "{%- for m in messages -%}{%- if m.role == 'critic' -%}{{ raise_exception('No critics') }}{%- endif -%}",
    )
    with pytest.raises(NotAppendOnly, match="No critics"):
        at_once(
            over(refusing).after(
                HeldEnd(token(QWEN), ended=True), [{"role": "critic", "content": "Hm"}], Context(None, {})
            )
        )


@pytest.mark.parametrize("behind", [[tool(call_id="c2")], []])
def test_arguments_that_are_no_json_are_refused(behind: list[Message]) -> None:
    call = {"id": "c2", "type": "function", "function": {"name": "add", "arguments": "{secret"}}
    injected = {"role": "assistant", "content": "", "tool_calls": [call]}
    with pytest.raises(NotAppendOnly, match="not a JSON") as refused:
        at_once(over(CHATML).after(HeldEnd(token(QWEN), ended=True), [injected, *behind], Context(None, {})))
    assert "secret" not in str(refused.value)


# What templates rewrite.

REWRITING = {
    "reasoning of earlier answers is left out": CHATML.replace(
        "{{- '<|im_start|>' + m.role + '\\n' + m.content -}}",
        "{{- '<|im_start|>' + m.role + '\\n' -}}"
        "{%- if m.reasoning_content and loop.last -%}{{- '<think>' + m.reasoning_content + '</think>' -}}{%- endif -%}"
        "{{- m.content -}}",
    ),
    "text is trimmed": CHATML.replace("+ m.content", "+ (m.content | trim)"),
    "the date is told": "{{- strftime_now('%Y-%m-%d %H:%M:%S.%f') -}}" + CHATML,
    "answers are numbered from the end": CHATML.replace(
        "m.role + '\\n'", "(m.role if m.role != 'assistant' else 'assistant' ~ loop.revindex) + '\\n'"
    ),
}


@pytest.mark.parametrize("rewrites", REWRITING)
def test_a_template_that_rewrites_history_rewrites_nothing_that_is_held(rewrites: str) -> None:
    template = REWRITING[rewrites]
    assert template != CHATML
    sampled = [*range(5000, 5009), token(QWEN)]
    end = HeldEnd(sampled[-1], ended=True, reasoning=True)
    expected = f"\n<|im_start|>user\nMore{QWEN}\n{NEXT}"
    extension = at_once(over(template).after(end, [user()], Context(None, {})))
    assert extension.drop == 0
    assert extension.ids.tolist() == family_tokenizer("qwen3").encode(expected, add_special_tokens=False)


def test_arguments_written_anew_change_nothing_that_is_held() -> None:
    end = HeldEnd(token(QWEN), ended=True, tool_calls=CALLED)
    for anew in ("tojson(indent=2)", "tojson | upper", "length"):
        template = CHATML.replace("call.function.arguments | tojson", f"call.function.arguments | {anew} | string")
        assert given(over(template), end, tool()) == (0, f"\n<|im_start|>tool\n42{QWEN}\n{NEXT}")


def test_a_template_that_writes_a_calls_id_behind_its_arguments_is_continued() -> None:
    with_id = CHATML.replace("+ '</tool_call>'", "+ call.id + '</tool_call>'")
    end = HeldEnd(token(QWEN), ended=True, tool_calls=(("call_é17", "search"),))
    assert given(over(with_id), end, tool(call_id="call_é17")) == (0, f"\n<|im_start|>tool\n42{QWEN}\n{NEXT}")


def test_a_template_that_finds_a_results_tool_by_its_call_finds_it() -> None:
    finding = CHATML.replace(
        "{{- '<|im_start|>' + m.role + '\\n' + m.content -}}",
        "{{- '<|im_start|>' + m.role + '\\n' + m.content -}}"
        "{%- if m.role == 'tool' -%}{%- for call in messages[loop.index0 - 1].tool_calls -%}"
        "{{ ' by ' + call.function.name if call.id == m.tool_call_id else ' not ' + call.function.name }}"
        "{%- endfor -%}{%- endif -%}",
    )
    assert finding != CHATML
    end = HeldEnd(token(QWEN), ended=True, tool_calls=(("c1", "search"), ("c2", "add")))
    assert given(over(finding), end, tool(call_id="c2"))[1].startswith("\n<|im_start|>tool\n42 not search by add")


def test_calls_without_id_or_name_are_rendered() -> None:
    naming = CHATML.replace("{{- '\\n<tool_call>'", "{{- '\\n<tool_call>' + call.id + call.function.name")
    end = HeldEnd(token(QWEN), ended=True, tool_calls=((None, None),))
    assert given(over(naming), end, tool()) == (0, f"\n<|im_start|>tool\n42{QWEN}\n{NEXT}")


# Families whose boundaries are special.


def test_glms_stop_token_begins_the_next_message() -> None:
    made = continuation("glm47")
    observed = HeldEnd(token("<|observation|>", "glm47"), ended=True, tool_calls=CALLED)
    asked = HeldEnd(token("<|user|>", "glm47"), ended=True)
    response = "<tool_response>42</tool_response><|assistant|><think>"
    assert given(made, observed, tool(), family="glm47") == (0, response)
    assert given(made, asked, user(), family="glm47") == (0, "More<|assistant|><think>")


def test_glms_stop_token_of_another_message_is_dropped() -> None:
    made = continuation("glm47")
    asked = HeldEnd(token("<|user|>", "glm47"), ended=True, tool_calls=CALLED)
    observed = HeldEnd(token("<|observation|>", "glm47"), ended=True)
    response = "<|observation|><tool_response>42</tool_response><|assistant|><think>"
    assert given(made, asked, tool(), family="glm47") == (1, response)
    assert given(made, observed, user(), family="glm47") == (1, "<|user|>More<|assistant|><think>")
    assert given(made, asked, family="glm47") == (1, "<|assistant|><think>")


OSS = "gpt-oss"


def test_gpt_oss_ends_an_earlier_answer_with_another_token_than_it_samples() -> None:
    end = HeldEnd(token("<|return|>", OSS), ended=True)
    expected = "<|end|><|start|>user<|message|>More<|end|><|start|>assistant"
    assert given(continuation(OSS), end, user(), family=OSS) == (1, expected)


def test_gpt_oss_ends_a_call_with_a_token_that_stays() -> None:
    end = HeldEnd(token("<|call|>", OSS), ended=True, tool_calls=CALLED, reasoning=True)
    expected = '<|start|>functions.search to=assistant<|channel|>commentary<|message|>"42"<|end|><|start|>assistant'
    assert given(continuation(OSS), end, tool(), family=OSS) == (0, expected)


def test_the_end_of_a_call_is_sought_in_what_no_appended_message_writes() -> None:
    end = HeldEnd(token("<|call|>", OSS), ended=True, tool_calls=CALLED)
    expected = (
        '<|start|>functions.search to=assistant<|channel|>commentary<|message|>"<|call|> <|call|>"<|end|>'
        "<|start|>assistant"
    )
    assert given(continuation(OSS), end, tool("<|call|> <|call|>"), family=OSS) == (0, expected)


def test_a_result_may_stand_in_the_answers_own_turn() -> None:
    """As Gemma 4's: a call is not ended, and the token that begins its result is sampled."""
    within = """
    {%- for m in messages -%}
    {%- if m.role == 'tool' -%}{{ '<|fim_prefix|>' + m.content + '<|fim_suffix|>' }}
    {%- else -%}
    {{- '<|im_start|>' + m.role + '\\n' + m.content -}}
    {%- for call in m.tool_calls or [] -%}{{ (call.function.arguments | tojson) + '<|fim_middle|>' }}{%- endfor -%}
    {%- if not m.tool_calls -%}{{ '<|im_end|>\\n' }}{%- endif -%}
    {%- endif -%}
    {%- endfor -%}
    {%- if add_generation_prompt and messages[-1].role not in ('tool',) and not messages[-1].tool_calls -%}
    {{ '<|im_start|>assistant\\n' }}
    {%- endif -%}"""
    begun = HeldEnd(token("<|fim_prefix|>"), ended=True, tool_calls=CALLED)
    assert given(over(within), begun, tool("<|fim_prefix|>")) == (0, "<|fim_prefix|><|fim_suffix|>")
    called = HeldEnd(token("<|fim_middle|>"), ended=True, tool_calls=CALLED)
    assert given(over(within), called, tool()) == (0, "<|fim_prefix|>42<|fim_suffix|>")


def test_gpt_oss_does_not_say_where_a_cut_call_ends() -> None:
    for end in (
        HeldEnd(1000, ended=False, tool_calls=CALLED),
        HeldEnd(token("<|return|>", OSS), ended=True, tool_calls=CALLED),
        HeldEnd(family_tokenizer(OSS).encode("}")[0], ended=True, tool_calls=CALLED),
    ):
        with pytest.raises(NotAppendOnly, match="does not end with a token that the template ends it with"):
            at_once(continuation(OSS).after(end, [tool()], Context(TOOLS, {})))


def test_deepseek_asks_for_an_answer_behind_questions_alone() -> None:
    made = continuation("deepseekv32")
    end = HeldEnd(token("<｜end▁of▁sentence｜>", "deepseekv32"), ended=True)
    assert given(made, end, user(), family="deepseekv32") == (0, "<｜User｜>More<｜Assistant｜></think>")
    thinking = given(made, end, user(), family="deepseekv32", thinking=True)
    assert thinking == (0, "<｜User｜>More<｜Assistant｜><think>")
    with pytest.raises(NotAppendOnly, match="no prompt for another answer"):
        at_once(made.after(end, [], Context(None, {})))


# Tokens.


def test_ids_behind_a_special_token_are_those_of_the_whole_text() -> None:
    """SentencePiece puts a space in front of a text, and in front of what follows a special token."""
    llama = "{%- for m in messages -%}{{ m.role + ': ' + m.content + '</s>' }}{%- endfor -%}{{ 'assistant:' }}"
    made = over(llama, "llama2")
    backend = with_template(llama, "llama2").backend_tokenizer
    head = backend.encode("user: Hi</s>assistant: Hello</s>", add_special_tokens=False).ids
    whole = backend.encode("user: Hi</s>assistant: Hello</s>user: More</s>assistant:", add_special_tokens=False).ids
    extension = at_once(made.after(HeldEnd(head[-1], ended=True), [user()], Context(None, {})))
    assert head + extension.ids.tolist() == whole


@pytest.mark.parametrize("family", ["qwen3", "qwen35", "glm47", "kimi25", "minimax_m25", "nemotron3", OSS])
def test_given_text_is_the_end_of_the_whole_conversations(family: str) -> None:
    made, rng = continuation(family), random.Random(family)
    for _ in range(examples(20)):
        history = conversation(rng, rng.randint(0, 3), tools=family != OSS)
        message = answer(rng, calls=rng.randint(0, family != OSS), turn=9)
        appended = results(rng, message) if message.get("tool_calls") else [user(rng.choice(("More", "  é\n")))]
        whole = whole_of(made.renderer, [*history, message, *appended], Context(TOOLS, {}))
        extension = at_once(made.after(held_end(message, None, ended=False), appended, Context(TOOLS, {})))
        assert whole[-len(extension.ids) :] == extension.ids.tolist()


def test_a_long_list_of_tools_is_rendered_once_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    made = build(with_template(CHATML), None)
    rendered: list[object] = []
    renderer = made.renderer
    render = renderer.render
    monkeypatch.setattr(renderer, "render", lambda *a, **k: rendered.append(a[1]) or render(*a, **k))  # type: ignore[func-returns-value]
    for turn in range(3):
        rendered.clear()
        end = HeldEnd(token(QWEN), ended=True, tool_calls=((f"c{turn}", "search"),))
        at_once(made.after(end, [tool(call_id=f"c{turn}")], Context([dict(each) for each in TOOLS], {})))
    assert len(rendered) == 1


def test_what_is_special_is_told() -> None:
    made = over(CHATML)
    assert made.is_special(token(QWEN))
    assert not made.is_special(9707)
    assert not made.is_special(10**6)


def test_a_long_text_is_encoded_without_the_interpreters_lock() -> None:
    """Comparisons of long sessions run in a thread, and the event loop goes on beside them."""
    renderer, text = build(family_tokenizer("qwen3"), None).renderer, "The answer is 42. " * 30_000
    worker = threading.Thread(target=renderer.encode, args=(text,))
    turns = 0
    worker.start()
    while worker.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 30, "who holds the lock lets others have two or three"

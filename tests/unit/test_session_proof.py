"""The start-up proof: what of a template it finds exact, and for what it refuses, the reason."""

from __future__ import annotations

import logging
import tracemalloc
from functools import cache
from pathlib import Path

import pytest

from middleware_hub.openai_session.continuing.continuation import Continuation, HeldEnd, build
from middleware_hub.openai_session.continuing.endings import AnswerShape, NotAppendOnly
from middleware_hub.openai_session.continuing.probes import CALLING, STANDARD, Shape, probe_of, shape_of
from middleware_hub.openai_session.continuing.proof import Proof, prove
from middleware_hub.openai_session.continuing.templates import from_tokenizer
from middleware_hub.openai_session.sessions.prompting import Context
from middleware_hub.tokenizing.async_encoder import AsyncEncoder
from middleware_hub.tokenizing.encoding import InexactTokenizer
from miles_router.errors import ConfigError
from tests.support.chat import CHATML, TOOLS, family_tokenizer, with_template
from tests.support.waiting import at_once

LOOP = "{%- for m in messages -%}"
OPENING = "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
TOOL = "{%- if m.role == 'tool' -%}"


@cache
def proved(template: str, name: str = "qwen3") -> Proof:
    return prove(from_tokenizer(with_template(template, name)))


def within(what: str) -> str:
    """ChatML with something more for each message."""
    return CHATML.replace(LOOP, LOOP + what)


def test_a_template_that_looks_at_one_message_at_a_time_is_exact_throughout() -> None:
    assert proved(CHATML).describe() == {
        "template": "the tokenizer's chat template",
        "exact": list(STANDARD),
        "refused": {},
        "notes": [],
    }


def test_qwen3s_own_template_is_exact_although_it_drops_reasoning() -> None:
    proof = build(family_tokenizer("qwen3"), None).proof
    assert proof.describe()["exact"] == list(STANDARD)


def test_the_proof_is_said_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level(logging.INFO):
        proofs = [build(with_template(CHATML), None).proof for _ in range(2)]
    told = [record.fields for record in caplog.records if record.message == "continuation_proved"]  # type: ignore[attr-defined]
    assert told == [{**proof.describe(), "before": before} for proof, before in zip(proofs, (False, True), strict=True)]


def test_what_a_template_refuses_is_refused_in_its_words() -> None:
    refusing = within(
        "{%- if m.role == 'system' and not loop.first -%}{{ raise_exception('Late system') }}{%- endif -%}"
    )
    proof = proved(refusing)
    assert proof.refused == {"system": "the template raises an error: Late system"}
    with pytest.raises(NotAppendOnly, match="Late system"):
        proof.require(STANDARD["system"], {})


def test_a_message_that_the_template_leaves_out_is_refused() -> None:
    silent = CHATML.replace("+ m.content", "+ (m.content if m.role != 'system' or loop.first else '')")
    assert proved(silent).refused == {"system": "the template omits a message of role system here"}


def test_messages_in_another_order_are_refused() -> None:
    turning = CHATML.replace(
        "in messages -%}", "in (messages[:-2] + messages[-2:][::-1] if messages[-2].role == 'critic' else messages) -%}"
    )
    reason = proved(turning).refusal(Shape(("critic", "user")), {})
    assert reason == "the template omits a message of role user here"


def test_a_tail_that_depends_on_the_history_is_refused() -> None:
    counting = CHATML + "{%- if messages[-1].role == 'system' -%}{{ messages | length }}{%- endif -%}"
    reason = "what the template writes behind an answer depends on the conversation before it"
    assert proved(counting).refused == {"system": reason}


def test_a_tail_that_depends_on_the_system_message_is_refused() -> None:
    quoting = CHATML + (
        "{%- if messages[0].role != 'system' and messages[-1].role == 'system' -%}{{ 'unled' }}{%- endif -%}"
    )
    reason = "what the template writes behind an answer depends on the system message"
    assert proved(quoting).refused == {"system": reason}


def test_a_switch_said_in_the_history_is_refused() -> None:
    switching = CHATML + "{%- if '/no_think' in (messages | map(attribute='content') | join) -%}{{ '.' }}{%- endif -%}"
    with pytest.raises(ConfigError, match="depends on /no_think in an earlier message"):
        proved(switching)


def test_tools_that_move_to_the_last_question_are_refused_where_there_are_tools() -> None:
    """As Mistral's."""
    moving = CHATML.replace("{%- if tools -%}", "{%- if tools and false -%}").replace(
        LOOP,
        "{%- set users = messages | selectattr('role', 'equalto', 'user') | list -%}"
        + LOOP
        + "{%- if tools and m == users[-1] -%}{{ tools | tojson }}{%- endif -%}",
    )
    proof = proved(moving)
    assert proof.refused == dict.fromkeys(
        ("user, with tools given", "tool, user"), "the template writes the tools behind the answer"
    )
    assert {"user", "tool", "two tools"} <= set(proof.exact)


def test_a_system_message_that_moves_behind_the_answer_is_refused() -> None:
    moving = within("{%- if loop.last and m.role == 'critic' -%}{{ messages[0].content }}{%- endif -%}")
    reason = proved(moving).refusal(Shape(("critic",)), {})
    assert reason == "what the template writes behind an answer depends on the conversation before it"


def test_history_that_is_left_out_once_something_is_appended_is_refused() -> None:
    forgetting = CHATML.replace(
        LOOP, "{%- set kept = messages[-4:] if messages[-1].role == 'critic' else messages -%}{%- for m in kept -%}"
    )
    reason = proved(forgetting).refusal(Shape(("critic",)), {})
    assert reason == "the template writes an earlier user message differently once messages are appended"


def test_a_template_without_a_prompt_for_an_answer_cannot_go_on_from_nothing() -> None:
    mute = CHATML.replace(OPENING, "")
    assert proved(mute).refused == {"nothing": "the template writes no prompt for another answer behind an answer"}


def test_a_question_that_cannot_be_appended_is_a_mistake_of_configuration() -> None:
    counting = CHATML + "{{ messages | length }}"
    with pytest.raises(ConfigError, match=r"cannot be continued exactly by a user's message: .* depends on the conv"):
        proved(counting)


def test_result_that_cannot_be_appended_is_an_error_when_the_template_takes_tools() -> None:
    counting = CHATML + "{%- if messages[-1].role == 'tool' -%}{{ messages | length }}{%- endif -%}"
    with pytest.raises(ConfigError, match="cannot be continued exactly by a tool's message"):
        proved(counting)


def test_a_template_without_tools_is_proved_without() -> None:
    refusing = within(TOOL + "{{ raise_exception('No tools') }}{%- endif -%}")
    assert set(proved(refusing).refused) == {"tool", "two tools", "tool, user"}
    silent = CHATML.replace("+ m.content", "+ (m.content if m.role != 'tool' else '')")
    assert set(proved(silent).refused) == {"tool", "two tools", "tool, user"}


def test_a_template_that_takes_no_system_message_is_proved_without() -> None:
    refusing = within("{%- if m.role == 'system' -%}{{ raise_exception('No system') }}{%- endif -%}")
    assert proved(refusing).refused == {"system": "the template raises an error: No system"}


def test_a_template_that_writes_no_answers_is_a_mistake_of_configuration() -> None:
    with pytest.raises(ConfigError, match="cannot be continued: the template leaves an answer out"):
        proved("{{ messages[0].content }}")


def test_a_template_that_takes_one_answer_alone_is_a_mistake_of_configuration() -> None:
    short = (
        "{%- if messages[-1].role == 'assistant' and (messages | selectattr('role', 'equalto', 'assistant') | list)[1:]"
        " -%}{{ raise_exception('One answer') }}{%- endif -%}"
    )
    with pytest.raises(ConfigError, match="the template refuses every longer conversation"):
        proved(short + CHATML)


def test_a_template_that_takes_no_earlier_reasoning_is_proved_without() -> None:
    forgetful = within(
        "{%- if m.reasoning_content and loop.revindex > 2 and messages[loop.index].role != 'assistant' -%}"
        "{{ raise_exception('Thoughts') }}{%- endif -%}"
    )
    assert "user" in proved(forgetful).exact


def test_reasoning_in_every_answer_may_be_demanded() -> None:
    strict = within(
        "{%- if m.role == 'assistant' and not m.reasoning_content -%}{{ raise_exception('Think!') }}{%- endif -%}"
    )
    assert set(proved(strict).refused) == {"assistant, user"}


def test_text_beside_calls_may_be_refused() -> None:
    strict = within("{%- if m.content and m.tool_calls -%}{{ raise_exception('No text') }}{%- endif -%}")
    assert proved(strict).refused == {}


def test_a_shape_is_exact_with_reasoning_and_without() -> None:
    for odd in ("messages[-2].reasoning_content", "not messages[-2].reasoning_content"):
        counting = "{%- if messages[-1].role == 'system' and " + odd + " -%}{{ messages | length }}{%- endif -%}"
        assert set(proved(CHATML + counting).refused) == {"system"}


def test_an_answer_whose_text_moves_behind_the_results_is_exact() -> None:
    """As Gemma 4's: what was said is held where it was sampled."""
    moving = within(TOOL + "{{ messages[loop.index0 - 1].content }}{%- endif -%}").replace(
        "+ m.content -", "+ ('' if m.tool_calls else m.content) -"
    )
    assert "tool" in proved(moving).exact


def test_notes_say_where_no_special_token_ends_an_answer() -> None:
    plain = "{%- for m in messages -%}{{ m.role + ': ' + m.content + '\\n' }}{%- endfor -%}{{ 'assistant:' }}"
    notes = proved(plain).notes
    assert "user: no special token ends an answer: the text behind an answer is encoded separately" in notes


def test_notes_say_where_ids_differ_from_those_of_the_whole_text(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = from_tokenizer(with_template(CHATML))
    encode_behind = renderer.encode_behind
    monkeypatch.setattr(renderer, "encode_behind", lambda text, token: [*encode_behind(text, token), 0])
    assert "user: the ids differ from those of the whole text" in prove(renderer).notes


def test_notes_say_where_a_tokenizer_cannot_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(text: str, token: int | None) -> list[int]:
        raise InexactTokenizer("cannot go on")

    renderer, encoder = from_tokenizer(with_template(CHATML)), AsyncEncoder(with_template(CHATML), longest=100)
    monkeypatch.setattr(renderer, "encode_behind", refuse)
    monkeypatch.setattr(encoder.encoder, "encode_behind", refuse)
    proof = prove(renderer)
    assert "user: cannot go on" in proof.notes
    made, end = Continuation(renderer, proof, encoder), HeldEnd(None, ended=False)
    with pytest.raises(NotAppendOnly, match="cannot go on"):
        at_once(made.after(end, [{"role": "user", "content": ""}], Context(None, {})))


# Shapes.


def test_a_shape_is_the_roles_and_what_they_hang_on() -> None:
    answer = AnswerShape((("a", "f"), ("b", "g")), reasoning=True)
    tool = {"role": "tool", "content": ""}
    calling = {"role": "assistant", "tool_calls": [{}]}
    assert shape_of(answer, [tool, tool, calling, tool], TOOLS) == Shape(
        ("tool", "tool", CALLING, "tool"), calls=2, tools=True, reasoning=True
    )
    assert shape_of(AnswerShape(), [], []) == Shape(())


def test_many_of_a_kind_are_one_shape() -> None:
    tool = {"role": "tool", "content": ""}
    calls = tuple((str(place), "f") for place in range(20))
    assert shape_of(AnswerShape(calls), [tool] * 20, TOOLS) == shape_of(AnswerShape(calls[:3]), [tool] * 3, TOOLS)


def test_a_probe_has_the_shape_it_is_made_for() -> None:
    for shape in (
        *STANDARD.values(),
        Shape(("tool", CALLING, "tool", "tool", "user"), calls=1, tools=True, reasoning=True),
        Shape(("tool",)),
        Shape((CALLING,)),
    ):
        answer, appended = probe_of(shape)
        assert shape_of(answer, appended, TOOLS if shape.tools else None) == shape
        assert all(message["role"] != CALLING for message in appended)
        ids = [call["id"] for message in appended for call in message.get("tool_calls", ())]
        assert len(set(ids)) == len(ids)


def test_results_of_a_probe_name_the_calls_they_answer() -> None:
    _, appended = probe_of(Shape(("tool", "tool", CALLING, "tool", "tool"), calls=2))
    assert [each["tool_call_id"] for each in appended[:2]] == ["call_0", "call_1"]
    assert [each["tool_call_id"] for each in appended[3:]] == [each["id"] for each in appended[2]["tool_calls"]]


def test_a_proof_is_made_once_for_a_shape_and_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    proof = prove(from_tokenizer(with_template(CHATML)))
    shape = Shape(("user", "user"))
    made: list[Shape] = []
    prove_one = proof._prove
    monkeypatch.setattr(proof, "_prove", lambda shape, context: made.append(shape) or prove_one(shape, context))  # type: ignore[func-returns-value]
    for settings in ({}, {}, {"a": 1, "b": 2}, {"b": 2, "a": 1}):
        proof.require(shape, settings)
    assert made == [shape, shape]


def test_request_that_appends_too_many_messages_is_refused_first() -> None:
    made, end = build(family_tokenizer("qwen3"), None), HeldEnd(None, ended=False)
    turns = [{"role": role, "content": "a"} for role in ("assistant", "user")]
    for appended, what in ((turns * 65, "128 roles"), ([turns[1]] * 4097, "4096 messages")):
        with pytest.raises(NotAppendOnly, match=f"more than {what}"):
            at_once(made.after(end, appended, Context(None, {})))
    assert len(at_once(made.after(end, turns * 64, Context(None, {}))).ids)


def test_large_tools_settings_and_roles_are_not_kept() -> None:
    made, end, large = build(family_tokenizer("qwen3"), None), HeldEnd(None, ended=False), 1 << 20

    def turn(number: int) -> None:
        name = f"{number}" * large
        at_once(
            made.after(
                end, [{"role": "user", "content": "a"}], Context([*TOOLS, {"function": {"name": name}}], {"x": name})
            )
        )
        with pytest.raises(NotAppendOnly):
            at_once(made.after(end, [{"role": name, "content": "a"}], Context(None, {})))

    turn(0)
    tracemalloc.start()
    for number in range(1, 6):
        turn(number)
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < large

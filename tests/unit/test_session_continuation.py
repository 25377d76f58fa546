"""The ids behind a held turn: what the template writes there, and what is proved of a template."""

from __future__ import annotations

import logging
import os
import random
import tracemalloc
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import orjson
import pytest

from middleware_hub.openai_session.continuing.continuation import Continuation, HeldEnd, NotAppendOnly, build
from middleware_hub.openai_session.continuing.families import ROLES
from middleware_hub.openai_session.continuing.probes import STANDARD, Shape
from middleware_hub.openai_session.continuing.proof import Proof, prove
from middleware_hub.openai_session.continuing.proof_file import ProofFile
from middleware_hub.openai_session.continuing.templates import from_tokenizer
from middleware_hub.openai_session.sessions.turn import Context
from miles_router.errors import ConfigError
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


def user() -> Message:
    return {"role": "user", "content": "More"}


def tool() -> Message:
    return {"role": "tool", "tool_call_id": "c1", "name": "search", "content": "42"}


def held_end(message: Message, last_id: int | None) -> HeldEnd:
    calls = tuple((each["id"], each["function"]["name"]) for each in message.get("tool_calls") or ())
    return HeldEnd(last_id, True, calls, bool(message.get("reasoning_content")))


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


@pytest.mark.parametrize("last", [None, 9707])
def test_behind_a_cut_answer_its_end_is_given(last: int | None) -> None:
    end = HeldEnd(last, ended=False)
    assert given(over(CHATML), end, user()) == (0, f"{QWEN}\n<|im_start|>user\nMore{QWEN}\n{NEXT}")


def test_a_stop_token_that_ends_the_calls_is_kept_and_the_answer_ended() -> None:
    closed = CHATML.replace("</tool_call>", "<|fim_suffix|>")
    end = HeldEnd(token("<|fim_suffix|>"), ended=True, tool_calls=CALLED)
    assert given(over(closed), end, tool()) == (0, f"{QWEN}\n<|im_start|>tool\n42{QWEN}\n{NEXT}")


def test_a_setting_that_spoils_the_proof_is_refused() -> None:
    spoilt = CHATML + "{%- if count -%}{{ messages | length }}{%- endif -%}"
    end = HeldEnd(token(QWEN), ended=True)
    assert given(over(spoilt), end, user())[0] == 0
    with pytest.raises(NotAppendOnly, match="depends on the conversation before it"):
        at_once(over(spoilt).after(end, [user()], Context(None, {"count": True})))


def test_arguments_written_anew_change_nothing_that_is_held() -> None:
    end = HeldEnd(token(QWEN), ended=True, tool_calls=CALLED)
    for anew in ("tojson(indent=2)", "tojson | upper", "length"):
        template = CHATML.replace("call.function.arguments | tojson", f"call.function.arguments | {anew} | string")
        assert given(over(template), end, tool()) == (0, f"\n<|im_start|>tool\n42{QWEN}\n{NEXT}")


OSS = "gpt-oss"


def test_gpt_oss_ends_an_earlier_answer_with_another_token_than_it_samples() -> None:
    end = HeldEnd(token("<|return|>", OSS), ended=True)
    expected = "<|end|><|start|>user<|message|>More<|end|><|start|>assistant"
    assert given(continuation(OSS), end, user(), family=OSS) == (1, expected)


def test_gpt_oss_ends_a_call_with_a_token_that_stays() -> None:
    end = HeldEnd(token("<|call|>", OSS), ended=True, tool_calls=CALLED, reasoning=True)
    expected = '<|start|>functions.search to=assistant<|channel|>commentary<|message|>"42"<|end|><|start|>assistant'
    assert given(continuation(OSS), end, tool(), family=OSS) == (0, expected)


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
    assert given(over(within), begun, {**tool(), "content": "<|fim_prefix|>"}) == (0, "<|fim_prefix|><|fim_suffix|>")
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


def test_ids_behind_a_special_token_are_those_of_the_whole_text() -> None:
    """SentencePiece puts a space in front of a text, and in front of what follows a special token."""
    llama = "{%- for m in messages -%}{{ m.role + ': ' + m.content + '</s>' }}{%- endfor -%}{{ 'assistant:' }}"
    made = over(llama, "llama2")
    backend = with_template(llama, "llama2").backend_tokenizer
    head = backend.encode("user: Hi</s>assistant: Hello</s>", add_special_tokens=False).ids
    whole = backend.encode("user: Hi</s>assistant: Hello</s>user: More</s>assistant:", add_special_tokens=False).ids
    extension = at_once(made.after(HeldEnd(head[-1], ended=True), [user()], Context(None, {})))
    assert head + extension.ids.tolist() == whole


#: Refuses what a system says late.
REFUSING = CHATML.replace(
    "{%- for m in messages -%}",
    "{%- for m in messages -%}{%- if m.role == 'system' and not loop.first -%}"
    "{{ raise_exception('Late system') }}{%- endif -%}",
)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's proofs are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "miles-router" / "proofs"


@pytest.fixture
def proved(monkeypatch: pytest.MonkeyPatch) -> list[Shape]:
    """The shapes that are proved from now on."""
    shapes: list[Shape] = []
    prove = Proof._prove

    def noted(proof: Proof, shape: Shape, context: Context) -> None:
        shapes.append(shape)
        prove(proof, shape, context)

    monkeypatch.setattr(Proof, "_prove", noted)
    return shapes


def ignored(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.fields["reason"] for each in caplog.records if each.message == "proof_ignored"]  # type: ignore[attr-defined]


def test_a_restart_knows_what_was_proved_and_refused_before(proved: list[Shape], directory: Path) -> None:
    first = build(with_template(REFUSING), None).proof
    assert len(proved) == 2 * len(STANDARD)
    proved.clear()
    second = build(with_template(REFUSING), None).proof
    assert proved == []
    assert second.describe() == first.describe()
    assert second.refused == {"system": "the template raises an error: Late system"}
    assert second.refusal(STANDARD["system"], {}) == "the template raises an error: Late system"
    assert second.refusal(STANDARD["user"], {}) is None
    (kept,) = directory.iterdir()
    assert kept.stat().st_mode & 0o777 == 0o600


def chatml() -> Continuation:
    return build(with_template(CHATML), None)


def other_special_tokens() -> Continuation:
    made = with_template(CHATML)
    made.bos_token = "<|endoftext|>"
    return build(made, None)


#: What is built, and what is replaced before.
CHANGES: Mapping[str, tuple[Callable[[], Continuation], str, object]] = {
    "another template": (lambda: build(with_template(CHATML + " "), None), "", None),
    "another family": (lambda: build(with_template(CHATML), "gpt-oss"), "", None),
    "a template of the library's": (lambda: build(with_template(CHATML), "qwen3"), "", None),
    "other special tokens": (other_special_tokens, "", None),
    "another library": (chatml, "middleware_hub.openai_session.continuing.proof_file._version", lambda name: "0"),
    "another Python": (chatml, "platform.python_version", lambda: "3.9"),
    "other code": (chatml, "middleware_hub.openai_session.continuing.proof_file._code_digest", lambda: "other"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_proof_is_used_for_nothing_else(
    change: str, proved: list[Shape], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chatml()
    proved.clear()
    build_other, replaced, by = CHANGES[change]
    if replaced:
        monkeypatch.setattr(replaced, by)
    build_other()
    assert proved
    assert len(list(directory.iterdir())) == 2


def rewritten(path: Path, **changes: Any) -> None:
    path.write_bytes(orjson.dumps({**orjson.loads(path.read_bytes()), **changes}))


def into_a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: Mapping[str, tuple[Callable[[Path], object], str]] = {
    "cut": (lambda path: os.truncate(path, path.stat().st_size - 9), "the file is damaged"),
    "empty": (lambda path: os.truncate(path, 0), "the file is damaged"),
    "endless": (lambda path: os.truncate(path, 1 << 30), "the file is damaged"),
    "no object": (lambda path: path.write_bytes(b"[]"), "the file contains another proof"),
    "a refusal taken out": (
        lambda path: rewritten(path, refusals=[None] * (2 * len(STANDARD))),
        "the file is damaged",
    ),
    "refusals that are none": (lambda path: rewritten(path, refusals=3), "the file is damaged"),
    "of something else": (lambda path: rewritten(path, subject="0"), "the file contains another proof"),
    "written by anybody": (lambda path: path.chmod(0o666), "another user may have written the file"),
    "a directory": (into_a_directory, "Is a directory"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_cannot_be_trusted_is_ignored_and_written_anew(
    damage: str, proved: list[Shape], directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build(with_template(REFUSING), None)
    (path,) = directory.iterdir()
    spoil, reason = DAMAGES[damage]
    spoil(path)
    proved.clear()
    assert build(with_template(REFUSING), None).proof.refused == {"system": "the template raises an error: Late system"}
    assert len(proved) == 2 * len(STANDARD)
    (told,) = ignored(caplog)
    assert reason in told
    if path.is_file():
        caplog.clear()
        proved.clear()
        build(with_template(REFUSING), None)
        assert (proved, ignored(caplog)) == ([], [])


@pytest.mark.usefixtures("directory")
def test_without_a_place_for_it_every_start_proves_anew(
    proved: list[Shape], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "miles-router").write_text("a file in its place")
    with caplog.at_level(logging.INFO):
        chatml()
    assert [each.message for each in caplog.records] == ["proof_ignored", "proof_not_saved", "continuation_proved"]
    monkeypatch.setattr("middleware_hub.openai_session.continuing.proof_file.default_directory", lambda: None)
    proved.clear()
    chatml()
    assert proved


def test_only_so_many_files_are_kept(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("middleware_hub.openai_session.continuing.proof_file.MAX_FILES", 4)
    for number in range(7):
        ProofFile({"number": number}).write([None])
    assert len(list(directory.iterdir())) == 4
    assert ProofFile({"number": 6}).read(1) == [None]


LOOP = "{%- for m in messages -%}"
TOOL = "{%- if m.role == 'tool' -%}"


@cache
def proof_of(template: str) -> Proof:
    return prove(from_tokenizer(with_template(template)))


def within(what: str) -> str:
    """ChatML with something more for each message."""
    return CHATML.replace(LOOP, LOOP + what)


def test_a_template_that_looks_at_one_message_at_a_time_is_exact_throughout() -> None:
    assert proof_of(CHATML).describe() == {
        "template": "the tokenizer's chat template",
        "exact": list(STANDARD),
        "refused": {},
        "notes": [],
    }


BEHIND = "what the template writes behind an answer depends on the"
REFUSED: Mapping[str, tuple[str, str]] = {
    "a message left out": (
        CHATML.replace("+ m.content", "+ (m.content if m.role != 'system' or loop.first else '')"),
        "the template omits a message of role system here",
    ),
    "an end by the history": (
        CHATML + "{%- if messages[-1].role == 'system' -%}{{ messages | length }}{%- endif -%}",
        f"{BEHIND} conversation before it",
    ),
    "an end by the system message": (
        CHATML + "{%- if messages[0].role != 'system' and messages[-1].role == 'system' -%}{{ 'x' }}{%- endif -%}",
        f"{BEHIND} system message",
    ),
}


@pytest.mark.parametrize(("template", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_continued_exactly_is_refused_with_the_reason(template: str, reason: str) -> None:
    assert proof_of(template).refused == {"system": reason}


def test_a_switch_said_in_the_history_is_refused() -> None:
    switching = CHATML + "{%- if '/no_think' in (messages | map(attribute='content') | join) -%}{{ '.' }}{%- endif -%}"
    with pytest.raises(ConfigError, match="depends on /no_think in an earlier message"):
        proof_of(switching)


def test_tools_that_move_to_the_last_question_are_refused_where_there_are_tools() -> None:
    """As Mistral's."""
    moving = CHATML.replace("{%- if tools -%}", "{%- if tools and false -%}").replace(
        LOOP,
        "{%- set users = messages | selectattr('role', 'equalto', 'user') | list -%}"
        + LOOP
        + "{%- if tools and m == users[-1] -%}{{ tools | tojson }}{%- endif -%}",
    )
    proof = proof_of(moving)
    assert proof.refused == dict.fromkeys(
        ("user, with tools given", "tool, user"), "the template writes the tools behind the answer"
    )
    assert {"user", "tool", "two tools"} <= set(proof.exact)


def test_history_that_is_left_out_once_something_is_appended_is_refused() -> None:
    forgetting = CHATML.replace(
        LOOP, "{%- set kept = messages[-4:] if messages[-1].role == 'critic' else messages -%}{%- for m in kept -%}"
    )
    reason = proof_of(forgetting).refusal(Shape(("critic",)), {})
    assert reason == "the template writes an earlier user message differently once messages are appended"


def test_a_question_that_cannot_be_appended_is_a_mistake_of_configuration() -> None:
    counting = CHATML + "{{ messages | length }}"
    with pytest.raises(ConfigError, match=r"cannot be continued exactly by a user's message: .* depends on the conv"):
        proof_of(counting)


def test_a_template_without_tools_is_proved_without() -> None:
    refusing = within(TOOL + "{{ raise_exception('No tools') }}{%- endif -%}")
    assert set(proof_of(refusing).refused) == {"tool", "two tools", "tool, user"}
    silent = CHATML.replace("+ m.content", "+ (m.content if m.role != 'tool' else '')")
    assert set(proof_of(silent).refused) == {"tool", "two tools", "tool, user"}


def test_notes_say_where_ids_differ_from_those_of_the_whole_text(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = from_tokenizer(with_template(CHATML))
    encode_behind = renderer.encode_behind
    monkeypatch.setattr(renderer, "encode_behind", lambda text, token: [*encode_behind(text, token), 0])
    assert "user: the joined ids differ from the whole text's" in prove(renderer).notes


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

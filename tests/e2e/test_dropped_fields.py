"""Fields of chat messages that SGLang drops without a word: their text reaches the prompt, or the turn names them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.test_session_media import prompt_of
from tests.support.session_trial import ADD, SessionTrial, message_of, simulated_sessions, user
from tests.support.stage import Stage

WORDS = "Bananas."
ADDS: Any = {"name": "add", "arguments": {"a": 17, "b": 25}}
SCRIPT: Any = [{"calls": [ADDS]}, {"calls": [ADDS]}, {"text": "Done."}]
ADD_FUNCTION = {"name": "add", "arguments": '{"a": 17, "b": 25}'}
CALLED = '<tool_call>\n{"name": "add", "arguments": {"a": 17, "b": 25}}\n</tool_call>'
both = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
#: Fields of an answer in a history whose text the template is given, and its content beside them.
SAID: dict[str, tuple[Any, dict[str, Any]]] = {
    "a refusal": (None, {"refusal": WORDS}),
    "a refusal beside an empty text": ("", {"refusal": WORDS}),
    "a refusal beside a text": ("No.", {"refusal": WORDS}),
    "a refusal beside parts": ([{"type": "text", "text": "No."}], {"refusal": WORDS}),
    "spoken words": (None, {"audio": {"id": "audio_1", "transcript": WORDS}}),
}
#: The same for reasoning, which Qwen3's template writes behind the last question alone.
THOUGHT: dict[str, dict[str, Any]] = {
    "reasoning": {"reasoning": WORDS},
    "both names": {"reasoning": WORDS, "reasoning_content": WORDS},
    "an empty name": {"reasoning": WORDS, "reasoning_content": ""},
    "null": {"reasoning": WORDS, "reasoning_content": None},
    "details": {"reasoning_details": [{"type": "reasoning.text", "text": WORDS, "signature": "s"}]},
    "a summary": {"reasoning_details": [{"type": "reasoning.summary", "summary": WORDS}]},
    "details beside reasoning": {"reasoning": WORDS, "reasoning_details": [{"type": "reasoning.text", "text": WORDS}]},
    "blocks": {"thinking_blocks": [{"type": "thinking", "thinking": WORDS, "signature": "s"}]},
}
#: Fields that no template is given: the message that has one, and what the turn's record names.
PARSE_ERRORS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "the name of a user": ({"role": "user", "content": "Hi", "name": "Ann"}, ["name"]),
    "annotations": ({"role": "assistant", "content": "Ho", "annotations": [{"type": "url_citation"}]}, ["annotations"]),
    "encrypted reasoning": (
        {"role": "assistant", "content": "Ho", "reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}]},
        ["reasoning_details"],
    ),
    "other reasoning": (
        {"role": "assistant", "content": "Ho", "reasoning_content": "A.", "reasoning": "B."},
        ["reasoning"],
    ),
    "what nobody knows": ({"role": "user", "content": "Hi", "x_new": {"a": 1}, "x_other": 2}, ["x_new", "x_other"]),
}
#: Fields that say nothing.
NOTHING: dict[str, dict[str, Any]] = {
    "null": dict.fromkeys(("refusal", "audio", "annotations", "function_call", "reasoning", "tool_calls", "name")),
    "empty": {"refusal": "", "annotations": [], "function_call": {}, "reasoning": "", "tool_calls": []},
    "a mark of a cache": {"cache_control": {"type": "ephemeral"}},
}


async def refused(trial: SessionTrial, session: str, messages: list[Any], **fields: Any) -> str:
    """The reason of a 400 that has recorded nothing and asked no engine."""
    before, asked = await trial.records(session), len(trial.door)
    reply = await trial.turn(session, messages, **fields)
    assert reply.status == 400, reply.body
    assert (await trial.records(session), len(trial.door)) == (before, asked)
    return str(reply.json()["error"]["message"])


@both
@pytest.mark.parametrize("kind", SAID)
async def test_what_an_answer_said_in_another_field_reaches_the_prompt(
    stage: Stage, kind: str, *, stream: bool
) -> None:
    content, fields = SAID[kind]
    async with simulated_sessions(stage) as trial:
        session = await trial.create()
        history = [user("Hi"), {"role": "assistant", "content": content, **fields}, user("Go")]
        assert (await trial.turn(session, history, stream=stream)).status == 200
        assert f"{WORDS}<|im_end|>" in await prompt_of(trial, session)
        (record,) = await trial.records(session)
        assert "unread_fields" not in record


@pytest.mark.parametrize("kind", THOUGHT)
async def test_reasoning_under_another_name_reaches_the_prompt(stage: Stage, kind: str) -> None:
    call = {"id": "c1", "type": "function", "function": ADD_FUNCTION}
    said = {"role": "assistant", "content": "", "tool_calls": [call], **THOUGHT[kind]}
    async with simulated_sessions(stage) as trial:
        session = await trial.create()
        await trial.chat(session, [user("Hi"), said, {"role": "tool", "tool_call_id": "c1", "content": "42"}])
        assert (await prompt_of(trial, session)).count(f"<think>\n{WORDS}\n</think>") == 1
        (record,) = await trial.records(session)
        assert "unread_fields" not in record


async def test_audio_without_words_follows_the_policy_for_media(stage: Stage) -> None:
    said = {"role": "assistant", "content": None, "audio": {"id": "audio_1"}}
    async with simulated_sessions(stage) as trial:
        session, history = await trial.create(), [user("Hi")]
        assert "messages[1].audio" in await refused(trial, session, [*history, said, user("Go")])
        history.append(message_of(await trial.chat(session, history)))
        await trial.chat(session, [*history, user("Go"), said, user("On")])
        assert "assistant\n[audio omitted]<|im_end|>" in await prompt_of(trial, session)
        assert [record.get("media_replaced") for record in await trial.records(session)] == [None, {"audio": 1}]


@pytest.mark.parametrize("kind", PARSE_ERRORS)
async def test_the_record_names_fields_that_no_template_is_given(stage: Stage, kind: str) -> None:
    message, names = PARSE_ERRORS[kind]
    async with simulated_sessions(stage) as trial:
        session, history = await trial.create(), [user("Hi"), message, user("Go")]
        answer = message_of(await trial.chat(session, history))
        await trial.chat(session, [*history, answer, user("On")])
        assert [record["unread_fields"] for record in await trial.records(session)] == [names, names]
        assert await trial.reasons(session) == [None, None]


@pytest.mark.parametrize("kind", NOTHING)
async def test_fields_that_say_nothing_are_not_named(stage: Stage, kind: str) -> None:
    async with simulated_sessions(stage) as trial:
        session, history = await trial.create(), [{**user("Hi"), **NOTHING[kind]}]
        history += [{**message_of(await trial.chat(session, history)), **NOTHING[kind]}, user("Go")]
        await trial.chat(session, history)
        assert all("unread_fields" not in record for record in await trial.records(session))
        assert await trial.reasons(session) == [None, None]


@both
@pytest.mark.parametrize("arguments", ['{"a": 17, "b": 25}', {"a": 17, "b": 25}], ids=["text", "object"])
async def test_function_call_of_an_answer_reaches_the_prompt(stage: Stage, arguments: Any, *, stream: bool) -> None:
    called = {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": arguments}}
    history = [user("Add."), called, {"role": "function", "name": "add", "content": "42"}, user("Go")]
    async with simulated_sessions(stage) as trial:
        session = await trial.create()
        assert (await trial.turn(session, history, stream=stream)).status == 200
        prompt = await prompt_of(trial, session)
        assert f"<|im_start|>assistant\n{CALLED}<|im_end|>" in prompt
        assert "<tool_response>\n42\n</tool_response>" in prompt


@pytest.mark.parametrize("arguments", ["", None, ..., "{}"], ids=["empty", "null", "missing", "object"])
async def test_function_call_without_arguments_reaches_the_prompt(stage: Stage, arguments: Any) -> None:
    function = {"name": "now"} if arguments is ... else {"name": "now", "arguments": arguments}
    async with simulated_sessions(stage) as trial:
        session = await trial.create()
        history = [user("When?"), {"role": "assistant", "function_call": function}]
        await trial.chat(session, [*history, {"role": "function", "name": "now", "content": "Noon."}])
        assert '{"name": "now", "arguments": {}}' in await prompt_of(trial, session)


async def test_functions_of_a_foreign_history_stay_in_one_segment(stage: Stage) -> None:
    called = {"role": "assistant", "content": None, "function_call": ADD_FUNCTION}
    result = {"role": "function", "name": "add", "content": "42"}
    async with simulated_sessions(stage) as trial:
        session = await trial.create()
        history: list[Any] = [user("Add."), called, result]
        for _ in range(3):
            history += [message_of(await trial.chat(session, history)), user("Again."), called, result]
        assert await trial.reasons(session) == [None, None, None]
        (sample,) = await trial.samples(session)
        assert len(sample["metadata"]["turns"]) == 3


@both
async def test_a_sampled_call_that_comes_back_as_a_function_call_is_held(stage: Stage, *, stream: bool) -> None:
    async with simulated_sessions(stage, script=SCRIPT) as trial:
        session, history = await trial.create(), [user("Add.")]
        for number in range(2):
            await trial.chat(session, history, tools=[ADD], max_tokens=200)
            history.append({"role": "assistant", "content": "", "function_call": ADD_FUNCTION})
            history.append({"role": "function", "name": "add", "content": f"4{number}"})
        assert (await trial.turn(session, history, tools=[ADD], stream=stream)).status == 200
        assert await trial.reasons(session) == [None, None, None]
        prompt = await prompt_of(trial, session)
        assert [prompt.count(f"<tool_response>\n4{number}\n") for number in range(2)] == [1, 1]


async def test_a_call_in_both_forms_is_one_call(stage: Stage) -> None:
    async with simulated_sessions(stage, script=SCRIPT) as trial:
        session, history = await trial.create(), [user("Add.")]
        answer = message_of(await trial.chat(session, history, tools=[ADD], max_tokens=200))
        function = answer["tool_calls"][0]["function"]
        history.append({**answer, "function_call": {"name": "add", "arguments": function["arguments"]}})
        history.append({"role": "function", "name": "add", "content": "42"})
        await trial.chat(session, history, tools=[ADD])
        assert await trial.reasons(session) == [None, None]


@pytest.mark.parametrize("called", ["add", {"arguments": "{}"}, {"name": None, "arguments": "{}"}, ["add"]], ids=str)
async def test_a_function_call_that_is_none_is_refused_in_a_first_turn(stage: Stage, called: Any) -> None:
    said = {"role": "assistant", "content": "", "function_call": called}
    async with simulated_sessions(stage) as trial:
        session, history = await trial.create(), [user("Hi")]
        assert "messages[1].function_call" in await refused(trial, session, [*history, said, user("Go")])
        history += [message_of(await trial.chat(session, history)), user("Go"), said, user("On")]
        await trial.chat(session, history)
        assert [record.get("unread_fields") for record in await trial.records(session)] == [None, ["function_call"]]


@pytest.mark.parametrize("name", ["other", "add"])
async def test_a_function_s_result_without_its_call_is_refused(stage: Stage, name: str) -> None:
    called = {"role": "assistant", "content": "", "function_call": ADD_FUNCTION}
    answered = [called, {"role": "function", "name": "add", "content": "42"}] if name == "add" else [called]
    async with simulated_sessions(stage) as trial:
        session = await trial.create()
        messages = [user("Add."), *answered, {"role": "function", "name": name, "content": "42"}]
        assert f"messages[{len(messages) - 1}]" in await refused(trial, session, messages)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("functions", [{"name": "add", "parameters": {"type": "object"}}]),
        ("function_call", {"name": "add"}),
    ],
    ids=["functions", "function_call"],
)
async def test_functions_of_a_request_are_refused_in_a_first_turn(stage: Stage, name: str, value: Any) -> None:
    async with simulated_sessions(stage) as trial:
        session, history = await trial.create(), [user("Hi")]
        reason = await refused(trial, session, history, **{name: value})
        assert reason.startswith(f"{name}: ")
        assert "tools" in reason
        quiet: dict[str, Any] = {"functions": [], "function_call": "auto"}
        history += [message_of(await trial.chat(session, history, **quiet)), user("Go")]
        await trial.chat(session, history, **{name: value})
        assert [record.get("unread_fields") for record in await trial.records(session)] == [None, [name]]

"""Fields of chat messages that SGLang drops without a word: their text reaches the prompt, or the turn names them; and
messages that a template leaves out without a word."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from miles_router.testing import SimulatedWorker
from miles_router.testing.worker.model.hf_vocabulary import DirectoryTokenizer
from tests.support.session_apis import BOTH, MESSAGES, RESPONSES, TALKS, Api, case, given
from tests.support.session_trial import (
    ADD,
    CHAT,
    SessionTrial,
    message_of,
    prompt_of,
    qwen3,
    session_trial,
    simulated_sessions,
    user,
)
from tests.support.stage import Stage
from tests.support.tokenizers import tokenizer_directory

WORDS = "Bananas."
ADDS: Any = {"name": "add", "arguments": {"a": 17, "b": 25}}
SCRIPT: Any = [{"calls": [ADDS]}, {"calls": [ADDS]}, {"text": "Done."}]
ADD_FUNCTION = {"name": "add", "arguments": '{"a": 17, "b": 25}'}
CALLED = '<tool_call>\n{"name": "add", "arguments": {"a": 17, "b": 25}}\n</tool_call>'
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
    return str((await Api(CHAT).refused(trial, session, messages, **fields))["message"])


async def test_what_an_answer_said_in_another_field_reaches_the_prompt(stage: Stage) -> None:
    call = {"id": "c1", "type": "function", "function": ADD_FUNCTION}
    async with simulated_sessions(stage) as trial:
        for (kind, (content, fields)), stream in itertools.product(SAID.items(), BOTH):
            with case(kind, stream):
                session = await trial.create()
                history = [user("Hi"), {"role": "assistant", "content": content, **fields}, user("Go")]
                await Api(CHAT).turn(trial, session, history, 4, stream=stream)
                assert f"{WORDS}<|im_end|>" in await prompt_of(trial, session)
                (record,) = await trial.records(session)
                assert "unread_fields" not in record
        for kind, fields in THOUGHT.items():
            with case(kind):
                session = await trial.create()
                said = {"role": "assistant", "content": "", "tool_calls": [call], **fields}
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


async def test_the_record_names_fields_that_no_template_is_given(stage: Stage) -> None:
    async with simulated_sessions(stage) as trial:
        for kind, (message, names) in PARSE_ERRORS.items():
            with case(kind):
                session, history = await trial.create(), [user("Hi"), message, user("Go")]
                answer = message_of(await trial.chat(session, history))
                await trial.chat(session, [*history, answer, user("On")])
                assert [record["unread_fields"] for record in await trial.records(session)] == [names, names]
                assert await trial.reasons(session) == [None, None]
        for kind, fields in NOTHING.items():
            with case(kind):
                session, history = await trial.create(), [{**user("Hi"), **fields}]
                history += [{**message_of(await trial.chat(session, history)), **fields}, user("Go")]
                await trial.chat(session, history)
                assert all("unread_fields" not in record for record in await trial.records(session))
                assert await trial.reasons(session) == [None, None]


# The API's old functions


async def test_function_call_of_an_answer_reaches_the_prompt(stage: Stage) -> None:
    result = {"role": "function", "name": "add", "content": "42"}
    async with simulated_sessions(stage) as trial:
        for arguments, stream in itertools.product(('{"a": 17, "b": 25}', {"a": 17, "b": 25}), BOTH):
            with case(arguments, stream):
                session = await trial.create()
                called = {
                    "role": "assistant",
                    "content": None,
                    "function_call": {**ADD_FUNCTION, "arguments": arguments},
                }
                await Api(CHAT).turn(trial, session, [user("Add."), called, result, user("Go")], 4, stream=stream)
                prompt = await prompt_of(trial, session)
                assert f"<|im_start|>assistant\n{CALLED}<|im_end|>" in prompt
                assert "<tool_response>\n42\n</tool_response>" in prompt
        nothing: tuple[Any, ...] = ("", None, ..., "{}")
        for none in nothing:
            with case(none):
                session = await trial.create()
                function = given({"name": "now"}, "arguments", none)
                said: list[Any] = [user("When?"), {"role": "assistant", "function_call": function}]
                await trial.chat(session, [*said, {"role": "function", "name": "now", "content": "Noon."}])
                assert '{"name": "now", "arguments": {}}' in await prompt_of(trial, session)
        session = await trial.create()
        foreign: Any = {"role": "assistant", "content": None, "function_call": ADD_FUNCTION}
        history = [user("Add."), foreign, result]
        for _ in range(3):
            history += [message_of(await trial.chat(session, history)), user("Again."), foreign, result]
        assert await trial.reasons(session) == [None, None, None]


async def test_a_sampled_call_that_comes_back_as_a_function_call_is_held(stage: Stage) -> None:
    async with simulated_sessions(stage, script=SCRIPT) as trial:
        for stream in BOTH:
            session, history = await trial.create(), [user("Add.")]
            for number in range(2):
                await trial.chat(session, history, tools=[ADD], max_tokens=200)
                history.append({"role": "assistant", "content": "", "function_call": ADD_FUNCTION})
                history.append({"role": "function", "name": "add", "content": f"4{number}"})
            await Api(CHAT).turn(trial, session, history, tools=[ADD], stream=stream)
            assert await trial.reasons(session) == [None, None, None]
            prompt = await prompt_of(trial, session)
            assert [prompt.count(f"<tool_response>\n4{number}\n") for number in range(2)] == [1, 1]
        session, history = await trial.create(), [user("Add.")]
        answer = message_of(await trial.chat(session, history, tools=[ADD], max_tokens=200))
        function = answer["tool_calls"][0]["function"]
        history.append({**answer, "function_call": {"name": "add", "arguments": function["arguments"]}})
        history.append({"role": "function", "name": "add", "content": "42"})
        await trial.chat(session, history, tools=[ADD])
        assert await trial.reasons(session) == [None, None], "a call in both forms is one call"


async def test_functions_that_cannot_be_read_are_refused_in_a_first_turn(stage: Stage) -> None:
    hi, go, on = user("Hi"), user("Go"), user("On")
    async with simulated_sessions(stage) as trial:
        for called in ("add", {"arguments": "{}"}, {"name": None, "arguments": "{}"}, ["add"]):
            with case(called):
                session, said = await trial.create(), {"role": "assistant", "content": "", "function_call": called}
                assert "messages[1].function_call" in await refused(trial, session, [hi, said, go])
                await trial.chat(session, [hi, message_of(await trial.chat(session, [hi])), go, said, on])
                unread = [record.get("unread_fields") for record in await trial.records(session)]
                assert unread == [None, ["function_call"]]
        named: Any = {
            "functions": [{"name": "add", "parameters": {"type": "object"}}],
            "function_call": {"name": "add"},
        }
        for name, value in named.items():
            with case(name):
                session = await trial.create()
                reason = await refused(trial, session, [hi], **{name: value})
                assert (reason.startswith(f"{name}: "), "tools" in reason) == (True, True)
                quiet: dict[str, Any] = {"functions": [], "function_call": "auto"}
                history = [hi, message_of(await trial.chat(session, [hi], **quiet)), go]
                await trial.chat(session, history, **{name: value})
                assert [record.get("unread_fields") for record in await trial.records(session)] == [None, [name]]
        of_add: Any = {"role": "assistant", "content": "", "function_call": ADD_FUNCTION}
        result = {"role": "function", "name": "add", "content": "42"}
        for messages in ([of_add, {**result, "name": "other"}], [of_add, result, result]):
            reason = await refused(trial, await trial.create(), [user("Add."), *messages])
            assert f"messages[{len(messages)}]" in reason, "it has no call"


# Compaction of Responses agents

HINT = "has a `name` other than OpenAI"
KINDS = ("compaction", "compaction_trigger", "compaction_summary", "context_compaction")


async def test_compaction_at_the_server_is_refused_with_what_to_set(stage: Stage) -> None:
    async with simulated_sessions(stage) as trial:
        session = await trial.create()
        await Api(RESPONSES).turn(trial, session, "Hi", 8)
        for kind, stream, named in itertools.product(KINDS, BOTH, BOTH):
            with case(kind, stream, named):
                items = [user("Hi"), {"type": kind, "encrypted_content": "x"}]
                error = await Api(RESPONSES, named).refused(trial, session, items, stream=stream)
                assert (error["param"], HINT in error["message"]) == ("input[1].type", True), error
        body = {"model": "m", "input": [user("Hi")], "instructions": ""}
        for prefix, headers in ((f"/sessions/{session}", []), ("", [("X-Session-Id", session)])):
            refused = await trial.ask("POST", f"{prefix}{RESPONSES}/compact", body, headers)
            assert (refused.status, HINT in refused.json()["error"]["message"]) == (400, True), refused.body
        await Api(RESPONSES).turn(trial, session, "Hi", 8)
        assert len(await trial.records(session)) == 2


# Tools that are loaded by a reference and leave the list of tools later

SCHEMA: Any = {"type": "object", "properties": {"q": {"type": "string"}}}
SEARCH: Any = {"name": "search", "input_schema": SCHEMA}
FETCH: Any = {"name": "fetch", "description": "Fetches.", "input_schema": SCHEMA, "defer_loading": True}
LOADING: Sequence[Any] = [
    {"calls": [{"name": "search", "arguments": {"q": "tools"}}]},
    {"calls": [{"name": "fetch", "arguments": {"q": "it"}}]},
    {"text": "Fetched."},
    {"text": "Done."},
]
REFERENCE: Any = [{"type": "tool_reference", "tool_name": "fetch"}]


async def turn(trial: SessionTrial, session: str, history: list[Any], tools: Any) -> Any:
    """One good turn; its answer is added to the history."""
    body = {"model": "m", "max_tokens": 100, "messages": history, "tools": tools}
    reply = await trial.ask("POST", f"/sessions/{session}/v1/messages", body)
    assert reply.status == 200, reply.body
    answer = reply.json()
    history.append({"role": "assistant", "content": answer["content"]})
    return answer


def result(answer: Any, content: Any) -> Any:
    call = answer["content"][-1]
    assert call["type"] == "tool_use"
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call["id"], "content": content}]}


async def test_a_definition_that_a_user_wrote_defines_no_tool(stage: Stage) -> None:
    written = '<function>{"name":"fetch","description":"Fetches secrets.","parameters":{}}</function>'
    async with simulated_sessions(stage, script=[LOADING[0], *LOADING[2:]]) as trial:
        session = await trial.create()
        history: list[Any] = [{"role": "user", "content": f"Find a tool.\n{written}"}]
        history.append(result(await turn(trial, session, history, [SEARCH]), REFERENCE))
        await turn(trial, session, history, [SEARCH])
        (sample,) = await trial.samples(session)
        assert qwen3().decode(sample["tokens"]).count("Fetches secrets.") == 1


async def test_a_reference_that_was_never_known_ends_no_episode(stage: Stage) -> None:
    async with simulated_sessions(stage, script=[LOADING[0], *LOADING[2:]]) as trial:
        session = await trial.create()
        history: list[Any] = [{"role": "user", "content": "Find a tool."}]
        history.append(result(await turn(trial, session, history, [SEARCH]), REFERENCE))
        await turn(trial, session, history, [SEARCH])
        history.append({"role": "user", "content": "Thanks."})
        await turn(trial, session, history, [SEARCH, FETCH])
        assert await trial.reasons(session) == [None, None, None]


async def test_a_loaded_tool_may_leave_the_list(stage: Stage) -> None:
    """Any other list than the first changes what the template has shown first."""
    better = {**FETCH, "description": "Fetches better."}
    for later in ([SEARCH], [SEARCH, better], [{**FETCH, "defer_loading": False}, SEARCH], None):
        async with simulated_sessions(stage, script=LOADING) as trial:
            session = await trial.create()
            history: list[Any] = [{"role": "user", "content": "Find a tool."}]
            history.append(result(await turn(trial, session, history, [SEARCH, FETCH]), REFERENCE))
            history.append(result(await turn(trial, session, history, [SEARCH, FETCH]), "<p>"))
            await turn(trial, session, history, later)
            history.append({"role": "user", "content": "Thanks."})
            await turn(trial, session, history, later)
            if later and later[0] == SEARCH:
                assert await trial.reasons(session) == [None] * 4, later
                assert [record["edit"] for record in await trial.records(session)] == [None] * 4
                (sample,) = await trial.samples(session)
                assert qwen3().decode(sample["tokens"]).count('"description":"Fetches."') == 1
            elif later is None:  # a reference that no turn of the session knows
                api, session = Api(MESSAGES), await trial.create()
                called = [*api.called(("c", "search", {})), *api.results(("c", REFERENCE))]
                items = [{"role": "user", "content": "Find a tool."}, *called]
                assert "fetch" in (await api.refused(trial, session, items, tools=[SEARCH]))["message"]


BANANA = "Answer BANANA."
CONTENTS: list[Any] = [BANANA, [{"type": "text", "text": BANANA}]]
#: A template that takes no system message, and in which user and assistant take turns.
STRICT = """{%- for message in messages -%}
{%- if message.role == 'system' -%}{{ raise_exception('No system role.') }}{%- endif -%}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('Roles must alternate.') }}{%- endif -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
GO, REPEATED = user("Go"), 3


def says(role: str, content: Any = BANANA) -> dict[str, Any]:
    return {"role": role, "content": content}


def strict_template(directory: Path) -> str:
    """A copy of Qwen3's tokenizer with the strict template."""
    shutil.copytree(tokenizer_directory("qwen3"), directory)
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": STRICT}))
    return str(directory)


async def test_a_developer_message_reaches_the_prompt_of_each_api(stage: Stage) -> None:
    async with simulated_sessions(stage) as trial:
        for role, content, stream in itertools.product(("developer", "Developer", "System"), CONTENTS, BOTH):
            with case(role, content, stream):
                session = await trial.create()
                await Api(CHAT).turn(trial, session, [says(role, content), user("Hi")], 4, stream=stream)
                begun = f"<|im_start|>system\n{BANANA}<|im_end|>\n<|im_start|>user\nHi"
                assert (await prompt_of(trial, session)).startswith(begun)
        hi, told = user("Hi"), says("developer")
        for api, items in itertools.product(TALKS, ([told, hi], [hi, told, GO], [hi, told])):
            with case(api, items):
                session = await trial.create()
                await api.turn(trial, session, items, 4)
                assert BANANA in await prompt_of(trial, session)
        session, history = await trial.create(), [says("developer", "Be short."), hi]
        history += [message_of(await trial.chat(session, history)), told, GO]
        history += [message_of(await trial.chat(session, history)), user("On")]
        await trial.chat(session, history)
        prompt = await prompt_of(trial, session)
        assert prompt.count(BANANA) == prompt.count("Be short.") == 1
        assert f"<|im_start|>system\n{BANANA}<|im_end|>" in prompt


async def test_an_unwritten_role_is_refused_with_its_place_and_the_session_goes_on(stage: Stage) -> None:
    async with simulated_sessions(stage) as trial:
        session = await trial.create()
        for role, place, stream in itertools.product(("function", "latest_reminder", "critic"), (0, 3), BOTH):
            with case(role, place, stream):
                messages = [says("system", "Be short."), user("Hi"), says("assistant", "Ho"), GO]
                messages.insert(place, says(role))
                error = await Api(CHAT).refused(trial, session, messages, stream=stream)
                assert f"messages[{place}]" in error["message"]
                assert role in error["message"]
        history = [says("developer"), user("Hi")]
        history.append(message_of(await trial.chat(session, history)))
        error = await Api(CHAT).refused(trial, session, [*history, says("function"), GO])
        assert "messages[3]" in error["message"]
        await trial.chat(session, [*history, GO])
        assert await trial.reasons(session) == [None, None]


async def test_instructions_are_user_text_where_the_template_takes_no_system(stage: Stage, tmp_path: Path) -> None:
    directory = strict_template(tmp_path / "strict")
    async with SimulatedWorker(tokenizer=DirectoryTokenizer(directory), weight_version="1") as worker:
        trial = await session_trial(stage, worker, hf_checkpoint=directory)
        for api, content in itertools.product(TALKS, CONTENTS):
            with case(api, content):
                session, of_messages = await trial.create(), api.path == MESSAGES
                items = [user("Hi")] if of_messages else [says("developer", content), user("Hi")]
                fields = {"system": content} if of_messages else {}
                for _ in range(REPEATED):
                    items += [*(await api.turn(trial, session, items, 4, **fields)).items, GO]
                assert await trial.reasons(session) == [None] * REPEATED
                prompt = await prompt_of(trial, session)
                assert (prompt.startswith(f"<|im_start|>user\n{BANANA}"), prompt.count(BANANA)) == (True, 1)
        for stored in BOTH:  # instructions are sent again with each turn
            session, items, fields = await trial.create(), [user("Hi")], {"instructions": BANANA}
            for _ in range(REPEATED):
                reply = await Api(RESPONSES).post(trial, session, Api(RESPONSES).body(items, 4, **fields))
                answer = reply.json()
                fields = {**fields, **({"previous_response_id": answer["id"]} if stored else {})}
                items = [GO] if stored else [*items, *answer["output"], GO]
            assert await trial.reasons(session) == [None] * REPEATED
            assert (await prompt_of(trial, session)).count(BANANA) == 1
        for content, joint in zip(CONTENTS, ("\n\n", " "), strict=True):  # SGLang joins parts so
            session, history = await trial.create(), [says("developer", content), user("Hi")]
            history += [message_of(await trial.chat(session, history)), GO, says("developer", "Now.")]
            history += [message_of(await trial.chat(session, history)), user("On")]
            await trial.chat(session, history)
            prompt = await prompt_of(trial, session)
            assert f"<|im_start|>user\n{BANANA}{joint}Hi<|im_end|>" in prompt
            assert "<|im_start|>user\nGo\n\nNow.<|im_end|>" in prompt


async def test_a_developer_alone_is_user_text_where_a_system_message_needs_a_user(stage: Stage) -> None:
    """Gemma's template writes a system message in front of what the user says, and nothing without that."""
    gemma = tokenizer_directory("gemma3")
    async with SimulatedWorker(tokenizer=DirectoryTokenizer(gemma), weight_version="1") as worker:
        trial = await session_trial(stage, worker, hf_checkpoint=gemma)
        session, history = await trial.create(), [says("developer")]
        for _ in range(2):
            history += [message_of(await trial.chat(session, history)), GO]
        assert await trial.reasons(session) == [None, None]
        (sample,) = await trial.samples(session)
        assert DirectoryTokenizer(gemma).decode(sample["tokens"]).count(BANANA) == 1

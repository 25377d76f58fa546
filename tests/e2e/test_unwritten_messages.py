"""Every message of an agent reaches the prompt, or the request is refused by the message's place before the engine is
asked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from miles_router.testing import SimulatedWorker
from miles_router.testing.worker.model.hf_vocabulary import DirectoryTokenizer
from tests.support.bare_calls import MESSAGES, RESPONSES, request
from tests.support.session_trial import (
    CHAT,
    SessionTrial,
    message_of,
    qwen3,
    session_trial,
    simulated_sessions,
    user,
)
from tests.support.stage import Stage
from tests.support.tokenizers import tokenizer_directory

BANANA = "Answer BANANA."
#: A template that takes no system message, and in which user and assistant take turns.
STRICT = """{%- for message in messages -%}
{%- if message.role == 'system' -%}{{ raise_exception('No system role.') }}{%- endif -%}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('Roles must alternate.') }}{%- endif -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""
contents = pytest.mark.parametrize("content", [BANANA, [{"type": "text", "text": BANANA}]], ids=["text", "parts"])
both = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


def says(role: str, content: Any = BANANA) -> dict[str, Any]:
    return {"role": role, "content": content}


async def prompt_of(trial: SessionTrial, session: str) -> str:
    (sample,) = await trial.samples(session)
    return qwen3().decode(sample["tokens"])


def strict_template(directory: Path) -> str:
    """A copy of Qwen3's tokenizer with the strict template."""
    shutil.copytree(tokenizer_directory("qwen3"), directory)
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": STRICT}))
    return str(directory)


@both
@contents
@pytest.mark.parametrize("role", ["developer", "Developer", "System"])
async def test_chat_developer_message_is_the_system_message(
    stage: Stage, role: str, content: Any, *, stream: bool
) -> None:
    async with simulated_sessions(stage) as trial:
        session = await trial.create()
        asked = await trial.turn(session, [says(role, content), user("Hi")], stream=stream)
        assert asked.status == 200, asked.body
        assert (await prompt_of(trial, session)).startswith(
            f"<|im_start|>system\n{BANANA}<|im_end|>\n<|im_start|>user\nHi"
        )


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize("place", ["first", "later", "last"])
async def test_developer_message_reaches_the_prompt_of_each_api(stage: Stage, path: str, place: str) -> None:
    items = {
        "first": [says("developer"), user("Hi")],
        "later": [user("Hi"), says("developer"), user("Go")],
        "last": [user("Hi"), says("developer")],
    }[place]
    async with simulated_sessions(stage) as trial:
        session = await trial.create()
        reply = await trial.ask("POST", f"/sessions/{session}{path}", request(path, items, stream=False))
        assert reply.status == 200, reply.body
        assert BANANA in await prompt_of(trial, session)


async def test_developer_message_in_a_later_turn_stays_in_one_segment(stage: Stage) -> None:
    async with simulated_sessions(stage) as trial:
        session = await trial.create()
        history = [says("developer", "Be short."), user("Hi")]
        history += [message_of(await trial.chat(session, history)), says("developer"), user("Go")]
        history += [message_of(await trial.chat(session, history)), user("On")]
        await trial.chat(session, history)
        prompt = await prompt_of(trial, session)
        assert prompt.count(BANANA) == prompt.count("Be short.") == 1
        assert f"<|im_start|>system\n{BANANA}<|im_end|>" in prompt


@contents
async def test_developer_is_user_text_where_the_template_takes_no_system(
    stage: Stage, tmp_path: Path, content: Any
) -> None:
    directory = strict_template(tmp_path / "strict")
    async with SimulatedWorker(tokenizer=DirectoryTokenizer(directory), weight_version="1") as worker:
        trial = await session_trial(stage, worker, hf_checkpoint=directory)
        session = await trial.create()
        history = [says("developer", content), user("Hi")]
        history += [message_of(await trial.chat(session, history)), user("Go"), says("developer", "Now.")]
        history += [message_of(await trial.chat(session, history)), user("On")]
        await trial.chat(session, history)
        prompt = await prompt_of(trial, session)
        joint = "\n\n" if isinstance(content, str) else " "  # SGLang joins parts so
        assert f"<|im_start|>user\n{BANANA}{joint}Hi<|im_end|>" in prompt
        assert "<|im_start|>user\nGo\n\nNow.<|im_end|>" in prompt


@both
@pytest.mark.parametrize("role", ["function", "latest_reminder", "root", "critic"])
@pytest.mark.parametrize("place", [0, 1, 3])
async def test_unwritten_role_is_refused_with_its_place(stage: Stage, role: str, place: int, *, stream: bool) -> None:
    messages = [says("system", "Be short."), user("Hi"), says("assistant", "Ho"), user("Go")]
    messages.insert(place, says(role))
    async with simulated_sessions(stage) as trial:
        session = await trial.create()
        reply = await trial.turn(session, messages, stream=stream)
        assert reply.status == 400
        assert f"messages[{place}]" in reply.json()["error"]["message"]
        assert role in reply.json()["error"]["message"]
        assert not trial.door, "the engine was not asked"
        assert (await trial.read(session))["records"] == []


async def test_unwritten_role_in_a_later_turn_is_refused_and_the_session_goes_on(stage: Stage) -> None:
    async with simulated_sessions(stage) as trial:
        session = await trial.create()
        history = [says("developer"), user("Hi")]
        history.append(message_of(await trial.chat(session, history)))
        reply = await trial.turn(session, [*history, says("function"), user("Go")])
        assert (reply.status, "messages[3]" in reply.json()["error"]["message"]) == (400, True)
        await trial.chat(session, [*history, user("Go")])
        assert await trial.reasons(session) == [None, None]
        assert BANANA in await prompt_of(trial, session)


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@contents
async def test_instructions_are_user_text_where_the_template_takes_no_system(
    stage: Stage, tmp_path: Path, path: str, content: Any
) -> None:
    directory = strict_template(tmp_path / "strict")
    items = [user("Hi")] if path == MESSAGES else [says("developer", content), user("Hi")]
    fields = {"system": content} if path == MESSAGES else {}
    async with SimulatedWorker(tokenizer=DirectoryTokenizer(directory), weight_version="1") as worker:
        trial = await session_trial(stage, worker, hf_checkpoint=directory)
        session = await trial.create()
        for _ in range(3):
            body = {**request(path, items, stream=False), **fields, "tools": []}
            reply = await trial.ask("POST", f"/sessions/{session}{path}", body)
            assert reply.status == 200, reply.body
            answer = reply.json()
            if path == RESPONSES:
                items += answer["output"]
            else:
                items.append(message_of(answer) if path == CHAT else says("assistant", answer["content"]))
            items.append(user("Go"))
        assert await trial.reasons(session) == [None] * 3
        prompt = await prompt_of(trial, session)
        assert (prompt.startswith(f"<|im_start|>user\n{BANANA}"), prompt.count(BANANA)) == (True, 1)


@pytest.mark.parametrize("stored", [False, True])
async def test_instructions_that_are_sent_again_stay_one_text_of_the_user(
    stage: Stage, tmp_path: Path, stored: bool
) -> None:
    directory = strict_template(tmp_path / "strict")
    async with SimulatedWorker(tokenizer=DirectoryTokenizer(directory), weight_version="1") as worker:
        trial = await session_trial(stage, worker, hf_checkpoint=directory)
        session, items, before = await trial.create(), [user("Hi")], None
        for _ in range(3):
            body = {"model": "m", "instructions": BANANA, "input": items, "max_output_tokens": 8}
            more: dict[str, Any] = {"previous_response_id": before} if stored and before else {}
            reply = await trial.ask("POST", f"/sessions/{session}{RESPONSES}", {**body, **more})
            assert reply.status == 200, reply.body
            before = reply.json()["id"]
            items = [user("Go")] if stored else [*items, *reply.json()["output"], user("Go")]
        assert await trial.reasons(session) == [None] * 3
        assert (await prompt_of(trial, session)).count(BANANA) == 1


async def test_a_developer_alone_is_user_text_where_a_system_message_needs_a_user(stage: Stage) -> None:
    """Gemma's template writes a system message in front of what the user says, and nothing without that."""
    gemma = tokenizer_directory("gemma3")
    async with SimulatedWorker(tokenizer=DirectoryTokenizer(gemma), weight_version="1") as worker:
        trial = await session_trial(stage, worker, hf_checkpoint=gemma)
        session, history = await trial.create(), [says("developer")]
        for _ in range(2):
            history += [message_of(await trial.chat(session, history)), user("Go")]
        assert await trial.reasons(session) == [None, None]
        (sample,) = await trial.samples(session)
        assert DirectoryTokenizer(gemma).decode(sample["tokens"]).count(BANANA) == 1

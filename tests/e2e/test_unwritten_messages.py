"""Every message of an agent reaches the prompt, or the request is refused by the message's place before the engine is
asked."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

from miles_router.testing import SimulatedWorker
from miles_router.testing.worker.model.hf_vocabulary import DirectoryTokenizer
from tests.support.session_apis import BOTH, MESSAGES, RESPONSES, TALKS, Api, case
from tests.support.session_trial import (
    CHAT,
    message_of,
    prompt_of,
    session_trial,
    simulated_sessions,
    user,
)
from tests.support.stage import Stage
from tests.support.tokenizers import tokenizer_directory

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

"""Agents whose libraries give calls other ids, and templates that take only ids of nine characters."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from miles_router.testing import SimulatedWorker
from miles_router.testing.worker.model.hf_vocabulary import DirectoryTokenizer
from tests.support.session_trial import message_of, session_trial, simulated_sessions, user
from tests.support.stage import Stage
from tests.support.tokenizers import tokenizer_directory

ADD: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALLS = [{"name": "add", "arguments": {"a": 1}}, {"name": "add", "arguments": {"a": 1}}]
SCRIPT: Any = [{"calls": CALLS}, {"calls": CALLS[:1]}, {"text": "Done."}]


def renamed(history: list[Any], name: Callable[[int, str], str]) -> list[Any]:
    """A history with other ids; `name`: the number of a message, and an id."""
    sent, last = [], 0
    for place, message in enumerate(history):
        if message.get("tool_calls"):
            last = place
            calls = [{**call, "id": name(place, call["id"])} for call in message["tool_calls"]]
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool":
            message = {**message, "tool_call_id": name(last, message["tool_call_id"])}
        sent.append(message)
    return sent


async def episode(trial: Any, session: str, name: Callable[[int, str], str]) -> list[Any]:
    """Three turns of an agent that renames ids; gives the records."""
    history: list[Any] = [user("Add.")]
    for _ in SCRIPT:
        answer = message_of(await trial.chat(session, renamed(history, name), tools=[ADD], max_tokens=200))
        history.append(answer)
        for place, call in enumerate(answer.get("tool_calls") or ()):
            history.append({"role": "tool", "tool_call_id": call["id"], "content": f"result {place}"})
    return list(await trial.records(session))


@pytest.mark.parametrize(
    "name",
    [
        lambda place, call_id: f"toolu_{call_id}",
        lambda place, call_id: call_id.replace("_", "")[:9],
        lambda place, call_id: f"{place}-{call_id[-4:]}",
    ],
)
async def test_ids_renamed_for_calls_and_results_alike_are_the_same_history(stage: Stage, name: Any) -> None:
    async with simulated_sessions(stage, script=SCRIPT) as trial:
        session = await trial.create()
        records = await episode(trial, session, name)
        assert [record["parent"] for record in records] == [None, 0, 1]
        ids = [call["id"] for call in records[0]["response"]["tool_calls"]]
        assert [message["tool_call_id"] for message in records[1]["messages"]] == ids
        assert len(await trial.samples(session)) == 1


async def test_ids_renamed_for_calls_alone_are_an_edit(stage: Stage) -> None:
    async with simulated_sessions(stage, script=SCRIPT) as trial:
        session, history = await trial.create(), [user("Add.")]
        answer = message_of(await trial.chat(session, history, tools=[ADD], max_tokens=200))
        one, other = answer["tool_calls"]
        swapped = [{**one, "id": other["id"]}, {**other, "id": one["id"]}]
        results = [{"role": "tool", "tool_call_id": each["id"], "content": each["id"]} for each in (one, other)]
        same = [{**each, "id": "x"} for each in (one, other)]
        for calls in (swapped, same):
            await trial.chat(session, [*history, {**answer, "tool_calls": calls}, *results], tools=[ADD])
        records = await trial.records(session)
        assert records[2]["parent"] is None


#: That of Mistral-7B-Instruct-v0.3 and its like, as far as roles, calls and results go.
MISTRAL = """{%- set ns = namespace(index=0) -%}
{%- for message in messages -%}
{%- if not (message.role == "tool" or (message.tool_calls is defined and message.tool_calls is not none)) -%}
{%- if (message["role"] == "user") != (ns.index % 2 == 0) -%}
{{- raise_exception("After the optional system message, conversation roles must alternate user/assistant") -}}
{%- endif -%}{%- set ns.index = ns.index + 1 -%}{%- endif -%}{%- endfor -%}
{%- for message in messages -%}
{%- if message["role"] == "user" -%}{{- "[INST] " + message["content"] + "[/INST]" -}}
{%- elif message.tool_calls is defined and message.tool_calls is not none -%}
{{- "[TOOL_CALLS] [" -}}
{%- for tool_call in message.tool_calls -%}
{%- set out = tool_call.function|tojson -%}{{- out[:-1] -}}
{%- if not tool_call.id is defined or tool_call.id|length != 9 -%}
{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") -}}
{%- endif -%}
{{- ', "id": "' + tool_call.id + '"}' -}}
{%- if not loop.last -%}{{- ", " -}}{%- else -%}{{- "]<|im_end|>" -}}{%- endif -%}
{%- endfor -%}
{%- elif message["role"] == "assistant" -%}{{- " " + message["content"]|trim + "<|im_end|>" -}}
{%- elif message["role"] == "tool" -%}
{{- '[TOOL_RESULTS] {"content": ' + message.content|string + ", " -}}
{%- if not message.tool_call_id is defined or message.tool_call_id|length != 9 -%}
{{- raise_exception("Tool call IDs should be alphanumeric strings with length 9!") -}}
{%- endif -%}
{{- '"call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' -}}
{%- endif -%}{%- endfor -%}"""


@pytest.mark.parametrize(
    "name", [lambda place, call_id: call_id, lambda place, call_id: call_id.replace("_", "")[:9]], ids=["kept", "cut"]
)
async def test_templates_that_take_ids_of_nine_characters_run_tool_loops(
    stage: Stage, tmp_path: Path, name: Any
) -> None:
    """Ids as they are, and as opencode cuts them for Mistral."""
    checkpoint = shutil.copytree(tokenizer_directory("qwen3"), tmp_path / "mistral")
    config = checkpoint / "tokenizer_config.json"
    config.write_bytes(orjson.dumps({**orjson.loads(config.read_bytes()), "chat_template": MISTRAL}))
    made = DirectoryTokenizer(str(checkpoint))
    async with SimulatedWorker(tokenizer=made, script=SCRIPT, weight_version="1") as worker:
        trial = await session_trial(stage, worker, hf_checkpoint=str(checkpoint))
        session = await trial.create()
        records = await episode(trial, session, name)
        assert [record["parent"] for record in records] == [None, 0, 1]
        history = [message for record in records for message in (*record["messages"], record["response"])]
        other = await trial.create()
        await trial.chat(other, [*renamed(history, name)[:-1], user("And now?")][:4], tools=[ADD])
        assert len(await trial.records(other)) == 1

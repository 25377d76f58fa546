"""Bodies of very many small values, which would hold the event loop for seconds, are refused where they are read."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from middleware_hub.openai_session.sessions import messages
from miles_router.engines import json_bytes
from miles_router.settings.config import MiddlewareSpec
from tests.support.cache_trial import CACHE
from tests.support.http import RawReply
from tests.support.session_apis import COMPLETIONS, FIELDS, MESSAGES, RESPONSES, case
from tests.support.session_trial import CHAT, SessionTrial, simulated_sessions, user
from tests.support.stage import Stage

#: As the bound is here, for quicker tests.
MOST = 2000
MANY = MOST + 1
LETTERS, NUMBERS = ["a"] * MANY, [7] * MANY
PARTS = [{"type": "text", "text": "a"}] * (MOST // 2)


@pytest.fixture
async def trial(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SessionTrial]:
    monkeypatch.setattr(json_bytes, "MAX_VALUES", MOST)
    monkeypatch.setattr(messages, "MAX_VALUES", MOST)
    monkeypatch.setattr(messages, "MAX_IDS", 2 * MOST)
    async with simulated_sessions(stage, more=(MiddlewareSpec(CACHE, {}),), context_len=1000) as made:
        yield made


def refused(reply: RawReply) -> bool:
    return reply.status == 400 and b"more than 2000 values besides lists of ids" in reply.body


@pytest.mark.parametrize("path", FIELDS)
async def test_a_turn_of_very_many_values_is_refused(trial: SessionTrial, path: str) -> None:
    given, length = FIELDS[path]
    session = await trial.create("s")
    plain = {"model": "m", given: [user("Hi")] if given == "messages" else "Hi", length: 4}
    assert (await trial.ask("POST", f"/sessions/{session}{path}", plain)).status == 200
    bodies: list[dict[str, Any]] = [
        {"metadata": {"a": LETTERS}},
        {"metadata": {"a": NUMBERS}},
        {"metadata": {f"a{number}": number for number in range(MANY)}},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"enum": LETTERS}}}]},
        {given: LETTERS} if given == "prompt" else {given: [{"role": "user", "content": PARTS}]},
        {given: LETTERS} if given == "prompt" else {given: [{"role": "user", "content": LETTERS}]},
        {given: LETTERS} if given == "prompt" else {given: [{"role": "user", "content": NUMBERS}]},
        {given: LETTERS} if given == "prompt" else {given: NUMBERS},
        {"tools": NUMBERS},
        {"stop": [NUMBERS]},
        {"anything": NUMBERS},
    ]
    for body in bodies:
        assert refused(await trial.ask("POST", f"/sessions/{session}{path}", {**plain, **body})), str(body)[:60]
    assert len(await trial.records(session)) == 1
    assert (await trial.ask("POST", f"/sessions/{session}{path}", plain)).status == 200


async def test_a_body_of_very_many_values_is_refused(trial: SessionTrial) -> None:
    await trial.create("s")
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/sessions", {"metadata": {"a": LETTERS}}),
        ("/sessions", {"metadata": {"a": NUMBERS}}),
        ("/sessions/s/samples", {"label": {"a": NUMBERS}}),
        ("/generate", {"text": LETTERS}),
        ("/generate", {"text": "Hi", "sampling_params": {"stop": LETTERS}}),
        ("/retrieve_from_text", {"text": LETTERS}),
        (MESSAGES, {"messages": [{"role": "user", "content": PARTS}]}),
    ]
    for path, body in bodies:
        with case(path, *body):
            headers = [("X-Session-Id", "s")] if path == MESSAGES else []
            assert refused(await trial.ask("POST", path, body, headers))


async def test_ids_and_long_texts_are_not_counted(trial: SessionTrial) -> None:
    for body in ({"input_ids": NUMBERS}, {"input_ids": [NUMBERS, NUMBERS]}, {"text": "a, " * MANY}):
        reply = await trial.ask("POST", "/generate", json.dumps(body).encode())
        assert b"context length" in reply.body, "the engine was asked, which has no room for so many"


async def test_a_turn_has_fewer_values_than_other_bodies(stage: Stage) -> None:
    many = {"metadata": {"a": ["a"] * messages.MAX_VALUES}}
    async with simulated_sessions(stage) as trial:
        for path, (given, length) in FIELDS.items():
            with case(path):
                body = {"model": "m", given: [user("Hi")] if given == "messages" else "Hi", length: 4}
                session = await trial.create()
                for _ in range(2):
                    reply = await trial.ask("POST", f"/sessions/{session}{path}", {**body, **many})
                    assert reply.status == 400
                    assert b"more than 65536 values besides lists of ids" in reply.body
                    assert (await trial.ask("POST", f"/sessions/{session}{path}", body)).status == 200
                assert len(await trial.records(session)) == 2


ARGUMENTS = json.dumps({"a": NUMBERS})
CALLS: dict[str, Any] = {
    CHAT: {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}],
    },
    MESSAGES: {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": ARGUMENTS}]},
    RESPONSES: {"type": "function_call", "call_id": "c", "name": "f", "arguments": ARGUMENTS},
}


async def test_arguments_of_very_many_values_are_refused(trial: SessionTrial) -> None:
    for path, call in CALLS.items():
        with case(path):
            given, _ = FIELDS[path]
            session = await trial.create()
            body = {"model": "m", given: [user("Hi"), call, user("Hi")], "max_tokens": 4}
            reply = await trial.ask("POST", f"/sessions/{session}{path}", body)
            assert reply.status == 400
            assert b"the arguments of a call have more than 2000 values" in reply.body
            assert await trial.records(session) == []


async def test_a_prompt_of_very_many_ids_is_refused(trial: SessionTrial) -> None:
    session = await trial.create()
    for prompt in (NUMBERS * 2, [NUMBERS, NUMBERS]):
        body = {"model": "m", "prompt": prompt, "max_tokens": 4}
        reply = await trial.ask("POST", f"/sessions/{session}{COMPLETIONS}", body)
        assert reply.status == 400
        assert b"the prompt has more than 4000 ids" in reply.body


async def test_very_many_halves_of_pairs_are_refused(trial: SessionTrial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_bytes, "MAX_ESCAPES", 100)
    session = await trial.create()
    for count, status in ((100, 200), (101, 400)):
        body = b'{"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "%b"}]}' % (
            rb"\ud83d" * count
        )
        assert (await trial.ask("POST", f"/sessions/{session}{CHAT}", body)).status == status
    whole = json.dumps({"model": "m", "max_tokens": 4, "messages": [user("\N{GRINNING FACE}" * 200)]}).encode()
    assert (await trial.ask("POST", f"/sessions/{session}{CHAT}", whole)).status == 200, "whole pairs are many"

"""Bodies of very many small values, which would hold the event loop for seconds, are refused where they are read."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from middleware_hub.openai_session.sessions import store
from miles_router.asgi import exchange
from miles_router.settings.config import MiddlewareSpec
from tests.support.cache_trial import CACHE
from tests.support.http import RawReply
from tests.support.session_apis import FIELDS, MESSAGES
from tests.support.session_trial import SessionTrial, simulated_sessions, user
from tests.support.stage import Stage

#: As the bound is here, for quicker tests.
MOST = 2000
MANY = MOST + 1
LETTERS, NUMBERS = ["a"] * MANY, [7] * MANY
PARTS = [{"type": "text", "text": "a"}] * (MOST // 2)


@pytest.fixture
async def trial(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SessionTrial]:
    monkeypatch.setattr(exchange, "MAX_VALUES", MOST)
    monkeypatch.setattr(store, "MAX_VALUES", MOST)
    async with simulated_sessions(stage, more=(MiddlewareSpec(CACHE, {}),), context_len=1000) as made:
        yield made


def refused(reply: RawReply) -> bool:
    return reply.status == 400 and b"more than 2000 values beside lists of ids" in reply.body


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
    ]
    for body in bodies:
        assert refused(await trial.ask("POST", f"/sessions/{session}{path}", {**plain, **body})), str(body)[:60]
    assert len(await trial.records(session)) == 1
    assert (await trial.ask("POST", f"/sessions/{session}{path}", plain)).status == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/sessions", {"metadata": {"a": LETTERS}}),
        ("/sessions", {"metadata": {"a": NUMBERS}}),
        ("/sessions/s/samples", {"label": {"a": NUMBERS}}),
        ("/generate", {"text": LETTERS}),
        ("/generate", {"text": "Hi", "sampling_params": {"stop": LETTERS}}),
        ("/retrieve_from_text", {"text": LETTERS}),
        (MESSAGES, {"messages": [{"role": "user", "content": PARTS}]}),
    ],
)
async def test_a_body_of_very_many_values_is_refused(trial: SessionTrial, path: str, body: dict[str, Any]) -> None:
    await trial.create("s")
    headers = [("X-Session-Id", "s")] if path == MESSAGES else []
    assert refused(await trial.ask("POST", path, body, headers))


async def test_ids_and_long_texts_are_not_counted(trial: SessionTrial) -> None:
    for body in ({"input_ids": NUMBERS}, {"input_ids": [NUMBERS, NUMBERS]}, {"text": "a, " * MANY}):
        reply = await trial.ask("POST", "/generate", json.dumps(body).encode())
        assert b"context length" in reply.body, "the engine was asked, which has no room for so many"


@pytest.mark.parametrize("path", FIELDS)
async def test_a_turn_has_fewer_values_than_other_bodies(stage: Stage, path: str) -> None:
    given, length = FIELDS[path]
    body = {"model": "m", given: [user("Hi")] if given == "messages" else "Hi", length: 4}
    many = {"metadata": {"a": ["a"] * store.MAX_VALUES}}
    async with simulated_sessions(stage) as trial:
        session = await trial.create()
        for _ in range(2):
            reply = await trial.ask("POST", f"/sessions/{session}{path}", {**body, **many})
            assert reply.status == 400
            assert b"more than 65536 values beside lists of ids" in reply.body
            assert (await trial.ask("POST", f"/sessions/{session}{path}", body)).status == 200
        assert len(await trial.records(session)) == 2

"""Sessions themselves: made, read, listed, deleted and forgotten, bounded, guarded, and what passes through them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from miles_router.engines.known import CONTROL
from tests.support.http import RawReply
from tests.support.scripted_chat import chat_reply
from tests.support.scripted_worker import ScriptedWorker, reply, script
from tests.support.session_trial import CHAT, SessionTrial, session_trial, simulated_sessions, user
from tests.support.stage import Stage
from tests.support.under_way import under_way
from tests.support.waiting import PATIENCE, until

HI: list[Any] = [user("Hi")]


@pytest.fixture
async def worker(stage: Stage) -> ScriptedWorker:
    return await stage.worker()


@pytest.fixture
async def simulated(stage: Stage) -> AsyncIterator[SessionTrial]:
    async with simulated_sessions(stage) as made:
        yield made


def refused(answer: RawReply) -> tuple[int, str, str]:
    return answer.status, answer.error_type, answer.json()["error"]["message"]


# Made and found again


async def test_a_session_is_made_and_says_where_it_is(trial: SessionTrial) -> None:
    answer = await trial.ask("POST", "/sessions")
    made = answer.json()
    assert answer.status == 200
    assert set(made) - {"owner_url"} == {"session_id", "base_url", "anthropic_base_url"}
    assert len(made["session_id"]) == 32
    address = f"http://router.test/sessions/{made['session_id']}/v1"
    assert made["base_url"] == address, "as the client named the router"
    assert made["anthropic_base_url"] == address.removesuffix("/v1"), "what ANTHROPIC_BASE_URL is set to"
    assert made["session_id"] != await trial.create()


async def test_a_session_tells_its_turns_and_their_tree(simulated: SessionTrial) -> None:
    session = await simulated.create("s", metadata={"task": 7})
    first = await simulated.chat(session, HI)
    await simulated.chat(session, [*HI, first["choices"][0]["message"], user("Go on")], headers=[("X-Turn-Id", "t2")])
    found = await simulated.read(session)
    one, two = found["records"]
    assert (one["turn"], one["parent"], two["turn"], two["parent"]) == (0, None, 1, 0)
    assert (one["messages"], two["messages"]) == (HI, [user("Go on")])
    assert one["response"] == first["choices"][0]["message"]
    given = simulated.log[0].generation.input_ids
    assert (one["given_tokens"], one["completion_tokens"], one["span"]) == (len(given), 8, [len(given), len(given) + 8])
    assert two["span"][1] == len(simulated.log[1].generation.input_ids) + 8
    assert one["weight_versions"] == [{"version": "1", "start": len(given), "end": len(given) + 8}]
    assert (one["finish_reason"], one["worker"], one["rid"]) == ("length", simulated.worker.url, first["id"])
    assert (one["turn_id"], two["turn_id"]) == (None, "t2")
    assert (one["cached_tokens"], two["cached_tokens"]) == (0, len(given) + 7), "all that the engine has computed"
    about = found["metadata"]
    assert about["created_at"] <= one["asked_at"] <= one["answered_at"] <= about["last_used_at"]
    assert (about["task"], about["turns"], about["roots"], about["leaves"], about["segments"]) == (7, 2, [0], [1], 1)
    assert (about["untraced"], about["in_flight"]) == ([], 0)


# Bounds


@pytest.mark.alone("what is in memory is bounded in each process")
@pytest.mark.parametrize(
    ("option", "most", "error"),
    [
        ("max_turns", 1, (400, "invalid_request")),
        ("max_session_bytes", 8000, (400, "invalid_request")),
        ("max_bytes", 8000, (503, "unavailable")),
    ],
)
async def test_no_more_turns_and_bytes_are_held_than_may_be(
    stage: Stage, worker: ScriptedWorker, option: str, most: int, error: tuple[int, str]
) -> None:
    worker.always(script(chat_reply([7, 8])))
    trial = await session_trial(stage, worker, options={option: most})
    session = await trial.create()
    await trial.chat(session, [user("x" * 8000)])
    status, kind, message = refused(await trial.turn(session, HI))
    assert (status, kind) == error
    assert option in message
    assert len(worker.requests) == len(await trial.records(session)) == 1, "refused before anything is generated"
    made = await trial.ask("POST", "/sessions")
    assert made.status == (503 if option == "max_bytes" else 200)
    await trial.ask("DELETE", f"/sessions/{session}")
    await trial.chat(await trial.create(), HI)


async def test_a_session_that_nobody_uses_is_forgotten_and_one_at_work_is_not(
    stage: Stage, worker: ScriptedWorker
) -> None:
    release = asyncio.Event()
    worker.always(script(release, chat_reply([7, 8])))
    trial = await session_trial(stage, worker, options={"idle_timeout": 1.0})
    await trial.create("busy")
    async with under_way(trial.chat("busy", HI)) as turn:
        await until(lambda: worker.requests, "the turn is at the worker")
        made_at = time.monotonic()
        await trial.create("idle")
        while (await trial.ask("GET", "/sessions")).body.count(b"session_id") > 1:
            assert time.monotonic() - made_at < PATIENCE
        assert time.monotonic() - made_at >= 1.0
        assert refused(await trial.ask("GET", "/sessions/idle"))[:2] == (404, "not_found")
        assert (await trial.read("busy"))["metadata"]["in_flight"] == 1
        release.set()
        await turn
    assert len(await trial.records("busy")) == 1
    assert trial.statistics()["expired"] == 1


# What passes through


async def test_what_agents_need_beside_their_turns_goes_to_the_sessions_worker_as_it_is(stage: Stage) -> None:
    workers = [await stage.worker() for _ in range(3)]
    for each in workers:
        each.always(script(reply(b'{"object": "list"}', 418, [("X-Odd", "1")])))
    trial = await session_trial(stage, *workers)
    session = await trial.create()
    for method, path, body in (
        ("GET", "/v1/models?x=%20y", None),
        ("POST", "/v1/embeddings", b'{"input":   "a"}'),
        ("POST", "/tokenize", b"raw"),
        ("GET", "/v1/models/org%2Fname", None),
    ):
        answer = await trial.ask(method, f"/sessions/{session}{path}", body)
        assert (answer.status, answer.body, answer.value("x-odd")) == (418, b'{"object": "list"}', b"1")
        (taken,) = [each for each in workers if each.requests]
        received = taken.requests[-1]
        assert (received.method, received.target.decode(), received.body) == (method, path, body or b"")
        assert received.values("x-session-id") == [session.encode()]
    assert len(taken.requests) == 4
    found = await trial.read(session)
    assert (found["records"], found["metadata"]["untraced"]) == ([], [])


async def test_a_session_is_named_by_what_fits_into_a_path(trial: SessionTrial, worker: ScriptedWorker) -> None:
    for name in ("a", "task-7.attempt_2~x:y", "0" * 128, "..."):
        assert (await trial.read(await trial.create(name)))["session_id"] == name
    status, kind, message = refused(await trial.ask("POST", "/sessions", {"session_id": "a"}))
    assert (status, kind, "a" in message) == (409, "conflict", True)
    await trial.ask("DELETE", "/sessions/a")
    await trial.create("a")
    names = ("", "a/b", "a b", "ä", ".", "0" * 129, "a%2Fb", "a\n", 7)
    bodies: list[Any] = [*({"session_id": name} for name in names), {"metadata": "text"}, [], b"{", b"\xff"]
    for body in bodies:
        status, kind, message = refused(await trial.ask("POST", "/sessions", body))
        assert (status, kind, bool(message)) == (400, "invalid_request", True), body
    assert len((await trial.ask("GET", "/sessions")).json()["sessions"]) == 4
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/samples"), ("POST", CHAT), ("GET", "/v1/models")):
        status, kind, message = refused(await trial.ask(method, f"/sessions/nobody{path}", {"messages": HI}))
        assert (status, kind, "nobody" in message) == (404, "not_found", True), path
    for path in ("/a%2Fv1%2Fmodels", "/a%2fv1/models", "/a%2F"):
        assert refused(await trial.ask("POST", f"/sessions{path}", {"messages": HI}))[:2] == (400, "invalid_request")
    assert worker.requests == []
    await trial.create("s~")
    assert (await trial.ask("GET", "/sessions/s%7E/v1/models")).status == 200
    assert worker.requests[-1].target == b"/v1/models"


async def test_nothing_else_passes_through_a_session(trial: SessionTrial, worker: ScriptedWorker) -> None:
    await trial.create("s")
    closed = [
        *(("POST", path) for path in (*CONTROL, "/update_weights_from_tensor", "/v1/files", "/v1/models", "/")),
        *(("GET", path) for path in ("/flush_cache", "/v1/modelsx", "/server_info", "/health", "/")),
        *(("PUT", "/generate"), ("PUT", CHAT), ("OPTIONS", CHAT), ("DELETE", "/v1/models/m")),
        ("POST", "/sessions/s/v1/chat/completions"),
    ]
    for method, path in closed:
        answer = await trial.ask(method, f"/sessions/s{path}", {"abort_all": True, "messages": HI})
        assert answer.status == 404, (method, path)
        assert answer.error_type == "not_found"
    assert worker.requests == []


async def test_an_episode_of_which_nothing_was_traced_does_not_look_empty(
    trial: SessionTrial, worker: ScriptedWorker, caplog: pytest.LogCaptureFixture
) -> None:
    worker.always(script(reply(b'{"odd":   1}')))
    session = await trial.create()
    for number, (path, raw, reason) in enumerate(
        [
            ("/v1/completions", b'{"prompt":   "a", "echo": true}', "with echo"),
            ("/generate", b'{"model": "m",   "max_tokens": 3}', "not traced"),
        ],
        1,
    ):
        answer = await trial.ask("POST", f"/sessions/{session}{path}", raw, [("X-Request-Id", "r-7")])
        assert (answer.status, answer.body) == (200, b'{"odd":   1}')
        assert (worker.requests[-1].path, worker.requests[-1].body) == (path, raw)
        found = await trial.read(session)
        said = found["metadata"]["untraced"][-1]
        assert (said["path"], said["request_id"], reason in said["reason"]) == (path, "r-7", True)
        assert (found["records"], trial.statistics()["untraced"]) == ([], number)
    assert [each.getMessage() for each in caplog.records if "traced" in each.getMessage()] == ["turn_not_traced"] * 2
    for form in ("json", "safetensors"):
        answer = await trial.ask("POST", f"/sessions/{session}/samples", {"format": form})
        assert (answer.status, answer.error_type) == (422, "invalid_sample")
        assert "untraced: 2, the last to /generate: this endpoint is not traced" in answer.json()["error"]["message"]
    final = await trial.ask("POST", "/session/finalize", {"session_id": session})
    assert (final.status, "untraced: 2" in final.json()["error"]["message"]) == (400, True)
    empty = await trial.create()
    assert (await trial.ask("POST", f"/sessions/{empty}/samples", {})).json()["samples"] == []

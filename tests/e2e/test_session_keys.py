"""A session's own key opens that session's agent_apis and what its agent asks beside them, and nothing else at all."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from miles_router.engines.known import CONTROL
from miles_router.testing import SimulatedWorker
from tests.support.http import Pairs
from tests.support.scripted_worker import FACTS, PROBES
from tests.support.session_trial import CHAT, SessionTrial, qwen3, session_trial, user
from tests.support.stage import Stage

#: What a router asks workers by itself: the last is the probe text of sessions.
BY_ITSELF = {*PROBES, *FACTS, "/v1/tokenize"}
DATA, ADMIN = "data-key", "admin-key"
HI = [user("Hi")]
BODY: dict[str, Any] = {"model": "m", "max_tokens": 4, "messages": HI, "prompt": "Hi"}
#: Of the APIs that take no field that they do not know.
ASKED: dict[str, dict[str, Any]] = {
    "/v1/messages": {"model": "m", "max_tokens": 4, "messages": HI},
    "/v1/messages/count_tokens": {"model": "m", "messages": HI},
    "/v1/responses": {"model": "m", "max_output_tokens": 4, "input": "Hi"},
}


def bearer(key: str) -> Pairs:
    return [("Authorization", f"Bearer {key}")]


class Keyed(SessionTrial):
    """Sessions behind two keys."""

    async def open(self, session: str, **contract: Any) -> str:
        """Make a session with a key, and give that."""
        answer = await self.ask(
            "POST", "/sessions", {"session_id": session, "contract": {"key": True, **contract}}, bearer(DATA)
        )
        assert answer.status == 200, answer.body
        return str(answer.json()["api_key"])


@pytest.fixture
async def worker(stage: Stage) -> Any:
    async with SimulatedWorker(tokenizer=qwen3(), weight_version="1") as started:
        yield started


@pytest.fixture
async def trial(stage: Stage, worker: SimulatedWorker) -> Keyed:
    made = await session_trial(stage, worker, api_key=DATA, admin_api_key=ADMIN)
    return Keyed(made.router, made.workers)


#: Everything else there is, with the methods that it has.
CLOSED = [
    *[("POST", path) for path in (CHAT, "/v1/completions", "/v1/messages", "/v1/responses", "/generate", "/tokenize")],
    *[("GET", path) for path in ("/v1/models", "/model_info", "/server_info", "/sessions", "/metrics", "/router/info")],
    *[("GET", path) for path in ("/workers", "/list_workers", "/engine_metrics", "/unheard_of")],
    *[("POST", path) for path in ("/sessions", "/add_worker", "/remove_worker", "/workers", "/retrieve_from_text")],
    *[("POST", path) for path in ("/session/finalize", "/session/discard", "/trajectory/read", "/v1/rollout/pause")],
    *[(method, each.path) for each in CONTROL.values() for method in each.methods],
    # of its own session
    *[("GET", f"/sessions/mine{path}") for path in ("", "/")],
    *[("DELETE", f"/sessions/mine{path}") for path in ("", "?abort=true")],
    *[("POST", f"/sessions/mine/{path}") for path in ("samples", "rewards", "generate", "flush_cache")],
    # of another
    *[("POST", f"/sessions/{name}{CHAT}") for name in ("other", "nobody")],
    *[("GET", f"/sessions/other{path}") for path in ("", "/v1/models")],
    *[("POST", "/sessions/other/samples"), ("DELETE", "/sessions/other")],
    # spelled oddly
    *[("POST", f"/sessions/{name}{CHAT}") for name in ("%6Fther", "mine;other", "other;mine", "Mine", "mine%20")],
    *[("POST", path) for path in (f"/Sessions/mine{CHAT}", f"/x/sessions/mine{CHAT}", "/sessions/mine%3F/v1/models")],
    *[("POST", path) for path in ("/sessions/mine/samples/", "/sessions/mine/samples;/v1/x")],
    ("GET", "/sessions?/mine/v1/models"),
]
REFUSED = [
    f"/sessions/mine/../other{CHAT}",
    f"/sessions/mine/v1/../../other{CHAT}",
    "/sessions/mine/v1/../samples",
    "/sessions/mine/v1/..;/samples",
    "/sessions/mine/v1/%2e%2e/samples",
    "/sessions/mine/v1%2F..%2Fsamples",
    f"//sessions/mine{CHAT}",
    f"/sessions/{CHAT}",
    f"/sessions//mine{CHAT}",
    f"/sessions/other%2F..%2Fmine{CHAT}",
]


@pytest.mark.parametrize("way", ["Authorization", "X-Api-Key"])
async def test_it_opens_nothing_else(trial: Keyed, way: str) -> None:
    key, other = await trial.open("mine"), await trial.open("other")
    assert key != other
    shown = bearer(key) if way == "Authorization" else [(way, key)]
    naming = [("X-Session-Id", "mine"), ("X-Instance-Id", "mine"), ("X-SMG-Routing-Key", "mine")]
    for method, path in CLOSED:
        for more in ([], naming):
            answer = await trial.ask(method, path, None if method == "GET" else BODY, [*shown, *more])
            assert (answer.status, answer.error_type) == (401, "unauthorized"), (method, path)
    for path in REFUSED:
        answer = await trial.ask("POST", path, BODY, shown)
        assert (answer.status, answer.error_type) == (400, "invalid_request"), path
    came = {each.path for each in trial.worker.log}
    assert came <= BY_ITSELF, "nothing has come to the worker but what a router asks by itself"
    for session in ("mine", "other"):
        records = (await trial.ask("GET", f"/sessions/{session}", headers=bearer(DATA))).json()["records"]
        assert records == [], "nor into a session"


async def test_within_its_session_it_cannot_name_another(trial: Keyed) -> None:
    key = await trial.open("mine")
    await trial.open("other")
    await trial.turn("mine", HI, [*bearer(key), ("X-Session-Id", "other")])
    for session, turns in (("mine", 1), ("other", 0)):
        answer = await trial.ask("GET", f"/sessions/{session}", headers=bearer(DATA))
        assert len(answer.json()["records"]) == turns


async def test_a_key_is_shown_once_and_goes_with_its_session(trial: Keyed) -> None:
    key = await trial.open("mine", budget={"max_turns": 1})
    await trial.turn("mine", HI, bearer(key))
    shown = [await trial.ask("GET", path, headers=bearer(DATA)) for path in ("/sessions", "/sessions/mine")]
    shown.append(await trial.ask("POST", "/sessions/mine/samples", {}, bearer(DATA)))
    assert not [answer for answer in shown if answer.status != 200 or key.encode() in answer.body]
    await trial.ask("DELETE", "/sessions/mine", headers=bearer(DATA))
    assert (await trial.turn("mine", HI, bearer(key))).status == 401
    assert await trial.open("mine") != key
    assert (await trial.turn("mine", HI, bearer(key))).status == 401


async def test_where_the_router_has_no_key_a_session_s_own_does_not_reach_a_worker(
    stage: Stage, worker: SimulatedWorker
) -> None:
    made = await session_trial(stage, worker)
    trial = Keyed(made.router, made.workers)
    key = await trial.open("mine")
    assert (await trial.turn("mine", HI, bearer(key))).status == 200
    assert "authorization" not in {name.decode().lower() for name, _ in trial.log[0].headers}


async def test_it_opens_what_its_agent_asks_and_stays_with_the_router(trial: Keyed) -> None:
    key = await trial.open("mine")
    asked = {CHAT: BODY, "/v1/completions": BODY, **ASKED, "/tokenize": {"prompt": "Hi"}, "/v1/models": None}
    for (path, body), way in itertools.product(asked.items(), ("Authorization", "X-Api-Key")):
        shown = bearer(key) if way == "Authorization" else [(way, key)]
        answer = await trial.ask("POST" if body else "GET", f"/sessions/mine{path}", body, shown)
        assert answer.status == 200, (path, way, answer.body)
    heads = [pair for exchange in trial.worker.log for pair in exchange.headers]
    assert not [value for _, value in heads if key.encode() in value]
    assert (await trial.turn("mine", HI, bearer(DATA))).status == 200, "the clients' key opens it as before"
    assert (await trial.ask("POST", "/sessions/mine/samples", {}, bearer(DATA))).json()["samples"]


async def test_within_its_session_there_is_nothing_but_what_agents_ask(trial: Keyed) -> None:
    key = await trial.open("mine")
    for path in ("/v1/rollout/pause", "/v1/unheard_of", "/v1/models/../samples", "/v1/load_lora_adapter"):
        assert (await trial.ask("POST", f"/sessions/mine{path}", {}, bearer(key))).status in (400, 404), path
    assert {each.path for each in trial.worker.log} <= BY_ITSELF, "what a router asks by itself"

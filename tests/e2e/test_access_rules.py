"""Access rules: the key that a path needs depends on what an engine would make of the path, however it is spelled."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.responses import JSONResponse
from starlette.routing import Route

from miles_router.engines.known import CONTROL, GENERATION, USUAL
from miles_router.settings.config import MiddlewareSpec
from tests.support.cache_trial import checkpoint
from tests.support.http import Pairs, RawReply, ask
from tests.support.plain_engine import TOLD, PlainEngine, plain_engine
from tests.support.running_router import RunningRouter
from tests.support.session_apis import case
from tests.support.session_trial import SESSIONS
from tests.support.spellings import some_spellings
from tests.support.stage import Stage

DATA: Pairs = [("Authorization", "Bearer data"), ("Content-Type", "application/json")]
ADMIN: Pairs = [("Authorization", "Bearer admin"), ("Content-Type", "application/json")]
KNOWN = [*CONTROL]
GENERATIONS = sorted(GENERATION)
WORKING = "tests.support.plugins.working"
SETTINGS: dict[str, Any] = {"api_key": "data", "admin_api_key": "admin"}


@pytest.fixture
async def engine() -> AsyncIterator[PlainEngine]:
    async with plain_engine() as started:
        yield started


async def with_sessions(stage: Stage, engine: PlainEngine, **settings: Any) -> RunningRouter:
    """A router in front of it that has a session `s`."""
    specs = (MiddlewareSpec(SESSIONS),)
    router = await stage.router(engine.url, middlewares=specs, hf_checkpoint=checkpoint(), **settings)
    assert (await router.ask("POST", "/sessions", DATA, b'{"session_id": "s"}')).status == 200
    engine.called.clear()
    return router


async def tried(router: RunningRouter, target: str, method: str = "POST", headers: Pairs = DATA) -> RawReply:
    return await router.ask(method, target, headers, b"{}")


def within(target: str) -> str:
    """A target beneath the session."""
    return target.replace("router.test", "router.test/sessions/s", 1) if "://" in target else f"/sessions/s{target}"


async def test_no_spelling_of_a_control_path_is_carried_out_with_the_key_of_clients(
    stage: Stage, engine: PlainEngine
) -> None:
    router = await with_sessions(stage, engine, **SETTINGS)
    for path in TOLD:
        with case(path):
            ways = some_spellings(path, TOLD)
            for target in (*ways, *map(within, ways)):
                answer = await tried(router, target)
                assert (engine.called, answer.status) in [([], status) for status in (400, 401, 404)], target
            for target in ways:
                assert (await tried(router, target, "GET")).status in (400, 401, 404), target
            assert engine.called == []


async def test_no_spelling_of_a_generation_passes_a_closed_gate(stage: Stage, engine: PlainEngine) -> None:
    router = await with_sessions(stage, engine, gate_max_held=0)
    for path in GENERATIONS:
        with case(path):
            assert (await tried(router, path)).status == 200
            assert engine.called == [path]
            assert (await router.ask("POST", "/pause_generation", DATA, b'{"mode": "abort"}')).status == 200
            engine.called.clear()
            for target in [each for way in some_spellings(path, GENERATIONS) for each in (way, within(way))]:
                answer = await tried(router, target)
                assert engine.called == [], target
                assert answer.status in (307, 400, 404, 503), target
            assert (await router.ask("POST", "/continue_generation", DATA, b"{}")).status == 200
            engine.called.clear()


@pytest.mark.parametrize("control", KNOWN)
async def test_an_escaped_letter_hides_no_control_path(stage: Stage, engine: PlainEngine, control: str) -> None:
    """Whoever may, controls the fleet by any spelling that says one thing: no worker gets it behind the gate's back."""
    router = await stage.router(engine.url)
    engine.called.clear()
    for target in (f"/%{ord(control[1]):02x}{control[2:]}", f"{control}?", f"http://router.test{control}"):
        await router.ask("POST", target, DATA, b'{"mode": "abort", "rid": "x", "model_path": "m", "new_version": "1"}')
    own = {each.path for each in USUAL.control}  # what other engines spell otherwise comes as this one spells it
    assert engine.called == [control] * 3 or control == "/abort_request" or control not in own
    assert {*engine.called} <= own
    assert router.app.router.gate.pauses == 3 * (control in ("/pause_generation", "/pause"))


async def test_what_goes_on_is_spelled_as_it_came(stage: Stage) -> None:
    worker = await stage.worker()
    router = await stage.router(worker)
    for target in ("/%67enerate", "/v1/models/Qwen%2FQwen3-4B", "/generate?", "/a%20b?c=%2F%0a"):
        await tried(router, target)
        assert worker.requests[-1].target == target.encode()


async def test_a_model_with_a_slash_in_its_name_is_found(stage: Stage, engine: PlainEngine) -> None:
    router = await with_sessions(stage, engine, **SETTINGS)
    for target in ("/v1/models/Qwen%2FQwen3-4B", "/sessions/s/v1/models/Qwen%2FQwen3-4B"):
        assert (await tried(router, target, "GET")).json()["model"] == "Qwen/Qwen3-4B"


LISTED = [
    "/generate",
    "/v1/chat/completions",
    "/v1/models",
    "/v1/models/m",
    "/v1/responses/r",
    "/tokenize",
    "/v1/score",
]
CLOSED = [
    "/",
    "/generate/",
    "/v1/responses/",
    "/v1/models/m/",
    "/server_info",
    "/get_server_info",
    "/v1/loads",
    "/health_generate",
    "/health/x",
    "/workers_",
    "/metrics/x",
]


async def test_the_key_of_clients_opens_a_list_and_the_key_of_administration_the_rest(stage: Stage) -> None:
    worker = await stage.worker()
    router = await stage.router(worker, **SETTINGS)
    for path in LISTED:
        assert (await tried(router, path)).status == 200
        assert (await tried(router, path, headers=ADMIN)).status == 401
    for path in CLOSED:
        assert (await tried(router, path)).error_type == "unauthorized", path
        assert (await tried(router, path, headers=ADMIN)).status == 200
    assert [request.path for request in worker.requests] == [*LISTED, *CLOSED]
    assert not any(b"Bearer" in request.head for request in worker.requests)


async def test_data_paths_adds_to_that_list(stage: Stage) -> None:
    worker = await stage.worker()
    router = await stage.router(worker, **SETTINGS, data_paths=("/v1/audio/", "/separate_reasoning"))
    tries = ["/v1/audio/transcriptions", "/separate_reasoning", "/separate_reasoning/x", "/v1/audio"]
    assert [(await tried(router, path)).status for path in tries] == [200, 200, 401, 401]


async def test_with_an_admin_key_alone_the_list_is_open_and_nothing_else(stage: Stage) -> None:
    worker = await stage.worker()
    router = await stage.router(worker, admin_api_key="admin")
    assert [(await tried(router, path, headers=[])).status for path in ("/generate", "/server_info")] == [200, 401]


async def test_middleware_routes_are_open_to_clients_and_their_neighbours_are_not(stage: Stage) -> None:
    worker = await stage.worker()
    own = {"power": "routes", "given": [Route("/odd/{name}/", JSONResponse({}))]}
    specs = (MiddlewareSpec(f"{WORKING}.Tagging"), MiddlewareSpec(f"{WORKING}.Odd", own))
    router = await stage.router(worker, middlewares=specs, **SETTINGS)
    tries = ["/tagging/x", "/odd/x/", "/tagging/x/y", "/tagging/x/", "/odd/x"]
    assert [(await tried(router, path, "GET")).status for path in tries] == [200, 200, 401, 401, 401]
    assert worker.requests == []


async def test_what_a_middleware_answers_inside_the_stack_is_open_where_it_says_so(stage: Stage) -> None:
    specs = (MiddlewareSpec("tests.support.plugins.working.Inside"),)
    router = await stage.router(await stage.worker(), middlewares=specs, **SETTINGS)
    tries = ["/inside/x/y", "/v1/exactly", "/inside", "/v1/exactly/x", "/v1/other"]
    assert [(await tried(router, path)).status for path in tries] == [200, 200, 401, 401, 401]


async def test_a_session_is_found_under_escaped_letters_too(stage: Stage, engine: PlainEngine) -> None:
    router = await with_sessions(stage, engine, **SETTINGS)
    assert (await tried(router, "/%73essions/%73/v1/%6dodels", "GET")).json()["called"] == "/v1/models"


@pytest.mark.parametrize("headers", [[("X-Override-Rid", "theirs"), ("x-override-priority", "9")]])
async def test_what_overrides_an_engines_choices_takes_the_key_of_administration(
    stage: Stage, headers: list[tuple[str, str]]
) -> None:
    worker = await stage.worker()
    router = await stage.router(worker, **SETTINGS)
    for more in ([], [("X-Api-Key", "admin")]):
        assert (await router.ask("POST", "/generate", [*DATA, *headers, *more], b"{}")).status == 200
    without, with_them = worker.requests
    assert (without.values("x-override-rid"), without.values("x-override-priority")) == ([], [])
    assert (with_them.values("x-override-rid"), with_them.values("x-override-priority")) == ([b"theirs"], [b"9"])


FOREIGN: list[Pairs] = [
    [("Origin", "https://evil.test")],
    [("Origin", "null")],
    [("Origin", "http://router.test:8080")],
    [("Origin", "http://router.test"), ("Origin", "http://evil.test")],
    [("Sec-Fetch-Site", "cross-site")],
]
CHANGES = [
    ("POST", "/add_worker?url=http://10.9.8.7:1"),
    ("POST", "/workers?url=http://10.9.8.7:1"),
    ("DELETE", "/workers/abc"),
    ("POST", "/remove_worker?url=http://10.9.8.7:1"),
    ("POST", "/flush_cache"),
    ("GET", "/flush_cache"),
    ("POST", "/pause_generation"),
    ("POST", "/sessions"),
    ("DELETE", "/sessions/s"),
    ("POST", "/update_weights_from_tensor"),
]


async def test_without_a_key_a_page_of_somebody_else_changes_nothing(stage: Stage, engine: PlainEngine) -> None:
    router = await with_sessions(stage, engine)
    for headers in FOREIGN:
        with case(headers):
            engine.called.clear()
            for method, target in CHANGES:
                answer = await router.ask(method, target, headers, b"{}")
                assert (answer.status, answer.error_type) == (403, "unauthorized"), target
            assert (engine.called, [worker.url for worker in router.pool]) == ([], [engine.url])
            assert (await router.ask("GET", "/sessions/s")).status == 200
            for method, target in (("GET", "/list_workers"), ("GET", "/health"), ("POST", "/generate")):
                assert (await router.ask(method, target, headers, b"{}")).status == 200


@pytest.mark.parametrize(
    ("headers", "settings"),
    [
        ([], {}),
        ([("Origin", "http://router.test")], {}),
        ([("Origin", "HTTP://Router.test:80"), ("Sec-Fetch-Site", "same-origin")], {}),
        ([("Origin", "https://public.test")], {"public_url": "https://public.test:443/"}),
        ([("Origin", "https://evil.test"), *DATA], {"api_key": "data"}),
    ],
    ids=["a program", "its own page", "its own page in full", "behind TLS", "with the key"],
)
async def test_whose_wish_it_is_may_change_the_fleet(stage: Stage, headers: Pairs, settings: dict[str, Any]) -> None:
    router = await stage.router(connect_timeout=0.05, **settings)
    assert (await router.ask("POST", "/add_worker?url=http://127.0.0.1:1", headers)).status == 200


async def made_at(router: RunningRouter, host: str | None) -> RawReply:
    headers = [] if host is None else [("Host", host)]
    return await ask(router.url, "POST", "/sessions", headers, b"{}")


async def test_a_session_is_at_the_address_that_its_maker_used(stage: Stage, engine: PlainEngine) -> None:
    router = await with_sessions(stage, engine)
    for host in ["router.test", "router.test:8080", "10.0.0.7:80", "[::1]:31000", "my_router-1"]:
        with case(host):
            assert (await made_at(router, host)).json()["base_url"].startswith(f"http://{host}/sessions/")


async def test_an_address_that_is_none_makes_no_session(stage: Stage, engine: PlainEngine) -> None:
    router = await with_sessions(stage, engine)
    for host in [
        "a b",
        "evil.test/x?",
        "user@evil.test",
        "a,b",
        "evil.test#",
        "[::1",
        "x:y",
        "é",
        "%41",
        "x:99999",
        "x:0",
        "x:",
    ]:
        with case(host):
            answer = await made_at(router, host)
            assert (answer.status, answer.error_type) == (400, "invalid_request")
            assert len((await router.ask("GET", "/sessions")).json()["sessions"]) == 1


async def test_an_absolute_target_says_the_address_whatever_host_says(stage: Stage, engine: PlainEngine) -> None:
    router = await with_sessions(stage, engine)
    for target, authority in [
        ("http://router.test:8080/sessions", "router.test:8080"),
        ("http://router.test/sessions", "router.test"),
        ("HTTP://somebody@[::1]:31000/sessions", "[::1]:31000"),
    ]:
        with case(target, authority):
            answer = await router.ask("POST", target, [("Host", "elsewhere.test")], b"{}")
            assert answer.json()["base_url"].startswith(f"http://{authority}/sessions/")
            answer = await router.ask("POST", "http://router.test:99999/sessions", [("Host", "router.test")], b"{}")
            assert (answer.status, answer.error_type) == (400, "invalid_request")


@pytest.mark.parametrize("public", ["https://rollouts.test", "https://rollouts.test/router/"])
async def test_behind_tls_a_session_is_at_the_public_address(stage: Stage, engine: PlainEngine, public: str) -> None:
    router = await with_sessions(stage, engine, public_url=public)
    base_url = (await made_at(router, "10.0.0.7:31000")).json()["base_url"]
    assert base_url.startswith(f"{public.rstrip('/')}/sessions/")
    assert base_url.endswith("/v1")

"""Keys, and which one a path needs: that depends on what an engine would make of it, however it is spelled."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import JSONResponse
from starlette.routing import Route

from miles_router.engines.known import CONTROL, GENERATION, USUAL
from miles_router.settings.config import MiddlewareSpec
from tests.support.cache_trial import checkpoint
from tests.support.http import Pairs, RawReply
from tests.support.plain_engine import TOLD, PlainEngine, plain_engine
from tests.support.running_router import RunningRouter
from tests.support.session_apis import case
from tests.support.session_trial import SESSIONS
from tests.support.spellings import some_spellings
from tests.support.stage import Stage

DATA: Pairs = [("Authorization", "Bearer data"), ("Content-Type", "application/json")]
ADMIN: Pairs = [("Authorization", "Bearer admin"), ("Content-Type", "application/json")]
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


async def test_an_escaped_letter_hides_no_control_path(stage: Stage, engine: PlainEngine) -> None:
    """Whoever may, controls the fleet by any spelling that says one thing: no worker gets it behind the gate's back."""
    own = {each.path for each in USUAL.control}  # what other engines spell otherwise comes as this one spells it
    router = await stage.router(engine.url)
    for control in CONTROL:
        with case(control):
            engine.called.clear()
            pauses = router.app.router.gate.pauses
            for target in (f"/%{ord(control[1]):02x}{control[2:]}", f"{control}?", f"http://router.test{control}"):
                body = b'{"mode": "abort", "rid": "x", "model_path": "m", "new_version": "1"}'
                await router.ask("POST", target, DATA, body)
            assert engine.called == [control] * 3 or control == "/abort_request" or control not in own
            assert {*engine.called} <= own
            assert router.app.router.gate.pauses - pauses == 3 * (control in ("/pause_generation", "/pause"))


async def test_models_and_sessions_are_found_under_escaped_letters(stage: Stage, engine: PlainEngine) -> None:
    router = await with_sessions(stage, engine, **SETTINGS)
    for target in ("/v1/models/Qwen%2FQwen3-4B", "/sessions/s/v1/models/Qwen%2FQwen3-4B"):
        assert (await tried(router, target, "GET")).json()["model"] == "Qwen/Qwen3-4B"
    assert (await tried(router, "/%73essions/%73/v1/%6dodels", "GET")).json()["called"] == "/v1/models"


LISTED = "/generate /v1/chat/completions /v1/models /v1/models/m /v1/responses/r /tokenize /v1/score"
CLOSED = """/ /generate/ /v1/responses/ /v1/models/m/ /server_info /get_server_info /v1/loads /health_generate /health/x
    /workers_ /metrics/x /router/other /list_workers/"""


async def test_the_key_of_clients_opens_a_list_and_the_key_of_administration_the_rest(stage: Stage) -> None:
    worker, router = await stage.worker_and_router(**SETTINGS)
    for path in LISTED.split():
        assert (await tried(router, path)).status == 200
        assert (await tried(router, path, headers=ADMIN)).status == 401
    for path in CLOSED.split():
        assert (await tried(router, path)).error_type == "unauthorized", path
        assert (await tried(router, path, headers=ADMIN)).status == 200
    assert [request.path for request in worker.requests] == [*LISTED.split(), *CLOSED.split()]
    assert not any(b"Bearer" in request.head for request in worker.requests)


#: What is open by default and by what was set: settings, headers, and the status of each path.
OPENED: list[tuple[dict[str, Any], Pairs, dict[str, int]]] = [
    (
        {**SETTINGS, "data_paths": ("/v1/audio/", "/separate_reasoning")},
        DATA,
        {"/v1/audio/x": 200, "/separate_reasoning": 200, "/separate_reasoning/x": 401, "/v1/audio": 401},
    ),
    ({"admin_api_key": "admin"}, [], {"/generate": 200, "/server_info": 401}),
    (
        {**SETTINGS, "middlewares": (MiddlewareSpec(f"{WORKING}.Inside"),)},
        DATA,
        {"/inside/x/y": 200, "/v1/exactly": 200, "/inside": 401, "/v1/exactly/x": 401, "/v1/other": 401},
    ),
]


async def test_settings_and_middlewares_add_to_that_list(stage: Stage) -> None:
    worker = await stage.worker()
    for settings, headers, statuses in OPENED:
        with case(settings):
            router = await stage.router(worker, **settings)
            assert {path: (await tried(router, path, headers=headers)).status for path in statuses} == statuses


@pytest.mark.alone("a route is no setting that a file can hold")
async def test_middleware_routes_are_open_to_clients_and_their_neighbours_are_not(stage: Stage) -> None:
    worker = await stage.worker()
    own = {"power": "routes", "given": [Route("/odd/{name}/", JSONResponse({}))]}
    specs = (MiddlewareSpec(f"{WORKING}.Tagging"), MiddlewareSpec(f"{WORKING}.Odd", own))
    router = await stage.router(worker, middlewares=specs, **SETTINGS)
    tries = ["/tagging/x", "/odd/x/", "/tagging/x/y", "/tagging/x/", "/odd/x"]
    assert [(await tried(router, path, "GET")).status for path in tries] == [200, 200, 401, 401, 401]
    assert worker.requests == []


async def test_what_overrides_an_engines_choices_takes_the_key_of_administration(stage: Stage) -> None:
    worker, router = await stage.worker_and_router(**SETTINGS)
    headers = [("X-Override-Rid", "theirs"), ("x-override-priority", "9")]
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


ALLOWED: list[tuple[Pairs, dict[str, Any]]] = [
    ([], {}),  # a program
    ([("Origin", "HTTP://Router.test:80"), ("Sec-Fetch-Site", "same-origin")], {}),
    ([("Origin", "https://public.test")], {"public_url": "https://public.test:443/"}),
    ([("Origin", "https://evil.test"), *DATA], {"api_key": "data"}),
]


async def test_whose_wish_it_is_may_change_the_fleet(stage: Stage) -> None:
    for headers, settings in ALLOWED:
        with case(headers):
            router = await stage.router(connect_timeout=0.05, **settings)
            assert (await router.ask("POST", "/add_worker?url=http://127.0.0.1:1", headers)).status == 200


# Where a session is


async def made_at(router: RunningRouter, host: str, target: str = "/sessions") -> RawReply:
    return await router.ask("POST", target, [("Host", host)], b"{}")


async def test_a_session_is_at_the_address_that_its_maker_used(stage: Stage, engine: PlainEngine) -> None:
    router = await with_sessions(stage, engine)
    hosts = ("router.test", "router.test:8080", "10.0.0.7:80", "[::1]:31000", "my_router-1")
    absolute = (("http://router.test:8080", "router.test:8080"), ("HTTP://somebody@[::1]:31000", "[::1]:31000"))
    for target, host, authority in [
        *(("/sessions", host, host) for host in hosts),
        *((f"{target}/sessions", "elsewhere.test", authority) for target, authority in absolute),
    ]:
        with case(target, host):
            base_url = (await made_at(router, host, target)).json()["base_url"]
            assert base_url.startswith(f"http://{authority}/sessions/")


BAD_HOSTS = ("a b", "evil.test/x?", "user@evil.test", "a,b", "evil.test#", "[::1", "x:y", "é", "%41", "x:99999", "x:")


async def test_an_address_that_is_none_makes_no_session(stage: Stage, engine: PlainEngine) -> None:
    router = await with_sessions(stage, engine)
    for host, target in [*((host, "/sessions") for host in BAD_HOSTS), ("a", "http://router.test:99999/sessions")]:
        with case(host, target):
            answer = await made_at(router, host, target)
            assert (answer.status, answer.error_type) == (400, "invalid_request")
            assert len((await router.ask("GET", "/sessions")).json()["sessions"]) == 1


@pytest.mark.parametrize("public", ["https://rollouts.test", "https://rollouts.test/router/"])
async def test_behind_tls_a_session_is_at_the_public_address(stage: Stage, engine: PlainEngine, public: str) -> None:
    router = await with_sessions(stage, engine, public_url=public)
    base_url = (await made_at(router, "10.0.0.7:31000")).json()["base_url"]
    assert base_url.startswith(f"{public.rstrip('/')}/sessions/")
    assert base_url.endswith("/v1")


# Keys


def bearer(key: str) -> Pairs:
    return [("Authorization", f"Bearer {key}")]


WRONG: list[Pairs] = [
    [],
    *map(bearer, ("datb", "dat", "data2", "", "DATA", "caf\xe9")),
    [("Authorization", "Basic data")],
    [("Authorization", "data")],
    [("X-Other-Key", "data")],
]


async def test_without_the_right_key_nothing_is_forwarded(stage: Stage) -> None:
    worker, router = await stage.worker_and_router(api_key="data")
    for headers in WRONG:
        with case(headers):
            answer = await router.ask("POST", "/generate", headers, b"{}")
            assert (answer.status, answer.error_type) == (401, "unauthorized")
            assert answer.value("www-authenticate") == b"Bearer"
            assert worker.requests == []


async def test_the_right_key_opens_and_stays_with_the_router(stage: Stage) -> None:
    worker, router = await stage.worker_and_router(api_key="data-key")
    for headers in [bearer("data-key"), [("authorization", "bearer  data-key")], [("X-Api-Key", "data-key")]]:
        with case(headers):
            assert (await router.ask("POST", "/generate", headers, b"{}")).status == 200
            assert b"data-key" not in worker.requests[-1].head
    for target in ("/workers", "/router/info"):  # where there is no other key
        assert [(await router.ask("GET", target, each)).status for each in ([], bearer("data-key"))] == [401, 200]
    router = await stage.router(worker, admin_api_key="admin")
    await router.ask("POST", "/generate", bearer("for the worker"), b"{}")
    assert worker.requests[-1].values("authorization") == [b"Bearer for the worker"], "its own business"


#: What stands behind is one worker's at most, which does not answer.
ADMIN_ROUTES = """
    POST /add_worker?url=http://127.0.0.7:1
    POST /remove_worker?url=http://127.0.0.7:1
    GET /list_workers
    GET /workers
    POST /workers?url=http://127.0.0.7:1
    GET /workers/abc
    DELETE /workers/abc
    GET /router/info
    GET /metrics
    GET /router/episodes
    GET /router/run
    GET /engine_metrics
"""


async def test_administration_takes_the_admin_key_alone(stage: Stage) -> None:
    router = await stage.router("http://127.0.0.7:2", **SETTINGS, connect_timeout=0.05)
    for method, target in map(str.split, ADMIN_ROUTES.strip().splitlines()):
        with case(method, target):
            for headers in ([], bearer("data"), bearer("wrong")):
                answer = await router.ask(method, target, headers)
                assert (answer.status, answer.error_type) == (401, "unauthorized")
    assert (await router.ask("GET", "/list_workers", bearer("admin"))).json()["urls"] == ["http://127.0.0.7:2"]
    for method, target in map(str.split, ADMIN_ROUTES.strip().splitlines()):
        with case(method, target):
            assert (await router.ask(method, target, bearer("admin"))).status in (200, 201, 404, 502)


async def test_health_needs_no_key_and_tells_no_secret(stage: Stage) -> None:
    worker, router = await stage.worker_and_router(**SETTINGS)
    for path in ("/health", "/liveness", "/readiness"):
        answer = await router.ask("GET", path)
        assert (answer.status, worker.url.encode() in answer.body) == (200, False), path
    for path in ("/health/x", "/health;x", "/readiness/", "/dashboard/x", "/liveness/x/"):
        assert (await router.ask("POST", path, body=b"{}")).status == 401, path
    assert worker.requests == []


async def test_keys_from_files_open_each_alone_and_stay_with_the_router(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("new-data\n\n  old-data  \n")
    (tmp_path / "admin").write_text("new-admin\r\nold-admin")
    files = {"api_key_file": str(tmp_path / "data"), "admin_api_key_file": str(tmp_path / "admin")}
    worker, router = await stage.worker_and_router(api_key="data", **files)
    for key, statuses in (
        *((key, (200, 401)) for key in ("new-data", "old-data", "data")),
        *((key, (401, 200)) for key in ("new-admin", "old-admin")),
    ):
        assert (await router.ask("POST", "/generate", bearer(key), b"{}")).status == statuses[0]
        assert (await router.ask("GET", "/workers", bearer(key))).status == statuses[1]
    assert not any(b"uthorization" in request.head for request in worker.requests)

"""Two keys: one for clients, one for administration; neither reaches a worker."""

from __future__ import annotations

from pathlib import Path

from tests.support.http import Pairs
from tests.support.running_router import RunningRouter
from tests.support.session_apis import case
from tests.support.stage import Stage

DATA, ADMIN = "data-key", "admin-key"
ADMIN_ROUTES = [
    ("POST", "/add_worker?url=http://127.0.0.7:1"),
    ("POST", "/remove_worker?url=http://127.0.0.7:1"),
    ("GET", "/list_workers"),
    ("GET", "/workers"),
    ("POST", "/workers?url=http://127.0.0.7:1"),
    ("GET", "/workers/abc"),
    ("DELETE", "/workers/abc"),
    ("GET", "/router/info"),
    ("GET", "/metrics"),
]
OPEN_ROUTES = ["/health", "/liveness", "/readiness"]


def bearer(key: str) -> Pairs:
    return [("Authorization", f"Bearer {key}")]


WRONG: dict[str, Pairs] = {
    "none": [],
    "another": bearer("data-kex"),
    "a prefix": bearer("data-ke"),
    "longer": bearer("data-key2"),
    "empty": bearer(""),
    "another scheme": [("Authorization", f"Basic {DATA}")],
    "no scheme": [("Authorization", DATA)],
    "other case": bearer(DATA.upper()),
    "not ascii": bearer("caf\xe9"),
    "in the query's place": [("X-Other-Key", DATA)],
}


async def urls(router: RunningRouter, key: str) -> list[str]:
    found: list[str] = (await router.ask("GET", "/list_workers", bearer(key))).json()["urls"]
    return found


async def test_without_the_right_key_nothing_is_forwarded(stage: Stage) -> None:
    worker = await stage.worker()
    router = await stage.router(worker, api_key=DATA)
    for name, headers in WRONG.items():
        with case(name):
            answer = await router.ask("POST", "/generate", headers, b"{}")
            assert (answer.status, answer.error_type, answer.value("www-authenticate")) == (
                401,
                "unauthorized",
                b"Bearer",
            )
            assert worker.requests == []


async def test_the_right_key_opens_and_stays_with_the_router(stage: Stage) -> None:
    worker = await stage.worker()
    router = await stage.router(worker, api_key=DATA)
    for headers in [bearer(DATA), [("authorization", f"bearer  {DATA}")], [("X-Api-Key", DATA)]]:
        with case(headers):
            assert (await router.ask("POST", "/generate", headers, b"{}")).status == 200
            assert DATA.encode() not in worker.requests[-1].head


async def test_without_a_data_key_the_clients_credentials_are_the_workers_business(stage: Stage) -> None:
    worker = await stage.worker()
    router = await stage.router(worker, admin_api_key=ADMIN)
    await router.ask("POST", "/generate", bearer("for the worker"), b"{}")
    assert worker.requests[0].values("authorization") == [b"Bearer for the worker"]


async def test_administration_takes_the_admin_key_alone(stage: Stage) -> None:
    for method, path in ADMIN_ROUTES:
        with case(method, path):
            router = await stage.router("http://127.0.0.7:2", api_key=DATA, admin_api_key=ADMIN, connect_timeout=0.05)
            for headers in ([], bearer(DATA), bearer("wrong")):
                answer = await router.ask(method, path, headers)
                assert (answer.status, answer.error_type) == (401, "unauthorized")
            assert await urls(router, ADMIN) == ["http://127.0.0.7:2"]
            assert (await router.ask(method, path, bearer(ADMIN))).status in (200, 201, 404)


async def test_administration_is_never_more_open_than_the_data_plane(stage: Stage) -> None:
    router = await stage.router(api_key=DATA)
    assert (await router.ask("GET", "/workers")).status == 401
    assert (await router.ask("GET", "/workers", bearer(DATA))).status == 200


async def test_health_needs_no_key_and_tells_no_secret(stage: Stage) -> None:
    worker = await stage.worker()
    router = await stage.router(worker, api_key=DATA, admin_api_key=ADMIN)
    for path in OPEN_ROUTES:
        with case(path):
            answer = await router.ask("GET", path)
            assert answer.status == 200
            assert worker.url.encode() not in answer.body


async def test_what_lies_behind_an_open_route_is_not_open(stage: Stage) -> None:
    worker = await stage.worker()
    router = await stage.router(worker, api_key=DATA, admin_api_key=ADMIN)
    for path in ["/health/x", "/health;x", "/readiness/", "/dashboard/x", "/liveness/x/"]:
        with case(path):
            assert (await router.ask("POST", path, body=b"{}")).status == 401
            assert worker.requests == []


async def test_what_lies_behind_an_admin_route_goes_to_a_worker_with_the_same_key(stage: Stage) -> None:
    worker = await stage.worker()
    router = await stage.router(worker, api_key=DATA, admin_api_key=ADMIN)
    for path in ["/metrics/x", "/router/other", "/list_workers/"]:
        with case(path):
            assert [(await router.ask("GET", path, headers)).status for headers in ([], bearer(DATA))] == [401, 401]
            assert (await router.ask("GET", path, bearer(ADMIN))).status == 200
            assert worker.requests.pop().target.decode() == path
            assert worker.requests == []


async def test_keys_from_files_open_each_alone_and_stay_with_the_router(stage: Stage, tmp_path: Path) -> None:
    (tmp_path / "data").write_text("new-data\n\n  old-data  \n")
    (tmp_path / "admin").write_text("new-admin\r\nold-admin")
    files = {"api_key_file": str(tmp_path / "data"), "admin_api_key_file": str(tmp_path / "admin")}
    worker = await stage.worker()
    router = await stage.router(worker, api_key=DATA, **files)
    for key in ("new-data", "old-data", DATA):
        assert (await router.ask("POST", "/generate", bearer(key), b"{}")).status == 200
        assert (await router.ask("GET", "/workers", bearer(key))).status == 401
    for key in ("new-admin", "old-admin"):
        assert (await router.ask("GET", "/workers", bearer(key))).status == 200
        assert (await router.ask("POST", "/generate", bearer(key), b"{}")).status == 401
    assert not any(b"uthorization" in request.head for request in worker.requests)

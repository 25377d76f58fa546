"""Worker administration in every spelling, and the router's own routes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.fleet import until_health
from tests.support.http import RawReply, request
from tests.support.metrics import metric, total
from tests.support.running_router import RunningRouter
from tests.support.scripted_worker import HANG, script
from tests.support.session_apis import case
from tests.support.stage import Stage
from tests.support.waiting import until

ONE, TWO = "http://127.0.0.7:30000", "https://127.0.0.8:8443/engine"
BAD_URLS = [
    *("", " ", "127.0.0.7:30000", "ftp://127.0.0.7", "http://", "http://:30000", "http://host:port", "http://host:0"),
    *("http://host:65536", "http://[::1", "http://user:password@host", "http://host/?query", "http://host/#fragment"),
    *("http://ho st", "http://host\r\nX-Injected: 1", "http://host/" + "x" * 3000, "http://a..b:30000"),
    "http://" + "x" * 64 + ".example",
]
BAD_BODIES = [b"not json", b"[]", b'"http://host"', b"{}", b'{"url": null}', b'{"url": 7}', b'{"url": ["http://a"]}']


def in_json(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


async def post(router: RunningRouter, path: str, body: bytes | None = None) -> RawReply:
    return await router.ask("POST", path, [("Content-Type", "application/json")] if body else (), body)


async def listed(router: RunningRouter) -> list[str]:
    urls: list[str] = (await router.ask("GET", "/list_workers")).json()["urls"]
    return urls


@pytest.fixture
async def router(stage: Stage) -> RunningRouter:
    """One whose workers need not exist: none is asked for anything in time."""
    return await stage.router(health_check_timeout=0.05, connect_timeout=0.05)


# Registration, the spelling of slime and miles


async def test_a_worker_registers_by_query_or_body_under_either_name(router: RunningRouter) -> None:
    for path, body in [
        (f"/add_worker?worker_url={ONE}", None),
        ("/add_worker?url=http%3A%2F%2F127.0.0.7%3A30000", None),
        ("/add_worker", in_json(worker_url=ONE)),
        ("/add_worker", in_json(url=ONE + "/")),
        (f"/add_worker?url={ONE}/", b""),
    ]:
        with case(path, body):
            answer = await post(router, path, body)
            assert (answer.status, answer.json()) == (200, {"status": "success", "worker_urls": {ONE: 0}})
            assert await listed(router) == [ONE]
            assert (await post(router, f"/remove_worker?url={ONE}")).status == 200


async def test_a_url_is_normalised(router: RunningRouter) -> None:
    for given, normal in [
        ("http://127.0.0.7:80", "http://127.0.0.7"),
        ("https://127.0.0.7:443/", "https://127.0.0.7"),
        ("HTTP://LOCALHOST:9", "http://localhost:9"),
        ("http://127.0.0.7:8000/engines/0//", "http://127.0.0.7:8000/engines/0"),
        ("http://[2001:DB8::1]:8000/", "http://[2001:db8::1]:8000"),
        ("  http://127.0.0.7:8000\n", "http://127.0.0.7:8000"),
    ]:
        with case(given, normal):
            answer = await post(router, "/add_worker", in_json(url=given))
            assert (answer.status, list(answer.json()["worker_urls"])) == (200, [normal])
            assert (await post(router, "/remove_worker", in_json(url=normal))).status == 200


async def test_a_malformed_url_is_400_and_changes_nothing(router: RunningRouter) -> None:
    await post(router, "/add_worker", in_json(url=ONE))
    for path in ["/add_worker", "/workers", "/remove_worker"]:
        with case(path):
            for url in BAD_URLS:
                answer = await post(router, path, in_json(url=url))
                assert (answer.status, answer.error_type) == (400, "invalid_request"), url
            assert await listed(router) == [ONE]


async def test_a_missing_url_or_a_body_that_is_no_object_is_400_and_changes_nothing(router: RunningRouter) -> None:
    await post(router, "/add_worker", in_json(url=ONE))
    for path in ["/add_worker", "/workers", "/remove_worker"]:
        with case(path):
            for body in (None, *BAD_BODIES):
                answer = await post(router, path, body)
                assert (answer.status, answer.error_type) == (400, "invalid_request"), body
            for body in (b"[]", b"not json"):  # whatever the query says
                assert (await post(router, f"{path}?url={TWO}", body)).status == 400
            assert await listed(router) == [ONE]


# Removal


async def test_a_worker_is_removed_by_query_or_body_under_either_name(router: RunningRouter) -> None:
    for path, body in [
        (f"/remove_worker?worker_url={ONE}/", None),
        ("/remove_worker", in_json(url=ONE)),
        ("/remove_worker", in_json(worker_url=ONE, drain=True)),
        (f"/remove_worker?url={ONE}&drain=false", None),
    ]:
        with case(path, body):
            await post(router, "/add_worker", in_json(url=ONE))
            await post(router, "/add_worker", in_json(url=TWO))
            assert (await post(router, path, body)).status == 200
            assert await listed(router) == [TWO]


# The REST form


async def test_the_rest_form_creates_shows_lists_and_deletes(router: RunningRouter) -> None:
    created = await post(router, "/workers", in_json(url=TWO, worker_type="regular", bootstrap_port=9000, api_key="k"))
    assert created.status in (200, 201)
    worker = created.json()
    expected = {"id", "url", "state", "in_flight", "weight_version", "failures", "last_check"}
    assert expected <= set(worker)
    assert (worker["url"], worker["state"], worker["in_flight"], worker["failures"]) == (TWO, "ready", 0, 0)
    assert worker["bootstrap_port"] == 9000
    assert "k" not in worker.values()
    shown = await router.ask("GET", f"/workers/{worker['id']}")
    assert (shown.status, shown.json()["url"]) == (200, TWO)
    assert [each["id"] for each in (await router.ask("GET", "/workers")).json()["workers"]] == [worker["id"]]
    assert (await router.ask("DELETE", f"/workers/{worker['id']}")).status == 200
    assert (await router.ask("GET", "/workers")).json()["workers"] == []
    assert (await router.ask("GET", f"/workers/{worker['id']}")).status == 404
    assert (await router.ask("DELETE", f"/workers/{worker['id']}")).status == 404


@pytest.mark.parametrize("spelled", ["http%3A%2F%2F10.9.8.7%3A30000", "HTTP:%2f%2f10.9.8.7:30000%2F"])
async def test_a_workers_url_stands_for_its_id_in_a_path(stage: Stage, spelled: str) -> None:
    other = await stage.worker()
    router = await stage.router(other, "http://10.9.8.7:30000", connect_timeout=0.05)
    assert (await router.ask("GET", f"/workers/{spelled}")).json()["url"] == "http://10.9.8.7:30000"
    assert (await router.ask("DELETE", f"/workers/{spelled}?drain=true")).json()["url"] == "http://10.9.8.7:30000"
    assert (await router.ask("DELETE", f"/workers/{spelled}")).error_type == "not_found"
    assert [worker.url for worker in router.pool] == [other.url]


async def test_what_lies_beneath_the_workers_is_the_routers_own(stage: Stage) -> None:
    worker, router = await stage.worker_and_router()
    for path, status in [
        ("a/b", 404),
        ("", 404),
        ("x/y%2Fz", 400),
        ("http://10.9.8.7:1", 400),
        ("ftp%3A%2F%2Fx", 400),
        ("a%0a", 400),
    ]:
        with case(path, status):
            for method in ("GET", "DELETE"):
                assert (await router.ask(method, f"/workers/{path}")).status == status
            assert worker.requests == []


BAD_ATTRIBUTES: list[dict[str, Any]] = [
    {"api_key": 7},
    {"api_key": "a\nb"},
    {"worker_type": "prefill"},
    {"labels": "x" * 9999},
]


async def test_attributes_that_cannot_be_used_are_400_and_register_nothing(router: RunningRouter) -> None:
    for fields in BAD_ATTRIBUTES:
        with case(fields):
            answer = await post(router, "/workers", in_json(url=ONE, **fields))
            assert (answer.status, answer.error_type, await listed(router)) == (400, "invalid_request", [])


async def test_a_workers_own_key_is_sent_to_it_and_shown_to_nobody(stage: Stage) -> None:
    worker = await stage.worker()
    router = await stage.router()
    await post(router, "/workers", in_json(url=worker.url, api_key="worker-secret"))
    await router.ask("POST", "/generate", [("Authorization", "Bearer of-the-client")], b"{}")
    await until(lambda: worker.probes, "the worker was probed")
    for received in (worker.requests[0], worker.probes[0]):
        assert received.values("authorization") == [b"Bearer worker-secret"]
    for path in ("/workers", "/router/info", "/metrics", "/list_workers"):
        assert b"worker-secret" not in (await router.ask("GET", path)).body


# The router's own routes


async def test_readiness_needs_a_routable_worker(stage: Stage) -> None:
    worker = await stage.worker()
    router = await stage.router(health_check_failure_threshold=1)
    assert (await router.ask("GET", "/readiness")).status == 503
    await post(router, f"/add_worker?url={worker.url}")
    ready = await router.ask("GET", "/readiness")
    assert (ready.status, ready.json()["workers_routable"]) == (200, 1)
    router.pool.record_failure(router.worker(worker), "test")
    assert (await router.ask("GET", "/readiness")).status == 503
    assert (await router.ask("GET", "/health")).status == 200


async def test_in_flight_requests_are_counted_everywhere_they_are_shown(stage: Stage) -> None:
    worker = (await stage.worker()).always(script(HANG))
    router = await stage.router(worker)
    clients = [await stage.client(router) for _ in range(3)]
    for client in clients:
        await client.send(request("POST", "/generate", body=b"{}"))
    await until(lambda: worker.busy == 3, "the worker has three requests")
    await until_health(router, in_flight=3)
    assert (await router.ask("GET", "/workers")).json()["workers"][0]["in_flight"] == 3
    assert (await post(router, f"/add_worker?url={worker.url}")).json()["worker_urls"] == {worker.url: 3}
    assert await metric(router, "miles_router_in_flight", worker=worker.url) == 3
    for client in clients:
        client.abort()


async def test_info_shows_version_workers_and_settings_but_no_key(stage: Stage) -> None:
    router = await stage.router(ONE, admin_api_key="admin-secret", health_check_timeout=0.05, connect_timeout=0.05)
    answer = await router.ask("GET", "/router/info", [("Authorization", "Bearer admin-secret")])
    info = answer.json()
    assert {"version", "uptime_seconds", "workers", "middlewares", "config"} <= set(info)
    assert info["config"]["max_retries"] == "2"
    assert [worker["url"] for worker in info["workers"]] == [ONE]
    assert b"admin-secret" not in answer.body


async def test_metrics_are_prometheus_text(stage: Stage) -> None:
    worker, router = await stage.worker_and_router()
    await router.ask("POST", "/generate", body=b"{}")
    answer = await router.ask("GET", "/metrics")
    assert (answer.value("content-type") or b"").startswith(b"text/plain; version=")
    text = answer.body.decode()
    labels = {"route": "generate", "status": "200", "worker": worker.url}
    assert total(text, "miles_router_requests_total", **labels) == 1
    assert total(text, "miles_router_request_seconds_bucket", le="+Inf", route="generate") == 1
    assert total(text, "miles_router_request_bytes_total") == 2


async def test_a_wrong_method_on_a_route_of_the_routers_own_is_405(stage: Stage) -> None:
    worker, router = await stage.worker_and_router()
    for method, path in [
        *(("GET", "/add_worker"), ("GET", "/remove_worker"), ("PUT", "/workers"), ("POST", "/workers/abc")),
        *(("POST", "/list_workers"), ("DELETE", "/readiness"), ("PATCH", "/router/info")),
    ]:
        with case(method, path):
            answer = await router.ask(method, path)
            assert (answer.status, answer.error_type) == (405, "invalid_request")
            (allowed,) = answer.values("allow")
            assert allowed
            assert method.encode() not in allowed.split(b", ")
            assert worker.requests == []
    answer = await router.ask("HEAD", "/flush_cache")
    (allowed,) = answer.values("allow")
    assert (answer.status, {*allowed.split(b", ")}, worker.requests) == (405, {b"GET", b"POST"}, [])

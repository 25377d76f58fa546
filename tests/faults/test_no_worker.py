"""No worker is registered, or none is routable: 503, `Retry-After`, and the reason."""

from __future__ import annotations

from tests.support.http import RawReply
from tests.support.stage import Stage


def assert_no_worker(reply: RawReply, message: str) -> None:
    assert reply.status == 503
    assert reply.error_type == "no_worker_available"
    assert message in reply.json()["error"]["message"]
    assert int(reply.value("retry-after") or 0) >= 1


async def test_every_method_is_told_that_no_worker_is_there(stage: Stage) -> None:
    router = await stage.router()
    for method in ("GET", "PUT", "DELETE", "OPTIONS"):
        assert_no_worker(await router.ask(method, "/any/path"), "/add_worker")
    reply = await router.ask("HEAD", "/any/path")
    assert (reply.status, reply.body) == (503, b"")


async def test_with_every_worker_quarantined_the_answer_is_503_and_names_their_state(stage: Stage) -> None:
    worker = await stage.worker()
    router = await stage.router(worker, health_check_failure_threshold=1)
    router.pool.record_failure(router.worker(worker), "test")
    assert_no_worker(await router.ask("POST", "/generate", body=b"{}"), "1 quarantined")
    assert worker.requests == []


async def test_connection_survives_a_503_and_serves_the_next_request(
    stage: Stage,
) -> None:
    worker = await stage.worker()
    router = await stage.router()
    client = await stage.client(router)
    assert_no_worker(await client.ask("POST", "/generate", body=b"{}"), "no worker")
    assert (await client.ask("POST", f"/add_worker?url={worker.url}")).status == 200
    assert (await client.ask("POST", "/generate", body=b"{}")).status == 200

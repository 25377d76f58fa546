"""Kept connections that the worker has closed meanwhile: nobody notices, and nothing is held against the worker."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.fleet import asked, post
from tests.support.http import request
from tests.support.running_router import RunningRouter
from tests.support.scripted_worker import CLOSE, HANG, RESET, Action, ScriptedWorker, reply, script, unread
from tests.support.stage import Stage
from tests.support.waiting import until

pytestmark = pytest.mark.alone("each process keeps connections of its own")


async def warmed(stage: Stage, connections: int) -> tuple[ScriptedWorker, RunningRouter]:
    """A worker and a router that keeps `connections` idle connections to it."""
    worker, router = await stage.worker_and_router()
    gate = asyncio.Event()
    worker.always(script(gate, reply()))
    clients = [await stage.client(router) for _ in range(connections)]
    for client in clients:
        await client.send(request("GET", "/warm"))
    await until(lambda: worker.busy == connections, "all connections are in use")
    gate.set()
    for client in clients:
        assert (await client.read()).status == 200
    assert len(worker.links) == connections
    worker.always(script(reply()))
    return worker, router


@pytest.mark.parametrize("end", [CLOSE, RESET])
async def test_a_kept_connection_that_dies_under_a_request_is_replaced_without_blame(stage: Stage, end: Action) -> None:
    worker, router = await warmed(stage, 1)
    worker.next(unread(end))
    answer = await router.ask("POST", "/generate", body=b"{}")
    assert answer.status == 200
    assert router.worker(worker).failures == 0
    assert len(worker.requests) == 3  # the warm-up, the one that was lost, its repetition


UPDATES = {
    "/update_weights_from_disk": {"model_path": "m", "weight_version": "2"},
    "/load_lora_adapter": {"lora_name": "a", "lora_path": "/a"},
    "/begin_weight_update": {},
}


@pytest.mark.parametrize("path", UPDATES)
@pytest.mark.parametrize("end", [CLOSE, RESET])
async def test_an_update_that_is_lost_is_not_written_again(stage: Stage, path: str, end: Action) -> None:
    """Its engine may have begun it, so the trainer has to hear of it."""
    worker, router = await warmed(stage, 1)
    worker.next(script(end))
    answer = await post(router, path, **UPDATES[path])
    assert (answer.status, answer.error_type) == (502, "fan_out_failed")
    assert asked(worker).count(path) == 1


async def test_aborts_go_over_kept_connections(stage: Stage) -> None:
    worker, router = await warmed(stage, 1)
    before = worker.connections
    for _ in range(3):
        assert (await post(router, "/abort_request", rid="a")).status == 200
    assert worker.connections == before


async def test_an_update_does_not_meet_a_connection_that_died_idle(stage: Stage) -> None:
    worker, router = await warmed(stage, 2)
    for link in tuple(worker.links):
        link.reset()
    answer = await post(router, "/update_weights_from_disk", model_path="m", weight_version="2")
    assert answer.status == 200, answer.body


@pytest.mark.parametrize("end", ["close", "reset"])
async def test_connections_closed_while_idle_are_forgotten(stage: Stage, end: str) -> None:
    worker, router = await warmed(stage, 3)
    for link in tuple(worker.links):
        link.close() if end == "close" else link.reset()
    await until(lambda: not worker.links, "both sides have closed")
    before = worker.connections
    assert (await router.ask("POST", "/generate", body=b"{}")).status == 200
    assert worker.connections == before + 1


async def test_a_restarted_worker_is_reached_again_at_once(stage: Stage) -> None:
    worker, router = await warmed(stage, 3)
    worker.kill()
    await worker.listen()
    for _ in range(4):
        assert (await router.ask("POST", "/generate", body=b"{}")).status == 200
    assert router.worker(worker).failures == 0


async def test_bytes_that_nobody_asked_for_end_the_connection_and_reach_no_client(stage: Stage) -> None:
    worker, router = await warmed(stage, 1)
    (link,) = worker.links
    link.writer.write(reply(b"unasked"))
    await until(lambda: not worker.links, "the router has dropped the connection")
    assert (await router.ask("GET", "/x")).body == b"{}"


@pytest.mark.parametrize("behind", [b"HTTP/1.1 500 Unas", reply(b"unasked", 500)], ids=["a beginning", "whole"])
async def test_a_second_reply_in_the_packet_of_the_first_reaches_no_client(stage: Stage, behind: bytes) -> None:
    worker, router = await stage.worker_and_router()
    worker.next(script(reply(b"mine") + behind, HANG))
    assert (await router.ask("GET", "/x")).body == b"mine"
    assert (await router.ask("GET", "/y")).body == b"{}"
    assert len({id(visit.link) for visit in worker.visits}) == 2

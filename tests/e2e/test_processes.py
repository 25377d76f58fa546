"""One router on several processes is one router: whichever of them is asked, it knows, shows and steers the whole."""

from __future__ import annotations

import asyncio

from prometheus_client.parser import text_string_to_metric_families

from miles_router.testing import SimulatedWorker
from tests.e2e.test_command import run
from tests.support.fleet import asked, by_path
from tests.support.processes import processes
from tests.support.recording_proxy import RecordingProxy
from tests.support.running_router import refuses
from tests.support.scripted_worker import BODY, ScriptedWorker, reply, script
from tests.support.stage import Stage
from tests.support.waiting import until

#: Connections enough that each process gets some: the system deals them by their ports.
MANY = 24


async def holding(stage: Stage, gate: asyncio.Event) -> ScriptedWorker:
    """A worker whose generations end when the gate opens."""
    worker = await stage.worker()
    worker.always(by_path(generate=script(BODY, gate, reply())))
    return worker


def generations(*workers: ScriptedWorker) -> int:
    return sum(asked(worker).count("/generate") for worker in workers)


async def test_requests_in_flight_are_those_of_all_processes(
    stage: Stage,
) -> None:
    gate = asyncio.Event()
    first, second = await holding(stage, gate), await holding(stage, gate)
    async with processes([first, second]) as router:
        under_way = router.generating(MANY)
        await until(lambda: generations(first, second) == MANY, "all generations are at workers")
        shown = {tuple((await router.in_flight()).values()) for _ in range(4)}
        assert len(shown) == 1
        ((one, other),) = shown
        assert one + other == MANY
        assert abs(one - other) <= MANY // 4, "a process hears of another's choices a moment later"
        gate.set()
        assert {each.status for each in await asyncio.gather(*under_way)} == {200}
        await router.becomes_idle()


async def test_what_was_counted_is_the_same_whichever_process_shows_it(stage: Stage) -> None:
    worker = await stage.worker()
    async with processes([worker]) as router:
        assert {each.status for each in await asyncio.gather(*router.generating(MANY))} == {200}
        counted = [await router.metric("miles_router_requests_total", route="generate") for _ in range(8)]
        assert counted == [MANY] * 8
        assert await router.metric("miles_router_worker_transitions_total", after="ready") == 1
        assert await router.metric("miles_router_workers", state="ready") == 1
        by_shard = [await router.metric("miles_router_requests_total", route="generate", shard=each) for each in "01"]
        assert sum(by_shard) == MANY
        assert all(by_shard), "the system dealt the connections to both"
        assert await router.metric("miles_router_worker_transitions_total", after="ready", shard="leader") == 1
        text = (await router.ask("GET", "/metrics")).body.decode()
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        assert {sample.labels.get("shard") for sample in samples} == {"0", "1", "leader"}
        assert len(samples) == len({(sample.name, *sample.labels.items()) for sample in samples})


async def test_a_worker_takes_requests_everywhere_once_its_registration_is_answered(stage: Stage) -> None:
    worker = await stage.worker()
    async with processes([]) as router:
        assert (await router.post("/generate", text="Hi")).status == 503
        assert (await router.post("/add_worker", url=worker.url)).status == 200
        assert {each.status for each in await asyncio.gather(*router.generating(MANY))} == {200}
        assert (await router.ask("DELETE", f"/workers/{worker.url.replace('/', '%2F')}")).status == 200
        assert {each.status for each in await asyncio.gather(*router.generating(MANY))} == {503}


async def test_a_worker_is_drained_when_no_process_has_a_request_there(stage: Stage) -> None:
    gate = asyncio.Event()
    worker, other = await holding(stage, gate), await stage.worker()
    async with processes([worker]) as router:
        under_way = router.generating(MANY)
        await until(lambda: generations(worker) == MANY, "all generations are at the worker")
        await router.post("/add_worker", url=other.url)
        drained = asyncio.ensure_future(router.post("/remove_worker", url=worker.url, drain=True))
        await router.shows(lambda info: info["workers_draining"] == 1)
        assert {each.status for each in await asyncio.gather(*router.generating(MANY))} == {200}
        assert generations(other) == MANY, "nothing new goes to the one that drains"
        assert not drained.done()
        gate.set()
        assert (await drained).json()["worker_urls"] == {other.url: 0}
        await asyncio.gather(*under_way)


async def test_once_a_pause_is_answered_no_process_sends_a_generation(stage: Stage) -> None:
    worker = await stage.worker()
    async with processes([worker]) as router:
        assert (await router.post("/pause_generation", mode="in_place")).status == 200
        waiting = router.generating(MANY)
        await router.held(MANY)
        assert generations(worker) == 0
        assert (await router.post("/continue_generation")).status == 200
        assert {each.status for each in await asyncio.gather(*waiting)} == {200}
        assert generations(worker) == MANY


async def test_an_abort_finds_what_it_means_in_every_process(stage: Stage) -> None:
    worker = await stage.worker()
    async with processes([worker]) as router:
        await router.post("/pause_generation", mode="in_place")
        waiting = [asyncio.ensure_future(router.post("/generate", text="Hi", rid=f"r{n}_")) for n in range(MANY)]
        await router.held(MANY)
        for number in range(MANY):
            assert (await router.post("/abort_request", rid=f"r{number}_")).status == 200
            answer = await waiting[number]
            assert answer.json()["meta_info"]["finish_reason"]["type"] == "abort"
            assert (await router.info())["gate"]["held"] == MANY - number - 1, "no other"
        assert generations(worker) == 0


async def test_old_and_new_weights_share_no_cache_whichever_process_sends() -> None:
    async with SimulatedWorker() as worker, RecordingProxy(worker.url) as proxy, processes([proxy.url]) as router:
        assert {each.status for each in await asyncio.gather(*router.generating(MANY))} == {200}
        assert (await router.post("/update_weight_version", new_version="7")).status == 200
        assert [(await router.info())["weight_version"] for _ in range(4)] == ["7"] * 4
        answers = [each.json() for each in await asyncio.gather(*router.generating(MANY))]
        assert {each["meta_info"]["weight_version"] for each in answers} == {"7"}
        keys = [each.body.get("extra_key") for each in proxy.generations]
        assert set(keys[:MANY]) == {None}
        assert len(set(keys[MANY:])) == 1, "all processes name the new cache alike"
        assert keys[-1] is not None


async def test_sigterm_lets_requests_of_all_processes_finish_and_exits_0(stage: Stage) -> None:
    gate = asyncio.Event()
    worker = await holding(stage, gate)
    async with processes([worker]) as router:
        under_way = router.generating(MANY)
        await until(lambda: generations(worker) == MANY, "all generations are at the worker")
        router.router.terminate()
        await until(lambda: refuses(router.url), "new connections are refused")
        gate.set()
        assert {each.status for each in await asyncio.gather(*under_way)} == {200}
        assert await router.router.stop() == 0
        assert "process_died" not in router.router.stderr()


async def test_a_port_is_not_shared_with_another_router(stage: Stage) -> None:
    async with processes([]) as router:
        port = router.url.rpartition(":")[2]
        done = run("--port", port, "--processes", "2")
        assert done.returncode == 2
        assert f"cannot listen on 127.0.0.1:{port}" in done.stderr

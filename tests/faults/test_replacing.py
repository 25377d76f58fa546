"""A new version that takes the place of a router of several processes while clients are at work."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from miles_router.testing import SimulatedWorker
from tests.e2e.test_processes import generations, holding
from tests.faults.test_layers_of_lost_processes import Agent, answers_of, configured, simulated
from tests.support.layers import layered, ports, post
from tests.support.owned import name_of
from tests.support.processes import HI, Processes, processes
from tests.support.running_router import AS_USERS_DO, refuses
from tests.support.stage import Stage
from tests.support.waiting import until

COUNT = 6


async def _works(router: Processes, agent: Agent, over: asyncio.Event) -> None:
    """Turn after turn, each on a connection of its own, as long as it is not over."""
    while not over.is_set():
        assert (await agent.turn(router.url)).status == 200


async def _generates(router: Processes, over: asyncio.Event) -> int:
    count = 0
    while not over.is_set():
        assert (await post(router.url, "/generate", HI)).status == 200
        count += 1
    return count


async def test_a_new_version_takes_over_under_load_and_nobody_is_refused(tmp_path: Path) -> None:
    config = configured(tmp_path, state_dir=str(tmp_path / "state"))
    async with simulated(token_latency_s=0.01) as worker, layered(config, start=AS_USERS_DO) as router:
        assert (await post(router.url, "/add_worker", {"url": worker.url})).status == 200
        before, own = router.children, [each.url for each in await ports(router)]
        agents, over = [Agent(name_of(index % 2, 2, f"agent{index}")) for index in range(COUNT)], asyncio.Event()
        for each in agents:
            assert (await post(router.url, "/sessions", {"session_id": each.name})).status == 200
        working = [asyncio.ensure_future(_works(router, each, over)) for each in agents]
        generating = [asyncio.ensure_future(_generates(router, over)) for _ in range(COUNT)]
        await until(lambda: all(agent.turns for agent in agents), "all have had a turn")
        configured(tmp_path, state_dir=str(tmp_path / "state"), max_connections=77)  # what tells the new one
        router.router.process.send_signal(signal.SIGUSR2)
        await until(lambda: not before.keys() & router.children.keys(), "those of the old one have ended")
        await router.whole()
        turns = [agent.turns for agent in agents]
        await until(lambda: all(a.turns > b for a, b in zip(agents, turns, strict=True)), "all go on")
        over.set()
        await asyncio.gather(*working)
        assert all(await asyncio.gather(*generating))
        assert (await router.info())["config"]["max_connections"] == "77"
        assert [each.url for each in await ports(router)] == own, "who was told of a port finds it"
        for agent in agents:
            assert answers_of(await agent.samples(router.url)) == [agent.turns], "in one line"
        await router.becomes_idle()
        assert router.router.stderr().count("listening") == 2


async def test_a_version_that_would_not_start_takes_no_place(tmp_path: Path) -> None:
    config = configured(tmp_path)
    async with SimulatedWorker() as worker, layered(config, worker, start=AS_USERS_DO) as router:
        before = router.children
        config.write_text("what_is_this: 1\n")
        router.router.process.send_signal(signal.SIGUSR2)
        await until(lambda: "replacement_refused" in router.router.stderr(), "it is said")
        assert "what_is_this" in router.router.stderr()
        assert router.children.keys() == before.keys()
        assert (await post(router.url, "/generate", HI)).status == 200


async def test_a_stop_is_stronger_than_a_new_version(stage: Stage) -> None:
    gate = asyncio.Event()
    worker = await holding(stage, gate)
    async with processes([worker], start=AS_USERS_DO) as router:
        (under_way,) = router.generating(1)
        await until(lambda: generations(worker) == 1, "it is at the worker")
        router.router.process.send_signal(signal.SIGUSR2)
        await until(lambda: "replacement_begins" in router.router.stderr(), "it begins")
        router.router.process.send_signal(signal.SIGTERM)
        await until(lambda: refuses(router.url), "new connections are refused")
        gate.set()
        assert (await under_way).status == 200
        assert await router.router.stop() == 0

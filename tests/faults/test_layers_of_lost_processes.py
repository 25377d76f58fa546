"""Processes of a router with sessions and texts that die: what was held only there is lost by name, or comes back from
the store and goes on with its tokens; and nothing else is touched."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from miles_router.testing import SimulatedWorker
from tests.e2e.test_episodes_on_processes import all_episodes
from tests.support.cache_trial import CACHE, checkpoint
from tests.support.http import CutReply, RawReply, ask
from tests.support.layers import layered, listed, ports, post, process_at, written
from tests.support.owned import name_of
from tests.support.processes import Processes, is_alive
from tests.support.session_trial import CHAT, SESSIONS, message_of, user
from tests.support.waiting import STEP, until

HERE, THERE = name_of(0, 2, "agent"), name_of(1, 2, "agent")
NAMES = (HERE, THERE)


def configured(directory: Path, **settings: Any) -> Path:
    return written(directory, ((SESSIONS, {}),), hf_checkpoint=checkpoint(), **settings)


def simulated(**settings: Any) -> SimulatedWorker:
    return SimulatedWorker(tokenizer=checkpoint(), weight_version="1", **settings)


class Agent:
    """One session, and what it was answered."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.messages = [user(f"Count for {name}.")]
        self.turns = 0

    async def turn(self, url: str, **fields: Any) -> RawReply:
        """The next turn. It can be repeated until it is answered."""
        body = {"model": "m", "max_tokens": 6, "messages": self.messages, **fields}
        reply = await post(url, f"/sessions/{self.name}{CHAT}", body, ("X-Turn-Id", f"t-{self.turns}"))
        if reply.status == 200 and not fields.get("stream"):
            self.turns += 1
            self.messages = [*self.messages, message_of(reply.json()), user(f"And {self.turns}?")]
        return reply

    async def samples(self, url: str) -> bytes:
        """What a trainer gets. It asks again where a process may have read the question while it was dying."""
        while (reply := await post(url, f"/sessions/{self.name}/samples", {"format": "json"})).status == 502:
            assert reply.error_type == "upstream_error"
        assert reply.status == 200, reply.body
        return reply.body


def answers_of(samples: bytes) -> list[int]:
    """How many answers each sample trains."""
    masks = [each["loss_mask"] for each in json.loads(samples)["samples"]]
    return [sum(now > before for before, now in zip([0, *mask], mask, strict=False)) for mask in masks]


async def agents(router: Processes, turns: int = 2) -> list[Agent]:
    """An agent in each process, with so many turns."""
    made = [Agent(name) for name in NAMES]
    for agent in made:
        assert (await post(router.url, "/sessions", {"session_id": agent.name})).status == 200
        for _ in range(turns):
            assert (await agent.turn(router.url)).status == 200
    return made


async def refused(agent: Agent, url: str) -> tuple[int, str]:
    reply = await agent.turn(url)
    return reply.status, reply.error_type


async def test_sessions_of_a_killed_process_are_lost_by_name_and_no_others(tmp_path: Path) -> None:
    async with simulated() as worker, layered(configured(tmp_path), worker) as router:
        own = await ports(router)
        here, there = await agents(router)
        kept = await here.samples(router.url)
        await router.kill(await process_at(router, own[1]))
        assert await refused(there, own[0].url) == (410, "not_found"), "it waits for the process that comes after it"
        await router.whole()
        for url in (router.url, own[0].url, own[1].url):
            assert await refused(there, url) == (410, "not_found")
            assert (await post(url, f"/sessions/{there.name}/samples")).error_type == "not_found"
            by_header = await post(url, CHAT, {"model": "m", "messages": there.messages}, ("X-Session-Id", there.name))
            assert by_header.error_type == "not_found"
            assert await here.samples(url) == kept
        assert (await here.turn(own[1].url)).status == 200
        assert await listed(own[1].url) == [HERE]


async def test_sessions_of_a_killed_process_come_back_from_the_store(tmp_path: Path) -> None:
    config = configured(tmp_path, state_dir=str(tmp_path / "state"))
    async with simulated() as worker, layered(config, worker) as router:
        own = await ports(router)
        both = await agents(router)
        before = [await agent.samples(router.url) for agent in both]
        for each in own:
            victim = await process_at(router, each)
            await router.kill(victim)
            for url in (own[0].url, own[1].url):
                assert [await agent.samples(url) for agent in both] == before
            await router.whole()
        generated = len(worker.log.at(CHAT))
        last = both[1]
        again = {"model": "m", "max_tokens": 6, "messages": last.messages[:-2]}
        repeated = await post(own[0].url, f"/sessions/{THERE}{CHAT}", again, ("X-Turn-Id", "t-1"))
        assert message_of(repeated.json()) == last.messages[-2], "answered from the record"
        assert len(worker.log.at(CHAT)) == generated
        for agent in both:
            assert (await agent.turn(router.url)).status == 200
            assert answers_of(await agent.samples(own[0].url)) == [3]
        assert await listed(own[1].url) == sorted(NAMES)


async def test_turns_that_a_killed_process_breaks_off_are_in_the_same_line(tmp_path: Path) -> None:
    config = configured(tmp_path, state_dir=str(tmp_path / "state"))
    async with simulated(token_latency_s=0.01) as worker, layered(config, worker) as router:
        own = await ports(router)
        both = await agents(router, turns=1)

        async def persist(agent: Agent, url: str) -> None:
            while agent.turns < 6:
                try:
                    reply = await agent.turn(url)
                    assert reply.status == 200, reply.body
                except (OSError, CutReply):
                    await asyncio.sleep(STEP)

        running = [asyncio.ensure_future(persist(agent, own[0].url)) for agent in both]
        for place, turns in ((1, 2), (0, 4)):
            while both[place].turns < turns:  # noqa: ASYNC110
                await asyncio.sleep(STEP)
            await router.kill(await process_at(router, own[place]))
            await router.whole()
        await asyncio.gather(*running)
        for agent in both:
            assert answers_of(await agent.samples(router.url)) == [6], "all of them in one line"
        await router.becomes_idle()


async def test_turns_go_on_while_the_leader_is_away(tmp_path: Path) -> None:
    config = configured(tmp_path, state_dir=str(tmp_path / "state"))
    async with simulated() as worker, simulated() as joined, layered(config, worker) as router:
        own = await ports(router)
        both = await agents(router)
        assert (await post(own[1].url, "/add_worker", {"url": joined.url})).status == 200
        await router.kill(await router.control())
        for agent, each in zip(both, reversed(own), strict=True):
            assert (await agent.turn(each.url)).status == 200
        known = (await ask(own[0].url, "GET", "/workers")).json()["workers"]
        assert [each["url"] for each in known] == [worker.url, joined.url]
        await router.whole()


async def test_a_killed_router_comes_back_with_another_number_of_processes(tmp_path: Path) -> None:
    config = configured(tmp_path, state_dir=str(tmp_path / "state"))
    async with simulated() as worker:
        async with layered(config, expect_status=-signal.SIGKILL) as router:
            assert (await post(router.url, "/add_worker", {"url": worker.url})).status == 200
            both = await agents(router)
            before = [await agent.samples(router.url) for agent in both]
            children = router.children
            router.router.process.kill()
            await until(lambda: not any(map(is_alive, children.values())), "all have ended")
        async with layered(config, count=3) as router:
            for each in await ports(router):
                for query in ("limit=1", "limit=5"):
                    assert [one["id"] for one in await all_episodes(each.url, query)] == [THERE, HERE]
            assert [await agent.samples(router.url) for agent in both] == before
            assert {(await agent.turn(router.url)).status for agent in both} == {200}


@pytest.mark.parametrize("state", [False, True])
async def test_sigterm_lets_turns_of_all_processes_end(tmp_path: Path, state: bool) -> None:
    settings: dict[str, Any] = {"state_dir": str(tmp_path / "state")} if state else {}
    config = configured(tmp_path, **settings)
    async with simulated(token_latency_s=0.05) as worker:
        async with layered(config, worker) as router:
            both = await agents(router, turns=0)
            turns = [asyncio.ensure_future(agent.turn(router.url, max_tokens=20)) for agent in both]
            await until(lambda: worker.running == 2, "both are under way")
            assert await router.router.stop() == 0
            assert {each.status for each in await asyncio.gather(*turns)} == {200}
        if state:
            async with layered(config, worker) as router:
                assert [answers_of(await agent.samples(router.url)) for agent in both] == [[1], [1]]


# Text rollouts


ROLLOUTS = 6


def with_texts(directory: Path) -> Path:
    layers: tuple[tuple[str, dict[str, Any]], ...] = ((SESSIONS, {}), (CACHE, {}))
    return written(directory, layers, hf_checkpoint=checkpoint(), state_dir=str(directory / "state"))


async def _killed(router: Processes) -> None:
    children = router.children
    router.router.process.kill()
    await until(lambda: not any(map(is_alive, children.values())), "all have ended")


class Rollout:
    """One text, and the tokens that it was given and answered so far."""

    def __init__(self, number: int, worker: SimulatedWorker) -> None:
        self.text = f"Question {number}: how many?"
        self.tokens: list[int] = []
        self.rid = ""
        self._worker = worker

    async def turn(self, url: str) -> None:
        """The next turn, which goes on from all tokens before it."""
        reply = await post(url, "/generate", {"text": self.text, "sampling_params": {"max_new_tokens": 8}})
        assert reply.status == 200, reply.body
        (generation,) = self._worker.log.at("/generate")[-1].generations
        assert generation.input_ids[: len(self.tokens)] == self.tokens, "the ids before, sampled ones included"
        self.tokens = [*generation.input_ids, *generation.output_ids]
        self.rid = generation.rid
        self.text += reply.json()["text"]
        assert await self.held(url) == self.tokens
        self.text += " And then?"

    async def held(self, url: str) -> list[int]:
        """What is retrieved of it, by its newest generation."""
        reply = await post(url, "/retrieve_from_text", {"rid": self.rid})
        assert reply.status == 200, reply.body
        found: list[int] = reply.json()["tokens"]
        return found


async def test_texts_of_a_killed_process_go_on_with_the_tokens_that_were_held(tmp_path: Path) -> None:
    async with simulated() as worker, layered(with_texts(tmp_path), worker) as router:
        own = await ports(router)
        rollouts = [Rollout(number, worker) for number in range(ROLLOUTS)]
        for number, each in enumerate(rollouts):
            await each.turn(own[number % 2].url)
        for victim in own:
            await router.kill(await process_at(router, victim))
            other = next(each for each in own if each is not victim)
            for each in rollouts:  # the first of them while it is being started again
                await each.turn(other.url)
            await router.whole()
        for each in rollouts:
            assert await each.held(own[0].url) == await each.held(own[1].url) == each.tokens


async def test_texts_come_back_in_a_router_of_another_number_of_processes(tmp_path: Path) -> None:
    async with simulated() as worker:
        rollouts = [Rollout(number, worker) for number in range(ROLLOUTS)]
        for count in (2, 3, 2):
            async with layered(with_texts(tmp_path), worker, count=count, expect_status=-signal.SIGKILL) as router:
                for each in rollouts:
                    await each.turn(router.url)
                await _killed(router)


async def test_new_texts_of_all_processes_wait_for_one_that_may_have_them(tmp_path: Path) -> None:
    async with simulated() as worker, layered(with_texts(tmp_path), worker) as router:
        own = await ports(router)
        each = Rollout(0, worker)
        await each.turn(own[0].url)
        for victim in [await process_at(router, place) for place in own]:
            await router.kill(victim)
        turns = [post(place.url, "/retrieve_from_text", {"text": each.text, "strict": False}) for place in own]
        replies: list[RawReply] = await asyncio.gather(*turns)
        assert [reply.json()["matched_tokens"] for reply in replies] == [len(each.tokens)] * 2

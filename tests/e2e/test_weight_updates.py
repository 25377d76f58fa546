"""Weight updates of a fleet of two real SGLang workers with generations in flight: nothing is lost, nothing made up.

Each client's answer is compared with what went through the proxies of the workers. Each test makes several updates
during one run of all generations.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Container
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

import aiohttp
import pytest

from miles_router.fleet.workers import Transition
from miles_router.testing.worker.model.hf_vocabulary import DirectoryTokenizer
from tests.sglang.environment import ensure
from tests.sglang_worker import RealWorker
from tests.support.chains import Piece, chain, check, check_experts, spread
from tests.support.events import events_of
from tests.support.generations import Generation
from tests.support.recording_proxy import RecordingProxy
from tests.support.running_router import RunningRouter, running_router
from tests.support.tiers import size
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.sglang

GENERATIONS, TOKENS = size(heavy=(64, 200), otherwise=(16, 250))
SAMPLING = {"temperature": 1, "max_new_tokens": TOKENS, "ignore_eos": True}
TURN = TOKENS * 3 // 10  # tokens of a chat request that is over before the first abort
CONTEXT = 5  # tokens of the prompt that SGLang decodes together with the output


@dataclass
class Rollout:
    """One generation as its client sees it."""

    number: int
    body: dict[str, Any]
    status: int = 0
    raw: bytes = b""

    @property
    def request_id(self) -> str:
        return f"rollout-{self.number}"

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))

    def events(self) -> list[Any]:
        """Of a stream, which must be whole."""
        return events_of(self.raw)

    def answer(self) -> Any:
        """The whole answer; a stream is checked on the way."""
        assert self.status == 200, self.raw
        if not self.stream:
            return json.loads(self.raw)
        events = self.events()
        for before, after in pairwise(events):
            count = len(before["output_ids"])
            assert after["output_ids"][:count] == before["output_ids"], "a stream never takes back an id"
            assert after["text"].startswith(before["text"]), "or a text"
            assert len(after["meta_info"]["output_token_logprobs"]) == len(after["output_ids"])
        assert [event["meta_info"]["finish_reason"] is None for event in events] == [True] * (len(events) - 1) + [False]
        return events[-1]


@dataclass
class Fleet:
    """A router, the proxies of its two workers, and what became of the workers' states."""

    router: RunningRouter
    proxies: list[RecordingProxy]
    http: aiohttp.ClientSession
    transitions: list[Transition] = field(default_factory=list)

    async def control(self, path: str, *, status: Container[int] = (200,), **body: Any) -> str:
        async with self.http.post(path, json=body) as reply:
            text = await reply.text()
            assert reply.status in status, (path, text)
            return text

    async def info(self) -> Any:
        async with self.http.get("/router/info") as reply:
            return await reply.json()

    async def run(self, rollout: Rollout) -> Rollout:
        headers = {"X-Request-Id": rollout.request_id}
        async with self.http.post("/generate", json=rollout.body, headers=headers) as reply:
            rollout.status = reply.status
            rollout.raw = await reply.read()
        return rollout

    async def chat(self, tokens: int) -> bytes:
        """An agent's turn, beside the rollouts; what its client gets."""
        sampling = {"temperature": 1, "max_tokens": tokens, "ignore_eos": True}
        body = {"model": "m", "messages": [{"role": "user", "content": "Go on"}], **sampling}
        async with self.http.post("/v1/chat/completions", json=body, headers={"X-Request-Id": "chat"}) as reply:
            return await reply.read()

    def goes(self) -> list[Generation]:
        return [go for proxy in self.proxies for go in proxy.begun]

    def streamed(self) -> int:
        """Tokens of streams that went through the proxies by now."""
        return sum(len(go.sampled) for go in self.goes() if go.body.get("stream"))

    def aborted(self) -> list[Generation]:
        return [go for go in self.goes() if (go.finish or {}).get("type") == "abort"]

    async def update(self, mode: str, version: str) -> None:
        """What a trainer does between two steps. A worker that holds something in place keeps its memory, and says 400
        to the flush; one that has nothing left does not."""
        await self.control("/pause_generation", mode=mode)
        await self.control("/update_weight_version", new_version=version, abort_all_requests=False)
        await self.control("/flush_cache", status=(200, 400, 502) if mode == "in_place" else (200,))
        info = await self.info()
        assert (info["gate"]["mode"], info["weight_version"]) == (mode, version)
        await self.control("/continue_generation")


@asynccontextmanager
async def fleet(workers: list[RealWorker], **settings: Any) -> AsyncIterator[Fleet]:
    """Probed five times a second, as the worst that can happen to a paused worker."""
    async with AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(RecordingProxy(worker.url)) for worker in workers]
        settings = {"health_check_interval": 0.2, "health_check_timeout": 2.0, **settings}
        router = await stack.enter_async_context(running_router(*(proxy.url for proxy in proxies), **settings))
        timeout = aiohttp.ClientTimeout(total=None)  # the test has one
        connector = aiohttp.TCPConnector(limit=0)
        http = await stack.enter_async_context(aiohttp.ClientSession(router.url, timeout=timeout, connector=connector))
        made = Fleet(router, proxies, http)
        router.pool.listeners.append(made.transitions.append)
        await until(lambda: all(w.weight_version for w in router.pool), "probes have passed")
        try:
            yield made
            await until(lambda: router.pool.in_flight == 0, "every lease is given back")
        finally:
            await made.control("/continue_generation")
            await made.control("/update_weight_version", new_version="default", abort_all_requests=True)


def rollouts() -> list[Rollout]:
    """Half of them streams, half of either with texts; workers, who take turns, get some of each."""
    made = []
    for number in range(GENERATIONS):
        prompt: dict[str, Any] = {"text": f"Rollout {number} tells:"}
        if number % 8 < 4:
            prompt = {"input_ids": [1000 + number, *range(100, 100 + number % 7)]}
        wanted = {"return_logprob": True, "return_routed_experts": True, "stream": number % 4 < 2}
        made.append(Rollout(number, {**prompt, **wanted, "sampling_params": SAMPLING}))
    return made


Disturbance = Callable[[Fleet, str], Awaitable[None]]


def update(mode: str) -> Disturbance:
    return lambda fleet, version: fleet.update(mode, version)


async def while_generating(fleet: Fleet, disturbances: dict[int, Disturbance]) -> list[Rollout]:
    """All rollouts at once, disturbed whenever their streams have got to a percentage of their tokens."""
    await fleet.control("/update_weight_version", new_version="v0", abort_all_requests=False)
    tasks = [asyncio.ensure_future(fleet.run(rollout)) for rollout in rollouts()]
    try:
        for number, (percent, disturb) in enumerate(disturbances.items(), 1):
            await _until_streamed(fleet, GENERATIONS // 2 * TOKENS * percent // 100)
            await disturb(fleet, f"v{number}")
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


async def _until_streamed(fleet: Fleet, tokens: int) -> None:
    await until(lambda: fleet.streamed() >= tokens, f"{tokens} tokens", deadline=10 * PATIENCE)


@cache
def vocabulary() -> DirectoryTokenizer:
    return DirectoryTokenizer(str(ensure().moe_model))


@cache
def bytes_of_a_row() -> int:
    config = json.loads((ensure().moe_model / "config.json").read_text())
    return int(config["num_hidden_layers"] * config["num_experts_per_tok"] * 4)


def spelled(body: dict[str, Any], ids: list[int]) -> str:
    """The text that the engine gives to output ids: those of its padded vocabulary it shows as id 0."""
    prompt = body.get("input_ids") or vocabulary().encode(body["text"])
    whole = [token if token < vocabulary().size else 0 for token in [*prompt[-CONTEXT:], *ids]]
    before, text = (vocabulary().decode(each, skip_special_tokens=True) for each in (prompt[-CONTEXT:], whole))
    return text[len(before) :]


def verify(fleet: Fleet, rollout: Rollout) -> tuple[Any, list[Piece], Counter[str]]:
    """An answer, the goes at workers that it is made of, and how much of it was compared with theirs."""
    answer = rollout.answer()
    ids, meta = answer["output_ids"], answer["meta_info"]
    pieces = chain(fleet.proxies, rollout.request_id, answer)
    positions = check(answer, pieces, prompt=rollout.body.get("input_ids"))
    rows = check_experts(answer, pieces, row=bytes_of_a_row())
    assert answer["text"] == spelled(rollout.body, ids)
    assert meta["output_token_logprobs_length"] == len(ids) == len(spread(meta["weight_versions"]))
    counts = {"positions": positions, "rows of experts": rows, "goes": len(pieces), "resumed": meta.get("resumed", 0)}
    return answer, pieces, Counter({**counts, "spans": len(meta["weight_versions"])})


def verify_whole(fleet: Fleet, done: list[Rollout]) -> Counter[str]:
    """Every answer is what it would be without a disturbance. Counts what was compared."""
    counts: Counter[str] = Counter()
    for rollout in done:
        answer, _, compared = verify(fleet, rollout)
        assert len(answer["output_ids"]) == TOKENS
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": TOKENS}
        counts += compared
        counts["answers"] += 1
    assert counts["answers"] == GENERATIONS
    print(dict(counts))
    return counts


async def test_generations_outlive_updates(sglang_moe_workers: list[RealWorker]) -> None:
    async with fleet(sglang_moe_workers, partial_rollout="resume") as made:
        modes = ("abort", "retract", "in_place") * 3
        done = await while_generating(made, {9 * place: update(mode) for place, mode in enumerate(modes, 1)})
        counts = verify_whole(made, done)
        aborted = len(made.aborted())
        assert GENERATIONS <= aborted <= GENERATIONS * modes.count("abort")
        assert counts["resumed"] == aborted
        assert counts["goes"] == GENERATIONS + aborted
        # How many updates each lives through is up to the machine.
        assert counts["spans"] > GENERATIONS
        assert (await made.info())["statistics"]["partial_rollouts"] == {"resumed": aborted, "returned": 0}
        assert not made.transitions
        assert all(worker.failures == 0 for worker in made.router.pool)


async def test_without_resume_aborts_come_as_the_engine_gave_them(sglang_moe_workers: list[RealWorker]) -> None:
    async with fleet(sglang_moe_workers) as made:
        chat = asyncio.ensure_future(made.chat(TOKENS))
        done = await while_generating(made, {25: update("abort")})
        replies = {each.headers.get("x-request-id"): each for proxy in made.proxies for each in proxy.exchanges}
        counts: Counter[str] = Counter()
        for rollout in done:
            assert rollout.raw == replies[rollout.request_id].reply
            answer, _, compared = verify(made, rollout)
            assert "resumed" not in answer["meta_info"]
            counts += compared
            counts["cut"] += answer["meta_info"]["finish_reason"]["type"] == "abort"
        print(dict(counts))
        assert await chat == replies["chat"].reply
        assert json.loads(await chat)["choices"][0]["finish_reason"] == "abort"
        assert counts["cut"] == len(made.aborted()) == counts["goes"] == GENERATIONS
        assert not made.transitions


async def test_generations_outlive_the_death_of_their_worker(sglang_moe_workers: list[RealWorker]) -> None:
    """Streams are carried on from what came; requests without a byte of an answer begin anew. The fleet is updated
    without the dead worker, which comes back with old weights and is let in once it has the new ones."""
    chats: list[asyncio.Future[bytes]] = []
    killed: list[RealWorker] = []

    async def ask(fleet: Fleet, version: str) -> None:
        chats.append(asyncio.ensure_future(fleet.chat(TURN)))

    async def kill(fleet: Fleet, version: str) -> None:
        def streams(proxy: RecordingProxy) -> int:
            return sum(go.streamed and bool(go.sampled) for go in proxy.begun if go.finish is None)

        await until(lambda: any(map(streams, fleet.proxies)), "a stream has begun")
        victim = max(fleet.proxies, key=streams)
        killed.append(sglang_moe_workers[fleet.proxies.index(victim)])
        await asyncio.to_thread(killed[0].kill)
        await until(lambda: len(fleet.router.pool.routable) == 1, "the loss is noticed")

    try:
        async with fleet(sglang_moe_workers, partial_rollout="resume", resume_on_worker_loss=True) as made:
            before = {5: ask, 10: update("retract"), 25: update("in_place"), 60: update("abort")}
            done = await while_generating(made, {**before, 75: kill, 85: update("abort")})
            counts = verify_whole(made, done)
            (victim,) = killed
            lost = [go for go in made.goes() if go.finish is None]
            streams = [go for go in lost if go.sampled]
            assert streams
            assert len(lost) >= GENERATIONS // 4
            cut = [go for go in made.aborted() if go.sampled]  # the rest had only queued
            # What a worker sampled last may have come to its proxy and not to the router.
            assert len(cut) <= counts["resumed"] <= len(cut) + len(streams)
            turn = json.loads(await chats[0])
            # Which updates fall into its middle depends on when the worker takes it up; no layer carries it on.
            finish, count = turn["choices"][0]["finish_reason"], turn["usage"]["completion_tokens"]
            assert (finish, count) == ("length", TURN) or (finish == "abort" and count < TURN)
            versions = {span["version"] for span in turn["metadata"]["weight_versions"]}
            assert versions <= {f"v{each}" for each in range(7)}
            (loss,) = made.transitions
            assert (loss.worker.url, loss.after and loss.after.value) == (
                made.proxies[sglang_moe_workers.index(victim)].url,
                "quarantined",
            )
            await asyncio.to_thread(victim.restart)
            await until(lambda: "'default'" in loss.worker.reason, "it is back, and out of date")
            await made.control("/update_weight_version", new_version="v7", abort_all_requests=False)
            await until(lambda: loss.worker.state.value == "ready", "it has what the fleet has")
            assert all(worker.failures == 0 for worker in made.router.pool if worker is not loss.worker)
    finally:
        for worker in killed:
            if not worker.alive:
                await asyncio.to_thread(worker.restart)

"""Routed experts of real SGLang: what trainers get is what went through the workers' proxies, row for row.

In batches of changing sizes a CPU rounds otherwise, and some tokens go elsewhere: the proxies are held against, and the
share of rows that one uninterrupted request has all the same is measured.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp
import numpy as np
import pytest

from miles_router.client import RouterClient
from miles_router.settings.config import MiddlewareSpec
from miles_router.tasks import together
from tests.sglang.environment import ensure
from tests.sglang_worker import RealWorker
from tests.support.agents import Agents
from tests.support.experts_proof import (
    CAPTURE,
    FRONT,
    KNOWING,
    LAYERS,
    TOP_K,
    Book,
    Share,
    TextRollouts,
    book,
    check_lines,
    delivered,
    rows_of,
    sample_rows,
    told_clients,
    uninterrupted,
)
from tests.support.generations import CHAT, GENERATE
from tests.support.recording_proxy import RecordingProxy, chats_of
from tests.support.running_router import RunningRouter, running_router
from tests.support.tiers import size
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.sglang

CACHE = MiddlewareSpec("middleware_hub.radix_tree_middleware.RadixTreeMiddleware", {})
SESSIONS = MiddlewareSpec("middleware_hub.openai_session_middleware.OpenAISessionMiddleware", {})
FIRST_VERSION = "default"  # of the real workers
ROLLOUTS, RESUMED, AGENTS = size(heavy=(16, 12, 12), otherwise=(8, 8, 5))
EVERY = 5 * RESUMED  # streamed tokens between two weight updates


@dataclass
class Stage:
    """A router that keeps routed experts, the proxies of its workers, and a connection to it."""

    router: RunningRouter
    proxies: list[RecordingProxy]
    workers: list[RealWorker]
    http: aiohttp.ClientSession

    @property
    def statistics(self) -> dict[str, Any]:
        return dict(self.router.app.router.statistics["routed_experts"]())

    async def ask(self, method: str, path: str, body: object = None, *, status: int = 200) -> Any:
        async with self.http.request(method, path, json=body) as reply:
            assert reply.status == status, await reply.text()
            return await reply.json()

    async def update(self, mode: str, version: str) -> None:
        """What a trainer does between two steps."""
        await self.ask("POST", "/pause_generation", {"mode": mode})
        order = {"new_version": version, "abort_all_requests": False}
        await self.ask("POST", "/update_weight_version", order)
        await self.ask("POST", "/continue_generation", {})

    def streamed(self) -> int:
        """Tokens of streams that went through the proxies by now."""
        return sum(len(go.sampled) for proxy in self.proxies for go in proxy.begun if go.body.get("stream"))

    async def shares(self, known: Book) -> tuple[Share, Share]:
        """How many rows a worker gives again for the same ids at once, with what it remembers and computed anew."""
        remembered, fresh = Share(), Share()
        for line in known.lines.values():
            for share, anew in ((remembered, False), (fresh, True)):
                again = await uninterrupted(self.http, self.workers[0].url, line.tokens, fresh=anew)
                share.add(line.possible[0], again)
        return remembered, fresh


@asynccontextmanager
async def stage(workers: list[RealWorker], *middlewares: MiddlewareSpec, **settings: Any) -> AsyncIterator[Stage]:
    async with AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(RecordingProxy(worker.url)) for worker in workers]
        settings = {"middlewares": (FRONT, *middlewares), "hf_checkpoint": str(ensure().moe_model), **settings}
        router = await stack.enter_async_context(running_router(*(proxy.url for proxy in proxies), **settings))
        timeout = aiohttp.ClientTimeout(total=10 * PATIENCE)
        http = await stack.enter_async_context(aiohttp.ClientSession(router.url, timeout=timeout))
        await router.probed()
        yield Stage(router, proxies, workers, http)


async def test_text_rollouts_have_the_rows_that_their_workers_gave_each_sent_once(
    sglang_moe_workers: list[RealWorker], capsys: pytest.CaptureFixture[str]
) -> None:
    async with stage(sglang_moe_workers, CACHE, KNOWING) as made:
        begun = time.monotonic()
        rollouts = TextRollouts(made.router.url, count=ROLLOUTS)
        await rollouts.run()
        ran = time.monotonic()
        known = book(made.proxies, rollouts.turns)
        assert await check_lines(made.http, known) == known.rows
        assert told_clients(made.router.app.router) == len(rollouts.turns) == 4 * ROLLOUTS
        transferred = known.transferred(made.proxies)
        assert transferred == made.statistics["transferred_rows"] == sum(len(line.own) for line in known.lines.values())
        assert known.rows - transferred == made.statistics["reused_rows"]
        remembered, fresh = await made.shares(known)
    with capsys.disabled():
        print(f"\n{len(rollouts.turns)} turns, {len(known.lines)} generations of {known.rows} rows, all compared")
        print(f"{transferred} transferred, {1 - transferred / known.rows:.1%} saved")
        print(f"equal to one uninterrupted request: {remembered} remembered, {fresh} computed anew")
        print(f"{known.behind_the_longest} of {len(known.lines)} began where the longest known tokens end")
        print(f"{ran - begun:.1f} s of rollouts, {time.monotonic() - ran:.1f} s of comparison")
    assert all(proxy.generations for proxy in made.proxies)
    assert known.behind_the_longest > 0.8 * len(known.lines)
    assert transferred < 0.5 * known.rows
    assert float(fresh) > 0.9


def _streamed(made: Stage, tokens: int) -> bool:
    return made.streamed() >= tokens


async def test_rollouts_resumed_after_pauses_have_the_rows_of_all_their_goes(
    sglang_moe_workers: list[RealWorker], capsys: pytest.CaptureFixture[str]
) -> None:
    modes = ("abort", "retract", "in_place") * 2
    async with stage(sglang_moe_workers, CACHE, KNOWING, partial_rollout="resume") as made:
        rollouts = TextRollouts(made.router.url, count=RESUMED, length=2, long=40)

        async def updates() -> None:
            for number, mode in enumerate(modes, 1):
                await until(
                    partial(_streamed, made, EVERY * number), f"{EVERY * number} tokens", deadline=10 * PATIENCE
                )
                await made.update(mode, f"v{number}")

        begun = time.monotonic()
        try:
            await together([rollouts.run(), updates()], name="rollouts and updates")
        finally:
            await made.update("abort", FIRST_VERSION)
        ran = time.monotonic()
        known = book(made.proxies, rollouts.turns)
        assert await check_lines(made.http, known) == known.rows
        assert told_clients(made.router.app.router) == len(rollouts.turns)
        transferred = known.transferred(made.proxies)
        remembered, fresh = await made.shares(known)
        statistics = made.statistics
    resumed = [line for line in known.lines.values() if len(line.goes) > 1]
    with capsys.disabled():
        print(f"\n{len(known.lines)} generations of {known.rows} rows, {len(resumed)} resumed, all compared")
        print(f"{transferred} transferred, {1 - transferred / known.rows:.1%} saved; {statistics}")
        print(f"equal to one uninterrupted request: {remembered} remembered, {fresh} computed anew")
        print(f"{ran - begun:.1f} s of rollouts, {time.monotonic() - ran:.1f} s of comparison")
    assert {bool(line.turn.body["stream"]) for line in resumed} == {False, True}
    assert {line.alone for line in resumed} == {False, True}
    assert len(resumed) >= len(known.lines) // 8  # under load fewer are under way when a pause comes
    assert float(fresh) > 0.9


async def test_agents_samples_have_the_rows_that_their_workers_gave(
    sglang_moe_workers: list[RealWorker], capsys: pytest.CaptureFixture[str]
) -> None:
    async with stage(sglang_moe_workers, SESSIONS, CAPTURE) as made, RouterClient(made.router.url) as client:
        begun = time.monotonic()
        agents = Agents(made.router.url, count=AGENTS, turns=6)
        twins = (await made.ask("POST", "/sessions", {}))["session_id"]
        await together([agents.run(), _twins(made, twins)], name="agents")
        ran = time.monotonic()
        went = chats_of(made.proxies, version=FIRST_VERSION)
        brought = {each.rid: rows_of(each.experts) for each in went.generations if each.experts}
        assert len(brought) == len(went.generations)
        samples = rows = tokens = 0
        remembered, fresh = Share(), Share()
        for session in (*agents.sessions, twins):
            mine = {each.rid: each for each in went.of(session)}
            proxy = went.of(session)[-1].proxy  # a session may leave a worker that has more to do
            told = (await made.ask("POST", f"/sessions/{session}/samples", {}))["samples"]
            read = [await client.session(session).collect(format=form) for form in ("json", "safetensors")]
            for sample, plain, binary in zip(told, *read, strict=True):
                expected = sample_rows(sample, mine)
                said = sample["routed_experts"]
                assert (said["dtype"], said["shape"]) == ("uint8", [len(sample["tokens"]) - 1, LAYERS, TOP_K])
                assert base64.b64decode(said["data"]) == expected.astype(np.uint8).tobytes()
                for each in (plain, binary):
                    assert each.tokens.tolist() == sample["tokens"]
                    assert each.routed_experts is not None
                    assert each.routed_experts.dtype == np.uint8
                    assert np.array_equal(each.routed_experts, expected)
                leaf = sample["metadata"]["leaf"]
                found = await delivered(made.http, session_id=session, leaf=leaf)
                assert np.array_equal(found.rows, expected)
                for share, anew in ((remembered, False), (fresh, True)):
                    worker = sglang_moe_workers[proxy].url
                    share.add(expected, await uninterrupted(made.http, worker, sample["tokens"], fresh=anew))
                samples, rows, tokens = samples + 1, rows + len(expected), tokens + len(sample["tokens"])
            records = (await made.ask("GET", f"/sessions/{session}"))["records"]
            for record in records:
                held = record["prompt_tokens"] + record["completion_tokens"] - 1
                assert record["routed_experts"] == {"rows": held}
                found = await delivered(made.http, rid=record["rid"])
                assert len(found.rows) == held
        replies = told_clients(made.router.app.router)
        statistics = made.statistics
    transferred = sum(map(len, brought.values()))
    whole = sum(len(each.prompt) + len(each.sampled) - 1 for each in went.generations)
    with capsys.disabled():
        print(f"\n{len(agents.sessions)} agents, {len(went.generations)} turns, {samples} samples, {tokens} tokens")
        print(f"{rows} rows compared; {transferred} of {whole} transferred, {1 - transferred / whole:.1%} saved")
        print(f"equal to one uninterrupted request: {remembered} remembered, {fresh} computed anew")
        print(f"{statistics}; {replies} replies; {len(agents.log.left)} broken off")
        print(f"{ran - begun:.1f} s of agents, {time.monotonic() - ran:.1f} s of comparison")
    assert rows == tokens - samples
    assert transferred == statistics["transferred_rows"]
    assert transferred < 0.5 * whole
    assert float(remembered) > 0.99
    assert float(fresh) > 0.9


async def _twins(made: Stage, session: str) -> None:
    """Streams of two choices, of which the agent goes on with the second, and asks for what it may not have."""
    messages: list[Any] = [{"role": "user", "content": "Say something."}]
    for turn in range(3):
        body = {"model": "m", "messages": messages, "n": 2, "max_tokens": 9, "stream": True}
        body |= {"return_routed_experts": True, "routed_experts_start_len": 3}
        async with made.http.post(f"/sessions/{session}{CHAT}", json=body) as reply:
            assert reply.status == 200, await reply.read()
            assert (await reply.read()).endswith(b"data: [DONE]\n\n")
        answer = (await made.ask("GET", f"/sessions/{session}?form=compact"))["records"][-1]["response"]
        messages = [*messages, answer, {"role": "user", "content": f"{turn}?"}]


WANTED = {"return_routed_experts": True, "sampling_params": {"max_new_tokens": 24, "ignore_eos": True}}
WAYS: dict[str, dict[str, Any]] = {
    "all": {},
    "from the fourth on": {"routed_experts_start_len": 3},
    "of two": {"sampling_params": {"max_new_tokens": 24, "ignore_eos": True, "n": 2}},
}


@pytest.mark.parametrize("stream", [False, True])
async def test_clients_who_ask_for_the_field_get_every_byte_as_the_worker_sent_it(
    stream: bool, sglang_moe_workers: list[RealWorker]
) -> None:
    async with stage(sglang_moe_workers, KNOWING) as made:
        for name, more in WAYS.items():
            body: dict[str, Any] = {"input_ids": [100, 101, 102, 103, 104], "stream": stream, **WANTED, **more}
            async with made.http.post(GENERATE, json=body, headers={"X-Request-Id": name}) as reply:
                came = await reply.read()
            exchanges = [each for proxy in made.proxies for each in proxy.exchanges]
            (exchange,) = [each for each in exchanges if each.headers.get("x-request-id") == name]
            assert (came, json.loads(exchange.body)) == (exchange.reply, body)
            start = body.get("routed_experts_start_len", 0)
            goes = [go for proxy in made.proxies for go in proxy.generations if go.request_id == name]
            assert len(goes) == body["sampling_params"].get("n", 1)
            for go in goes:
                told = await made.ask("POST", "/routed_experts", {"rid": go.rid, "format": "json", "start": start})
                assert told["routed_experts"] == go.experts
                assert told["shape"] == [5 + 24 - 1 - start, LAYERS, TOP_K]
            if start:
                refused = await made.ask("POST", "/routed_experts", {"rid": goes[0].rid}, status=404)
                assert refused["error"]["type"] == "not_found"


async def test_a_worker_that_tells_no_experts_is_named_at_the_first_request(sglang_workers: list[RealWorker]) -> None:
    params = {"max_new_tokens": 4}
    async with stage(sglang_workers, SESSIONS, CACHE, CAPTURE) as made:
        urls = [proxy.url for proxy in made.proxies]
        session = (await made.ask("POST", "/sessions", {}))["session_id"]
        message = {"messages": [{"role": "user", "content": "Hi"}], "model": "m", "max_tokens": 4}
        for path, body in (
            (GENERATE, {"text": "Hi", "sampling_params": params}),
            (GENERATE, {"text": "Hi", "sampling_params": params, "return_routed_experts": True}),
            (f"/sessions/{session}{CHAT}", message),
        ):
            error = (await made.ask("POST", path, body, status=502))["error"]
            _names(error, urls)
            async with made.http.post(path, json={**body, "stream": True}) as reply:
                events = (await reply.read()).split(b"\n\n")
            _names(_error_of(events), urls)
        refused = (await made.ask("POST", f"/sessions/{session}/samples", {}, status=422))["error"]
        assert refused["type"] == "invalid_sample", "a part of the stream has passed, and no sample has it"


def _error_of(events: Sequence[bytes]) -> Any:
    told = [json.loads(event.removeprefix(b"data: ")) for event in events if event.startswith(b"data: {")]
    (error,) = [each["error"] for each in told if "error" in each]
    return error


def _names(error: Any, urls: Sequence[str]) -> None:
    assert error["type"] == "upstream_error"
    assert any(url in error["message"] for url in urls)
    assert "--enable-return-routed-experts" in error["message"]

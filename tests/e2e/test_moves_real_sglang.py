"""Real SGLang workers: a running generation moves from one to the other, and every token is one that they sampled."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import orjson
import pytest

from miles_router.tasks import spawn
from tests.sglang.environment import ensure
from tests.sglang_worker import RealWorker
from tests.support.chains import chain, check, check_experts
from tests.support.fleet import JSON, post
from tests.support.recording_proxy import RecordingProxy
from tests.support.running_router import running_router
from tests.support.waiting import soon, until

pytestmark = pytest.mark.sglang

PROMPT = list(range(100, 140))
TOKENS = 700


async def test_a_running_generation_moves_and_its_answer_is_what_both_sampled(
    sglang_moe_workers: list[RealWorker],
) -> None:
    async with AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(RecordingProxy(worker.url)) for worker in sglang_moe_workers]
        router = await stack.enter_async_context(running_router(*(proxy.url for proxy in proxies), move_after=0.2))
        await until(lambda: all(each.facts for each in router.pool), "all is known of the workers")

        def ask(rid: str, tokens: int, *headers: tuple[str, str], **fields: Any) -> asyncio.Task[Any]:
            sampling = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 1}
            body = {"input_ids": PROMPT, "rid": rid, "sampling_params": sampling, **fields}
            named = [*JSON, ("X-Request-Id", rid), *headers]
            return spawn(router.ask("POST", "/generate", named, orjson.dumps(body)), name=rid)

        def at(proxy: RecordingProxy) -> list[str]:
            return [each.body["rid"] for each in proxy.begun]

        staying = {}
        for session in ("a", "b"):  # each at a worker of its own
            for number in range(2):
                rid = f"{session}-stays-{number}"
                staying[rid] = ask(rid, 4000, ("X-Session-Id", session))
                await until(lambda: sum(len(proxy.begun) for proxy in proxies) == len(staying), "it runs")
        assert sorted(len(proxy.begun) for proxy in proxies) == [2, 2]
        moving = ask("one-that-moves", TOKENS, return_logprob=True, return_routed_experts=True)
        await until(lambda: sum(len(proxy.begun) for proxy in proxies) == 5, "it runs as well")
        (idle,) = [proxy for proxy in proxies if "one-that-moves" not in at(proxy)]
        for rid in at(idle):
            assert (await post(router, "/abort_request", rid=rid)).status == 200
        metrics = router.app.router.metrics
        await until(lambda: metrics.moved_generations, lambda: f"it has moved: {dict(metrics.unmoved_generations)}")
        for rid in staying:
            await post(router, "/abort_request", rid=rid)
        answer = (await soon(moving)).json()
        ends = [(await soon(each)).json()["meta_info"]["finish_reason"]["type"] for each in staying.values()]
        assert ends == ["abort"] * 4
        meta = answer["meta_info"]
        assert (meta["finish_reason"], meta["resumed"], meta["id"]) == (
            {"type": "length", "length": TOKENS},
            1,
            "one-that-moves",
        )
        pieces = chain(proxies, "one-that-moves", answer)
        assert len(pieces) == 2
        assert all(piece.end > piece.start for piece in pieces)
        assert check(answer, pieces, prompt=PROMPT) == TOKENS
        config = orjson.loads((ensure().moe_model / "config.json").read_bytes())
        check_experts(answer, pieces, row=4 * config["num_hidden_layers"] * config["num_experts_per_tok"])
        assert dict(metrics.unmoved_generations) == {}
        await until(lambda: router.pool.in_flight == 0, "every lease is given back")

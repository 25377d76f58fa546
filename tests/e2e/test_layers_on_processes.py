"""Sessions, texts and rows of experts on a router of two processes: exact, wherever requests land."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from miles_router.testing import SimulatedWorker
from tests.support.cache_trial import CACHE, checkpoint
from tests.support.experts_trial import EXPERTS, MOE, SHAPE, ExpertsTrial, tokens_of, truth
from tests.support.forks import fork_router
from tests.support.http import Client, ask
from tests.support.layers import JSON, layered, listed, ports, post, written
from tests.support.owned import name_of
from tests.support.running_router import router_process
from tests.support.session_trial import CHAT, SESSIONS, exactly, message_of, user
from tests.support.waiting import STEP, until

LAYERS: tuple[tuple[str, dict[str, Any]], ...] = ((SESSIONS, {}), (CACHE, {}), (EXPERTS, {"moe_shape": SHAPE}))
SYSTEM = "You are a careful solver. " * 20


def configured(directory: Path) -> Path:
    return written(directory, LAYERS, hf_checkpoint=checkpoint())


def simulated(**settings: Any) -> SimulatedWorker:
    return SimulatedWorker(tokenizer=checkpoint(), moe=MOE, weight_version="1", **settings)


async def test_sessions_and_their_experts_are_exact_wherever_turns_land(tmp_path: Path) -> None:
    async with simulated() as worker, layered(configured(tmp_path), worker) as router:
        own = await ports(router)
        trials = [ExpertsTrial(each, [worker]) for each in own]
        names = [name_of(index, 2, "agent") for index in range(2)]
        async with await Client.connect(own[0].url) as one, await Client.connect(own[1].url) as other:
            for name in names:
                await trials[0].create(name)
                before, messages = len(worker.log.at(CHAT)), [user("Count.")]
                for turn in range(6):
                    body = {"model": "m", "max_tokens": 6, "messages": messages, "return_routed_experts": True}
                    asking = ((one, other)[turn % 2] if turn < 4 else own[turn % 2]).ask
                    reply = await asking("POST", f"/sessions/{name}{CHAT}", JSON, json.dumps(body).encode())
                    assert reply.status == 200, reply.body
                    messages = [*messages, message_of(reply.json()), user(f"And {turn}?")]
                generations = [each.generations[0] for each in worker.log.at(CHAT)[before:]]
                for trial in trials:
                    (sample,) = await trial.exact(name)
                    exactly(sample, *generations)
                    assert np.array_equal(await trial.rows(session_id=name), truth(sample["tokens"]))
        for trial in trials:
            assert await listed(trial.router.url) == sorted(names)
        # One that is late with its numbers is shown as it was
        await router.shows(lambda info: info["statistics"]["openai_sessions"]["sessions"] == 2)
        while await router.metric("miles_router_sessions_turns_total") < 12:  # noqa: ASYNC110
            await asyncio.sleep(STEP)
        assert await router.metric("miles_router_sessions_turns_total") == 12
        assert await router.metric("miles_router_forwarded_requests_total") > 0
        assert await router.metric("miles_router_forwarded_unavailable_total") == 0
        assert await router.metric("miles_router_forwarded_lost_total") == 0


async def test_texts_and_their_rows_are_found_from_every_process_with_the_reuse_of_one(tmp_path: Path) -> None:
    async with simulated() as worker, layered(configured(tmp_path), worker) as router:
        own = [ExpertsTrial(each, [worker]) for each in await ports(router)]
        for prompt in range(4):
            text, before = SYSTEM + f"Question {prompt}: ", list[int]()
            for turn in range(4):
                answer = await own[(prompt + turn) % 2].generate(text=text)
                (generation,) = worker.log.at("/generate")[-1].generations
                assert generation.input_ids[: len(before)] == before, "the ids before, sampled ones included"
                before = tokens_of(generation)
                text += answer["text"]
                for trial in own:
                    found = await trial.post("/retrieve_from_text", {"text": text})
                    assert (found.json()["tokens"], found.json()["matched_tokens"]) == (before, len(before))
                    assert np.array_equal(await trial.rows(rid=generation.rid), truth(before))
                text += f" And then {turn}?"
        await router.shows(lambda info: info["statistics"]["radix_tree"]["entries"] == 16)
        first = {"return_routed_experts": True, "routed_experts_start_len": 4, "rid": "gap"}
        await own[0].generate(text="Another one?", **first)
        for trial in own:
            status, _, message = await trial.refused(rid="gap")
            assert (status, "0 to 3" in message) == (404, True), "each process says what the one that knows it says"


async def test_no_turn_of_any_process_is_sent_behind_an_answered_pause(tmp_path: Path) -> None:
    async with simulated() as worker, layered(configured(tmp_path), worker) as router:
        own = await ports(router)
        assert (await post(own[1].url, "/pause_generation", {"mode": "in_place"})).status == 200
        body = {"model": "m", "max_tokens": 4, "messages": [user("Hi")]}
        turns = [
            asyncio.ensure_future(post(own[place].url, CHAT, body, ("X-Session-Id", name_of(index, 2, f"{place}-"))))
            for place in range(2)
            for index in range(2)
        ]
        await router.held(4)
        assert not worker.log.at(CHAT)
        assert (await post(own[0].url, "/continue_generation")).status == 200
        assert {each.status for each in await asyncio.gather(*turns)} == {200}
        await until(lambda: len(worker.log.at(CHAT)) == 4, "all turns have come")
        await router.becomes_idle()


async def test_what_processes_ask_of_each_other_brings_the_client_s_key(tmp_path: Path) -> None:
    config = written(tmp_path, LAYERS, hf_checkpoint=checkpoint(), api_key="ours", max_text_chars=200, processes=2)
    given, start = ("--config", str(config)), partial(fork_router, tokenizer=checkpoint())
    async with simulated() as worker, router_process(*given, "--worker-urls", worker.url, start=start) as router:
        key = ("Authorization", "Bearer ours")
        for index in range(2):
            assert (await post(router.url, "/sessions", {"session_id": name_of(index, 2, "s")}, key)).status == 200
        texts = [f"{number}: Hi" for number in range(4)]
        for text in texts:
            assert (await post(router.url, "/generate", {"text": text, "rid": text[0]}, key)).status == 200
        for _ in range(4):  # so that each process is asked
            found = await ask(router.url, "GET", "/sessions", [key])
            assert len(found.json()["sessions"]) == 2
            for text in texts:
                assert (await post(router.url, "/retrieve_from_text", {"rid": text[0]}, key)).status == 200
            found = await post(router.url, "/retrieve_from_text", {"texts": [*texts, texts[0] + "a" * 200]}, key)
            assert (found.status, found.error_type) == (413, "request_too_large")
        assert (await ask(router.url, "GET", "/sessions")).status == 401

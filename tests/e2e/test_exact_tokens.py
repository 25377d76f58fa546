"""Text rollouts against real SGLang: what is retrieved is what went through the workers' proxies, at every position."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from typing import Any

import aiohttp
import numpy as np
import pytest

from miles_router.client import RouterClient, Sample, group, multi_turn, single_turn
from miles_router.settings.config import MiddlewareSpec
from miles_router.tasks import cancelled, spawn
from tests.sglang.environment import ensure
from tests.sglang_worker import RealWorker
from tests.support.exactness import compare_all, drift, retrieve
from tests.support.generations import Generation
from tests.support.oracle import Ledger, Visible
from tests.support.recording_proxy import RecordingProxy
from tests.support.rollouts import GROUPS, SIZE, TURNS, Rollouts, Turn, generate
from tests.support.running_router import RunningRouter, running_router
from tests.support.session_trial import IM_END
from tests.support.tokenizers import tokenizer
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.sglang

UPDATES = 8
CACHE = MiddlewareSpec("middleware_hub.radix_tree_middleware.RadixTreeMiddleware", {})


@pytest.fixture
async def proxies(sglang_workers: list[RealWorker]) -> AsyncIterator[list[RecordingProxy]]:
    async with RecordingProxy(sglang_workers[0].url) as one, RecordingProxy(sglang_workers[1].url) as other:
        yield [one, other]


@pytest.fixture
async def router(proxies: list[RecordingProxy]) -> AsyncIterator[RunningRouter]:
    model = str(ensure().dense_model)
    async with running_router(*(proxy.url for proxy in proxies), middlewares=(CACHE,), hf_checkpoint=model) as running:
        yield running


@asynccontextmanager
async def changing_versions(workers: list[RealWorker], proxies: list[RecordingProxy]) -> AsyncIterator[None]:
    """New weight versions under the requests in flight, until the block ends."""
    async with aiohttp.ClientSession() as session:

        async def update(version: str) -> None:
            for worker in workers:
                order = {"new_version": version, "abort_all_requests": False}
                async with session.post(f"{worker.url}/update_weight_version", json=order) as reply:
                    assert reply.status == 200

        def begun(least: int) -> bool:
            return sum(len(proxy.begun) for proxy in proxies) >= least

        async def keep_updating() -> None:
            for version in range(1, UPDATES + 1):
                least = GROUPS * SIZE * TURNS * version // (UPDATES + 1)
                await until(partial(begun, least), f"{least} generations have begun", deadline=10 * PATIENCE)
                await update(str(version))

        updating = spawn(keep_updating(), name="weight updates")
        try:
            yield
        finally:
            await cancelled(updating)
            await update("default")


async def test_every_position_is_what_the_engine_was_given_or_sampled(
    router: RunningRouter,
    proxies: list[RecordingProxy],
    sglang_workers: list[RealWorker],
    capsys: pytest.CaptureFixture[str],
) -> None:
    begun = time.monotonic()
    rollouts = Rollouts(router.url)
    async with changing_versions(sglang_workers, proxies):
        await rollouts.run()
    generated = time.monotonic()
    ledger = Ledger(tokenizer("qwen3"))
    compared = await compare_all(router.url, proxies, rollouts.turns, ledger)
    assert compared.generations >= GROUPS * SIZE * TURNS
    assert len({version for each in ledger.accounts.values() for version in each.arrays.versions}) > UPDATES // 2
    assert ledger.reused > compared.generations / 2
    finals = [ledger.accounts[turn.rid] for turn in rollouts.last.values()]
    assert len(finals) == GROUPS * SIZE
    measured = drift(finals, tokenizer("qwen3"))
    with capsys.disabled():
        print(
            f"\n{compared}; {ledger.reused} generations were given recorded tokens, {ledger.shorter} of them fewer than"
        )
        print(f"some other entry had; {router.app.router.statistics['radix_tree']()}\n{measured}")
        print(f"{generated - begun:.1f} s of rollouts, {time.monotonic() - generated:.1f} s of comparison")
    assert measured.changed_rollouts > measured.rollouts / 2, "random weights are the hardest input there is"


async def test_siblings_with_one_text_and_different_ids_are_kept_apart(
    router: RunningRouter, proxies: list[RecordingProxy]
) -> None:
    spelling = tokenizer("qwen3").backend_tokenizer.token_to_id
    whole, first, second = spelling("Ġthem"), spelling("Ġth"), spelling("em")
    prompt = "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\nIt was"
    async with aiohttp.ClientSession(router.url) as session:

        async def forced(text: str, token: int) -> Turn:
            params = {"max_new_tokens": 1, "logit_bias": {str(token): 100}}
            sent = time.monotonic()
            (answer,) = await generate(session, {"text": text, "sampling_params": params})
            assert answer["output_ids"] == [token]
            return Turn(0, 0, 0, answer["meta_info"]["id"], Visible(text, sent, time.monotonic()), answer["text"])

        half = await forced(prompt, first)
        split = await forced(half.whole, second)
        joined = await forced(prompt, whole)
        assert split.whole == joined.whole == f"{prompt} them"
        found: dict[str, Any] = await retrieve(session, text=joined.whole)
        assert (found["ambiguous"], found["rid"]) == (True, joined.rid), "the newest, and it says so"
        assert set(found["candidates"]) == {split.rid, joined.rid}
        by_rid = [(await retrieve(session, rid=turn.rid))["tokens"] for turn in (split, joined)]
        assert [tokens[-2:] for tokens in by_rid] == [[first, second], [*by_rid[1][-2:-1], whole]]
        further = [await forced(f"{joined.whole}{more}", second) for more in ("", " and", "e")]
    compared = await compare_all(router.url, proxies, [half, split, joined, *further], Ledger(tokenizer("qwen3")))
    assert (compared.generations, compared.ambiguous) == (6, 1)


# The client's reference rollouts

PROMPT = "<|im_start|>user\nWhat is 17 plus 25?<|im_end|>\n<|im_start|>assistant\n"
TOOL = "<|im_end|>\n<|im_start|>tool\n{}<|im_end|>\n<|im_start|>assistant\n"
#: Random weights end their turn after some fifteen tokens.
SAMPLING: dict[str, Any] = {"max_new_tokens": 150, "logit_bias": {str(IM_END): 9.5}}


def check_sample(sample: Sample, turns: list[Generation]) -> int:
    """The sample is what the last turn was given and sampled, and no position is in the loss that the engine did not
    sample there. Says how many are."""
    last = turns[-1]
    given = [turn.given or [] for turn in turns]
    assert sample.tokens.tolist() == given[-1] + last.sampled
    assert sample.prompt_length == len(given[0])
    sampled = {
        (len(prompt) + place, token, float(np.float32(logprob)))
        for prompt, turn in zip(given, turns, strict=True)
        for place, (token, logprob) in enumerate(zip(turn.sampled, turn.logprobs, strict=True))
    }
    trained = np.flatnonzero(sample.loss_mask).tolist()
    assert {(place, int(sample.tokens[place]), float(sample.logprobs[place])) for place in trained} <= sampled
    assert set(range(len(given[-1]), len(sample))) <= set(trained), "the last turn is in the loss as a whole"
    assert {run.version for run in sample.weight_versions} == {"default"}
    return len(trained)


async def test_rollouts_hold_what_the_engines_were_given_and_sampled(
    router: RunningRouter, proxies: list[RecordingProxy]
) -> None:
    said = count()

    async def environment(reply: str) -> str | None:
        return TOOL.format(next(said))

    async with RouterClient(router.url, timeout=10 * PATIENCE) as client:
        single = await group(lambda: single_turn(client, PROMPT, SAMPLING), 8)
        several = await group(lambda: multi_turn(client, PROMPT, environment, SAMPLING, max_turns=4), 8)
        events = [each async for each in client.generate_stream(PROMPT, sampling_params=SAMPLING)]
        streamed = await client.retrieve(PROMPT + events[-1].text, rid=events[-1].rid)
    known = {generation.rid: generation for proxy in proxies for generation in proxy.generations}
    for sample in single:
        turn = known[sample.metadata["rid"]]
        assert check_sample(sample, [turn]) == len(turn.sampled)
        assert sample.status == ("completed" if (turn.finish or {})["type"] == "stop" else "truncated")
    trained = all_sampled = 0
    for sample in several:
        turns = [known[rid] for rid in sample.metadata["rids"]]
        trained += check_sample(sample, turns)
        all_sampled += sum(len(turn.sampled) for turn in turns)
    assert max(len(sample.metadata["rids"]) for sample in several) == 4
    assert trained > 0.9 * all_sampled, "but for what their texts cut through, all that was sampled is in the loss"
    turn = known[events[-1].rid]
    assert streamed.tokens.tolist() == (turn.given or []) + turn.sampled
    assert events[-1].output_ids == turn.sampled

"""The reference rollouts of texts on real SGLang: samples hold what went through the proxies of the workers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import count
from typing import Any

import numpy as np
import pytest

from miles_router.client import RouterClient, Sample, group, multi_turn, single_turn
from miles_router.settings.config import MiddlewareSpec
from tests.sglang.environment import ensure
from tests.sglang_worker import RealWorker
from tests.support.generations import Generation
from tests.support.recording_proxy import RecordingProxy
from tests.support.running_router import RunningRouter, running_router
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.sglang

CACHE = MiddlewareSpec("middleware_hub.radix_tree_middleware.RadixTreeMiddleware", {})
PROMPT = "<|im_start|>user\nWhat is 17 plus 25?<|im_end|>\n<|im_start|>assistant\n"
TOOL = "<|im_end|>\n<|im_start|>tool\n{}<|im_end|>\n<|im_start|>assistant\n"
IM_END = 151645
#: Random weights end their turn after some fifteen tokens.
SAMPLING: dict[str, Any] = {"max_new_tokens": 150, "logit_bias": {str(IM_END): 9.5}}
TURNS, GROUP = 4, 8


@pytest.fixture
async def proxies(sglang_workers: list[RealWorker]) -> AsyncIterator[list[RecordingProxy]]:
    async with RecordingProxy(sglang_workers[0].url) as one, RecordingProxy(sglang_workers[1].url) as other:
        yield [one, other]


@pytest.fixture
async def router(proxies: list[RecordingProxy]) -> AsyncIterator[RunningRouter]:
    model = str(ensure().dense_model)
    async with running_router(*(proxy.url for proxy in proxies), middlewares=(CACHE,), hf_checkpoint=model) as running:
        yield running


def check(sample: Sample, turns: list[Generation]) -> int:
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
        single = await group(lambda: single_turn(client, PROMPT, SAMPLING), GROUP)
        several = await group(lambda: multi_turn(client, PROMPT, environment, SAMPLING, max_turns=TURNS), GROUP)
        events = [each async for each in client.generate_stream(PROMPT, sampling_params=SAMPLING)]
        streamed = await client.retrieve(PROMPT + events[-1].text, rid=events[-1].rid)
    known = {generation.rid: generation for proxy in proxies for generation in proxy.generations}
    for sample in single:
        turn = known[sample.metadata["rid"]]
        assert check(sample, [turn]) == len(turn.sampled)
        assert sample.status == ("completed" if (turn.finish or {})["type"] == "stop" else "truncated")
    trained = all_sampled = 0
    for sample in several:
        turns = [known[rid] for rid in sample.metadata["rids"]]
        trained += check(sample, turns)
        all_sampled += sum(len(turn.sampled) for turn in turns)
    assert max(len(sample.metadata["rids"]) for sample in several) == TURNS
    assert trained > 0.9 * all_sampled, "but for what their texts cut through, all that was sampled is in the loss"
    turn = known[events[-1].rid]
    assert streamed.tokens.tolist() == (turn.given or []) + turn.sampled
    assert events[-1].output_ids == turn.sampled

"""Rewards of turns before a real SGLang: they stand at the tokens that the engine sampled for these turns."""

from __future__ import annotations

import pytest

from tests.sglang_worker import RealWorker
from tests.support.real_sessions import real_sessions
from tests.support.session_trial import exactly_through, message_of, user

pytestmark = pytest.mark.sglang


async def test_rewards_stand_at_the_tokens_that_the_engine_sampled(sglang_workers: list[RealWorker]) -> None:
    async with real_sessions(sglang_workers[0]) as (trial, proxy):
        session, history = await trial.create(), [user("Hi")]
        for turn, reward in enumerate((0.5, -0.25)):
            history += [message_of(await trial.chat(session, history)), user("Go on")]
            given = [{"turn": turn, "reward": reward}, {"turn": turn, "name": "advantage", "value": 2 * reward}]
            given.append({"turn": turn, "span": [0, 1], "name": "advantage", "value": 8.0})
            assert (await trial.ask("POST", f"/sessions/{session}/rewards", given)).status == 200
        (sample,) = await trial.samples(session, per_token=["reward", "advantage"])
        generations = list(proxy.chats(version="default"))
        exactly_through(sample, generations)
        rewards, advantages = [0.0] * len(sample["tokens"]), [0.0] * len(sample["tokens"])
        for each, reward in zip(generations, (0.5, -0.25), strict=True):
            start, end = len(each.prompt), len(each.prompt) + len(each.sampled)
            rewards[end - 1] = reward
            advantages[start:end] = [8.0, *[2 * reward] * (end - start - 1)]
        assert sample["per_token"] == {"reward": rewards, "advantage": advantages}

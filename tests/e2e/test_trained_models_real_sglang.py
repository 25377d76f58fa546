"""Two real SGLang with different weights, each a trained model of one router."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from miles_router.client import RouterClient
from miles_router.settings.config import MiddlewareSpec
from tests.sglang_worker import RealWorker
from tests.support.cache_trial import CACHE
from tests.support.generations import whole_generations
from tests.support.real_sessions import real_sessions, rolled_model
from tests.support.recording_proxy import RecordingProxy
from tests.support.session_trial import SESSIONS, SessionTrial, exactly_through, message_of, user

pytestmark = pytest.mark.sglang

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RealWorker, RealWorker, Path]]:
    model = rolled_model(tmp_path_factory.mktemp("coder"))
    solver = RealWorker.start()
    with RealWorker.start(model=model) as coder, solver:
        yield solver, coder, model


async def test_sessions_and_texts_of_each_model_are_exact(started: tuple[RealWorker, RealWorker, Path]) -> None:
    solver, coder, model = started
    settings: dict[str, Any] = {
        "middlewares": (MiddlewareSpec(SESSIONS), MiddlewareSpec(CACHE)),
        "model_id": "solver",
        "trained_models": (f"coder={model}",),
    }
    async with real_sessions(solver, **settings) as (trial, own), RecordingProxy(coder.url) as other:
        address = f"{trial.router.url}/models/coder"
        answer = await trial.ask("POST", "/models/coder/workers", {"url": other.url})
        assert (answer.status, answer.json()["model_id"]) == (201, "coder")
        tokens, texts = [], []
        for url, proxy in ((trial.router.url, own), (address, other)):
            async with RouterClient(url) as client:
                tokens.append(await two_turns(trial, client, proxy))
                rollout = await client.generate("The weather", sampling_params={"max_new_tokens": 8, "temperature": 0})
                found = await client.retrieve(rid=rollout.rid)
                assert found.tokens[found.loss_mask == 1].tolist() == list(rollout.output_ids)
                texts.append(found.tokens.tolist())
        assert tokens[0] != tokens[1], "the weights are others"
        assert texts[0] != texts[1]


async def two_turns(trial: SessionTrial, client: RouterClient, proxy: RecordingProxy) -> list[int]:
    session = await client.create_session()
    history = [user("Say something.")]
    for text in ("Go on.", None):
        answer = await session.chat(history, **GREEDY)
        if text is not None:
            history += [message_of(answer), user(text)]
    (sample,) = await session.collect()
    exactly_through(sample.to_dict(), whole_generations(proxy.chats(version="default")))
    return list(sample.tokens.tolist())

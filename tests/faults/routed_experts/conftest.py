"""Routers with a keeper of routed experts before one scripted worker."""

from __future__ import annotations

import pytest

from tests.support.cache_trial import CACHE
from tests.support.experts_trial import ExpertsTrial, experts_trial
from tests.support.scripted_chat import able
from tests.support.scripted_worker import ScriptedWorker
from tests.support.session_trial import SESSIONS
from tests.support.stage import Stage


@pytest.fixture
async def worker(stage: Stage) -> ScriptedWorker:
    return able(await stage.worker())


@pytest.fixture(params=[(), (CACHE,)], ids=["alone", "behind the cache"])
async def trial(stage: Stage, worker: ScriptedWorker, request: pytest.FixtureRequest) -> ExpertsTrial:
    return await experts_trial(stage, worker, around=request.param)


@pytest.fixture
async def alone(stage: Stage, worker: ScriptedWorker) -> ExpertsTrial:
    return await experts_trial(stage, worker)


@pytest.fixture
async def sessions(stage: Stage, worker: ScriptedWorker) -> ExpertsTrial:
    return await experts_trial(stage, worker, around=(SESSIONS,))

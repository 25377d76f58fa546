"""A `rid` that is sent again at once after its client has left, on real SGLang."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from miles_router.tasks import cancelled
from tests.sglang_worker import RealWorker
from tests.support.fleet import post, posting
from tests.support.running_router import RunningRouter, running_router
from tests.support.waiting import until

pytestmark = pytest.mark.sglang


@pytest.fixture
async def router(sglang_workers: list[RealWorker]) -> AsyncIterator[RunningRouter]:
    async with running_router(sglang_workers[0].url) as running:
        yield running


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_name_whose_client_left_is_answered_in_full(router: RunningRouter, stream: bool) -> None:
    endless = {"max_new_tokens": 4000, "ignore_eos": True}
    leaving = posting(router, text="One", rid="mine", stream=stream, sampling_params=endless)
    await until(lambda: router.pool.in_flight == 1, "it is sent")
    await post(router, "/generate", text="Two", sampling_params={"max_new_tokens": 1})
    await cancelled(leaving)
    sampling = {"max_new_tokens": 3, "ignore_eos": True}
    answer = await post(router, "/generate", text="One", rid="mine", sampling_params=sampling)
    assert answer.status == 200
    meta = answer.json()["meta_info"]
    assert (meta["id"], meta["finish_reason"]["type"], meta["completion_tokens"]) == ("mine", "length", 3)

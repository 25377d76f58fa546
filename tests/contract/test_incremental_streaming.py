"""A worker started with `--incremental-streaming-output`: its `/generate` streams are pieces, not growing wholes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.contract.client import WorkerClient
from tests.contract.conftest import KINDS, client_of, simulated
from tests.sglang_worker import RealWorker

FIRST_SPECIAL = 151_643  # of the Qwen3 vocabulary
SHORT = {"max_new_tokens": 32, "ignore_eos": True}


@pytest.fixture(params=KINDS)
async def worker(request: pytest.FixtureRequest) -> AsyncIterator[WorkerClient]:
    async with contextlib.AsyncExitStack() as stack:
        if request.param == "sglang":
            url = stack.enter_context(RealWorker.start("--incremental-streaming-output")).url
        else:
            url = await stack.enter_async_context(simulated(request.param, incremental_streaming_output=True))
        yield await stack.enter_async_context(client_of(url))


async def test_every_event_has_only_what_is_new(worker: WorkerClient) -> None:
    request: dict[str, Any] = {"text": "One", "sampling_params": SHORT, "return_logprob": True}
    events = await worker.events("/generate", **request)
    assert len(events) > 1
    ids = [token for event in events for token in event["output_ids"]]
    assert len(ids) == 32
    if max(ids) < FIRST_SPECIAL:  # special and padding ids are shown in ways of their own
        assert "".join(event["text"] for event in events) == await worker.decode(ids)
    for event in events:
        logprobs = event["meta_info"]["output_token_logprobs"]
        assert [token for _, token, _ in logprobs] == event["output_ids"]
    counts = [event["meta_info"]["completion_tokens"] for event in events]
    assert counts[-1] == 32
    assert counts == sorted(counts)
    assert events[-1]["meta_info"]["weight_versions"] == [{"version": "default", "start": 0, "end": 32}]

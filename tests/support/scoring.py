"""A client of a router that believes no answer: what it says was sampled is given to the engine again, and scored."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import aiohttp
import pytest

from miles_router.control import standstill
from tests.contract.client import WorkerClient
from tests.support.running_router import RunningRouter
from tests.support.stage import Stage
from tests.support.waiting import PATIENCE, until

SHORT = {"max_new_tokens": 6, "ignore_eos": True}
LONG = {"max_new_tokens": 40, "ignore_eos": True}
PROMPT = [40, 41, 42, 43, 44]


class Client(WorkerClient):
    """A client of a router before such workers."""

    def __init__(self, router: RunningRouter, session: aiohttp.ClientSession) -> None:
        super().__init__(router.url, session)
        self.router = router

    async def refused(self, path: str, /, **payload: Any) -> str:
        answer = await self.ask("POST", path, payload)
        assert (answer.status, answer.json["error"]["type"]) == (501, "unsupported_by_engine"), answer.body
        return str(answer.json["error"]["message"])

    async def is_true(self, prompt: Sequence[int], answer: Any) -> list[int]:
        """See that an answer has the ids that were sampled after this prompt, with their logprobs; gives them."""
        ids, meta = answer["output_ids"], answer["meta_info"]
        entries = meta["output_token_logprobs"]
        assert [entry[1] for entry in entries] == ids
        assert meta["completion_tokens"] == len(ids)
        if ids:
            whole = [*prompt, *ids]
            request = {"input_ids": whole, "sampling_params": {**SHORT, "max_new_tokens": 1}, "logprob_start_len": 0}
            scored = (await self.generate(**request, return_logprob=True))["meta_info"]["input_token_logprobs"]
            assert [entry[1] for entry in scored] == whole
            for (sampled, _, _), (again, _, _) in zip(entries, scored[-len(ids) :], strict=True):
                assert math.isclose(sampled, again, abs_tol=1e-3), (entries, scored)
        return list(ids)

    async def is_scored(self, tokens: Sequence[int], mask: Sequence[int], logprobs: Sequence[float]) -> None:
        """See that the logprobs of what was sampled are what the engine says of these tokens."""
        request = {"input_ids": list(tokens), "sampling_params": {"max_new_tokens": 0}, "logprob_start_len": 0}
        scored = (await self.generate(**request, return_logprob=True))["meta_info"]["input_token_logprobs"]
        for own, sampled, (score, token, _) in zip(logprobs, mask, scored, strict=True):
            assert not sampled or math.isclose(own, score, abs_tol=1e-3), (own, score, token)


@contextlib.contextmanager
def impatient() -> Iterator[None]:
    """Within it a router in this process soon gives up a flush that a paused worker refuses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(standstill, "FLUSH_PATIENCE", 0.3)
        yield


@contextlib.asynccontextmanager
async def client_of(stage: Stage, urls: Sequence[str], **settings: Any) -> AsyncIterator[Client]:
    router = await stage.router(*urls, **settings)
    await until(lambda: len(router.pool.routable) == len(urls), "all workers have answered")
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=4 * PATIENCE)) as session:
        yield Client(router, session)

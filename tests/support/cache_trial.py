"""A router with the text cache before one worker, and what tests ask of it."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from miles_router.settings.config import MiddlewareSpec
from miles_router.testing import SimulatedWorker
from miles_router.testing.tiny_tokenizer import build
from miles_router.testing.worker.exchange_log import Exchange
from tests.support.events import events_of
from tests.support.http import RawReply, ask
from tests.support.running_router import RunningRouter
from tests.support.scripted_worker import ScriptedWorker
from tests.support.stage import Stage

CACHE = "middleware_hub.radix_tree_middleware.RadixTreeMiddleware"
JSON = [("Content-Type", "application/json")]
STREAM = [("Content-Type", "text/event-stream")]
SHORT = {"max_new_tokens": 6, "ignore_eos": True}


@functools.cache
def _directory() -> tempfile.TemporaryDirectory[str]:
    directory = tempfile.TemporaryDirectory(prefix="checkpoint-")
    build(Path(directory.name))
    return directory


def checkpoint() -> str:
    """A directory with a small tokenizer, made once."""
    return _directory().name


class Trial:
    """A router with the cache before one worker."""

    def __init__(self, router: RunningRouter, worker: SimulatedWorker | None = None) -> None:
        self.router = router
        self.worker = worker

    async def post(self, path: str, body: Any, headers: list[tuple[str, str]] | None = None) -> RawReply:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self.router.ask("POST", path, headers or JSON, raw)

    async def generate(self, **body: Any) -> Any:
        answer = await self.post("/generate", {"sampling_params": SHORT, **body})
        assert answer.status == 200, answer.body
        return answer.json()

    async def retrieve(self, **body: Any) -> Any:
        answer = await self.post("/retrieve_from_text", body)
        assert answer.status == 200, answer.body
        return answer.json()

    @property
    def log(self) -> list[Exchange]:
        assert self.worker is not None
        return self.worker.log.at("/generate")

    def given(self) -> list[list[int]]:
        """What each generation of the last request was given at the worker."""
        return [each.input_ids for each in self.log[-1].generations]

    def statistics(self) -> dict[str, Any]:
        return dict(self.router.app.router.statistics["radix_tree"]())


async def trial_before(stage: Stage, worker: SimulatedWorker | ScriptedWorker, **options: Any) -> Trial:
    middlewares = (MiddlewareSpec(CACHE, options),)
    url = worker.url if isinstance(worker, SimulatedWorker) else worker
    router = await stage.router(url, middlewares=middlewares, hf_checkpoint=checkpoint())
    return Trial(router, worker if isinstance(worker, SimulatedWorker) else None)


@asynccontextmanager
async def simulated_trial(stage: Stage, **worker_options: Any) -> AsyncIterator[Trial]:
    async with SimulatedWorker(tokenizer=checkpoint(), **worker_options) as worker:
        yield await trial_before(stage, worker)


async def ask_worker(url: str, body: Any) -> RawReply:
    return await ask(url, "POST", "/generate", JSON, json.dumps(body).encode())


async def exactly_recorded(trial: Trial, answer: Any, given: list[int]) -> None:
    found = await trial.retrieve(rid=answer["meta_info"]["id"])
    assert found["tokens"] == given + answer["output_ids"]
    assert found["loss_mask"][len(given) :] == [1] * len(answer["output_ids"])
    assert found["finished"]


def events(body: bytes) -> list[Any]:
    return events_of(body)


def event(ids: list[int], text: str, *, finish: bool = False) -> bytes:
    meta = {
        "id": "r1",
        "completion_tokens": len(ids),
        "finish_reason": {"type": "length", "length": 3} if finish else None,
        "output_token_logprobs": [[-0.5, token, None] for token in ids],
        "weight_version": "1",
        **({"weight_versions": [{"version": "1", "start": 0, "end": len(ids)}]} if finish else {}),
    }
    return b"data: " + json.dumps({"text": text, "output_ids": ids, "meta_info": meta}).encode() + b"\n\n"


def data_of(body: bytes) -> list[bytes]:
    parts = [part.removeprefix(b"data: ") for part in body.split(b"\n\n")]
    return [part for part in parts if part and part != b"[DONE]"]

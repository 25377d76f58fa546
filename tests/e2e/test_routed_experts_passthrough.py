"""A long string of routed experts on its way through: 60 MB are given on as they are, with and without a keeper."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from miles_router.testing.worker.model.moe import encode_routes
from tests.support.experts_trial import ASKED, ExpertsTrial, compact, event_of, experts_trial, generated
from tests.support.http import RawReply
from tests.support.scripted_chat import DONE, EVENT_STREAM, JSON, PROMPT
from tests.support.scripted_worker import LAST_CHUNK, ScriptedWorker, chunk, chunked_head, reply, script
from tests.support.stage import Stage

LAYERS, NUMBER, TOP_K = 48, 128, 8
ROWS = 29_300
SIZE = 60_000_000
#: The router is given it in pieces, as a network would give them.
PIECE = 1 << 18
OUTPUT = [7] * (ROWS + 1 - len(PROMPT))


@functools.cache
def rows() -> Any:
    return np.random.default_rng(3).integers(0, NUMBER, (ROWS, LAYERS, TOP_K), dtype=np.int32)


def answer(experts: str | None) -> dict[str, Any]:
    """An answer of many tokens, of which nothing else is told."""
    meta: dict[str, Any] = {"completion_tokens": len(OUTPUT), "output_token_logprobs": None}
    return {**generated([7], experts, **meta), "text": 'he said "routed_experts": "AAAA", and \\'}


@functools.cache
def body(*, stream: bool, told: bool = True) -> bytes:
    """What the worker writes; without what is `told`, the bytes of the same answer that never had it."""
    whole = answer(encode_routes(rows()) if told else None)
    if not stream:
        return compact(whole)
    running = {**answer(None), "meta_info": {**answer(None)["meta_info"], "finish_reason": None}}
    return event_of(running) + event_of(whole) + DONE


def behaves(worker: ScriptedWorker, *, stream: bool) -> None:
    data = body(stream=stream)
    assert len(data) > SIZE
    pieces = (data[at : at + PIECE] for at in range(0, len(data), PIECE))
    if stream:
        worker.always(script(chunked_head(EVENT_STREAM), *map(chunk, pieces), LAST_CHUNK))
    else:
        worker.always(script(reply(data, headers=JSON)))


def same(got: RawReply, want: bytes) -> bool:
    """Whether they are equal; a failure must not print them."""
    return (len(got.body), hashlib.sha256(got.body).digest()) == (len(want), hashlib.sha256(want).digest())


@pytest.fixture(scope="module", autouse=True)
def forgotten() -> Iterator[None]:
    yield
    rows.cache_clear()
    body.cache_clear()


@pytest.fixture
async def worker(stage: Stage) -> ScriptedWorker:
    return await stage.worker()


@pytest.fixture
async def trial(stage: Stage, worker: ScriptedWorker) -> ExpertsTrial:
    return await experts_trial(stage, worker, options={"moe_shape": f"{LAYERS}x{NUMBER}x{TOP_K}"})


async def kept(trial: ExpertsTrial) -> None:
    """All rows are held, in a byte each, and are those that the worker told."""
    found = await trial.rows(rid="r1")
    assert (found.dtype.name, found.shape) == ("uint8", rows().shape)
    assert np.array_equal(found, rows())
    assert trial.held["bytes"] == rows().size


@pytest.mark.parametrize("settings", [{}, {"partial_rollout": "resume"}], ids=["plainly", "under resume"])
@pytest.mark.parametrize("stream", [False, True])
async def test_without_a_keeper_every_byte_passes_as_it_came(
    stage: Stage, worker: ScriptedWorker, stream: bool, settings: dict[str, Any]
) -> None:
    behaves(worker, stream=stream)
    router = await stage.router(worker, **settings)
    asked = {**ASKED, "stream": stream, "return_routed_experts": True}
    got = await router.ask("POST", "/generate", JSON, compact(asked))
    assert (got.status, worker.requests[-1].body) == (200, compact(asked))
    assert same(got, body(stream=stream))


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_keeper_gives_every_byte_to_who_asked_and_else_the_rest_as_it_came(
    worker: ScriptedWorker, trial: ExpertsTrial, stream: bool, asks: bool
) -> None:
    behaves(worker, stream=stream)
    got = await trial.post(
        "/generate", {**ASKED, "stream": stream, **({"return_routed_experts": True} if asks else {})}
    )
    assert got.status == 200
    assert same(got, body(stream=stream, told=asks))
    await kept(trial)

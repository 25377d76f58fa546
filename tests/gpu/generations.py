"""Generations that run while the weights change, and what must be true of each at its end."""

from __future__ import annotations

import asyncio
import base64
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np

from tests.gpu.engine import Engine, until_running
from tests.gpu.model import Shape
from tests.gpu.spread import Differences, differences, spread
from tests.support.chains import Piece, chain, check, check_experts
from tests.support.chains import spread as positions
from tests.support.events import answers_of
from tests.support.recording_proxy import RecordingProxy
from tests.support.waiting import until

ROW_ITEM = 4  # bytes of an expert id on SGLang's wire
FIRST_IDS = 150_000  # prompts are made of ids below
AT_ONCE = 4  # prefills with logprobs of a whole sequence; each takes a row of the vocabulary's size a token
MORE = 16  # tokens that all generations have got before anything is disturbed


@dataclass
class Rollout:
    """One generation as its client knows it."""

    request_id: str
    prompt: list[int]
    stream: bool
    answer: dict[str, Any] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        """Prompt and output."""
        return [*self.prompt, *self.answer["output_ids"]]

    @property
    def versions(self) -> list[str]:
        """The weight version of each output token."""
        return positions(self.answer["meta_info"]["weight_versions"])

    @property
    def logprobs(self) -> list[float]:
        return [entry[0] for entry in self.answer["meta_info"]["output_token_logprobs"]]


def rollouts(count: int, name: str) -> list[Rollout]:
    """As many, every fourth of which is streamed, with prompts of 16 to 256 tokens."""
    dice = random.Random(name)
    return [
        Rollout(
            request_id=f"{name}-{number}",
            prompt=[dice.randrange(FIRST_IDS) for _ in range(dice.randint(16, 256))],
            stream=number % 4 == 0,
        )
        for number in range(count)
    ]


async def run(url: str, rollout: Rollout, tokens: int) -> None:
    """Generate, through the router. The router keeps the rows, and the client gets them too."""
    body = {
        "input_ids": rollout.prompt,
        "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True},
        "return_logprob": True,
        "return_routed_experts": True,
        "stream": rollout.stream,
    }
    timeout = aiohttp.ClientTimeout(total=None)
    async with (
        aiohttp.ClientSession(timeout=timeout) as http,
        http.post(f"{url}/generate", json=body, headers={"X-Request-Id": rollout.request_id}) as reply,
    ):
        data = await reply.read()
        assert reply.status == 200, data
    (rollout.answer,) = answers_of(data, stream=rollout.stream)


async def all_under_way(made: Engine, proxy: RecordingProxy, count: int) -> None:
    """Until every one of them has sampled some tokens: all are in the batch, and those that stream have got more since
    then."""
    await until_running(made, count)
    streams = [each for each in proxy.begun if each.streamed and each.finish is None]
    assert streams
    reached = [len(each.sampled) + MORE for each in streams]
    grown = lambda: all(len(each.sampled) >= goal for each, goal in zip(streams, reached, strict=True))  # noqa: E731
    await until(grown, "the streams go on")


@dataclass
class Checked:
    """What all the generations of a trial came to."""

    generations: int = 0
    tokens: int = 0
    rows: int = 0
    crossed: int = 0  # generations with tokens of both versions
    carried_on: int = 0  # those that went on at the worker as another request


async def checked(
    url: str, proxy: RecordingProxy, shape: Shape, of: Sequence[Rollout], tokens: int, old: str, new: str
) -> Checked:
    """No generation is lost; each says exactly what the worker said, with a row for each token but the last.

    Raises:
        AssertionError: it is not so.
    """
    row = ROW_ITEM * shape.num_hidden_layers * shape.num_experts_per_tok
    found = Checked()
    async with aiohttp.ClientSession(url) as http:
        for rollout in of:
            rollout.pieces = chain([proxy], rollout.request_id, rollout.answer)
            assert len(rollout.answer["output_ids"]) == tokens, rollout.answer["meta_info"]
            assert rollout.answer["meta_info"]["finish_reason"] == {"type": "length", "length": tokens}
            found.tokens += check(rollout.answer, rollout.pieces, prompt=rollout.prompt)
            rows = check_experts(rollout.answer, rollout.pieces, row=row)
            assert rows == len(rollout.ids) - 1
            await _delivered(http, shape, rollout)
            versions = rollout.versions
            assert versions == sorted(versions, key=(old, new).index), "the old version comes before the new one"
            found.rows += rows
            found.generations += 1
            found.crossed += len(set(versions)) == 2
            found.carried_on += len(rollout.pieces) > 1
    return found


async def _delivered(http: aiohttp.ClientSession, shape: Shape, rollout: Rollout) -> None:
    """`/routed_experts` has the rows that the answer had, as bytes."""
    async with http.post("/routed_experts", json={"rid": rollout.answer["meta_info"]["id"]}) as reply:
        body = await reply.read()
        assert reply.status == 200, body
        dimensions = [int(each) for each in reply.headers["X-Shape"].split(",")]
    assert dimensions == [len(rollout.ids) - 1, shape.num_hidden_layers, shape.num_experts_per_tok]
    wide = np.frombuffer(base64.b64decode(rollout.answer["meta_info"]["routed_experts"]), "<i4")
    assert np.array_equal(np.frombuffer(body, np.uint8), wide)


async def audit(made: Engine, of: Sequence[Rollout]) -> dict[str, dict[str, Any]]:
    """How far the recorded logprobs lie from those that the worker computes now, by the version of the tokens."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def one(rollout: Rollout) -> Differences:
        async with turns:
            said = await made.recompute(rollout.ids)
        return differences(rollout.logprobs, said["logprobs"][len(rollout.prompt) - 1 :])

    apart = await asyncio.gather(*(one(rollout) for rollout in of))
    by_version: dict[str, list[Differences]] = {}
    for rollout, each in zip(of, apart, strict=True):
        stamps = np.asarray(rollout.versions)
        for version in sorted(set(rollout.versions)):
            by_version.setdefault(version, []).append(each[stamps == version])
    return {version: spread(each) for version, each in by_version.items()}

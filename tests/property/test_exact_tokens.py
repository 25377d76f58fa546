"""Exact tokens under any mix of requests, with real tokenizers of different kinds and a worker that samples their
hardest ids. The account is kept at the worker's proxy, as in `tests/e2e/test_exact_tokens.py`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Any

import aiohttp
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from miles_router.settings.config import MiddlewareSpec
from miles_router.testing import SimulatedWorker
from miles_router.testing.worker.model.hf_vocabulary import DirectoryTokenizer
from tests.support.exactness import compare_all
from tests.support.oracle import Ledger, Visible
from tests.support.recording_proxy import RecordingProxy
from tests.support.rollouts import Turn, generate
from tests.support.running_router import running_router
from tests.support.tiers import examples, nightly
from tests.support.tokenizers import tokenizer, tokenizer_directory

#: The vocabulary of Gemma takes half a minute to load.
EXAMPLES = {"qwen3": 60, "llama2": 60, **({"gemma3": 20} if nightly() else {})}
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)  # the account says what is wrong; shrinking takes minutes
PLENTY = 1_000_000
RIDS, VERSIONS = count(), count(100)
PROMPTS = ("Hello", "Say a", "naïve 世界", "x\n", " 12 ", "🚀")
MORE = ("", "", " and then", "s", "\n\n", " ", "é", "界", "👍🏽", "\N{REPLACEMENT CHARACTER}", "STOP\nuser: hi\n")
STOPS: tuple[Any, ...] = (None, None, "a", ["e", " "], ["er", "界"])


class AsSGLangLoadsIt(DirectoryTokenizer):
    """transformers changes some tokenizers while it loads them (which tokens are special, for one)."""

    def __init__(self, name: str) -> None:
        super().__init__(tokenizer_directory(name))
        self._fast = tokenizer(name).backend_tokenizer


@cache
def vocabulary(name: str) -> DirectoryTokenizer:
    return AsSGLangLoadsIt(name)


@cache
def hard_ids(name: str) -> list[int]:
    """Ids that a text does not give back: pieces of characters, special tokens, spellings that merge."""
    backend = tokenizer(name).backend_tokenizer
    special = sorted(backend.get_added_tokens_decoder())[:12]
    whole = [
        i for text in ("a", " a", "e", "er", " the", "界", "\n", "  ", "🚀", "é") for i in backend.encode(text).ids
    ]
    pieces = [i for i in range(min(len(tokenizer(name)), 400)) if "\N{REPLACEMENT CHARACTER}" in backend.decode([i])]
    return sorted({*special, *whole, *pieces, *(tokenizer(name).all_special_ids)})


@dataclass(frozen=True)
class Ask:
    """One request: which text it continues and how, what the worker is to sample, and in which shape it is asked."""

    base: int
    cut: int
    more: str
    says: tuple[int, ...]  # indices into `hard_ids`
    shape: str
    stop: Any
    no_stop_trim: bool
    skip_special_tokens: bool
    ignore_eos: bool

    def params(self) -> dict[str, Any]:
        flags = {name: getattr(self, name) for name in ("no_stop_trim", "skip_special_tokens", "ignore_eos")}
        return {"max_new_tokens": max(1, len(self.says)), "stop": self.stop, "temperature": 1, **flags}


ASKS = st.builds(
    Ask,
    base=st.integers(0, 9),
    cut=st.sampled_from((0, 0, 0, 1, 2, 5)),
    more=st.sampled_from(MORE),
    says=st.lists(st.integers(0, 10_000), max_size=10).map(tuple),
    shape=st.sampled_from(("plain", "plain", "stream", "n", "list", "stream n", "aborted", "updated", "ids")),
    stop=st.sampled_from(STOPS),
    no_stop_trim=st.booleans(),
    skip_special_tokens=st.booleans(),
    ignore_eos=st.booleans(),
)
#: Asked at once; an integer sets the worker's weight version instead.
STEPS = st.lists(st.one_of(st.lists(ASKS, min_size=1, max_size=3), st.integers(1, 9)), min_size=2, max_size=8)


class Play:
    """Clients of one router, and what they have seen."""

    def __init__(self, name: str, worker: SimulatedWorker, session: aiohttp.ClientSession) -> None:
        self.name = name
        self.worker = worker
        self.session = session
        self.turns: list[Turn] = []

    async def step(self, step: list[Ask] | int) -> None:
        if isinstance(step, int):
            await self.update(step)
            return
        await asyncio.gather(*(self.ask(each) for each in step))

    def text_of(self, ask: Ask) -> str:
        texts = [*PROMPTS, *(turn.whole for turn in self.turns)]
        text = texts[-1 - ask.base % len(texts)]
        text = (text[: len(text) - ask.cut] or text) + ask.more
        return text.encode("utf-8", "replace").decode()

    async def ask(self, ask: Ask) -> None:
        text = self.text_of(ask)
        pool = hard_ids(self.name)
        samples = 2 if ask.shape in ("n", "stream n") else 1
        texts = [text, text + "!"] if ask.shape == "list" else [text]
        for _ in range(samples * len(texts) if ask.says else 0):
            self.worker.say([pool[index % len(pool)] for index in ask.says])
        body: dict[str, Any] = {"text": texts if ask.shape == "list" else text, "sampling_params": ask.params()}
        body["sampling_params"]["n"] = samples
        body["stream"] = ask.shape in ("stream", "stream n")
        if ask.shape == "ids":
            ids = tokenizer(self.name).backend_tokenizer.encode(text).ids
            body["input_ids"] = ids
            del body["text"]
            texts = [tokenizer(self.name).backend_tokenizer.decode(ids, skip_special_tokens=False)]
        sent = time.monotonic()
        if ask.shape == "aborted":
            answers = await self.aborted(body)
        elif ask.shape == "updated":
            answers = await self.updated(body)
        else:
            answers = await generate(self.session, body)
        for index, answer in enumerate(answers):
            seen = Visible(texts[index // samples], sent, time.monotonic(), ids=ask.shape == "ids")
            self.turns.append(Turn(0, 0, 0, answer["meta_info"]["id"], seen, answer["text"]))

    async def aborted(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Asked under an id, and aborted by it once the worker generates."""
        body["rid"] = f"aborted {next(RIDS)}."
        body["sampling_params"] |= {"max_new_tokens": 100, "ignore_eos": True, "stop": None}
        self.worker.engine.token_latency_s = 0.001
        asking = asyncio.ensure_future(generate(self.session, body))
        while not asking.done():
            await self.order("/abort_request", {"rid": body["rid"]})
            await asyncio.sleep(0.003)
        self.worker.engine.token_latency_s = 0.0
        return await asking

    async def updated(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Streamed while the weights change."""
        body["sampling_params"] |= {"max_new_tokens": 40, "ignore_eos": True, "stop": None}
        asking = asyncio.ensure_future(generate(self.session, {**body, "stream": True}))
        while not asking.done():
            await self.update(next(VERSIONS))
        return await asking

    async def update(self, version: int) -> None:
        await self.order("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    async def order(self, path: str, body: dict[str, Any]) -> None:
        async with self.session.post(self.worker.url + path, json=body) as reply:
            assert reply.status == 200


@asynccontextmanager
async def stage(name: str, max_tokens: int) -> AsyncIterator[tuple[Play, RecordingProxy, str]]:
    cached = MiddlewareSpec("middleware_hub.radix_tree_middleware.RadixTreeMiddleware", {"max_tokens": max_tokens})
    async with (
        SimulatedWorker(tokenizer=vocabulary(name), stop_probability=1 / 20) as worker,
        RecordingProxy(worker.url) as proxy,
        running_router(proxy.url, middlewares=(cached,), hf_checkpoint=tokenizer_directory(name)) as router,
        aiohttp.ClientSession(router.url) as session,
    ):
        yield Play(name, worker, session), proxy, router.url


@pytest.mark.parametrize("name", EXAMPLES)
def test_retrieved_is_what_was_given_and_sampled(name: str) -> None:
    @settings(max_examples=examples(EXAMPLES[name]), phases=PHASES, suppress_health_check=list(HealthCheck))
    @given(steps=STEPS, max_tokens=st.sampled_from((PLENTY, PLENTY, 40, 150)))
    def holds(steps: list[list[Ask] | int], max_tokens: int) -> None:
        asyncio.run(played(name, steps, max_tokens))

    holds()


async def played(name: str, steps: list[list[Ask] | int], max_tokens: int) -> None:
    async with stage(name, max_tokens) as (play, proxy, url):
        for step in steps:
            await play.step(step)
        ledger = Ledger(tokenizer(name), evicting=max_tokens != PLENTY)
        assert not play.turns or await compare_all(url, [proxy], play.turns, ledger)

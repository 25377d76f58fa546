"""Whatever clients and agents do, the experts of every token are delivered as the model chose them, and no row is asked
for that a trajectory has already. The account is kept at the worker's proxy."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from miles_router.settings.config import MiddlewareSpec
from miles_router.testing import MoeShape, SimulatedWorker, Tokenizer
from miles_router.testing.worker.exchange_log import Exchange, GenerationRecord
from miles_router.testing.worker.model.hf_vocabulary import DirectoryTokenizer
from miles_router.testing.worker.model.moe import route
from miles_router.trajectory.safetensors import unpack
from tests.support.cache_trial import CACHE, checkpoint
from tests.support.events import answers_of
from tests.support.http import RawReply
from tests.support.running_router import processes_used
from tests.support.session_trial import CHAT, SESSIONS, Message, SessionTrial, qwen3, user
from tests.support.stage import staged
from tests.support.tiers import examples
from tests.support.tokenizers import tokenizer_directory
from tests.support.waiting import until

EXPERTS = "middleware_hub.routed_experts_middleware.RoutedExpertsMiddleware"
GENERATE, DELIVER = "/generate", "/routed_experts"
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)  # the account says what is wrong; shrinking takes minutes
UNSHRUNK = settings(phases=PHASES, suppress_health_check=list(HealthCheck))
PLENTY = 1 << 30

Ids = npt.NDArray[np.integer[Any]]


@cache
def tiny() -> Tokenizer:
    return DirectoryTokenizer(checkpoint())


@dataclass(frozen=True)
class Model:
    """A worker's, and what the router knows of it."""

    shape: MoeShape
    told: bool
    max_bytes: int

    @property
    def options(self) -> dict[str, Any]:
        told = f"{self.shape.layers}x{self.shape.experts}x{self.shape.top_k}" if self.told else ""
        return {"moe_shape": told, "max_bytes": self.max_bytes}


shapes = st.builds(
    lambda layers, top_k, more: MoeShape(layers, top_k + more, top_k),
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(0, 20) | st.integers(240, 600),
)
models = st.builds(Model, shapes, st.booleans(), st.sampled_from([PLENTY, PLENTY, 3000, 600]))


class Play(SessionTrial):
    """A router that keeps the experts of one worker, and those who ask it."""

    def __init__(self, trial: SessionTrial, model: Model) -> None:
        super().__init__(trial.router, trial.workers)
        self.model = model

    @property
    def held(self) -> dict[str, Any]:
        return dict(self.router.app.router.statistics["routed_experts"]())

    @property
    def plenty(self) -> bool:
        return self.model.max_bytes == PLENTY

    def truth(self, tokens: list[int]) -> Ids:
        """[tokens - 1, layers, top_k], or without telling layers apart where the router cannot."""
        rows = route(self.model.shape, tokens)
        assert len(rows) == len(tokens) - 1
        return rows if self.model.told else rows.reshape(len(rows), -1)

    def check_array(self, array: Ids, tokens: list[int]) -> None:
        assert np.array_equal(array, self.truth(tokens))

    async def check_delivery(self, generation: GenerationRecord, form: str = "raw", **named: Any) -> None:
        """What is delivered are the experts of its tokens; nothing is only if it cannot be there."""
        tokens = tokens_of(generation)
        answer = await self.ask("POST", DELIVER, {**named, "format": form})
        if answer.status == 404:
            assert not self.plenty, answer.body
            return
        assert answer.status == 200, answer.body
        assert answer.value("x-rid") == generation.rid.encode()
        self.check_array(array_of(answer, form), tokens)
        start, stop = len(tokens) // 3, len(tokens) * 2 // 3
        part = await self.ask("POST", DELIVER, {**named, "start": start, "stop": stop})
        assert (part.status, part.value("x-start")) == (200, str(start).encode())
        assert np.array_equal(array_of(part, "raw"), self.truth(tokens)[start:stop])

    def check_account(self, exchanges: list[Exchange]) -> None:
        """The numbers are those of the proxy, and everything is within the budget."""
        held = self.held
        assert held["bytes"] <= self.model.max_bytes * processes_used()
        shape = self.model.shape
        assert held["shape"] == (vars(shape) if self.model.told else None)
        if self.plenty:
            transferred = [
                len(tokens_of(each)) - 1 - start_of(exchange) for exchange in exchanges for each in exchange.generations
            ]
            assert (held["answers"], held["transferred_rows"]) == (len(transferred), sum(transferred))
            assert (held["missing"], held["evicted"]) == ({}, 0)


def tokens_of(generation: GenerationRecord) -> list[int]:
    return generation.input_ids + generation.output_ids


def start_of(exchange: Exchange) -> int:
    """The first row that the worker was asked for; it was asked for rows each time."""
    body = exchange.json()
    assert body["return_routed_experts"] is True
    return int(body.get("routed_experts_start_len", 0))


def array_of(answer: RawReply, form: str) -> Ids:
    if form == "json":
        told = answer.json()
        array: Ids = np.frombuffer(base64.b64decode(told["routed_experts"]), "<i4").reshape(told["shape"])
        return array
    if form == "safetensors":
        arrays, _ = unpack(answer.body)
        return arrays["routed_experts"]
    shape = [int(each) for each in (answer.value("x-shape") or b"").split(b",")]
    return np.frombuffer(answer.body, (answer.value("x-dtype") or b"").decode()).reshape(shape)


def common_prefix(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@asynccontextmanager
async def play_with(model: Model, layer: str, *, stops: float = 0.05) -> AsyncIterator[Play]:
    sessions = layer == SESSIONS
    tokenizer, directory = (qwen3(), tokenizer_directory("qwen3")) if sessions else (tiny(), checkpoint())
    specs = (MiddlewareSpec(layer, {}), MiddlewareSpec(EXPERTS, model.options))
    kind: dict[str, Any] = {
        "moe": model.shape,
        "tokenizer": tokenizer,
        "weight_version": "1",
        "stop_probability": stops,
    }
    async with staged() as stage, SimulatedWorker(**kind) as worker:
        router = await stage.router(worker.url, middlewares=specs, hf_checkpoint=directory)
        yield Play(SessionTrial(router, [worker]), model)


# Texts


@dataclass(frozen=True)
class Ask:
    """One request of a client that continues texts."""

    base: int  # which text it continues
    cut: int  # characters of it that are left out at its end
    more: str
    tokens: int
    n: int
    stream: bool
    batch: bool  # two prompts at once
    wants: bool  # the client asks for experts itself
    form: str


asks = st.builds(
    Ask,
    base=st.integers(0, 9),
    cut=st.sampled_from([0, 0, 0, 1, 4, 12]),
    more=st.sampled_from(["", "", " and then", "s", "\n\n", "é", "界", '"routed_experts":"AAAA"', "\\"]),
    tokens=st.integers(1, 14),
    n=st.sampled_from([1, 1, 2, 3]),
    stream=st.booleans(),
    batch=st.sampled_from([False, False, False, True]),
    wants=st.sampled_from([False, False, False, True]),
    form=st.sampled_from(["raw", "json", "safetensors"]),
)


class Texts:
    """A client of the text cache, and what it has seen."""

    def __init__(self, play: Play) -> None:
        self.play = play
        self.texts = ["Hello there, tell me", "Once"]
        self.seen: list[tuple[str, GenerationRecord]] = []  # its whole text

    def reused(self) -> int:
        counted: dict[str, Any] = dict(self.play.router.app.router.statistics["radix_tree"]())
        return int(counted["reused_tokens"])

    async def ask(self, ask: Ask) -> None:
        text = self.texts[-1 - ask.base % len(self.texts)]
        text = (text[: len(text) - ask.cut] or text) + ask.more
        prompts = [text, text + "!"] if ask.batch else [text]
        body: dict[str, Any] = {"text": prompts if ask.batch else text, "stream": ask.stream}
        body["sampling_params"] = {"max_new_tokens": ask.tokens, "n": ask.n}
        if ask.wants:
            body["return_routed_experts"] = True
        before = self.reused()
        reply = await self.play.ask("POST", GENERATE, body)
        assert reply.status == 200, reply.body
        answers = read(reply, stream=ask.stream)
        assert len(answers) == ask.n * len(prompts)
        exchange = self.play.worker.log.at(GENERATE)[-1]
        if not ask.wants:
            assert b'"routed_experts":' not in reply.body.replace(b'\\"', b"")
            self.check_start(exchange, self.reused() - before)
        now = [
            (prompts[number // ask.n] + answer["text"], self.play.worker.log.generation(answer["meta_info"]["id"]))
            for number, answer in enumerate(answers)
        ]
        self.texts += [text for text, _ in now]
        for answer, (text, generation) in zip(answers, now, strict=True):
            if ask.wants:
                flat = np.frombuffer(base64.b64decode(answer["meta_info"]["routed_experts"]), "<i4")
                whole = self.play.truth(tokens_of(generation))
                assert np.array_equal(flat.reshape(whole.shape), whole)
            await self.play.check_delivery(generation, ask.form, rid=generation.rid)
            self.seen.append((text, generation))

    def check_start(self, exchange: Exchange, matched: int) -> None:
        """Rows are asked for from the first that is not held; a prompt's are those of the tokens that were found."""
        start = start_of(exchange)
        prompts = {tuple(each.input_ids): each.input_ids for each in exchange.generations}
        earlier = [tokens_of(each) for _, each in self.seen]
        for prompt in prompts.values():
            known = max((min(common_prefix(prompt, each), len(each) - 1) for each in earlier), default=0)
            assert start <= known, "a row that nobody has was not asked for"
        if len(prompts) == 1 and len(exchange.generations) == 1 and self.play.plenty:
            whole = any(len(each) == matched and prompt[:matched] == each for each in earlier)
            assert start == matched or (start == matched - 1 and whole), (start, matched)

    async def check(self) -> None:
        """At the end everything is still there, by its id and by its text."""
        newest = dict(self.seen)
        for text, generation in self.seen:
            await self.play.check_delivery(generation, rid=generation.rid)
            if newest[text] is generation:
                await self.play.check_delivery(generation, text=text)
        self.play.check_account(self.play.worker.log.at(GENERATE))


def read(reply: RawReply, *, stream: bool) -> list[Any]:
    """The answers; of a stream, whose events are cumulative, the last ones."""
    if not stream:
        parsed = reply.json()
        return parsed if isinstance(parsed, list) else [parsed]
    return answers_of(reply.body, stream=True)


@settings(UNSHRUNK, max_examples=examples(80))
@given(models, st.lists(asks, min_size=1, max_size=7))
async def test_texts_have_the_experts_that_the_model_chose(model: Model, asks: list[Ask]) -> None:
    async with play_with(model, CACHE) as play:
        texts = Texts(play)
        for ask in asks:
            await texts.ask(ask)
        await texts.check()


async def test_a_text_that_goes_on_brings_each_row_once() -> None:
    async with play_with(Model(MoeShape(2, 300, 3), True, PLENTY), CACHE, stops=0) as play:
        texts = Texts(play)
        ends: list[int] = []
        for number in range(8):
            await texts.ask(Ask(0, 0, " and then", 9, 1, number % 2 == 0, False, False, "raw"))
            ends.append(len(tokens_of(texts.seen[-1][1])))
        starts = [start_of(exchange) for exchange in play.worker.log.at(GENERATE)]
        assert starts == [0, *(end - 1 for end in ends[:-1])]
        assert play.held["transferred_rows"] == ends[-1] - 1
        assert play.held["bytes"] == (ends[-1] - 1) * 12, "each row is held once: 2 layers of 3 ids of 2 bytes"
        await texts.check()


# Sessions


@dataclass(frozen=True)
class Turn:
    """One request of an agent."""

    base: int  # which history it continues
    edit: int | None  # which of its messages it changes, from the end
    more: str
    tokens: int
    n: int
    stream: bool


turns = st.builds(
    Turn,
    base=st.sampled_from([0, 0, 0, 1, 2, 5]),
    edit=st.sampled_from([None, None, None, 1, 2, 3]),
    more=st.sampled_from(["Go on.", "And then?", "界", 'say "routed_experts":"AAAA"']),
    tokens=st.integers(1, 12),
    n=st.sampled_from([1, 1, 1, 2]),
    stream=st.booleans(),
)


class Agent:
    """An agent in one session."""

    def __init__(self, play: Play, session: str) -> None:
        self.play = play
        self.session = session
        self.histories: list[list[Message]] = [[user("Hi")]]

    async def turn(self, turn: Turn) -> None:
        sent = list(self.histories[-1 - turn.base % len(self.histories)])
        if turn.edit is not None and turn.edit < len(sent):
            sent[-1 - turn.edit] = {**sent[-1 - turn.edit], "content": "something else"}
        if len(self.histories) > 1:
            sent.append(user(turn.more))
        reply = await self.play.turn(self.session, sent, stream=turn.stream, n=turn.n, max_tokens=turn.tokens)
        assert reply.status == 200, reply.body
        assert b'"routed_experts":' not in reply.body.replace(b'\\"', b"")
        records = (await self.play.records(self.session))[-turn.n :]
        generations = self.play.worker.log.at(CHAT)[-1].generations
        assert {record["rid"] for record in records} == {generation.rid for generation in generations}
        self.histories += [[*sent, record["response"]] for record in records]

    async def check(self) -> None:
        """Every turn, by its id and as a leaf; every sample."""
        proxy, records = self.play.worker.log, await self.play.records(self.session)
        generations = [proxy.generation(record["rid"]) for record in records]
        for record, generation in zip(records, generations, strict=True):
            tokens = tokens_of(generation)
            if self.play.plenty:
                assert record["routed_experts"] == {"rows": len(tokens) - 1}
                self.check_start(record, generations)
            await self.play.check_delivery(generation, rid=generation.rid)
            named = {"session_id": self.session, "leaf": record["turn"]}
            await self.play.check_delivery(generation, "json", **named)
        for sample in await self.play.samples(self.session):
            assert sample["tokens"] == tokens_of(generations[sample["metadata"]["leaf"]])
            told = sample.get("routed_experts")
            if told is None:
                assert not (self.play.plenty and self.play.model.told)
                why = sample["metadata"]["routed_experts_missing"]
                assert not self.play.plenty or "moe_shape" in why, "what is trained on has its dimensions"
            else:
                array: Ids = np.frombuffer(base64.b64decode(told["data"]), told["dtype"]).reshape(told["shape"])
                self.play.check_array(array, sample["tokens"])

    def check_start(self, record: Any, generations: list[GenerationRecord]) -> None:
        """Rows are asked for from the first on that the turn before does not have."""
        (exchange,) = [each for each in self.play.worker.log.at(CHAT) if record["rid"] in map(rid_of, each.generations)]
        expected = 0
        if record["parent"] is not None:
            before = tokens_of(generations[record["parent"]])
            expected = min(record["prompt_tokens"] - record["given_tokens"], len(before) - 1)
            assert generations[record["turn"]].input_ids[:expected] == before[:expected]
        assert start_of(exchange) == expected


def rid_of(generation: GenerationRecord) -> str:
    return generation.rid


@settings(UNSHRUNK, max_examples=examples(40))
@given(models, st.lists(turns, min_size=1, max_size=6))
async def test_turns_have_the_experts_that_the_model_chose(model: Model, turns: list[Turn]) -> None:
    async with play_with(model, SESSIONS) as play:
        agent = Agent(play, await play.create())
        for turn in turns:
            await agent.turn(turn)
        await agent.check()
        play.check_account(play.worker.log.at(CHAT))
        evicted = play.held["evicted"]
        assert (await play.ask("DELETE", f"/sessions/{agent.session}")).status in (200, 204)
        await until(lambda: (play.held["bytes"], play.held["generations"]) == (0, 0), "they go with the session")
        assert play.held["evicted"] == evicted, "and make no room for others"


async def test_a_conversation_that_goes_on_brings_each_row_once() -> None:
    async with play_with(Model(MoeShape(2, 300, 3), True, PLENTY), SESSIONS, stops=0) as play:
        agent = Agent(play, await play.create())
        for number in range(6):
            await agent.turn(Turn(0, None, "Go on.", 9, 1, number % 2 == 0))
        await agent.check()
        lengths = [len(tokens_of(exchange.generation)) for exchange in play.worker.log.at(CHAT)]
        starts = [start_of(exchange) for exchange in play.worker.log.at(CHAT)]
        assert starts == [0, *(length - 1 for length in lengths[:-1])]
        assert play.held["transferred_rows"] == lengths[-1] - 1
        assert play.held["bytes"] == (lengths[-1] - 1) * 12, "each row is held once"
        (sample,) = await play.samples(agent.session)
        assert len(sample["tokens"]) == lengths[-1]

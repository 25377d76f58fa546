"""A router with sessions before workers, agents in them, and what tests ask of both."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from miles_router.settings.config import MiddlewareSpec
from miles_router.testing import SimulatedWorker, Tokenizer
from miles_router.testing.worker.exchange_log import Exchange, GenerationRecord
from miles_router.testing.worker.model.hf_vocabulary import DirectoryTokenizer
from miles_router.testing.worker.model.script import Step
from tests.support.cache_trial import checkpoint
from tests.support.events import events_of
from tests.support.generations import Generation
from tests.support.http import Pairs, RawReply
from tests.support.running_router import RunningRouter
from tests.support.scripted_worker import ScriptedWorker
from tests.support.simulated.sglang_jax import SimulatedJax
from tests.support.stage import Stage
from tests.support.tokenizers import tokenizer_directory
from tests.support.waiting import PATIENCE

CHAT = "/v1/chat/completions"
SESSIONS = "middleware_hub.openai_session_middleware.OpenAISessionMiddleware"
JSON = [("Content-Type", "application/json")]
#: Qwen3's own: the end of a message, and the text between an answer that ended and the next one.
IM_END = 151645
Message = dict[str, Any]
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
ASK_ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 17, "b": 25}}\n</tool_call>'


@functools.cache
def qwen3() -> Tokenizer:
    """The Qwen3 vocabulary for simulated workers, loaded once."""
    return DirectoryTokenizer(tokenizer_directory("qwen3"))


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def tool_result(call: Any, text: str) -> Message:
    return {"role": "tool", "tool_call_id": call["id"], "content": text}


def message_of(answer: Any) -> Message:
    message: Message = answer["choices"][0]["message"]
    return message


class SessionTrial:
    """A router with sessions before workers."""

    def __init__(self, router: RunningRouter, workers: Sequence[SimulatedWorker]) -> None:
        self.router = router
        self.workers = workers

    @property
    def worker(self) -> SimulatedWorker:
        (only,) = self.workers
        return only

    async def ask(self, method: str, path: str, body: Any = None, headers: Pairs = ()) -> RawReply:
        raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        return await self.router.ask(method, path, [*JSON, *headers], raw)

    async def create(self, session: str | None = None, **fields: Any) -> str:
        named = {"session_id": session} if session is not None else {}
        answer = await self.ask("POST", "/sessions", {**named, **fields})
        assert answer.status == 200, answer.body
        return str(answer.json()["session_id"])

    async def turn(self, session: str, messages: Sequence[Message], headers: Pairs = (), **fields: Any) -> RawReply:
        """A chat request and its reply, whatever that is."""
        body = {"model": "m", "max_tokens": 8, "messages": messages, **fields}
        return await self.ask("POST", f"/sessions/{session}{CHAT}", body, headers)

    async def chat(self, session: str, messages: Sequence[Message], headers: Pairs = (), **fields: Any) -> Any:
        answer = await self.turn(session, messages, headers, **fields)
        assert answer.status == 200, answer.body
        return answer.json()

    async def stream(self, session: str, messages: Sequence[Message], headers: Pairs = (), **fields: Any) -> list[Any]:
        answer = await self.turn(session, messages, headers, stream=True, **fields)
        assert answer.status == 200, answer.body
        return chunks_of(answer.body)

    @contextlib.asynccontextmanager
    async def agent(self, session: str, **options: Any) -> AsyncIterator[AsyncOpenAI]:
        """The official client, which knows a `base_url` and nothing else."""
        http = DefaultAsyncHttpxClient(verify=False)  # reading this machine's certificates takes a while
        given = {"api_key": "none", "max_retries": 0, "timeout": PATIENCE, "http_client": http, **options}
        async with AsyncOpenAI(base_url=f"{self.router.url}/sessions/{session}/v1", **given) as client:
            yield client

    async def read(self, session: str) -> Any:
        answer = await self.ask("GET", f"/sessions/{session}?form=compact")
        assert answer.status == 200, answer.body
        return answer.json()

    async def records(self, session: str) -> list[Any]:
        return list((await self.read(session))["records"])

    async def reasons(self, session: str) -> list[str | None]:
        return [record["reason"] for record in await self.records(session)]

    async def samples(self, session: str, **want: Any) -> list[Any]:
        answer = await self.ask("POST", f"/sessions/{session}/samples", {"format": "json", **want})
        assert answer.status == 200, answer.body
        return list(answer.json()["samples"])

    @property
    def log(self) -> list[Exchange]:
        return self.worker.log.at(CHAT)

    def statistics(self) -> dict[str, Any]:
        return dict(self.router.app.router.statistics["openai_sessions"]())


async def session_trial(
    stage: Stage,
    *workers: SimulatedWorker | ScriptedWorker,
    options: Mapping[str, Any] | None = None,
    more: Sequence[MiddlewareSpec] = (),
    **settings: Any,
) -> SessionTrial:
    """A router with sessions, and more layers, before these workers. Scripted ones have a small tokenizer, which is
    quicker."""
    simulated = [worker for worker in workers if isinstance(worker, SimulatedWorker)]
    router = await stage.router(
        *(worker.url if isinstance(worker, SimulatedWorker) else worker for worker in workers),
        middlewares=(MiddlewareSpec(SESSIONS, options or {}), *more),
        **{"hf_checkpoint": tokenizer_directory("qwen3") if simulated else checkpoint(), **settings},
    )
    return SessionTrial(router, simulated)


@contextlib.asynccontextmanager
async def simulated_sessions(
    stage: Stage,
    *,
    options: Mapping[str, Any] | None = None,
    more: Sequence[MiddlewareSpec] = (),
    settings: Mapping[str, Any] | None = None,
    worker_class: type[SimulatedWorker] = SimulatedWorker,
    **worker: Any,
) -> AsyncIterator[SessionTrial]:
    async with worker_class(tokenizer=qwen3(), **{"weight_version": "1", **worker}) as started:
        yield await session_trial(stage, started, options=options, more=more, **(settings or {}))


async def prompt_of(trial: SessionTrial, session: str) -> str:
    (sample,) = await trial.samples(session)
    return qwen3().decode(sample["tokens"])


def by_ids(context_len: int) -> dict[str, Any]:
    """Settings of a simulated worker whose chat has no ids, and whose parsers are known."""
    parsers = {"tool_call_parser": "qwen25", "reasoning_parser": "qwen3"}
    return {"worker_class": SimulatedJax, "weight_version": None, "context_len": context_len, **parsers}


def say(trial: SessionTrial, steps: Iterable[object]) -> None:
    """Have the only worker answer these steps of a script, one after the other, whatever it is asked."""
    for step in steps:
        trial.worker.say(Step.read(step).written(thinks=True))


def chunks_of(body: bytes) -> list[Any]:
    """The chunks of a stream that ended in order."""
    return events_of(body)


def text_of(chunks: Iterable[Any]) -> str:
    """The content that chunks have together."""
    deltas = [each["delta"] for chunk in chunks for each in chunk["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def exactly(sample: Any, *turns: GenerationRecord, elsewhere: int = 0) -> None:
    """A sample is what the worker was given and has sampled in these generations of its proxy, one behind the other,
    each position once. What the first `elsewhere` of them sampled is trained in another sample."""
    is_made_of(sample, [(turn.input_ids, turn.output_ids, turn.logprobs) for turn in turns], elsewhere)


def exactly_through(sample: Any, generations: Sequence[Generation]) -> None:
    """The same of what went through the proxy in front of a real engine."""
    is_made_of(sample, [(each.prompt, each.sampled, each.logprobs) for each in generations])


def is_made_of(
    sample: Any, turns: Iterable[tuple[Sequence[int], Sequence[int], Sequence[float]]], elsewhere: int = 0
) -> None:
    """The same of what each was given and has sampled, with its logprobs."""
    tokens: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    for number, (given, sampled, told) in enumerate(turns):
        assert list(given[: len(tokens)]) == tokens, "what was held has been given again as it was"
        new = given[len(tokens) :]
        tokens += [*new, *sampled]
        mask += [0] * len(new) + [int(number >= elsewhere)] * len(sampled)
        logprobs += [0.0] * len(new) + list(told)
    assert sample["tokens"] == tokens
    assert sample["loss_mask"] == mask
    assert np.array_equal(np.array(sample["logprobs"], np.float32), np.array(logprobs, np.float32))

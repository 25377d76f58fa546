"""A router that keeps routed experts, workers that tell them, and what tests ask of both."""

from __future__ import annotations

import base64
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from miles_router.settings.config import MiddlewareSpec
from miles_router.testing import SimulatedWorker
from miles_router.testing.worker.exchange_log import Exchange, GenerationRecord
from miles_router.testing.worker.model.moe import MoeShape, encode_routes, route
from tests.support.cache_trial import checkpoint
from tests.support.http import RawReply
from tests.support.metrics import metric, metrics, samples
from tests.support.scripted_chat import JSON, PROMPT
from tests.support.scripted_worker import ScriptedWorker, reply
from tests.support.session_trial import Message, SessionTrial, message_of, user
from tests.support.stage import Stage
from tests.support.waiting import until

EXPERTS = "middleware_hub.routed_experts_middleware.RoutedExpertsMiddleware"
MOE = MoeShape(3, 40, 2)
SHAPE = "3x40x2"
#: Ids in a row; bytes too, as long as ids are below 256.
WIDTH = 6
SHORT = {"max_new_tokens": 6, "ignore_eos": True}
SYSTEM: Message = {"role": "system", "content": "Be brief."}
HI = [SYSTEM, user("Hi")]
Ids = npt.NDArray[np.int32]


def truth(tokens: Sequence[int], start: int = 0, moe: MoeShape = MOE) -> Ids:
    """The rows of a generation whose prompt and output are `tokens`."""
    rows: Ids = route(moe, tokens, start)
    return rows


def tokens_of(generation: GenerationRecord) -> list[int]:
    return generation.input_ids + generation.output_ids


def experts_of(sample: Any) -> npt.NDArray[Any]:
    told = sample["routed_experts"]
    assert set(told) == {"dtype", "shape", "data"}
    flat: npt.NDArray[Any] = np.frombuffer(base64.b64decode(told["data"], validate=True), told["dtype"])
    array: npt.NDArray[Any] = flat.reshape(told["shape"])
    return array


def array_of(answer: RawReply) -> npt.NDArray[Any]:
    assert answer.status == 200, answer.body
    assert answer.value("content-type") == b"application/octet-stream"
    shape = [int(each) for each in (answer.value("x-shape") or b"").split(b",")]
    return np.frombuffer(answer.body, (answer.value("x-dtype") or b"").decode()).reshape(shape)


class ExpertsTrial(SessionTrial):
    """A router with a keeper of routed experts."""

    async def post(self, path: str, body: Any, headers: Sequence[tuple[str, str]] = ()) -> RawReply:
        return await self.ask("POST", path, body, headers)

    async def generate(self, **body: Any) -> Any:
        answer = await self.post("/generate", {"sampling_params": SHORT, **body})
        assert answer.status == 200, answer.body
        return answer.json()

    async def deliver(self, **asked: Any) -> RawReply:
        return await self.post("/routed_experts", asked)

    async def rows(self, **asked: Any) -> npt.NDArray[Any]:
        return array_of(await self.deliver(**asked))

    async def refused(self, **asked: Any) -> tuple[int, str, str]:
        answer = await self.deliver(**asked)
        assert answer.status != 200, answer.head
        return answer.status, answer.error_type, answer.json()["error"]["message"]

    async def sampling(self) -> None:
        """Until the only worker has sampled something of what it is working on."""
        running = self.worker.engine.running
        await until(lambda: any(each.output_ids for each in running.values()), "it has begun to sample")

    @property
    def held(self) -> dict[str, Any]:
        return dict(self.router.app.router.statistics["routed_experts"]())

    async def metric(self, name: str) -> float:
        return await metric(self.router, f"miles_router_routed_experts_{name}")

    async def missing(self) -> dict[str, int]:
        """How many answers came without rows that could be held, by reason: the same wherever one looks."""
        told = Counter[str]()
        for each in samples(await metrics(self.router.url), "miles_router_routed_experts_missing_total"):
            told[each.labels["reason"]] += int(each.value)
        assert told == self.held["missing"]
        return told

    def generations(self, path: str | None = None) -> list[GenerationRecord]:
        exchanges: Sequence[Exchange] = self.worker.log.at(path) if path else list(self.worker.log)
        return [generation for exchange in exchanges for generation in exchange.generations]

    def starts(self, path: str) -> list[int]:
        """The first rows that the worker was asked for, request by request; it was asked for rows each time."""
        asked = [exchange.json() for exchange in self.worker.log.at(path)]
        assert all(each["return_routed_experts"] is True for each in asked)
        return [each["routed_experts_start_len"] for each in asked]

    async def exact(self, session: str, **want: Any) -> list[Any]:
        """The samples of a session, each with the experts of its tokens."""
        samples = await self.samples(session, **want)
        for sample in samples:
            assert "routed_experts_missing" not in sample["metadata"], sample["metadata"]
            found = experts_of(sample)
            assert found.dtype == np.uint8
            assert np.array_equal(found, truth(sample["tokens"]))
        return samples


async def experts_trial(
    stage: Stage,
    *workers: SimulatedWorker | ScriptedWorker | str,
    around: Sequence[str | tuple[str, Mapping[str, Any]]] = (),
    options: Mapping[str, Any] | None = None,
    **settings: Any,
) -> ExpertsTrial:
    """A router with the keeper before these workers, and around it the layers named. The vocabulary is a small one,
    which is quicker."""
    layers = [(each, {}) if isinstance(each, str) else each for each in around]
    specs = [*layers, (EXPERTS, {"moe_shape": SHAPE} if options is None else options)]
    simulated = [worker for worker in workers if isinstance(worker, SimulatedWorker)]
    router = await stage.router(
        *(worker.url if isinstance(worker, SimulatedWorker) else worker for worker in workers),
        middlewares=tuple(MiddlewareSpec(path, given) for path, given in specs),
        **{"hf_checkpoint": checkpoint(), **settings},
    )
    return ExpertsTrial(router, simulated)


@contextlib.asynccontextmanager
async def simulated_experts(
    stage: Stage,
    *,
    around: Sequence[str | tuple[str, Mapping[str, Any]]] = (),
    options: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    **worker: Any,
) -> AsyncIterator[ExpertsTrial]:
    async with SimulatedWorker(**{"moe": MOE, "tokenizer": checkpoint(), "weight_version": "1", **worker}) as started:
        yield await experts_trial(stage, started, around=around, options=options, **(settings or {}))


async def episode(trial: ExpertsTrial, session: str, turns: int, **fields: Any) -> list[Message]:
    """So many turns, one behind the other; every second one is streamed."""
    history = [*HI]
    for turn in range(turns):
        if turn % 2:
            await trial.stream(session, history, **fields)
            message = (await trial.records(session))[-1]["response"]
        else:
            message = message_of(await trial.chat(session, history, **fields))
        history += [message, user(f"Go on {turn}")]
    return history[:-1]


async def all_kept(trial: ExpertsTrial) -> None:
    """Every generation of the worker's is delivered by its id."""
    for generation in trial.generations("/generate"):
        found = await trial.rows(rid=generation.rid)
        assert np.array_equal(found, truth(tokens_of(generation)))


# Answers of `/generate`, written down. The prompt is `PROMPT`, which has as many tokens as the chat's.

ASKED = {"input_ids": PROMPT}


def told(ids: Sequence[int], start: int = 0, moe: MoeShape = MOE, prompt: Sequence[int] = PROMPT) -> str:
    """What an engine tells of a generation that sampled `ids`."""
    return encode_routes(truth([*prompt, *ids], start, moe))


def generated(ids: Sequence[int], experts: str | None, *, rid: str = "r1", **fields: Any) -> dict[str, Any]:
    """One answer; `fields` go into its `meta_info`, behind the experts if there are any."""
    meta = {
        "id": rid,
        "finish_reason": {"type": "length", "length": len(ids)},
        "prompt_tokens": len(PROMPT),
        "completion_tokens": len(ids),
        "output_token_logprobs": [[-0.5, token, None] for token in ids],
        "weight_version": "1",
        **({} if experts is None else {"routed_experts": experts}),
        "dp_rank": None,
        **fields,
    }
    return {"text": "ok", "output_ids": list(ids), "meta_info": meta}


def compact(answer: object) -> bytes:
    return json.dumps(answer, separators=(",", ":")).encode()


def event_of(answer: object) -> bytes:
    return b"data: " + compact(answer) + b"\n\n"


def in_one(answer: object) -> bytes:
    return reply(compact(answer), headers=JSON)

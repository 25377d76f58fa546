"""Generations that are cut while a scripted worker answers them: a test writes down what the worker says."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from tests.support.fleet import post
from tests.support.http import RawReply
from tests.support.running_router import RunningRouter
from tests.support.scripted_worker import Behaviour, ScriptedWorker, Visit, chunk, chunked_head, reply, script
from tests.support.stage import Stage
from tests.support.waiting import soon, until

JSON = [("Content-Type", "application/json")]
EVENTS = chunked_head([("Content-Type", "text/event-stream")])
DONE = b"data: [DONE]\n\n"
END = (chunk(DONE), chunk(b""))
ABORT = {"type": "abort", "message": "Aborted"}
IN_THE_QUEUE = {"type": "abort", "message": "Abort in waiting queue"}
PROMPT = [1, 2]
EOS = 99


def answer(ids: Sequence[int], finish: object = None, *, prompt: int = len(PROMPT), **meta: Any) -> dict[str, Any]:
    """What a worker says of a go; its text is an x for each token."""
    said = {"id": "w", "finish_reason": finish, "prompt_tokens": prompt, "completion_tokens": len(ids), **meta}
    return {"text": "x" * len(ids), "output_ids": list(ids), "meta_info": said}


def length(count: int) -> dict[str, Any]:
    return {"type": "length", "length": count}


def in_json(body: bytes, status: int = 200) -> bytes:
    return reply(body, status, JSON)


def in_one(answers: Sequence[object]) -> bytes:
    return in_json(orjson.dumps(answers[0] if len(answers) == 1 else answers))


def told(*answers: object) -> Behaviour:
    return script(in_one(answers))


def event(said: object) -> bytes:
    return chunk(b"data: %b\n\n" % orjson.dumps(said))


def streamed(*answers: object) -> Behaviour:
    return script(EVENTS, *map(event, answers), *END)


class Engine:
    """A worker whose goes are written down; what else it is asked it answers as one would whose model ends with `EOS`
    and whose text is an x for each token."""

    def __init__(self, worker: ScriptedWorker) -> None:
        self.worker = worker
        self.goes: deque[Behaviour] = deque()
        self.asked: list[dict[str, Any]] = []
        self.probed: list[int] = []
        self.experts: deque[Behaviour] = deque()
        self.routed_by: list[object] = []  # the adapters whose experts it was asked for
        self.keys: list[bytes] = []
        self.encodings: list[bytes] = []  # that a client said it could read
        worker.standing |= {
            "/generate": self._generate,
            "/v1/tokenize": self._tokenize,
            "/v1/detokenize": self._detokenize,
            "/server_info": script(reply(b'{"incremental_streaming_output": false}')),
        }

    async def _generate(self, visit: Visit) -> None:
        body = orjson.loads(await visit.read_body())
        self.encodings += visit.request.values("accept-encoding")
        sampling = body.get("sampling_params") or {}
        biased = sampling.get("logit_bias")
        if sampling.get("max_new_tokens") == 0:
            self.routed_by.append(body.get("lora_path"))
            await self.experts.popleft()(visit)
            return
        if biased is None:
            self.asked.append(body)
            await self.goes.popleft()(visit)
            return
        (token,) = map(int, biased)
        self.probed.append(token)
        finish = {"type": "stop", "matched": token} if token == EOS else length(1)
        await visit.write(reply(orjson.dumps(answer([token], finish))))

    async def _tokenize(self, visit: Visit) -> None:
        self.keys += visit.request.values("authorization")
        await script(reply(orjson.dumps({"tokens": PROMPT})))(visit)

    async def _detokenize(self, visit: Visit) -> None:
        ids = orjson.loads(await visit.read_body())["tokens"]
        await visit.write(reply(orjson.dumps({"text": ["x" * len(each) for each in ids]})))


async def engine(stage: Stage) -> Engine:
    return Engine(await stage.worker())


async def engine_and_router(stage: Stage, **settings: Any) -> tuple[Engine, RunningRouter]:
    one = await engine(stage)
    return one, await stage.router(one.worker, **settings)


Generating = asyncio.Future[RawReply]


def generate(router: RunningRouter, *headers: tuple[str, str], **fields: Any) -> Generating:
    """A request, of the ids of `PROMPT` unless it says otherwise."""
    body = {"input_ids": PROMPT, **fields}
    if "text" in body:
        del body["input_ids"]
    return asyncio.ensure_future(router.ask("POST", "/generate", [*JSON, *headers], orjson.dumps(body)))


def held(router: RunningRouter) -> int:
    return router.app.router.gate.held


Cut = Callable[[asyncio.Event], Behaviour]


def one_piece(*answers: object) -> Cut:
    """A go that a pause ends."""
    return lambda paused: script(paused, in_one(answers))


def a_stream(*answers: object) -> Cut:
    """A stream whose last event a pause brings."""
    *before, last = map(event, answers)
    return lambda paused: script(EVENTS, *before, paused, last, *END)


def streams(*answers: object) -> Cut:
    """The streams of several generations, which a pause ends all at once."""
    return lambda paused: script(EVENTS, paused, *map(event, answers), *END)


async def pause(router: RunningRouter, one: Engine, cut: Cut, asking: Callable[[], Generating]) -> Generating:
    """A generation whose first go a pause has cut, so that it waits for the fleet to go on."""
    paused = asyncio.Event()
    one.goes.append(cut(paused))
    before = len(one.asked)
    generating = asking()
    await until(lambda: len(one.asked) > before, "it runs")
    await post(router, "/pause_generation")
    paused.set()
    await until(lambda: held(router), "it was cut and waits")
    return generating


async def going_on(router: RunningRouter, generating: Generating) -> RawReply:
    assert (await post(router, "/continue_generation")).status == 200
    return await soon(generating)


def events(came: RawReply) -> list[dict[str, Any]]:
    *said, done, _ = came.body.split(b"\n\n")
    assert done == DONE.strip()
    return [orjson.loads(each.removeprefix(b"data: ")) for each in said]

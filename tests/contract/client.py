"""The HTTP client of the contract suite: one worker, real or simulated, and what tests ask of it again and again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp

from miles_router.tasks import cancelled, spawn
from tests.support.waiting import PATIENCE, soon

#: Seconds in which a worker answers a generation that was aborted.
ENDS = 5.0
ENDLESS = {"max_new_tokens": 4000, "ignore_eos": True}
#: An engine answers an aborted request before its scheduler has let it go: it waits for that, up to so many seconds.
FLUSH = "/flush_cache?timeout=60"


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Any
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Stream:
    """A server-sent event stream, read event by event as the bytes come."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response
        self._chunks = response.content.iter_any()
        self._buffer = b""

    async def raw(self) -> AsyncIterator[bytes]:
        """Each event without the blank line that ends it."""
        while True:
            while b"\n\n" in self._buffer:
                event, _, self._buffer = self._buffer.partition(b"\n\n")
                yield event
            try:
                self._buffer += await anext_chunk(self._chunks)
            except StopAsyncIteration:
                assert not self._buffer, "the stream ended inside an event"
                return

    async def next(self) -> Any:
        """The next event's JSON."""
        async for event in self.raw():
            return json.loads(event.removeprefix(b"data: "))
        raise AssertionError("the stream has ended")

    async def rest(self) -> list[Any]:
        """All further events; the stream must end with `[DONE]`."""
        events = [event.removeprefix(b"data: ") async for event in self.raw()]
        assert events, "the stream ended without [DONE]"
        assert events[-1] == b"[DONE]"
        return [json.loads(event) for event in events[:-1]]


async def anext_chunk(chunks: Any) -> bytes:
    chunk: bytes = await soon(chunks.__anext__())
    return chunk


class WorkerClient:
    """One worker at `url`."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self.session = session

    async def ask(self, method: str, path: str, payload: Any = None, **options: Any) -> Answer:
        """One request and its whole answer, whatever its status."""
        if payload is not None:
            options["json"] = payload
        async with self.session.request(method, self.url + path, **options) as response:
            return Answer(response.status, response.headers, await response.read())

    async def get(self, path: str) -> Any:
        """The JSON of a successful GET."""
        answer = await self.ask("GET", path)
        assert answer.status == 200, answer.body
        return answer.json

    async def post(self, path: str, /, **payload: Any) -> Any:
        """The JSON of a successful POST."""
        answer = await self.ask("POST", path, payload)
        assert answer.status == 200, answer.body
        return answer.json

    async def generate(self, **payload: Any) -> Any:
        return await self.post("/generate", **payload)

    async def chat(self, **payload: Any) -> Any:
        return await self.post("/v1/chat/completions", **{**CHAT, **payload})

    @contextlib.asynccontextmanager
    async def stream(self, path: str, /, **payload: Any) -> AsyncIterator[Stream]:
        async with self.session.post(self.url + path, json={**payload, "stream": True}) as response:
            assert response.status == 200, await response.read()
            yield Stream(response)

    async def events(self, path: str, /, **payload: Any) -> list[Any]:
        """Every event of a stream, `[DONE]` checked and left out."""
        async with self.stream(path, **payload) as stream:
            return await stream.rest()

    async def cut_off(self, stream: Stream, rid: str, when: Callable[[Any], bool]) -> Any:
        """The last event of a stream, which is aborted once `when(event)`."""
        while not when(await stream.next()):
            pass
        await self.ask("POST", "/abort_request", {"rid": rid})
        return (await stream.rest())[-1]

    @contextlib.asynccontextmanager
    async def in_flight(self, rid: str, **payload: Any) -> AsyncIterator[asyncio.Task[Any]]:
        """A plain `/generate` that would run for long, given once the worker runs it, and aborted at the end."""
        before, _ = await self.load()
        request = {"text": "Go on", "sampling_params": ENDLESS, "return_logprob": True, "rid": rid, **payload}
        task = spawn(self.generate(**request), name=rid)
        try:
            await self.until_running(before + 1, task)
            yield task
        finally:
            await self.ask("POST", "/abort_request", {"rid": rid})
            await asyncio.wait({task}, timeout=ENDS)  # once it has answered, the next request may have its name
            await cancelled(task)

    async def load(self) -> tuple[int, int]:
        """How many requests run, and how many wait."""
        (load,) = (await self.get("/v1/loads"))["loads"]
        return load["num_running_reqs"], load["num_waiting_reqs"]

    async def until_running(self, count: int, request: asyncio.Task[Any] | None = None) -> None:
        """Waits until the worker runs exactly `count` requests, or this one has ended before that was seen."""
        deadline = time.monotonic() + PATIENCE
        while (load := await self.load())[0] != count and not (request is not None and request.done()):
            assert time.monotonic() < deadline, f"{load} requests run and wait, expected {count} to run"
            await asyncio.sleep(0.01)

    @contextlib.asynccontextmanager
    async def paused(self, mode: str) -> AsyncIterator[None]:
        await self.post("/pause_generation", mode=mode)
        try:
            yield
        finally:
            await self.post("/continue_generation")

    async def set_version(self, version: str) -> None:
        """A new weight version, with requests in flight left alone."""
        await self.post("/update_weight_version", new_version=version, abort_all_requests=False)

    async def encode(self, text: str) -> list[int]:
        tokens: list[int] = (await self.post("/v1/tokenize", prompt=text, add_special_tokens=False))["tokens"]
        return tokens

    async def decode(self, ids: list[int]) -> str:
        text: str = (await self.post("/v1/detokenize", tokens=ids, skip_special_tokens=False))["text"]
        return text

    async def settle(self) -> None:
        """Leaves the worker as a new one: not paused, idle, first version."""
        await self.post("/continue_generation")
        await self.ask("POST", "/abort_request", {"abort_all": True})
        await self.until_running(0)
        await self.set_version("default")  # whatever it names: SGLang may sample with a version that it does not name


CHAT = {"model": "m", "messages": [{"role": "user", "content": "Say something."}], "max_tokens": 6}


async def unfinished(task: asyncio.Task[Any], seconds: float) -> bool:
    """Whether `task` is still at work after some seconds in which it could well have ended."""
    await asyncio.wait([task], timeout=seconds)
    return not task.done()


def covers(spans: list[dict[str, Any]], length: int) -> bool:
    """Whether version spans tile `[0, length)` in order."""
    bounds = [0, *(span["end"] for span in spans)]
    return [span["start"] for span in spans] == bounds[:-1] and bounds[-1] == length

"""The door of a worker: a reverse proxy between router and worker that forwards everything verbatim and writes down
what each `/generate` was given and what came back. It knows the worker's protocol and nothing of the router.

    async with Door(worker.url) as door:
        ... running_router(door.url) ...
        door.generations
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import aiohttp
import orjson
from aiohttp import web

HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "host", "content-length"}
MAX_BODY = 1 << 30


@dataclass
class Generation:
    """One sample, as it went through the door. `given` is None where the worker was sent no ids."""

    given: list[int] | None
    body: dict[str, Any]  # the request it belongs to
    params: dict[str, Any]
    arrived: float  # when the request came in
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    logprob_ids: list[int] = field(default_factory=list)
    versions: list[tuple[str, int, int]] = field(default_factory=list)
    text: str = ""
    finish: dict[str, Any] | None = None
    rid: str = ""
    request_id: str = ""  # the router's `X-Request-Id`
    told: list[str] = field(default_factory=list)  # the version that each token's event named
    experts: str = ""  # the rows of routed experts it came with, in base64
    answered: float = float("inf")  # when its end came out of the worker
    kept: bool = False

    @property
    def skip_special(self) -> bool:
        return bool(self.params.get("skip_special_tokens", True))

    def position_versions(self) -> list[str]:
        """The weight version of each sampled token."""
        found = [version for version, start, end in self.versions for _ in range(start, end)]
        assert len(found) == len(self.sampled), (self.versions, len(self.sampled))
        return found


@dataclass
class Exchange:
    """One request of any path, with its body and the reply's."""

    method: str
    path: str
    body: bytes
    headers: dict[str, str]  # names in lower case
    arrived: float = field(default_factory=time.monotonic)
    status: int = 0
    parts: list[tuple[float, bytes]] = field(default_factory=list)  # of the reply, each with the time it came
    ended: bool = False

    @property
    def reply(self) -> bytes:
        return b"".join(data for _, data in self.parts)


class Door:
    """`async with Door(url, incremental=...)`; `incremental` is how the worker streams."""

    def __init__(self, worker_url: str, *, incremental: bool = False) -> None:
        self.generations: list[Generation] = []
        self.begun: list[Generation] = []  # all of them, those that broke off included
        self.exchanges: list[Exchange] = []
        self._target = worker_url.rstrip("/")
        self._incremental = incremental
        self._port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def __aenter__(self) -> Door:
        self._session = aiohttp.ClientSession(
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(total=None),
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
        )
        self._runner = web.ServerRunner(
            web.Server(self._pass, request_factory=_request, handler_cancellation=True), shutdown_timeout=1
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _pass(self, request: web.BaseRequest) -> web.StreamResponse:
        exchange = Exchange(request.method, request.path, await request.read(), _lower(request.headers))
        self.exchanges.append(exchange)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
        noted = _begun(exchange.body) if request.path == "/generate" and request.method == "POST" else []
        self.begun += noted
        for each in noted:
            each.request_id = request.headers.get("X-Request-Id", "")
        try:
            async with self._session.request(
                request.method, self._target + request.raw_path, data=exchange.body, headers=headers
            ) as reply:
                return await self._answer(request, exchange, reply, noted)
        except aiohttp.ClientError:
            assert request.transport is not None
            request.transport.abort()
            raise asyncio.CancelledError from None  # which ends the connection without a word in the log

    async def _answer(
        self, request: web.BaseRequest, exchange: Exchange, reply: aiohttp.ClientResponse, noted: list[Generation]
    ) -> web.StreamResponse:
        exchange.status = reply.status
        answer = web.StreamResponse(status=reply.status, reason=reply.reason)
        for name, value in reply.headers.items():
            if name.lower() not in HOP_BY_HOP:
                answer.headers.add(name, value)
        if reply.content_length is not None:
            answer.content_length = reply.content_length
        await answer.prepare(request)
        events = _Events(noted, incremental=self._incremental)
        streaming = reply.content_type == "text/event-stream"
        received = 0
        async for data in reply.content.iter_any():
            exchange.parts.append((time.monotonic(), data))
            received += len(data)
            if streaming:
                events.feed(data)
            elif reply.status == 200 and noted and received == reply.content_length:
                _take_plain(noted, orjson.loads(exchange.reply))
            self._keep(noted)  # before the router can know of them
            await answer.write(data)
        exchange.ended = True
        await answer.write_eof()
        return answer

    def _keep(self, noted: list[Generation]) -> None:
        """Those whose end has come; a generation that broke off is none."""
        for each in noted:
            if each.finish is not None and not each.kept:
                each.kept = True
                self.generations.append(each)

    def in_a_stream(self) -> bool:
        """Whether some stream has begun and not ended."""
        return any(len(each.parts) > 2 and not each.ended for each in self.exchanges)

    def by_rid(self) -> dict[str, Generation]:
        return {each.rid: each for each in self.generations}


def _request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
    return web.BaseRequest(message, payload, protocol, writer, task, task.get_loop(), client_max_size=MAX_BODY)


def _lower(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def _begun(body: bytes) -> list[Generation]:
    """The samples that a request asks for, prompt by prompt."""
    try:
        asked = orjson.loads(body)
    except ValueError:
        return []
    if not isinstance(asked, dict):
        return []
    ids = asked.get("input_ids")
    texts = asked.get("text")
    rows: list[Any] = [ids] if ids and isinstance(ids[0], int) else ids or []
    count = len(rows) or (1 if isinstance(texts, str) else len(texts or []))
    params = asked.get("sampling_params") or {}
    each = params if isinstance(params, list) else [params] * count
    samples = []
    for index in range(count):
        given = rows[index] if rows else None
        samples += [Generation(given, asked, each[index], time.monotonic()) for _ in range(each[index].get("n", 1))]
    return samples


def _take_plain(noted: list[Generation], reply: Any) -> None:
    answers = reply if isinstance(reply, list) else [reply]
    assert len(answers) == len(noted), "one answer for each sample"
    for generation, answer in zip(noted, answers, strict=True):
        _take(generation, answer, more=False)


def _take(generation: Generation, answer: dict[str, Any], *, more: bool) -> None:
    """Write an answer down; `more` adds it to what came before."""
    meta = answer["meta_info"]
    logprobs = meta.get("output_token_logprobs", [])
    if not more:
        generation.sampled, generation.logprobs, generation.logprob_ids, generation.text = [], [], [], ""
    generation.sampled = generation.sampled + answer["output_ids"]
    generation.logprobs = generation.logprobs + [entry[0] for entry in logprobs]
    generation.logprob_ids = generation.logprob_ids + [entry[1] for entry in logprobs]
    generation.text += answer["text"]
    generation.rid = meta["id"]
    generation.finish = meta["finish_reason"]
    generation.experts = meta.get("routed_experts") or ""
    generation.told += [meta["weight_version"]] * (len(generation.sampled) - len(generation.told))
    if generation.finish is not None:
        generation.versions = [(span["version"], span["start"], span["end"]) for span in meta["weight_versions"]]
        generation.answered = time.monotonic()


class _Events:
    def __init__(self, noted: list[Generation], *, incremental: bool) -> None:
        self._noted = noted
        self._incremental = incremental
        self._rest = b""

    def feed(self, data: bytes) -> None:
        for event in self._complete(data):
            if event.startswith(b"data: {"):
                answer = orjson.loads(event[len(b"data: ") :])
                if "output_ids" in answer:
                    _take(self._noted[answer.get("index", 0)], answer, more=self._incremental)

    def _complete(self, data: bytes) -> Iterator[bytes]:
        *events, self._rest = (self._rest + data).split(b"\n\n")
        yield from events

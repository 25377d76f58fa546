"""A reverse proxy between router and worker that forwards everything verbatim and writes down
what each generation was given and what came back. It knows the worker's protocol and nothing of the router.

    async with RecordingProxy(worker.url) as proxy:
        ... running_router(proxy.url) ...
        proxy.generations
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from tests.support.generations import (
    CHAT,
    GENERATE,
    Generating,
    Generation,
    NewVersion,
    streamed_chat,
    whole_chat,
    whole_generations,
)

HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "host", "content-length"}
MAX_BODY = 1 << 30
NEW_VERSION, CONTINUE = "/update_weight_version", "/continue_generation"


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


class RecordingProxy:
    """`async with RecordingProxy(url, incremental=...)`; `incremental` is how the worker streams."""

    def __init__(self, worker_url: str, *, incremental: bool = False) -> None:
        self.begun: list[Generation] = []  # of `/generate`, those that broke off included
        self.exchanges: list[Exchange] = []
        self._target = worker_url.rstrip("/")
        self._incremental = incremental
        self._port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def generations(self) -> list[Generation]:
        return sorted((each for each in self.begun if each.finish is not None), key=lambda each: each.answered)

    async def __aenter__(self) -> RecordingProxy:
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
        headers = {name.lower(): value for name, value in request.headers.items()}
        exchange = Exchange(request.method, request.path, await request.read(), headers)
        self.exchanges.append(exchange)
        generates = request.path == GENERATE and request.method == "POST"
        body, request_id = exchange.body if generates else b"", headers.get("x-request-id", "")
        generating = Generating(body, incremental=self._incremental, request_id=request_id)
        self.begun += generating.all
        passed_on = {name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP}
        try:
            async with self._session.request(
                request.method, self._target + request.raw_path, data=exchange.body, headers=passed_on
            ) as reply:
                return await self._answer(request, exchange, reply, generating)
        except aiohttp.ClientError:
            assert request.transport is not None
            request.transport.abort()
            raise asyncio.CancelledError from None  # which ends the connection without a word in the log

    async def _answer(
        self, request: web.BaseRequest, exchange: Exchange, reply: aiohttp.ClientResponse, generating: Generating
    ) -> web.StreamResponse:
        exchange.status = reply.status
        answer = web.StreamResponse(status=reply.status, reason=reply.reason)
        for name, value in reply.headers.items():
            if name.lower() not in HOP_BY_HOP:
                answer.headers.add(name, value)
        if reply.content_length is not None:
            answer.content_length = reply.content_length
        await answer.prepare(request)
        received = 0
        async for data in reply.content.iter_any():
            exchange.parts.append((time.monotonic(), data))
            received += len(data)
            # Before the router can know of it:
            if reply.content_type == "text/event-stream":
                generating.feed(data)
            elif reply.status == 200 and generating.all and received == reply.content_length:
                generating.end(exchange.reply)
            await answer.write(data)
        exchange.ended = True
        await answer.write_eof()
        return answer

    def in_a_stream(self) -> bool:
        """Whether some stream has begun and not ended."""
        return any(len(each.parts) > 2 and not each.ended for each in self.exchanges)

    def chats(self, *, version: str) -> Iterator[Generation]:
        """The choices of every chat that ended; `version` is that of the worker at the beginning."""
        versions = [NewVersion(version, -1.0, -1.0), *self._new_versions()]
        for exchange in self._chats():
            if exchange.ended:
                assert exchange.status == 200, exchange.reply
                body = orjson.loads(exchange.body)
                read = streamed_chat(body, exchange.parts, versions) if body.get("stream") else None
                for each in read or whole_chat(body, exchange.reply):
                    each.arrived = exchange.arrived
                    each.session = exchange.headers.get("x-session-id", "")
                    each.request_id = exchange.headers.get("x-request-id", "")
                    yield each

    def chats_broken_off(self) -> int:
        return sum(not exchange.ended for exchange in self._chats())

    def _chats(self) -> Iterator[Exchange]:
        return (exchange for exchange in self.exchanges if exchange.path == CHAT)

    def _new_versions(self) -> Iterator[NewVersion]:
        for number, exchange in enumerate(self.exchanges):
            if exchange.path == NEW_VERSION:
                used = next(each.arrived for each in self.exchanges[number:] if each.path == CONTINUE)
                yield NewVersion(orjson.loads(exchange.body)["new_version"], exchange.arrived, used)


@dataclass
class Chats:
    """All chats that went through some proxies."""

    generations: list[Generation] = field(default_factory=list)
    broken_off: int = 0  # requests whose client left

    def of(self, session: str) -> list[Generation]:
        return [each for each in self.generations if each.session == session]


def chats_of(proxies: Sequence[RecordingProxy], *, version: str) -> Chats:
    """Return the chats of all proxies. `version` is the workers' first weight version.

    A chat that was cut may have continued behind another proxy; it counts as the last one's."""
    legs: list[Generation] = []
    for number, proxy in enumerate(proxies):
        for each in proxy.chats(version=version):
            each.proxy = number
            legs.append(each)
    whole = whole_generations(sorted(legs, key=lambda each: each.arrived))
    return Chats(whole, broken_off=sum(proxy.chats_broken_off() for proxy in proxies))


def _request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
    return web.BaseRequest(message, payload, protocol, writer, task, task.get_loop(), client_max_size=MAX_BODY)

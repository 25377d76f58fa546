"""Requests to the router over one pool of connections, asked again as long as that is safe."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson

try:
    import aiohttp
    from yarl import URL
except ModuleNotFoundError as error:
    raise ImportError("miles_router.client needs aiohttp: pip install 'miles-router[client]'") from error

from miles_router.client.errors import (
    ConnectionLost,
    InvalidReply,
    NotConnected,
    RouterClientError,
    TimedOut,
    read_error,
)
from miles_router.trajectory.finite import require_finite
from miles_router.version import __version__

logger = logging.getLogger(__name__)

#: An idle connection is given up long before the router would (75 s), so that no request meets its end.
KEEP_ALIVE = 15.0
READ_BUFFER = 2**20


@dataclass(frozen=True)
class Retries:
    """How often a request is asked again, and after how long.

    Asked again is what cannot have been carried out: no connection was made, or the router said `Retry-After` or that
    no worker could be reached. A request that only reads, or that the router recognizes when it comes twice, is asked
    again also when its connection was lost before a reply began. A reply that has begun is never asked for again.

    Attributes:
        attempts: after the first.
        first_delay: seconds before the second attempt; doubled with each further one, and spread by up to a half.
        longest_delay: seconds; also the most that is waited where the router names a time.
    """

    attempts: int = 5
    first_delay: float = 0.5
    longest_delay: float = 10.0

    def delay(self, attempt: int, retry_after: float | None = None) -> float:
        """Seconds to wait after failure number `attempt`, from 0."""
        backoff = min(self.first_delay * 2.0**attempt, self.longest_delay) * random.uniform(0.5, 1.0)
        return min(max(backoff, retry_after or 0.0), self.longest_delay)


DEFAULT_RETRIES = Retries()


class RetryLog:
    """Says that requests are asked again: the first at once, the others in one line every `EVERY` seconds."""

    EVERY = 10.0

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._said_at = -math.inf
        self._unsaid = 0

    def note(self, error: RouterClientError, delay: float) -> None:
        """Note that a request failed and is asked again in `delay` seconds."""
        now = self._clock()
        if now - self._said_at < self.EVERY:
            self._unsaid += 1
            return
        more = f"; {self._unsaid} others were since the last such line" if self._unsaid else ""
        self._said_at, self._unsaid = now, 0
        logger.warning("%s; asked again in %.1f s%s", error, delay, more)

    def close(self) -> None:
        """Say what was not said yet."""
        if self._unsaid:
            logger.warning("requests asked again since the last such line: %d", self._unsaid)
        self._unsaid = 0


@dataclass(frozen=True)
class Request:
    """One request. `body` is sent as JSON unless it is None."""

    method: str
    path: str
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    #: Carrying it out twice is the same as once.
    repeatable: bool = False


@dataclass(frozen=True)
class Pool:
    """What a pool of connections is made with; see `RouterClient`."""

    base_url: str
    api_key: str | None
    timeout: float | None
    connect_timeout: float
    max_connections: int


class Transport:
    """One pool, opened by the first request."""

    def __init__(self, pool: Pool, retries: Retries) -> None:
        self._pool = pool
        self._retries = retries
        self._http: aiohttp.ClientSession | None = None
        self._closed = False
        self._retry_log = RetryLog(time.monotonic)
        #: Where processes of the router said they listen alone, and nobody could be reached.
        self.unreachable: set[str] = set()

    async def close(self) -> None:
        """Close every connection; requests under way break off."""
        self._closed = True
        self._retry_log.close()
        if self._http is not None:
            await self._http.close()

    async def json(self, request: Request) -> Any:
        """The JSON of the reply; None where it has no body.

        Raises:
            RouterClientError: as its tree says.
        """
        raw = await self.bytes(request)
        try:
            return orjson.loads(raw) if raw else None
        except orjson.JSONDecodeError as error:
            raise InvalidReply(
                f"{request.method} {request.path} was answered with a body that is not JSON: {error}"
            ) from None

    async def listed(self, path: str, name: str) -> list[Any]:
        """The list of this name in the reply to GET. Raises as `json`."""
        answer = await self.json(Request("GET", path, repeatable=True))
        if not isinstance(answer, dict) or not isinstance(answer.get(name), list):
            raise InvalidReply(f"GET {path} was answered without {name}")
        found: list[Any] = answer[name]
        return found

    async def bytes(self, request: Request) -> bytes:
        """The whole body of the reply.

        Raises:
            RouterClientError: as its tree says.
        """
        async with self.open(request) as response:
            return await response.read()

    @asynccontextmanager
    async def open(self, request: Request) -> AsyncIterator[aiohttp.ClientResponse]:
        """A good reply whose body is still to be read; leaving early breaks the connection, and so ends a generation.

        Raises:
            RouterClientError: as its tree says; also for what goes wrong with the body.
        """
        response = await self._reply(request)
        try:
            with _client_errors(request):
                yield response
        finally:
            response.close()  # after the whole body this does nothing: its connection is back in the pool

    async def _reply(self, request: Request) -> aiohttp.ClientResponse:
        failures = 0
        while True:
            try:
                return await self._attempt(request)
            except RouterClientError as error:
                if failures >= self._retries.attempts or not _is_repeatable(request, error):
                    raise
                delay = self._retries.delay(failures, error.retry_after)
                self._retry_log.note(error, delay)
            failures += 1
            await asyncio.sleep(delay)

    async def _attempt(self, request: Request, base_url: str | None = None) -> aiohttp.ClientResponse:
        headers = dict(request.headers)
        data = None
        if request.body is not None:
            data = _written(request.body)
            headers["Content-Type"] = "application/json"
        url = URL((base_url or self._pool.base_url) + request.path, encoded=True)
        with _client_errors(request):
            http = self._session()
            response = await http.request(request.method, url, data=data, headers=headers, allow_redirects=False)
            if response.status < 300:
                return response
            raise read_error(response.status, response.headers, await response.read())

    def _session(self) -> aiohttp.ClientSession:
        if self._closed:
            raise RuntimeError("this client is closed")
        if self._http is None:
            pool = self._pool
            headers = {"User-Agent": f"miles-router-client/{__version__}"}
            if pool.api_key is not None:
                headers["Authorization"] = f"Bearer {pool.api_key}"
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=pool.max_connections, keepalive_timeout=KEEP_ALIVE),
                timeout=aiohttp.ClientTimeout(total=pool.timeout, sock_connect=pool.connect_timeout),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=headers,
                read_bufsize=READ_BUFFER,
            )
        return self._http


class OwnerTransport(Transport):
    """The same pool of connections, to the process of the router that has a session, at `owner_url`. Where that cannot
    be reached from here, it is logged once, and the router is asked."""

    def __init__(self, transport: Transport, owner_url: str) -> None:
        super().__init__(transport._pool, transport._retries)
        self._transport = transport
        self._retry_log = transport._retry_log
        self._owner_url = owner_url

    async def _attempt(self, request: Request, base_url: str | None = None) -> aiohttp.ClientResponse:
        unreachable = self._transport.unreachable
        if self._owner_url not in unreachable:
            try:
                return await self._transport._attempt(request, self._owner_url)
            except NotConnected as error:
                unreachable.add(self._owner_url)
                logger.warning("%s; its sessions are asked for at %s from now on", error, self._pool.base_url)
        return await self._transport._attempt(request)


def _written(body: Any) -> bytes:
    """A body as JSON.

    Raises:
        ValueError: it contains NaN or an infinity, which orjson writes as null, or decimals of these.
        TypeError: JSON has no form for one of its values.
    """
    try:
        data = orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:
        require_finite(body)
        raise
    if b"null" in data:
        require_finite(body)
    return data


def _is_repeatable(request: Request, error: RouterClientError) -> bool:
    lost = isinstance(error, ConnectionLost) and not isinstance(error, TimedOut)
    return error.retryable or (lost and request.repeatable)


@contextmanager
def _client_errors(request: Request) -> Iterator[None]:
    """aiohttp's errors as ours."""
    where = f"{request.method} {request.path}"
    try:
        yield
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        raise NotConnected(f"{where}: {error}", retryable=True) from error
    except asyncio.TimeoutError as error:
        raise TimedOut(f"{where}: no complete reply in time") from error
    except (aiohttp.ClientError, ConnectionError) as error:
        raise ConnectionLost(f"{where}: {error or type(error).__name__}") from error

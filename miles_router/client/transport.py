"""HTTP requests to the router over one pool of connections, repeated when that is safe."""

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

#: Seconds after which an idle connection is closed: long before the router does (75 s), so that no request meets that.
KEEP_ALIVE = 15.0
READ_BUFFER = 2**20


@dataclass(frozen=True)
class Retries:
    """The rules by which failed requests are repeated.

    A request is repeated if it cannot have been carried out: no connection was made, or the router sent `Retry-After`
    or reported that no worker could be reached. A repeatable request (it only reads, or the router recognizes a
    duplicate) is also repeated if its connection was lost before a reply began. Once a reply has begun, the request is
    never repeated.

    Attributes:
        attempts: the number of repetitions after the first attempt.
        first_delay: seconds before the second attempt; doubled for each further one, and shortened at random by up to
            half.
        longest_delay: the longest delay in seconds, also if the router asks for more.
    """

    attempts: int = 5
    first_delay: float = 0.5
    longest_delay: float = 10.0

    def delay(self, attempt: int, retry_after: float | None = None) -> float:
        """Return the seconds to wait after failure number `attempt`, counted from 0."""
        backoff = min(self.first_delay * 2.0 ** min(attempt, 60), self.longest_delay) * random.uniform(0.5, 1.0)
        return min(max(backoff, retry_after or 0.0), self.longest_delay)


DEFAULT_RETRIES = Retries()


class RetryLog:
    """The log of repeated requests: the first is logged at once, further ones in one line every `EVERY` seconds."""

    EVERY = 10.0

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._logged_at = -math.inf
        self._unlogged = 0

    def note(self, error: RouterClientError, delay: float) -> None:
        """Record that a request failed and is repeated in `delay` seconds."""
        now = self._clock()
        if now - self._logged_at < self.EVERY:
            self._unlogged += 1
            return
        more = f"; {self._unlogged} other retries since the last such line" if self._unlogged else ""
        self._logged_at, self._unlogged = now, 0
        logger.warning("%s; retrying in %.1f s%s", error, delay, more)

    def close(self) -> None:
        """Log the repetitions that were not logged yet."""
        if self._unlogged:
            logger.warning("retries since the last such line: %d", self._unlogged)
        self._unlogged = 0


@dataclass(frozen=True)
class Request:
    """One request. `body` is sent as JSON unless it is None."""

    method: str
    path: str
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    #: Whether carrying the request out twice has the same effect as once.
    repeatable: bool = False


@dataclass(frozen=True)
class Pool:
    """The parameters of a pool of connections; `RouterClient` explains them."""

    base_url: str
    api_key: str | None
    timeout: float | None
    connect_timeout: float
    max_connections: int


class Transport:
    """A pool of connections, opened by the first request."""

    def __init__(self, pool: Pool, retries: Retries) -> None:
        self._pool = pool
        self._retries = retries
        self._http: aiohttp.ClientSession | None = None
        self._closed = False
        self._retry_log = RetryLog(time.monotonic)
        #: The `owner_url`s of router processes that this client could not connect to.
        self.unreachable: set[str] = set()

    async def close(self) -> None:
        """Close every connection; requests in progress fail."""
        self._closed = True
        self._retry_log.close()
        if self._http is not None:
            await self._http.close()

    async def json(self, request: Request) -> Any:
        """Send a request, and return the JSON of the reply; None if it has no body.

        Raises:
            RouterClientError: one of its subclasses.
        """
        raw = await self.bytes(request)
        try:
            return orjson.loads(raw) if raw else None
        except orjson.JSONDecodeError as error:
            raise InvalidReply(
                f"{request.method} {request.path} was answered with a body that is not JSON: {error}"
            ) from None

    async def get_list(self, path: str, name: str) -> list[Any]:
        """Return the list `name` in the reply to a GET of `path`. Raises as `json` does."""
        answer = await self.json(Request("GET", path, repeatable=True))
        if not isinstance(answer, dict) or not isinstance(answer.get(name), list):
            raise InvalidReply(f"GET {path} was answered without {name}")
        found: list[Any] = answer[name]
        return found

    async def bytes(self, request: Request) -> bytes:
        """Send a request, and return the whole body of the reply.

        Raises:
            RouterClientError: one of its subclasses.
        """
        async with self.open(request) as response:
            return await response.read()

    @asynccontextmanager
    async def open(self, request: Request) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request, and yield the reply with its body still to be read. Leaving early breaks the connection,
        which ends a generation.

        Raises:
            RouterClientError: one of its subclasses, also for errors while the body is read.
        """
        response = await self._send_with_retries(request)
        try:
            with _client_errors(request):
                yield response
        finally:
            response.close()  # after the whole body this does nothing: its connection is back in the pool

    async def _send_with_retries(self, request: Request) -> aiohttp.ClientResponse:
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
            data = _encode_body(request.body)
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
    """A transport to the router process that owns a session, at `owner_url`, over the same pool of connections. If that
    process cannot be reached from here, this is logged once, and requests go to the router's own URL."""

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
                logger.warning("%s; requests for its sessions go to %s from now on", error, self._pool.base_url)
        return await self._transport._attempt(request)


def _encode_body(body: Any) -> bytes:
    """Return a body as JSON.

    Raises:
        ValueError: it contains NaN or an infinity (orjson writes these as null), or decimals of these.
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
    """Convert aiohttp's errors into the client's."""
    where = f"{request.method} {request.path}"
    try:
        yield
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        raise NotConnected(f"{where}: {error}", retryable=True) from error
    except asyncio.TimeoutError as error:
        raise TimedOut(f"{where}: no complete reply in time") from error
    except (aiohttp.ClientError, ConnectionError) as error:
        raise ConnectionLost(f"{where}: {error or type(error).__name__}") from error

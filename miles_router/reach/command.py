"""The command `miles-router reach URL`: checks from outside what an agent in a remote sandbox will need.

It uses only the standard library, and changes nothing at the router.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from miles_router.errors import BadRequest, ConfigError
from miles_router.fleet.worker_url import parse_worker_url
from miles_router.reach.route import PATH

#: The environment variable with the clients' key.
KEY = "MILES_ROUTER_API_KEY"
#: Routes that need no key, and routes that should need one where strangers can reach them.
OPEN = ("/health", "/liveness", "/readiness", "/dashboard")
GUARDED = ("/v1/models", "/sessions", "/workers", "/router/info", "/metrics")
#: Seconds to connect, and to wait for the answer to a request that asks for no delay.
PATIENCE = 30.0
STREAM_SECONDS, STREAM_EVERY = 1.5, 0.125
LOOPBACK = ("127.0.0.1", "::1", "localhost")
OK, WARNING, FAILURE = "ok", "warn", "FAIL"


class Finding(NamedTuple):
    """One line of the report."""

    level: str
    about: str
    text: str


class OutsideAnswer(NamedTuple):
    """An answer, and the seconds after the request at which each piece of its body arrived."""

    status: int
    body: bytes
    arrived: Sequence[float]


class Outside:
    """A client of the router at `url`, which opens a connection for each request."""

    def __init__(self, url: str, key: str | None) -> None:
        parts = urlsplit(url)
        self.url = url
        self.tls, self.host, self._port = parts.scheme == "https", parts.hostname or "", parts.port
        self._prefix, self._key = parts.path.rstrip("/"), key

    def ask(
        self, method: str, target: str, body: bytes | None = None, *, key: bool = True, patience: float = PATIENCE
    ) -> OutsideAnswer:
        """Send a request and read the whole answer. Raises OSError or http.client.HTTPException."""
        kind = http.client.HTTPSConnection if self.tls else http.client.HTTPConnection
        connection = kind(self.host, self._port, timeout=patience)
        headers = {"Authorization": f"Bearer {self._key}"} if key and self._key else {}
        began = time.monotonic()
        try:
            connection.request(method, self._prefix + target, body, headers)
            answer = connection.getresponse()
            pieces, arrived = [], []
            while piece := answer.read1(65536):
                pieces.append(piece)
                arrived.append(time.monotonic() - began)
            return OutsideAnswer(answer.status, b"".join(pieces), arrived)
        finally:
            connection.close()


def findings(outside: Outside, *, idle: float, body_bytes: int) -> Iterator[Finding]:
    """Yield what was found; a failure to connect is the only finding then."""
    try:
        health = outside.ask("GET", "/health")
    except (OSError, http.client.HTTPException) as error:
        yield Finding(FAILURE, "connection", f"{outside.url} does not answer: {error}{_hint(error)}")
        return
    if health.status != 200:
        yield Finding(FAILURE, "connection", f"GET /health is {health.status}, so {outside.url} is not the router")
        return
    yield Finding(OK, "connection", f"{outside.url} answers in {health.arrived[-1] * 1000:.0f} ms")
    if not outside.tls:
        local = outside.host in LOOPBACK
        text = "plain HTTP: keys and texts can be read on the way; put TLS in front (configs/nginx-tls.conf)"
        yield Finding(OK if local else WARNING, "TLS", "plain HTTP on this machine" if local else text)
    else:
        yield Finding(OK, "TLS", "the certificate is valid for this name")
    with ThreadPoolExecutor() as pool:
        silent = pool.submit(_silence, outside, idle)
        yield from _keys(outside)
        for check in (_stream, _address):
            yield check(outside)
        yield _body(outside, body_bytes)
        yield silent.result()


def _keys(outside: Outside) -> Iterator[Finding]:
    for path in OPEN[:3]:
        if (status := outside.ask("GET", path, key=False).status) not in (200, 503):
            yield Finding(WARNING, "keys", f"{path} is {status} without a key; health checks of balancers need it")
    open_to_all = [path for path in GUARDED if outside.ask("GET", path, key=False).status == 200]
    if open_to_all:
        yield Finding(WARNING, "keys", f"answered without a key: {', '.join(open_to_all)}; set --api-key-file and "
                      "--admin-api-key-file, or let the proxy pass only /sessions/ID/v1/")  # fmt: skip
    else:
        yield Finding(OK, "keys", f"without a key only {', '.join(OPEN)} answer")


def _stream(outside: Outside) -> Finding:
    try:
        answer = outside.ask("POST", f"{PATH}?seconds={STREAM_SECONDS}&every={STREAM_EVERY}", b"")
    except (OSError, http.client.HTTPException) as error:
        return Finding(FAILURE, "stream", f"a stream was broken off: {error!r}")
    if answer.status != 200:
        return Finding(FAILURE, "stream", f"POST {PATH} is {answer.status}: {_said(answer)}")
    if not answer.body.endswith(b"data: [DONE]\n\n"):
        return Finding(FAILURE, "stream", "a stream ended before its last event")
    if answer.arrived[-1] - answer.arrived[0] < STREAM_SECONDS / 2:
        return Finding(FAILURE, "stream", f"a stream of {STREAM_SECONDS:g} s arrived in one piece: a proxy buffers it; "
                       "switch that off (nginx: proxy_buffering off)")  # fmt: skip
    return Finding(OK, "stream", f"events arrive as they are sent, in {len(answer.arrived)} pieces")


def _address(outside: Outside) -> Finding:
    answer = outside.ask("POST", PATH, b"")
    if answer.status != 200:
        return Finding(FAILURE, "base_url", f"POST {PATH} is {answer.status}: {_said(answer)}")
    told: Mapping[str, object] = json.loads(answer.body.partition(b"\n")[0].removeprefix(b"data: "))
    if told["base_url"] != outside.url:
        return Finding(FAILURE, "base_url", f"sessions would send agents to {told['base_url']}: set "
                       f"--public-url {outside.url}")  # fmt: skip
    return Finding(OK, "base_url", "sessions send agents to this address")


def _body(outside: Outside, count: int) -> Finding:
    megabytes = f"{count / 1e6:g} MB"
    try:
        answer = outside.ask("POST", PATH, bytes(count), patience=10 * PATIENCE)
    except (OSError, http.client.HTTPException) as error:
        return Finding(FAILURE, "body", f"a request of {megabytes} was broken off: {error!r}{LIMIT}")
    if answer.status != 200 or f'"received":{count},'.encode() not in answer.body:
        return Finding(FAILURE, "body", f"a request of {megabytes} is {answer.status}: {_said(answer)}{LIMIT}")
    return Finding(OK, "body", f"a request of {megabytes} arrives")


LIMIT = "; raise the limit of the proxy (nginx: client_max_body_size 0) or of the router (--max-request-bytes)"


def _silence(outside: Outside, idle: float) -> Finding:
    began = time.monotonic()
    try:
        answer = outside.ask("POST", f"{PATH}?delay={idle}", b"", patience=idle + PATIENCE)
        if answer.status == 200:
            return Finding(OK, "silence", f"an answer that takes {idle:g} s arrives")
        reason = f"{answer.status}: {_said(answer)}"
    except (OSError, http.client.HTTPException) as error:
        reason = repr(error)
    return Finding(FAILURE, "silence", f"an answer that takes {idle:g} s is cut after {time.monotonic() - began:.0f} s "
                   f"({reason}); raise the proxy's time limit (nginx: proxy_read_timeout), or let agents stream: "
                   "heartbeats come every --heartbeat-interval seconds")  # fmt: skip


def _said(answer: OutsideAnswer) -> str:
    return " ".join(answer.body[:200].decode("latin-1").split()) or "no reason"


def _hint(error: Exception) -> str:
    return "; is it the certificate's name, or an authority unknown here?" if isinstance(error, ssl.SSLError) else ""


def parser() -> argparse.ArgumentParser:
    """Return the parser of `miles-router reach`, which takes no settings."""
    made = argparse.ArgumentParser(
        prog="miles-router reach",
        description="Check from outside what an agent in a remote sandbox needs of the way to the router.",
        allow_abbrev=False,
    )
    made.add_argument("url", metavar="URL", help="the router's public address, as agents get it")
    made.add_argument("--key-file", metavar="FILE", help=f"file with the clients' key [default: ${KEY}]")
    text = "seconds that an answer may keep silent [default: 100]"
    made.add_argument("--idle", metavar="SECONDS", type=float, default=100.0, help=text)
    text = "size of the request to try, in MB [default: 16]"
    made.add_argument("--body", metavar="MB", type=float, default=16.0, help=text)
    return made


def run(arguments: Sequence[str]) -> int:
    """Print each finding. Return 1 if an agent would meet a failure, else 0.

    Raises:
        ConfigError: the URL is invalid, or the key cannot be read.
    """
    options = parser().parse_args(arguments)
    try:
        url = parse_worker_url(options.url).url
        key = Path(options.key_file).read_text(encoding="utf-8").split()[0] if options.key_file else os.environ.get(KEY)
    except BadRequest as error:
        raise ConfigError(f"reach: {error}") from None
    except (OSError, UnicodeDecodeError, IndexError) as error:
        raise ConfigError(f"reach: --key-file {options.key_file}: cannot be read: {error}") from None
    failed = False
    for finding in findings(Outside(url, key), idle=options.idle, body_bytes=int(options.body * 1e6)):
        failed = failed or finding.level == FAILURE
        print(f"{finding.level:<5} {finding.about:<11} {finding.text}", flush=True)
    return int(failed)

"""The command `miles-router reach URL`: checks from outside what an agent in a remote sandbox will need.

It uses only the standard library, and changes nothing at the router.
"""

from __future__ import annotations

import argparse
import http.client
import os
import re
import ssl
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from miles_router.errors import BadRequest, ConfigError
from miles_router.fleet.worker_url import parse_worker_url
from miles_router.reach.route import LONGEST, PATH
from miles_router.settings.keys import key_problem
from miles_router.settings.trained_models import MOUNT

#: The environment variable with the clients' key.
KEY = "MILES_ROUTER_API_KEY"
#: Routes that need no key, and routes that should need one where strangers can reach them.
OPEN = ("/health", "/liveness", "/readiness")
GUARDED = ("/v1/models", "/sessions", "/workers", "/router/info", "/metrics")
#: Seconds to connect, and to wait for the answer to a request that asks for no delay.
PATIENCE = 30.0
STREAM_SECONDS, STREAM_EVERY = 1.5, 0.125
LOOPBACK = ("127.0.0.1", "::1", "localhost")
#: Bounds: bytes of an answer, of an answer in a message, and of the request to try.
MAX_ANSWER, SHOWN, MAX_BODY = 1024 * 1024, 200, 1024**3
#: Statuses by which a router or a proxy refuses a request at once.
REFUSALS = (400, 401, 403, 404, 405, 503)
OK, WARNING, FAILURE = "ok", "warn", "FAIL"


class Finding(NamedTuple):
    """One line of the report."""

    level: str
    about: str
    text: str


class Unreached(Exception):
    """No usable answer came. The message says why.

    Attributes:
        refused: the router, or a server in front of it, has refused the request; no limit on the way is to blame.
    """

    def __init__(self, reason: str, *, refused: bool = False) -> None:
        super().__init__(reason)
        self.refused = refused


class OutsideAnswer(NamedTuple):
    """An answer, and the seconds after the request at which each piece of its body arrived."""

    status: int
    body: bytes
    arrived: Sequence[float]

    @property
    def shown(self) -> str:
        """The status and the beginning of the body, fit for a terminal."""
        text = " ".join(self.body[:SHOWN].decode("latin-1").split())
        return f"{self.status}: {''.join(each if each.isprintable() else '?' for each in text) or 'no reason'}"


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
        """Send a request and read the whole answer, for at most `patience` seconds and `MAX_ANSWER` bytes.

        Raises:
            Unreached: the answer did not come, or not in these bounds.
        """
        kind = http.client.HTTPSConnection if self.tls else http.client.HTTPConnection
        connection = kind(self.host, self._port, timeout=patience)
        headers = {"Authorization": f"Bearer {self._key}"} if key and self._key else {}
        began = time.monotonic()
        try:
            connection.request(method, self._prefix + target, body, headers)
            answer = connection.getresponse()
            pieces, arrived = b"", []
            while piece := answer.read1(65536):
                pieces += piece
                arrived.append(time.monotonic() - began)
                if len(pieces) > MAX_ANSWER or arrived[-1] > patience:
                    raise Unreached("the answer does not end")
            return OutsideAnswer(answer.status, pieces, arrived)
        except (OSError, http.client.HTTPException) as error:
            hint = ", by its certificate" if isinstance(error, ssl.SSLError) else ""
            raise Unreached(f"{error!r} after {time.monotonic() - began:.0f} s{hint}") from None
        finally:
            connection.close()

    def probe(self, query: str = "", body: bytes = b"", *, patience: float = PATIENCE) -> OutsideAnswer:
        """Return the whole answer to `POST /reach`.

        Raises:
            Unreached: no reply came, or the reply is not from the router.
        """
        answer = self.ask("POST", PATH + query, body, patience=patience)
        if answer.status != 200:
            raise Unreached(answer.shown, refused=answer.status in REFUSALS)
        if not answer.body.startswith(b'data: {"received":') or not answer.body.endswith(b"data: [DONE]\n\n"):
            raise Unreached("the answer is incomplete, or comes from another server")
        return answer


def findings(outside: Outside, *, idle: float, body_bytes: int) -> Iterator[Finding]:
    """Yield the findings in order; only the first one if the router is not there."""
    try:
        health = outside.ask("GET", "/health")
    except Unreached as error:
        yield Finding(FAILURE, "connection", f"{outside.url} does not answer: {error}")
        return
    if health.status != 200 or b'"workers_total"' not in health.body:
        yield Finding(FAILURE, "connection", f"{outside.url} is not the router: GET /health is {health.shown}")
        return
    yield Finding(OK, "connection", f"{outside.url} answers in {health.arrived[-1] * 1000:.0f} ms")
    yield _encryption(outside)
    with ThreadPoolExecutor(1) as pool:
        silent = pool.submit(_silence, outside, idle)
        for about, check in (("keys", _keys), ("stream", _stream), ("base_url", _address)):
            try:
                yield check(outside)
            except Unreached as error:
                yield Finding(FAILURE, about, f"{PATH} or another path is not answered: {error}")
        yield _body(outside, body_bytes)
        yield silent.result()


def _encryption(outside: Outside) -> Finding:
    if outside.tls:
        return Finding(OK, "TLS", "the certificate is valid for this name")
    if outside.host in LOOPBACK:
        return Finding(OK, "TLS", "plain HTTP on this machine")
    text = "plain HTTP: keys and texts can be read on the way; put TLS in front (configs/nginx-tls.conf)"
    return Finding(WARNING, "TLS", text)


def _keys(outside: Outside) -> Finding:
    for path in OPEN:
        if (answer := outside.ask("GET", path, key=False)).status not in (200, 503):
            text = f"{path} is {answer.shown} without a key; health checks of balancers need it"
            return Finding(WARNING, "keys", text)
    if answered := [path for path in GUARDED if outside.ask("GET", path, key=False).status == 200]:
        text = f"answered without a key: {', '.join(answered)}; set --api-key-file and --admin-api-key-file, "
        return Finding(WARNING, "keys", text + "or let the proxy pass only /sessions/ID/v1/")
    return Finding(OK, "keys", f"none of {', '.join(GUARDED)} answers without a key")


def _stream(outside: Outside) -> Finding:
    answer = outside.probe(f"?seconds={STREAM_SECONDS}&every={STREAM_EVERY}")
    if answer.arrived[-1] - answer.arrived[0] < STREAM_SECONDS / 2:
        text = f"a stream of {STREAM_SECONDS:g} s arrived in one piece: a proxy buffers it; "
        return Finding(FAILURE, "stream", text + "switch that off (nginx: proxy_buffering off)")
    return Finding(OK, "stream", f"events arrive as they are sent, in {len(answer.arrived)} pieces")


def _address(outside: Outside) -> Finding:
    answer = outside.probe()
    found = re.search(rb'"base_url":"([^"]+)"', answer.body)
    reported = None
    with suppress(BadRequest):
        reported = parse_worker_url(found[1].decode("latin-1")).url if found else None
    if reported != outside.url:
        mount = re.search(f"{MOUNT}[^/]+$", reported or "")  # of one of several trained models: not part of the setting
        public = outside.url.removesuffix(mount[0] if mount else "")
        text = f"sessions would send agents elsewhere; set --public-url {public} (POST {PATH}: {answer.shown})"
        return Finding(FAILURE, "base_url", text)
    return Finding(OK, "base_url", "sessions send agents to this address")


def _body(outside: Outside, count: int) -> Finding:
    try:
        answer = outside.probe(body=bytes(count), patience=10 * PATIENCE)
        if f'"received":{count},'.encode() not in answer.body:
            raise Unreached(f"another number of bytes arrived: {answer.shown}")
    except Unreached as error:
        text = f"a request of {count / 1e6:g} MB does not arrive ({error}); raise the limit of the proxy "
        text += "(nginx: client_max_body_size 0) or of the router (--max-request-bytes)"
        return Finding(FAILURE, "body", text)
    return Finding(OK, "body", f"a request of {count / 1e6:g} MB arrives")


def _silence(outside: Outside, idle: float) -> Finding:
    try:
        outside.probe(f"?delay={idle}", patience=idle + PATIENCE)
    except Unreached as error:
        text = f"an answer that takes {idle:g} s does not arrive ({error})"
        if error.refused:
            return Finding(FAILURE, "silence", text)
        text += "; raise the proxy's time limit "
        text += "(nginx: proxy_read_timeout), or let agents stream: heartbeats come every --heartbeat-interval seconds"
        return Finding(FAILURE, "silence", text)
    return Finding(OK, "silence", f"an answer that takes {idle:g} s arrives")


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
    if not 0 <= options.idle <= LONGEST or not 0 <= options.body * 1e6 <= MAX_BODY:
        raise ConfigError(f"reach: --idle takes 0 to {LONGEST:g} seconds, --body 0 to {MAX_BODY / 1e6:g} MB")
    try:
        url = parse_worker_url(options.url).url
        key = Path(options.key_file).read_text(encoding="utf-8").split()[0] if options.key_file else os.environ.get(KEY)
    except BadRequest as error:
        raise ConfigError(f"reach: {error}") from None
    except (OSError, UnicodeDecodeError, IndexError) as error:
        raise ConfigError(f"reach: --key-file {options.key_file}: cannot be read: {error}") from None
    if problem := key_problem(key or None):
        raise ConfigError(f"reach: the key {problem}")
    failed = False
    for finding in findings(Outside(url, key), idle=options.idle, body_bytes=int(options.body * 1e6)):
        failed = failed or finding.level == FAILURE
        print(f"{finding.level:<5} {finding.about:<11} {finding.text}", flush=True)
    return int(failed)

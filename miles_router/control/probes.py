"""Probes: the requests by which the router asks one worker about its state. They report, and decide nothing."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from miles_router.asgi.wire import RawHeaders
from miles_router.engines.engine import WITHHELD, Engine, Names
from miles_router.engines.facts import Facts
from miles_router.engines.known import ALIVE, DOCUMENTS, KINDS, USUAL, facts_of, read_facts
from miles_router.errors import Unauthorized, UpstreamError, UpstreamTimeout
from miles_router.fleet.workers import Worker
from miles_router.forwarding.upstream import Upstream

OK, NOT_FOUND = 200, 404
#: The statuses of an engine that requires another API key.
KEYED = frozenset({401, 403})
MAX_ANSWER = 1024 * 1024
MAX_DOCUMENT = 64 * 1024 * 1024  # an engine's OpenAPI schema may have a megabyte and more
MAX_MODELS = 8 * 1024 * 1024  # some 50,000 adapters
MAX_TOKENS = 16 * 1024 * 1024  # the ids of a text that contains every added token
#: Seconds that tokenizing a text may take.
PATIENCE = 5.0
#: Most seconds for `/health`: SGLang answers 503 after 20 s if it is paused or busy, which must count as a timeout.
DEEP_PATIENCE = 10.0
#: Attempts to read the facts of a worker whose connections all close meanwhile.
ATTEMPTS = 2
#: Most seconds between two attempts to make an engine prove that it works.
PAUSE = 1.0


class Probes:
    """The probes of workers over `upstream`. Each request may take `timeout` seconds."""

    def __init__(self, upstream: Upstream, *, timeout: float) -> None:
        self._upstream = upstream
        #: Seconds that one request may take.
        self.timeout = timeout

    async def liveness(self, worker: Worker) -> Facts:
        """Ask for the cheap check, and return the facts in its answer: the model and the weight version.

        Raises:
            UpstreamError: the worker does not answer, or answers with a server error.
        """
        ways = ALIVE if worker.engine is None else (worker.engine.alive,)
        for names in ways:
            status, body = await self._first(worker, names, self.timeout)
            if status == OK:
                return read_facts({names[0]: body})
        return Facts()

    async def weight_version(self, worker: Worker) -> str | None:
        """Return the weight version in the worker's answer to the cheap check; None if it reports none.

        Raises:
            UpstreamError: the worker does not answer, or answers with a server error.
        """
        if worker.engine is None:
            return (await self.liveness(worker)).weight_version
        status, body = await self._first(worker, worker.engine.alive, self.timeout)
        return worker.engine.weight_version(body) if status == OK else None

    async def sampling_version(self, worker: Worker) -> str | None:
        """Return the weight version that the worker's schedulers use now; None if it is not reported, or if they
        differ."""
        engine = _engine(worker)
        with suppress(UpstreamError):
            status, body = await self._first(worker, engine.scheduler, self.timeout, MAX_DOCUMENT)
            return engine.sampling_version(body) if status == OK else None
        return None

    async def facts(self, worker: Worker) -> tuple[Facts, int | None]:
        """Return all facts of a worker and the number of the process that reported them. The number is None if an
        answer is missing, or may come from another process. Facts that the worker does not report are None."""
        for _ in range(ATTEMPTS):
            documents, process = await self._documents(worker)
            facts = facts_of(documents)
            if None in documents.values():
                break
            if process is not None and process == self.process(worker):
                return facts, process
        return facts, None

    async def adapters(
        self, worker: Worker, patience: float | None = None, key: bytes | None = None
    ) -> frozenset[str] | None:
        """Return the adapters that a worker has loaded; None if it does not answer within `patience` seconds or gives
        no list. `key` is the `Authorization` to send if the worker has no key of its own.

        Raises:
            Unauthorized: the worker requires another key.
        """
        with suppress(UpstreamError):
            timeout = self.timeout if patience is None else min(self.timeout, patience)
            status, body = await self._first(worker, _engine(worker).models, timeout, MAX_MODELS, key)
            if status in KEYED:
                raise Unauthorized(f"{worker.url}{_engine(worker).models[0]} answered {status}")
            return _engine(worker).adapters(body) if status == OK else frozenset() if status == NOT_FOUND else None
        return None

    async def tokenize(self, worker: Worker, path: str, text: str, key: bytes | None) -> tuple[int, bytes]:
        """Have the worker's engine encode `text` without special tokens. Return the status and body of its answer.

        Args:
            path: the worker's route that tokenizes text.
            key: the `Authorization` header to send if the worker was registered without a key.

        Raises:
            UpstreamError: the worker does not answer.
        """
        body = _engine(worker).tokenize_body(text)
        headers = [(b"content-type", b"application/json"), *_headers(worker, key)]
        return await self._upstream.fetch(
            worker.address, path, headers=headers, timeout=PATIENCE, limit=MAX_TOKENS, body=body
        )

    def process(self, worker: Worker) -> int | None:
        """Return the number of the process at a worker's address; None if no connection to it is open."""
        return self._upstream.process(worker.address)

    async def is_unready(self, worker: Worker) -> bool:
        """Return whether the worker reports that it is not ready. A timeout is no such report: a busy worker answers
        late."""
        path = _engine(worker).ready
        if path is None:
            return False
        try:
            return _engine(worker).is_unready(*await self._get(worker, path, self.timeout))
        except UpstreamError:
            return False

    async def is_paused(self, worker: Worker) -> bool:
        """Return whether the worker is not ready but healthy, which means paused. An unhealthy worker is not paused."""
        path = _engine(worker).well
        if path is None:
            return False
        try:
            return await self.is_unready(worker) and (await self._get(worker, path, self.timeout))[0] == OK
        except UpstreamError:
            return False

    async def wait_for_progress(self, worker: Worker, patience: float) -> None:
        """Return once the worker's engine has proved that it works, however long that takes.

        For half of `patience` (seconds) it is asked for its scheduler's state only, then also for a token: SGLang
        counts that as a failed health check if it is silent for 20 s. An engine without these routes is not suspected,
        nor is one that cannot be asked because this machine has no free connection.
        """
        try:
            status, _ = await self._first(worker, _engine(worker).scheduler, patience / 2, MAX_DOCUMENT)
            if status == OK:
                return
        except UpstreamError as error:
            if error.exhausted:
                return
        while True:
            try:
                await self._first(worker, _engine(worker).token, patience)
                return
            except UpstreamError as error:
                if error.exhausted:
                    return
            await asyncio.sleep(min(PAUSE, patience / 10))

    async def deep_check_failure(self, worker: Worker) -> str | None:
        """Run the deep check, and return why it failed, or None.

        Raises:
            UpstreamTimeout: no answer came.
        """
        order = (worker.engine or (await self.facts(worker))[0].engine or USUAL).deep
        path = order.target.decode("ascii")
        headers = [*_headers(worker, None), *([(b"content-type", b"application/json")] if order.body else [])]
        try:
            status, _ = await self._upstream.fetch(
                worker.address,
                path,
                headers=headers,
                timeout=min(self.timeout, DEEP_PATIENCE),
                limit=MAX_ANSWER,
                body=order.body or None,
            )
        except UpstreamTimeout:
            raise
        except UpstreamError as error:
            return str(error)
        return f"{worker.url}{path} answered {status}" if status >= 500 else None

    async def _documents(self, worker: Worker) -> tuple[dict[str, bytes | None], int | None]:
        """Return the worker's documents by path, and the number of the process that answered the first one. While the
        engine's kind is unknown, use the documents of the first kind whose first document the worker has."""
        documents: dict[str, bytes | None] = {}
        process: int | None = None
        for kind in KINDS if worker.engine is None else (worker.engine,):
            for names in kind.documents:
                if names[0] not in documents:
                    timeout = max(self.timeout, kind.slow_documents.get(names[0], 0.0))
                    documents[names[0]] = await self._document(worker, names, timeout)
                    process = self.process(worker) if len(documents) == 1 else process
                if worker.engine is None and documents[kind.documents[0][0]] == b"":
                    break
            else:
                return documents, process
        return {names[0]: b"" for names in DOCUMENTS}, process

    async def _document(self, worker: Worker, names: Names, timeout: float) -> bytes | None:
        """Return a document; b"" if the worker does not have it, None if it did not answer, `WITHHELD` if it needs
        another key."""
        try:
            status, body = await self._first(worker, names, timeout, MAX_DOCUMENT)
        except UpstreamError:
            return None
        return body if status == OK else WITHHELD if status in KEYED else b""

    async def _first(
        self,
        worker: Worker,
        names: Names,
        timeout: float,
        limit: int = MAX_ANSWER,
        key: bytes | None = None,
    ) -> tuple[int, bytes]:
        """Return status and body of the first of these paths that the worker knows.

        Raises:
            UpstreamError: the worker does not answer, or answers with a server error.
        """
        for path in names:
            status, body = await self._get(worker, path, timeout, limit, key)
            if status >= 500:
                raise UpstreamError(f"{worker.url}{path} answered {status}")
            if status != NOT_FOUND:
                break
        return status, body

    async def _get(
        self, worker: Worker, path: str, timeout: float, limit: int = MAX_ANSWER, key: bytes | None = None
    ) -> tuple[int, bytes]:
        """Return status and body of a GET with the worker's own key, or with `key` if it has none."""
        headers = _headers(worker, key)
        return await self._upstream.fetch(worker.address, path, headers=headers, timeout=timeout, limit=limit)


def _engine(worker: Worker) -> Engine:
    return worker.engine or USUAL


def _headers(worker: Worker, key: bytes | None) -> RawHeaders:
    headers: RawHeaders = [(b"accept", b"application/json")]
    if worker.api_key is not None:
        key = b"Bearer " + worker.api_key.encode()
    if key is not None:
        headers.append((b"authorization", key))
    return headers

"""Probes: the questions that one worker is asked beside its traffic. They report, and decide nothing."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from miles_router.asgi.headers import RawHeaders
from miles_router.engines.engine import WITHHELD, Engine, Names
from miles_router.engines.facts import Facts
from miles_router.engines.known import ALIVE, DOCUMENTS, KINDS, USUAL, facts_of, read_facts
from miles_router.errors import Unauthorized, UpstreamError, UpstreamTimeout
from miles_router.fleet.workers import Worker
from miles_router.forwarding.upstream import Upstream

OK, NOT_FOUND = 200, 404
#: What an engine answers that has a key which it was not asked with.
KEYED = frozenset({401, 403})
MAX_ANSWER = 1024 * 1024
MAX_DOCUMENT = 64 * 1024 * 1024  # an engine's schema of itself may have a megabyte and more
MAX_MODELS = 8 * 1024 * 1024  # some 50,000 adapters
MAX_TOKENS = 16 * 1024 * 1024  # the ids of a text that names every added token
#: Seconds that tokenizing a text may take.
PATIENCE = 5.0
#: SGLang's `/health` gives up after 20 s and says 503, paused or busy: beyond this many seconds its word is silence.
DEEP_PATIENCE = 10.0
#: How often a worker is asked for its facts that loses all connections meanwhile.
ATTEMPTS = 2
#: Seconds until an engine that did not prove that it moves is asked again, at most.
PAUSE = 1.0


class Probes:
    """Asks workers over `upstream`; each question may take `timeout` seconds."""

    def __init__(self, upstream: Upstream, *, timeout: float) -> None:
        self._upstream = upstream
        #: Seconds that one question may take.
        self.timeout = timeout

    async def liveness(self, worker: Worker) -> Facts:
        """What a worker that answers says at the cheap check: its model, and the version of its weights.

        Raises:
            UpstreamError: it does not answer, or answers with a server error.
        """
        ways = ALIVE if worker.engine is None else (worker.engine.alive,)
        for names in ways:
            status, body = await self._first(worker, names, self.timeout)
            if status == OK:
                return read_facts({names[0]: body})
        return Facts()

    async def sampling_version(self, worker: Worker) -> str | None:
        """The weight version that samples at a worker now; None where it does not say, or not everywhere the same."""
        engine = _engine(worker)
        with suppress(UpstreamError):
            status, body = await self._first(worker, engine.scheduler, self.timeout, MAX_DOCUMENT)
            return engine.sampling_version(body) if status == OK else None
        return None

    async def facts(self, worker: Worker) -> tuple[Facts, int | None]:
        """All that a worker says about itself, and the number of the process that said it; None where parts of it went
        unanswered, or may be another process's. What it does not answer is unknown."""
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
        """The adapters that a worker has now; None where it does not say, within so many seconds, to this
        `Authorization`.

        Raises:
            Unauthorized: it says that to others.
        """
        with suppress(UpstreamError):
            timeout = self.timeout if patience is None else min(self.timeout, patience)
            status, body = await self._first(worker, _engine(worker).models, timeout, MAX_MODELS, key)
            if status in KEYED:
                raise Unauthorized(f"{worker.url}{_engine(worker).models[0]} answered {status}")
            return _engine(worker).adapters(body) if status == OK else frozenset() if status == NOT_FOUND else None
        return None

    async def tokenize(self, worker: Worker, path: str, text: str, key: bytes | None) -> tuple[int, bytes]:
        """As `TokenizerQuestion.tokenize`."""
        body = _engine(worker).tokenize_body(text)
        headers = [(b"content-type", b"application/json"), *_headers(worker, key)]
        return await self._upstream.fetch(
            worker.address, path, headers=headers, timeout=PATIENCE, limit=MAX_TOKENS, body=body
        )

    def process(self, worker: Worker) -> int | None:
        """The number of the process at a worker's address; None where no connection to it is open."""
        return self._upstream.process(worker.address)

    async def is_unready(self, worker: Worker) -> bool:
        """Whether it says that it is not ready. Silence says nothing: a busy worker is late."""
        path = _engine(worker).ready
        if path is None:
            return False
        try:
            return _engine(worker).is_unready(*await self._get(worker, path, self.timeout))
        except UpstreamError:
            return False

    async def is_paused(self, worker: Worker) -> bool:
        """Whether it says that it was paused and is well. One that is not well says neither."""
        path = _engine(worker).well
        if path is None:
            return False
        try:
            return await self.is_unready(worker) and (await self._get(worker, path, self.timeout))[0] == OK
        except UpstreamError:
            return False

    async def moves(self, worker: Worker, patience: float) -> None:
        """Return once a worker's engine has proved that it moves, however long that takes. It is asked quietly for
        half of `patience` (seconds), then also for a token, which SGLang counts as a failure of its health where it
        is silent for 20 s. An engine that does not know these questions proves nothing, and is not suspected; nor is
        one that cannot be asked because this machine has no room for a connection.
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

    async def sickness(self, worker: Worker) -> str | None:
        """Why the deep check did not pass, or None.

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
        """What a worker says about itself, and the number of the process that answered first, whose connection is kept.
        One that is unknown is asked for the documents of the first kind of which it has the first document."""
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
        """An answer; b"" where the worker has none to give, None where it did not answer; `WITHHELD`."""
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
        """The answer under the first of these names that the worker knows.

        Raises:
            UpstreamError: it does not answer, or answers with a server error.
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
        """An answer to the worker's own key, else to `key`."""
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

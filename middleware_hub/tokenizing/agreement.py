"""Check that each engine tokenizes as the router does. A transformers release that loads a tokenizer wrongly, or a
different tokenizer file on one side, would silently make every training sample wrong."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager

from middleware_hub.tokenizing.async_encoder import AsyncEncoder
from middleware_hub.tokenizing.encoding import TextEncoder
from miles_router.engines.facts import Facts
from miles_router.engines.known import USUAL
from miles_router.engines.probe_text import probe_text
from miles_router.errors import RouterError, UpstreamError
from miles_router.middlewares import Exchange, Router, Scope, Worker, cancelled, first_header, spawn

logger = logging.getLogger(__name__)

NAME = "tokenizer_agreement"
OK, NOT_FOUND = 200, 404
#: Statuses of an engine that requires an API key.
KEYED = frozenset({401, 403})
#: Attempts for each engine process, and seconds that a request waits for the comparison.
ATTEMPTS, PATIENCE = 3, 5.0
#: Special tokens that an engine may add on each side of a text despite `add_special_tokens: false`.
MAX_ADDED = 2


class ProbeComparison:
    """The result of the comparison of one tokenizer with one engine process."""

    def __init__(self) -> None:
        self.attempts = 0
        self.settled = False
        self.difference: str | None = None
        self.task: asyncio.Task[None] | None = None


class ProbeComparisons:
    """The results for one engine process, by the router's tokenizer; they are stored with the engine's facts. A worker
    is compared with the tokenizer of its own model and with those of the trained models that it teaches."""

    def __init__(self) -> None:
        self._by_encoder: dict[TextEncoder, ProbeComparison] = {}

    def of(self, encoder: TextEncoder) -> ProbeComparison:
        """Return the result for the tokenizer of this encoder, which the first call creates."""
        return self._by_encoder.setdefault(encoder, ProbeComparison())


class TokenizerAgreement:
    """A comparison of the router's tokenizer with the tokenizer of each engine process of a pool, by the ids of a probe
    text. A worker is compared as soon as its facts are known. All middlewares of a router share one instance.

    Args:
        router: the handle of the pool.
        encoder: encodes as the router does.
    """

    def __init__(self, router: Router, encoder: TextEncoder) -> None:
        self._router = router
        self._encoder = encoder
        self._others: dict[str, TokenizerAgreement] = {}
        added = encoder.added_tokens
        self._probe = probe_text(added[token] for token in sorted(added))
        self._ids = encoder.encode_rendered(self._probe).tolist()
        self._added = frozenset(added)
        self._unknown: set[Worker] = set()  # workers whose facts were requested and are still unknown
        self._differing: set[Worker] = set()  # workers of which at least one engine process differed

    @classmethod
    def of(cls, router: Router) -> TokenizerAgreement:
        """Return the router's shared instance; create it at the first call."""
        found: TokenizerAgreement | None = getattr(router.state, NAME, None)
        if found is None:
            found = cls(router, AsyncEncoder.of(router).encoder)
            setattr(router.state, NAME, found)
        return found

    async def differences(self, model: str) -> Sequence[str]:
        """Return why workers of another pool cannot take the router's ids, one text for each such worker. Workers
        without a route that tokenizes are not compared.

        Raises:
            UnknownModel: there is no pool of this name.
        """
        router = self._router.of_model(model)
        if model not in self._others:
            own = router is self._router
            self._others[model] = self if own else TokenizerAgreement(router, self._encoder)
        other = self._others[model]
        await other._settle_all(None)
        return [*other._reasons(other._barred())]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Compare workers in the background as they join; registration does not wait for it."""
        fleet = self._router.fleet
        fleet.facts_listeners.append(self._compare_soon)
        for worker in fleet.pool:
            self._compare_soon(worker)
        try:
            yield
        finally:
            fleet.facts_listeners.remove(self._compare_soon)
            others = [worker for other in self._others.values() for worker in other._router.pool]
            for worker in [*fleet.pool, *others]:
                comparison = self._comparison_of(worker)
                if comparison is not None and comparison.task is not None:
                    await cancelled(comparison.task)

    async def require(self, scope: Scope) -> None:
        """Compare routable workers that are not compared yet, and bar the request from workers whose tokenizer differs.
        Waits at most `PATIENCE` seconds; workers that are still not compared stay eligible.

        Raises:
            UpstreamError: every routable worker that generates differs.
        """
        routing = Exchange.of(scope).routing
        routing.excluded_workers = self._barred
        if not all(map(self._is_settled, self._router.pool.routable)):
            await self._settle_all(first_header(scope["headers"], b"authorization"))
        if not self._differing:
            return
        snapshot, barred = self._router.pool.snapshot, self._barred()
        if barred and snapshot.generating and not snapshot.remaining(barred, generates=True):
            raise UpstreamError("; ".join(self._reasons(barred)))

    async def _settle_all(self, key: bytes | None) -> None:
        """Compare routable workers that are not compared yet, for at most `PATIENCE` seconds."""
        waiting = [
            spawn(self._settle(worker, key), name=f"wait for the tokenizer of {worker.url}")
            for worker in self._router.pool.routable
            if not self._is_settled(worker)
        ]
        if waiting:
            await asyncio.wait(waiting, timeout=PATIENCE)

    def _barred(self) -> Sequence[Worker]:
        """Return the workers whose current engine process differs."""
        if not self._differing:
            return ()
        return [
            worker
            for worker in self._differing
            if (comparison := self._comparison_of(worker)) is not None and comparison.difference
        ]

    def _reasons(self, workers: Iterable[Worker]) -> Iterable[str]:
        for worker in sorted(workers, key=lambda worker: worker.url):
            if (comparison := self._comparison_of(worker)) is not None:
                yield f"{worker.url} {comparison.difference}"

    def _comparison_of(self, worker: Worker) -> ProbeComparison | None:
        """Return the comparison with the worker's current engine process; None while its facts are unknown."""
        return None if worker.facts is None else worker.facts.learned(ProbeComparisons).of(self._encoder)

    def _is_settled(self, worker: Worker) -> bool:
        """Return whether a request no longer has to wait for this worker's comparison."""
        comparison = self._comparison_of(worker)
        if comparison is None:
            return worker in self._unknown
        return comparison.task is None and (comparison.settled or comparison.attempts >= ATTEMPTS)

    async def _settle(self, worker: Worker, key: bytes | None) -> None:
        """Wait until a worker is compared. `key` is the `Authorization` value for an engine that requires one."""
        if worker.facts is None:
            await self._router.fleet.facts(worker.url)
        if worker.facts is None:
            self._unknown = {each for each in self._unknown if self._router.pool.find(each.url) is each} | {worker}
        comparison = self._comparison_of(worker)
        if comparison is not None and comparison.task is not None:
            await asyncio.wait({comparison.task})
            comparison = self._comparison_of(worker)
        if comparison is not None and not self._is_settled(worker):
            await asyncio.wait({comparison.task or self._start(worker, comparison, key, final=True)})

    def _compare_soon(self, worker: Worker) -> None:
        """Start the comparison once the worker's facts are known, unless it runs or is done."""
        self._unknown.discard(worker)
        comparison = self._comparison_of(worker)
        if comparison is not None and comparison.task is None and not self._is_settled(worker):
            self._start(worker, comparison, None, final=False)

    def _start(
        self, worker: Worker, comparison: ProbeComparison, key: bytes | None, *, final: bool
    ) -> asyncio.Task[None]:
        comparison.task = spawn(self._compare(worker, comparison, key, final=final), name=f"tokenizer of {worker.url}")
        return comparison.task

    async def _compare(self, worker: Worker, comparison: ProbeComparison, key: bytes | None, *, final: bool) -> None:
        """Ask a worker for the probe's ids and compare them with the router's. With `final`, a status 401 or 403 counts
        as an attempt. Without it the comparison waits for a request that brings a key."""
        path = None if worker.facts is None else _path(worker.facts)
        try:
            status, answer = await self._ask(worker, path, key)
        finally:
            comparison.task = None
        if status in KEYED and not final:
            return
        comparison.attempts += 1
        ids = (worker.engine or USUAL).tokens(answer) if status == OK else None
        comparison.settled = ids is not None or status in (OK, NOT_FOUND)
        fields: dict[str, object] = {"worker": worker.url}
        if ids is None:
            if comparison.settled or comparison.attempts >= ATTEMPTS:
                logger.info("tokenizer_not_compared", extra={"fields": {**fields, "status": status}})
        elif not self._agrees(ids):
            comparison.difference = self._difference(ids)
            self._differing = {each for each in self._differing if self._router.pool.find(each.url) is each} | {worker}
            logger.error("tokenizer_differs", extra={"fields": {**fields, "difference": comparison.difference}})

    async def _ask(self, worker: Worker, path: str | None, key: bytes | None) -> tuple[int, bytes]:
        if path is None:
            return NOT_FOUND, b""
        try:
            return await self._router.fleet.probes.tokenize(worker, path, self._probe, key)
        except RouterError as error:
            return 0, str(error).encode()

    def _agrees(self, ids: list[int]) -> bool:
        """Return whether `ids` are the router's, apart from special tokens at both ends. An engine that ignores
        `add_special_tokens` adds some."""
        for begin in range(MAX_ADDED + 1):
            end = begin + len(self._ids)
            extra = ids[:begin] + ids[end:]
            if ids[begin:end] == self._ids and len(extra) <= 2 * MAX_ADDED and self._added.issuperset(extra):
                return True
        return False

    def _difference(self, ids: list[int]) -> str:
        pairs = zip(self._ids, ids, strict=False)
        place = next(
            (place for place, (own, theirs) in enumerate(pairs) if own != theirs), min(len(ids), len(self._ids))
        )
        return (
            f"tokenizes a probe text differently from the router, from token {place} on ({len(ids)} tokens instead of "
            f"{len(self._ids)}), so its ids mean other texts. Give both the same tokenizer files and a "
            "transformers release that loads them correctly; if the tokenizer has code, set --trust-remote-tokenizer"
        )


def _path(facts: Facts) -> str | None:
    """Return the path of the engine's tokenize route, or None if it has no such route. An engine that withholds its
    schema without a key is assumed to have the usual route."""
    names = (facts.engine or USUAL).tokenize
    withheld = facts.endpoints is None and facts.model_path is None
    return next((path for path in names if withheld or facts.answers(path)), None)

"""RadixTreeMiddleware: text rollouts with exact tokens, over `/generate`, and `/retrieve_from_text` for the trainer.

Clients send and receive plain text. Where a prompt continues an earlier generation, the engine is given the recorded
ids of it, and the encoding of the rest. Every generation is recorded with its ids, logprobs, loss mask and weight
versions, under the text that the client saw.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

import orjson
from starlette.routing import BaseRoute, Route

from middleware_hub.auditing.audits import Audits
from middleware_hub.auditing.routes import audit_routes
from middleware_hub.auditing.teachers import Teachers
from middleware_hub.radix_tree.answers import AnswerTap
from middleware_hub.radix_tree.archive.archive import TextArchive
from middleware_hub.radix_tree.archive.text_rows import TextRows
from middleware_hub.radix_tree.audits import TextAuditor
from middleware_hub.radix_tree.cache import RadixTreeCache
from middleware_hub.radix_tree.dashboard.rollouts import KIND, TextRollouts
from middleware_hub.radix_tree.evaluating import EvaluationTap
from middleware_hub.radix_tree.holders import TextHolders
from middleware_hub.radix_tree.recording import TextRecorder, TokenizedText
from middleware_hub.radix_tree.requests import LOGPROBS, NotRecordable, read_request
from middleware_hub.radix_tree.retrieval import Retrieval
from middleware_hub.tokenizing.agreement import TokenizerAgreement
from middleware_hub.tokenizing.async_encoder import AsyncEncoder
from miles_router.errors import BadRequest, ConfigError
from miles_router.middlewares import (
    ASGIApp,
    Exchange,
    GenerateRequest,
    HasLifespan,
    HasRoutes,
    Receive,
    Router,
    Scope,
    Send,
    UnknownShape,
    Watch,
    replay,
    with_body,
)
from miles_router.middlewares.generation import Heartbeat, HeartbeatForm, asks_for_evaluation
from miles_router.middlewares.rows import RowDeliveries, RowSource
from miles_router.middlewares.state import BODY_SAYS, HasOwners
from miles_router.trajectory import InvalidTrajectory

PATH, METHODS = "/generate", ("POST", "PUT")
RETRIEVE = "/retrieve_from_text"
NAME = "radix_tree"


class RadixTreeMiddleware:
    """The text-keyed token cache.

    Args:
        max_tokens: tokens in memory; a shared prefix counts once. Each takes at most 12 bytes, plus its text;
            three ids of a sampling mask count as one.
        keep_versions: when room is needed, generations of weight versions older than this many are evicted first.
    """

    one_model = True

    def __init__(self, app: ASGIApp, *, router: Router, max_tokens: int = 16_000_000, keep_versions: int = 2) -> None:
        if max_tokens < 1:
            raise ConfigError(f"radix_tree_middleware.max_tokens: must be at least 1, not {max_tokens}")
        if keep_versions < 0:
            raise ConfigError(f"radix_tree_middleware.keep_versions: must be at least 0, not {keep_versions}")
        self.app = app
        self.router = router
        self.cache = RadixTreeCache(max_tokens=max_tokens, keep_versions=keep_versions)
        self._encoder = AsyncEncoder.of(router)
        self._agreement = TokenizerAgreement.of(router)
        rows = TextRows(router.rows, write=router.config.state_rows)
        self._archive = TextArchive(self.cache, router.store, rows, max_tokens=max_tokens)
        self._recorder = TextRecorder(self.cache, self._archive, self._encoder)
        self._rollouts = router.episodes[KIND] = TextRollouts(router, self.cache)
        self._holders = TextHolders(self._recorder, router.owners)
        self._retrieval = Retrieval(self._recorder, self._rollouts, self._holders, router.owners, Teachers.of(router))
        self._audits = Audits.of(router)
        self._audits.add(KIND, TextAuditor(self._rollouts, self._audits.asker))
        router.publish(NAME, self.cache.statistics)
        if router.store is not None:
            router.publish(f"{NAME}_archive", self._archive.statistics)
        for kind, channel in router.rows.items():
            channel.bring_rid = self._archive.load_rid
            channel.sources["text"] = RowSource(
                partial(self._retrieval.rows, kind), bring=self._archive.load, require=self._retrieval.require
            )

    @asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        """Run the processes that encode long texts, the archive, and the comparison of workers' tokenizers."""
        async with self._encoder.lifespan(), self._archive.running(), self._agreement.running():
            yield

    def routes(self) -> Sequence[BaseRoute]:
        return [Route(RETRIEVE, self._retrieval.answer, methods=["POST"]), *audit_routes(self._audits)]

    def owner_name(self, scope: Scope) -> str | None:
        """Return `BODY_SAYS` for paths where the process is chosen by the texts in the body, else None."""
        recorded = scope["path"] == PATH and scope["method"] in METHODS
        return BODY_SAYS if recorded or scope["path"] == RETRIEVE else None

    async def _require(self, scope: Scope, request: GenerateRequest) -> None:
        texts = [await self._recorder.text_of(prompt) for prompt in request.prompts]
        await self._holders.require(scope, texts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Replace a text prompt by ids, and record the answers. Pass evaluations and every other path through."""
        if scope["type"] != "http" or scope["path"] != PATH or scope["method"] not in METHODS:
            await self.app(scope, receive, send)
            return
        exchange = Exchange.of(scope)
        body = await exchange.read(receive)
        if asks_for_evaluation(scope["headers"]):
            self.router.owners.prefer_home(scope)
            self.cache.statistics.passed_through["evaluation"] += 1
            tap = EvaluationTap(send, self.router, exchange, body)
            await tap.call(self.app, scope, replay(body, receive))
            return
        try:
            request = read_request(exchange.loads(body))
            if self.router.owners.several and not self.router.owners.is_forwarded(scope):
                await self._require(scope, request)
            with Watch(receive):  # stops encoding a long text when its client has left
                prompts = [await self._recorder.tokenize(prompt) for prompt in request.prompts]
        except InvalidTrajectory as error:
            raise BadRequest(f"input_ids: {error}") from None  # an engine's process ends over such ids
        except (NotRecordable, UnknownShape) as error:
            self.router.owners.prefer_home(scope)
            self.cache.statistics.passed_through[error.reason] += 1
            await self.app(scope, replay(body, receive), send)
            return
        await self._agreement.require(scope)
        ids = [prompt.trajectory.tokens for prompt in prompts]
        changed = orjson.dumps(request.with_ids(ids, **{LOGPROBS: True}), option=orjson.OPT_SERIALIZE_NUMPY)
        deliveries = RowDeliveries.captured(
            self.router.rows, lambda kind: [prompt.held_rows(kind) for prompt in prompts], per_prompt=request.samples
        )
        async with AsyncExitStack() as until_answered:
            until_answered.enter_context(self.cache.pinned(*(prompt.match.entry for prompt in prompts)))
            exchange.routing.continued_cache = _kept_cache(prompts)
            before = next((each.continued_entry for each in prompts if each.continued_entry is not None), None)
            exchange.routing.mark("read", mode="text", continues=None if before is None else before.rid)
            exchange.routing.mark("prompt", tokens=sum(map(len, ids)))
            until_answered.enter_context(deliveries.attached_to(exchange))
            rollouts = until_answered.enter_context(self._rollouts.track(exchange, request, prompts))
            seconds = self.router.config.heartbeat_interval if request.stream else 0.0
            heartbeat = await until_answered.enter_async_context(Heartbeat(send, exchange, HeartbeatForm(), seconds))
            recording = AnswerTap(
                heartbeat.send, self.router, self._recorder, exchange, request, prompts, deliveries, rollouts
            )
            await recording.call(self.app, with_body(scope, changed), replay(changed, receive))


def _kept_cache(prompts: Sequence[TokenizedText]) -> int | None:
    """Return the prefix cache to use for a request whose prompts all continue recorded generations, else None.

    A request has one prefix cache. Return the newest, so that no prompt finds keys and values older than its own.
    """
    kept = [None if (before := prompt.continued_entry) is None else before.cache for prompt in prompts]
    known = [cache for cache in kept if cache is not None]
    return max(known) if known and len(known) == len(kept) else None


_owners: type[HasOwners] = RadixTreeMiddleware
_lifespan: type[HasLifespan] = RadixTreeMiddleware
_routes: type[HasRoutes] = RadixTreeMiddleware

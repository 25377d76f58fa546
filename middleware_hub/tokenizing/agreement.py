"""Whether the engines' tokenizers are the router's. A transformers release that loads a tokenizer wrongly, or another
file on one side, would make every sample wrong without a word."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import orjson

from middleware_hub.tokenizing.async_encoder import AsyncEncoder
from miles_router.engines.facts import Facts
from miles_router.engines.spelling import PROBE
from miles_router.errors import RouterError
from miles_router.middlewares import RawHeaders, Router, Scope, spawn

logger = logging.getLogger(__name__)

NAME = "tokenizer_agreement"
#: SGLang 0.5.23 shows only the first of its two names in its schema.
PATHS = ("/v1/tokenize", "/tokenize")
OK, NOT_FOUND = 200, 404
MAX_ANSWER = 16 * 1024 * 1024
#: How often an engine process is asked that does not answer, and the seconds that a request waits for it.
ATTEMPTS, PATIENCE = 3, 5.0


class TokenizerDiffers(RouterError):
    """A worker makes other tokens of a text than the router: what is recorded would not be what its model has read.
    Sessions and the text cache take no requests while such a worker is routable."""

    status = 502
    type = "tokenizer_differs"


class ProbeComparison:
    """What is known of one engine process. It goes with the engine's facts."""

    def __init__(self) -> None:
        self.attempts = 0
        self.settled = False
        self.difference: str | None = None
        self.asking: asyncio.Task[Any] | None = None


class TokenizerAgreement:
    """Compares the ids of a probe text with those of each engine process. All middlewares of a router share one."""

    def __init__(self, router: Router) -> None:
        self._router = router
        encoder = AsyncEncoder.of(router).encoder
        self._probe = " ".join([PROBE, *encoder.added_tokens()])
        self._ids = encoder.encode_rendered(self._probe).tolist()
        self._unknown: set[str] = set()  # workers that were waited for, and have not said what they are

    @classmethod
    def of(cls, router: Router) -> TokenizerAgreement:
        """Return the router's one."""
        found: TokenizerAgreement | None = getattr(router.state, NAME, None)
        if found is None:
            found = cls(router)
            setattr(router.state, NAME, found)
        return found

    async def require(self, scope: Scope) -> None:
        """Compare the tokenizer of each routable worker that was not compared before.

        Raises:
            TokenizerDiffers: one has another.
        """
        routable = self._router.pool.routable
        waiting = [
            work for worker in routable if (work := self._waits_for(worker.url, worker.facts, scope)) is not None
        ]
        if waiting:
            await asyncio.wait(waiting, timeout=PATIENCE)
        for worker in routable:
            known = None if worker.facts is None else worker.facts.learned(ProbeComparison)
            if known is not None and known.difference is not None:
                raise TokenizerDiffers(f"{worker.url} {known.difference}")

    def _waits_for(self, url: str, facts: Facts | None, scope: Scope) -> asyncio.Task[Any] | None:
        if facts is None:
            if url in self._unknown:
                return None
            self._unknown = {each for each in self._unknown if self._router.pool.find(each) is not None} | {url}
            return spawn(self._meet(url, scope), name=f"tokenizer of {url}")
        self._unknown.discard(url)
        known = facts.learned(ProbeComparison)
        if known.settled or known.attempts >= ATTEMPTS:
            return None
        if known.asking is None:
            known.asking = spawn(self._compare(url, facts, known, scope), name=f"tokenizer of {url}")
        return known.asking

    async def _meet(self, url: str, scope: Scope) -> None:
        await self._router.fleet.facts(url)
        worker = self._router.pool.find(url)
        known = None if worker is None else worker.facts
        if known is not None and (asking := self._waits_for(url, known, scope)) is not None:
            await asyncio.wait({asking})

    async def _compare(self, url: str, facts: Facts, known: ProbeComparison, scope: Scope) -> None:
        known.attempts += 1
        path = next((path for path in PATHS if facts.answers(path)), None)
        try:
            status, answer = await self._ask(url, path, scope) if path is not None else (NOT_FOUND, b"")
        except RouterError as error:
            status, answer = 0, str(error).encode()
        finally:
            known.asking = None
        ids = _ids(answer) if status == OK else None
        known.settled = ids is not None or status in (OK, NOT_FOUND)
        fields: dict[str, object] = {"worker": url}
        if ids is None:
            if known.settled or known.attempts >= ATTEMPTS:
                logger.info("tokenizer_not_compared", extra={"fields": {**fields, "status": status}})
        elif ids != self._ids:
            known.difference = self._difference(ids)
            logger.error("tokenizer_differs", extra={"fields": {**fields, "difference": known.difference}})

    async def _ask(self, url: str, path: str, scope: Scope) -> tuple[int, bytes]:
        body = orjson.dumps({"prompt": self._probe, "add_special_tokens": False})
        headers: RawHeaders = [(b"content-type", b"application/json")]
        headers += [pair for pair in scope["headers"] if pair[0] == b"authorization"]
        async with self._router.forward("POST", path, headers=headers, body=body, preferred=url) as forwarded:
            answer = await forwarded.reply.read_all(MAX_ANSWER)
            return (forwarded.reply.status if forwarded.worker.url == url else 0), answer

    def _difference(self, ids: list[int]) -> str:
        pairs = zip(self._ids, ids, strict=False)
        place = next((place for place, (own, its) in enumerate(pairs) if own != its), min(len(ids), len(self._ids)))
        return (
            f"tokenizes a probe text otherwise than the router, from token {place} on ({len(ids)} tokens, not "
            f"{len(self._ids)}): nothing is traced with it. Give both the same tokenizer files and a transformers "
            "release that loads them rightly; if the tokenizer has code of its own, set --trust-remote-tokenizer"
        )


def _ids(answer: bytes) -> list[int] | None:
    try:
        parsed = orjson.loads(answer)
    except orjson.JSONDecodeError:
        return None
    ids = parsed.get("tokens") if isinstance(parsed, dict) else None
    return ids if isinstance(ids, list) and {*map(type, ids)} == {int} else None

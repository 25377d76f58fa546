"""SGLang. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from miles_router.engines import paths
from miles_router.engines.actions import Action, Order
from miles_router.engines.control import ControlRequest
from miles_router.engines.engine import Documents, Engine, Headers, RankReader
from miles_router.engines.facts import HALVES, Facts
from miles_router.engines.sglang import ranks
from miles_router.engines.sglang.caches import takes_cache_key, with_cache_key
from miles_router.engines.sglang.control import REQUESTS, order, own_request
from miles_router.engines.sglang.facts import HALF, model_and_server, read_facts, sampling_version


class SGLang(Engine):
    """An engine whose requests and answers pass byte for byte."""

    kind = "sglang"
    alive = paths.MODEL_INFO
    scheduler = paths.SERVER_INFO
    deep = paths.HEALTH
    token = paths.HEALTH_GENERATE
    ready: ClassVar[str | None] = paths.READY
    well: ClassVar[str | None] = paths.WELL
    documents = (paths.MODEL_INFO, paths.SERVER_INFO, paths.SCHEMA)
    control = REQUESTS

    @classmethod
    def recognized(cls, documents: Documents) -> SGLang | None:
        """Return it where an engine says what it was started with, or which weights it has."""
        model, server = model_and_server(documents)
        if {server.get(HALF), model.get(HALF)} & HALVES:
            return PAIR_HALF
        return SGLANG if server or "weight_version" in model else None

    def facts(self, documents: Documents) -> Facts:
        return replace(read_facts(documents), engine=self)

    def has_said_all(self, documents: Documents) -> bool:
        return None not in (documents.get(paths.MODEL_INFO[0]), documents.get(paths.SERVER_INFO[0]))

    def sampling_version(self, said: bytes) -> str | None:
        return sampling_version(said)

    def takes_cache_key(self, facts: Facts, path: str) -> bool:
        return takes_cache_key(facts, path)

    def with_cache_key(self, body: bytes, key: str) -> bytes:
        return with_cache_key(body, key)

    def ranks(self, facts: Facts) -> int:
        return ranks.ranks(facts)

    def pinned(
        self, path: str, headers: Headers, body: bytes, rank: int, *, encoded: bool
    ) -> tuple[Headers, bytes] | None:
        return ranks.pinned(path, headers, body, rank, encoded=encoded)

    def rank_reader(self, path: str, *, streamed: bool) -> RankReader | None:
        return ranks.rank_reader(path, streamed=streamed)

    def order(self, action: Action) -> Order:
        return order(action)

    @classmethod
    def own_request(cls, path: str) -> ControlRequest | None:
        return own_request(path)


class PairHalf(SGLang):
    """One half of a prefill/decode pair. One that retracts forgets which weights sampled what, and whose rows are
    whose: it keeps generations in place."""

    pauses: ClassVar[Mapping[str, str]] = {"retract": "in_place"}


SGLANG, PAIR_HALF = SGLang(), PairHalf()

"""The `Engine` implementation for SGLang. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import orjson

from miles_router.engines.actions import Action, Order
from miles_router.engines.control import ControlRequest
from miles_router.engines.engine import Documents, Engine, Headers, Names, Parse, ReadRank
from miles_router.engines.facts import HALVES, Facts
from miles_router.engines.pairs.request import PairedRequest
from miles_router.engines.paths import MODELS, RESPONSES
from miles_router.engines.sglang import pairs, paths, questions, ranks, refusals
from miles_router.engines.sglang.adapters import BY_FIELD, WITH_FIELD, listed_adapters, with_adapter
from miles_router.engines.sglang.caches import takes_cache_key, with_cache_key
from miles_router.engines.sglang.control import REQUESTS, order, own_request
from miles_router.engines.sglang.facts import HALF, model_and_server, read_facts, sampling_version


class SGLang(Engine):
    """The SGLang engine. Requests and answers pass byte for byte."""

    kind = "sglang"
    alive = paths.MODEL_INFO
    scheduler = paths.SERVER_INFO
    deep = Order("GET", paths.HEALTH.encode(), b"")
    token = paths.HEALTH_GENERATE
    ready: ClassVar[str | None] = paths.READY
    well: ClassVar[str | None] = paths.WELL
    documents = (paths.MODEL_INFO, paths.SERVER_INFO, paths.SCHEMA)
    metrics = paths.METRICS
    models = (MODELS,)
    generates, computes = paths.GENERATION, paths.COMPUTED
    aside, tokenizers, client_paths = paths.ASIDE, paths.TOKENIZERS, paths.CLIENT_PATHS
    made_names: ClassVar[Sequence[str]] = ("", "resp_", "HEALTH_CHECK_")
    name_fields: ClassVar[Mapping[str, str]] = {RESPONSES: "request_id"}
    tokenize: ClassVar[Names] = paths.TOKENIZE
    places: ClassVar[frozenset[str]] = frozenset({*ranks.FIELDS, "bootstrap_host", "bootstrap_room"})
    adapter_only_by_field: ClassVar[frozenset[str]] = BY_FIELD
    adapter_by_field: ClassVar[frozenset[str]] = WITH_FIELD
    rank_wish = staticmethod(ranks.wish)
    control = REQUESTS
    overflow = staticmethod(refusals.overflow)
    stateful = questions.STATEFUL
    ask_prompt_tokens = staticmethod(questions.prompt_tokens)
    ask_chat_tokens = staticmethod(questions.chat_tokens)
    ask_texts = staticmethod(questions.texts)
    ask_reasoning = staticmethod(questions.reasoning)
    ask_calls = staticmethod(questions.calls)
    chats_by_ids: ClassVar[bool] = True

    @classmethod
    def recognized(cls, documents: Documents) -> SGLang | None:
        """Return the engine if the documents contain its start arguments or a weight version."""
        model, server = model_and_server(documents)
        if {server.get(HALF), model.get(HALF)} & HALVES:
            return PAIR_HALF
        return SGLANG if server or "weight_version" in model else None

    def facts(self, documents: Documents) -> Facts:
        return replace(read_facts(documents), engine=self)

    def has_said_all(self, documents: Documents) -> bool:
        return None not in (documents.get(paths.MODEL_INFO[0]), documents.get(paths.SERVER_INFO[0]))

    def sampling_version(self, body: bytes) -> str | None:
        return sampling_version(body)

    def takes_cache_key(self, facts: Facts, path: str) -> bool:
        return takes_cache_key(facts, path)

    def with_cache_key(self, body: bytes, key: str) -> bytes:
        return with_cache_key(body, key)

    def with_adapter(self, path: str, body: bytes, adapter: str, parse: Parse) -> bytes:
        return with_adapter(path, body, adapter, parse)

    def adapters(self, listed: bytes) -> frozenset[str]:
        return listed_adapters(listed)

    def tokenize_body(self, text: str) -> bytes:
        return orjson.dumps({"prompt": text, "add_special_tokens": False})

    def tokens(self, answer: bytes) -> list[int] | None:
        try:
            parsed = orjson.loads(answer)
        except orjson.JSONDecodeError:
            return None
        ids = parsed.get("tokens") if isinstance(parsed, dict) else None
        return ids if isinstance(ids, list) and {*map(type, ids)} == {int} else None

    def ranks(self, facts: Facts) -> int:
        return ranks.ranks(facts)

    def pinned(
        self, path: str, headers: Headers, body: bytes, rank: int, *, encoded: bool
    ) -> tuple[Headers, bytes] | None:
        return ranks.pinned(path, headers, body, rank, encoded=encoded)

    def rank_reader(self, path: str, *, streamed: bool) -> ReadRank | None:
        scanner = ranks.rank_scanner(path, streamed=streamed)
        return None if scanner is None else scanner.feed

    def paired(self, path: str, body: bytes, parse: Parse) -> PairedRequest:
        return pairs.paired(path, body, parse)

    def with_room(self, body: bytes, host: str, port: int, room: int) -> bytes:
        return pairs.with_room(body, host, port, room)

    def order(self, action: Action) -> Order:
        return order(action)

    @classmethod
    def own_request(cls, path: str) -> ControlRequest | None:
        return own_request(path)


class PairHalf(SGLang):
    """One half of a prefill/decode pair of SGLang. A half that retracts forgets the weight versions and the rows of its
    tokens, so it is paused in place instead."""

    pauses: ClassVar[Mapping[str, str]] = {"retract": "in_place"}


SGLANG, PAIR_HALF = SGLang(), PairHalf()

"""The `Engine` for vLLM. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import orjson

from miles_router.engines import paths as own_paths
from miles_router.engines.actions import Action, Order
from miles_router.engines.engine import Documents, Engine, Headers, Parse, Parts, Translation
from miles_router.engines.facts import Facts
from miles_router.engines.generate import GenerateRequest
from miles_router.engines.openai.by_ids import chat_by_ids, has_input_ids
from miles_router.engines.questions import EngineQuestion
from miles_router.engines.sglang.adapters import listed_adapters
from miles_router.engines.vllm import control, facts, openai, paths, refusals
from miles_router.engines.vllm.facts import Flags
from miles_router.engines.vllm.generate import CONSTRAINTS, SALT, PromptSampling, salt_of, translate
from miles_router.engines.writing import with_key

RANK = b"x-data-parallel-rank"
MAX_RANKS = 1024


class VLLM(Engine):
    """An engine that generates from prompt ids; the router translates SGLang's requests for it.

    Args:
        flags: the flags that the server was started with.
    """

    kind = "vllm"
    alive = scheduler = token = paths.WEIGHT_INFO
    deep = Order(
        "POST",
        paths.SAMPLE.encode(),
        orjson.dumps({"token_ids": [1], "sampling_params": {"max_tokens": 1, "detokenize": False}}),
    )
    ready: ClassVar[str | None] = paths.IS_PAUSED
    well: ClassVar[str | None] = paths.WEIGHT_INFO[0]
    documents = (paths.VERSION, paths.SERVER_INFO, paths.MODEL_LIST, paths.WEIGHT_INFO, (paths.SAMPLE,))
    slow_documents: ClassVar[Mapping[str, float]] = {paths.SERVER_INFO[0]: 60.0}
    metrics = paths.METRICS
    models = paths.MODEL_LIST
    generates, computes = paths.GENERATION, paths.COMPUTED
    aside, tokenizers, client_paths = paths.ASIDE, paths.TOKENIZERS, paths.CLIENT_PATHS
    name_fields: ClassVar[Mapping[str, str]] = {paths.SAMPLE: "request_id"}
    adapter_by_model: ClassVar[frozenset[str]] = frozenset({paths.SAMPLE})
    tokenize = (paths.TOKENIZE,)
    unwanted_headers = frozenset({b"x-request-id"})  # vLLM prefers it to `request_id`
    control = control.REQUESTS
    overflow = staticmethod(refusals.overflow)
    stateful = frozenset(CONSTRAINTS)
    ids_only = True
    max_prompts = 512  # each prompt takes a connection
    repeats_noise = True
    translates = True

    def __init__(self, flags: Flags) -> None:
        self.flags = flags

    def __eq__(self, other: object) -> bool:
        return isinstance(other, VLLM) and other.flags == self.flags

    def __hash__(self) -> int:
        return hash(self.flags)

    @classmethod
    def recognized(cls, documents: Documents) -> VLLM | None:
        return cls(facts.flags(documents)) if facts.is_vllm(documents) else None

    def facts(self, documents: Documents) -> Facts:
        """Read the engine's facts. `engine` and `lacks` are None until all documents were answered."""
        engine = self if self.has_said_all(documents) else None
        return replace(
            facts.read_facts(documents), engine=engine, lacks=tuple(self.flags.missing()) if engine else None
        )

    def has_said_all(self, documents: Documents) -> bool:
        return None not in (documents.get(paths.SERVER_INFO[0]), documents.get(paths.SAMPLE))

    def sampling_version(self, body: bytes) -> str | None:
        return facts.weight_version(body)

    def is_unready(self, status: int, body: bytes) -> bool:
        return b'"is_paused":true' in body

    def adapters(self, listed: bytes) -> frozenset[str]:
        return listed_adapters(listed)

    def ask_prompt_tokens(self, text: str) -> EngineQuestion[list[int]] | None:
        return EngineQuestion(paths.TOKENIZE, {"prompt": text}, _tokens)

    def tokenize_body(self, text: str) -> bytes:
        return orjson.dumps({"prompt": text, "add_special_tokens": False})

    def tokens(self, answer: bytes) -> list[int] | None:
        try:
            parsed = orjson.loads(answer)
        except orjson.JSONDecodeError:
            return None
        return _tokens(parsed) if isinstance(parsed, dict) else None

    def takes_cache_key(self, facts: Facts, path: str) -> bool:
        return path in paths.GENERATION

    def with_cache_key(self, body: bytes, key: str) -> bytes:
        return with_key(body, SALT, key, salt_of)

    def ranks(self, facts: Facts) -> int:
        return facts.dp_size if facts.dp_size is not None and facts.dp_size <= MAX_RANKS else 1

    def pinned(
        self, path: str, headers: Headers, body: bytes, rank: int, *, encoded: bool
    ) -> tuple[Headers, bytes] | None:
        return [*(pair for pair in headers if pair[0] != RANK), (RANK, b"%d" % rank)], body

    def order(self, action: Action) -> Order:
        return control.order(action, self.flags)

    def refused(self, answer: bytes) -> bool:
        return control.refused(answer)

    def translate(self, path: str, body: bytes, parse: Parse) -> Translation | Parts | None:
        if path == own_paths.GENERATE:
            return translate(GenerateRequest.read(parse(body)), self.flags)
        if path == own_paths.CHAT and has_input_ids(body, parse):
            return chat_by_ids(body, parse, lambda sent: self._sampling(parse(sent)))
        return openai.translate(path, body, parse, self.flags) if path in openai.PATHS else None

    def _sampling(self, fields: Any) -> PromptSampling:
        return PromptSampling(GenerateRequest.read(fields), 0, self.flags, incremental=True)


def _tokens(answer: Mapping[str, Any]) -> list[int] | None:
    ids = answer.get("tokens")
    return ids if isinstance(ids, list) and {*map(type, ids)} <= {int} else None

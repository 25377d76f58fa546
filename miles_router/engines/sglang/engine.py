"""The `Engine` implementation for SGLang, with a parser of the documents in which SGLang describes itself. No I/O.

Source: SGLang 0.5.23, `entrypoints/http_server.py`: `/model_info`, `/server_info` (every server argument, flat) and
`/openapi.json`; the older `/get_model_info` and `/get_server_info` have the same shapes.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import orjson

from miles_router.engines.actions import Action, Order
from miles_router.engines.control import ControlRequest
from miles_router.engines.engine import Documents, Engine, Headers, Names, Parse, ReadRank
from miles_router.engines.facts import HALVES, Facts
from miles_router.engines.pairs.request import PairedRequest
from miles_router.engines.paths import MODELS, RESPONSES
from miles_router.engines.sglang import pairs, paths, questions, ranks, refusals
from miles_router.engines.sglang.adapters import BY_FIELD, WITH_FIELD, listed_adapters, with_adapter
from miles_router.engines.sglang.adapters import NAME as ADAPTER_NAME
from miles_router.engines.sglang.caches import takes_cache_key, with_cache_key
from miles_router.engines.sglang.control import REQUESTS, order, own_request
from miles_router.engines.sglang.paths import MODEL_INFO, SCHEMA, SERVER_INFO

#: Fields of `/server_info` that change during the life of a process.
VOLATILE = frozenset({"internal_states", "weight_version"})
#: The field of `/server_info` with the startup time of the process, in fractions of a second.
STARTUP = "startup_time"
#: The field that names the half of a pair.
HALF = "disaggregation_mode"
TEMPLATE_SETTINGS = (
    "chat_template",
    "hf_chat_template_name",
    "default_chat_template_kwargs",
    "trust_request_chat_template",
)


def read_facts(documents: Documents) -> Facts:
    """Parse the documents. Unreadable parts leave their facts at None."""
    model, server = model_and_server(documents)
    schema = documents.get(SCHEMA[0])
    # `/model_info` follows control requests; `/server_info` keeps the start arguments.
    both = {**server, **model}
    endpoints, schemas = (None, None) if schema is None else _read_schema(schema)
    return Facts(
        version=_text(server, "version"),
        model_path=_text(both, "model_path"),
        served_model_name=_text(both, "served_model_name"),
        tokenizer_path=_text(both, "tokenizer_path"),
        model_type=_text(both, "model_type"),
        weight_version=_version(both),
        half=_text(both, HALF),
        dp_size=_ranks(server),
        tool_call_parser=_text(both, "tool_call_parser"),
        reasoning_parser=_text(both, "reasoning_parser"),
        template={name: server[name] for name in TEMPLATE_SETTINGS if name in server} if server else None,
        incremental_streaming=_flag(server, "incremental_streaming_output", "stream_output"),
        preferred_sampling_params=_mapping(both, "preferred_sampling_params"),
        sampling_defaults=_text(server, "sampling_defaults"),
        lora=_flag(server, "enable_lora"),
        adapters=_adapters(server),
        auto_truncate=_flag(server, "allow_auto_truncate"),
        context_length=_context_length(server),
        token_capacity=_count(server, "max_total_num_tokens"),
        endpoints=endpoints,
        schemas=schemas,
        process=_process(server),
    )


def model_and_server(documents: Documents) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the JSON of `/model_info` and `/server_info`; {} for one that is missing or unreadable."""
    return _parse_object(documents.get(MODEL_INFO[0])), _parse_object(documents.get(SERVER_INFO[0]))


def _version(info: Mapping[str, Any]) -> str | None:
    """Return the weight version in the JSON of `/model_info` or `/server_info` as a string, whatever its type."""
    version = info.get("weight_version")
    return None if version is None else str(version)


def sampling_version(server_info: bytes) -> str | None:
    """Return the weight version of the schedulers, which stamp the sampled tokens; None if they differ or report none.

    It comes from the `internal_states` in an answer of `/server_info`, one per scheduler. `/model_info` has the version
    of the HTTP process instead, which only learns of successful updates.
    """
    states = _parse_object(server_info).get("internal_states")
    each_says = states if isinstance(states, list) else ()
    versions = {_version(each) if isinstance(each, dict) else None for each in each_says}
    return versions.pop() if len(versions) == 1 else None


@functools.lru_cache(maxsize=16)  # parsed by each kind of engine at every check, and at the end of many turns
def _parse_object(body: bytes | None) -> Mapping[str, Any]:
    try:
        parsed = orjson.loads(body or b"")
        orjson.dumps(parsed)  # orjson parses deeper JSON than it writes, and parts of this are written
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _text(info: Mapping[str, Any], name: str) -> str | None:
    """Return a string; "" if the value is null, None if it is missing or has another type."""
    value = info.get(name, False)
    return "" if value is None else value if isinstance(value, str) else None


def _count(info: Mapping[str, Any], name: str) -> int | None:
    value = info.get(name)
    return value if type(value) is int and value > 0 else None


def _adapters(server: Mapping[str, Any]) -> frozenset[str] | None:
    """Return the adapter names. `lora_paths` has the start arguments, or a mapping or list of objects per adapter."""
    listed = server.get("lora_paths")
    if not isinstance(listed, (list, dict)):
        return None
    names = [each.get(ADAPTER_NAME) if isinstance(each, dict) else each for each in listed]
    return frozenset(name.partition("=")[0] for name in names if isinstance(name, str))


def _context_length(server: Mapping[str, Any]) -> int | None:
    """Return the context length. SGLang reports it only if it was set; else it is the maximum prompt length plus 6."""
    reported, longest = _count(server, "context_length"), _count(server, "max_req_input_len")
    return reported or (None if longest is None else longest + 6)


def _ranks(server: Mapping[str, Any]) -> int | None:
    """Return the number of data-parallel ranks. SGLang 0.5.23 reports replicas or attention groups
    (`runtime_context.num_dp_ranks_of`); before, `dp_size` was both."""
    replicas, groups = _count(server, "dp_size"), _count(server, "attn_dp_size")
    return None if replicas is None else replicas * (groups or 1)


def _flag(info: Mapping[str, Any], *names: str) -> bool | None:
    """Return the first of these fields that is present: newer engines renamed some."""
    value = next((info[name] for name in names if name in info), None)
    return value if isinstance(value, bool) else None


def _mapping(info: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """Return an object; {} if the value is null. Older SGLang has JSON in a string here."""
    value = info.get(name, False)
    if isinstance(value, str):
        return _parse_object(value.encode()) or None
    return {} if value is None else value if isinstance(value, dict) else None


def _process(server: Mapping[str, Any]) -> bytes | None:
    """Return a digest of the start arguments and the startup time; None without a startup time. The startup time has
    many digits, so two processes hardly share it."""
    if not server.get(STARTUP):
        return None
    lasting = {name: value for name, value in server.items() if name not in VOLATILE}
    return hashlib.sha256(orjson.dumps(lasting, option=orjson.OPT_SORT_KEYS)).digest()


@functools.lru_cache(maxsize=8)  # most workers of a fleet have the same schema, which may have a megabyte
def _read_schema(body: bytes) -> tuple[frozenset[str] | None, Mapping[str, frozenset[str]] | None]:
    schema = _parse_object(body)
    paths, components = schema.get("paths"), schema.get("components")
    schemas = components.get("schemas") if isinstance(components, dict) else None
    return (
        frozenset(paths) if isinstance(paths, dict) else None,
        {name: frozenset(_properties(each)) for name, each in schemas.items()} if isinstance(schemas, dict) else None,
    )


def _properties(schema: object) -> Mapping[str, Any]:
    found = schema.get("properties") if isinstance(schema, dict) else None
    return found if isinstance(found, dict) else {}


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

    def weight_version(self, body: bytes) -> str | None:
        return _version(_parse_object(body))  # at the end of many turns: no other fact is read

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

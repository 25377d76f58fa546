"""What SGLang says about itself. Pure.

Source: SGLang 0.5.23, `entrypoints/http_server.py`: `/model_info`, `/server_info` (every server argument, flat) and
`/openapi.json`; the older `/get_model_info` and `/get_server_info` have the same shapes.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from typing import Any

import orjson

from miles_router.engines.engine import Documents
from miles_router.engines.facts import Facts
from miles_router.engines.sglang.adapters import NAME as ADAPTER_NAME
from miles_router.engines.sglang.paths import MODEL_INFO, SCHEMA, SERVER_INFO

#: Of `/server_info`: what changes while one process lives.
VOLATILE = frozenset({"internal_states", "weight_version"})
#: Of `/server_info`: how long this very process took to start, in parts of a second.
STARTUP = "startup_time"
#: What an engine says of itself that is one half of a pair, as one of these.
HALF = "disaggregation_mode"
TEMPLATE_SETTINGS = (
    "chat_template",
    "hf_chat_template_name",
    "default_chat_template_kwargs",
    "trust_request_chat_template",
)


def read_facts(documents: Documents) -> Facts:
    """Read what an engine says; what cannot be read says nothing."""
    model, server = model_and_server(documents)
    schema = documents.get(SCHEMA[0])
    # `/model_info` follows what control requests change after the start; `/server_info` keeps what was launched.
    both = {**server, **model}
    endpoints, schemas = (None, None) if schema is None else _read_schema(schema)
    return Facts(
        version=_text(server, "version"),
        model_path=_text(both, "model_path"),
        served_model_name=_text(both, "served_model_name"),
        tokenizer_path=_text(both, "tokenizer_path"),
        model_type=_text(both, "model_type"),
        weight_version=weight_version(both),
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
        context_length=_window(server),
        token_capacity=_count(server, "max_total_num_tokens"),
        endpoints=endpoints,
        schemas=schemas,
        process=_process(server),
    )


def model_and_server(documents: Documents) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return what `/model_info` and `/server_info` say; {} for one that says nothing."""
    return _object(documents.get(MODEL_INFO[0])), _object(documents.get(SERVER_INFO[0]))


def weight_version(info: Mapping[str, Any]) -> str | None:
    """The weight version in an answer to `/model_info` or `/server_info`, as a text whatever its type."""
    version = info.get("weight_version")
    return None if version is None else str(version)


def sampling_version(server_info: bytes) -> str | None:
    """The weight version in the `internal_states` of an answer to `/server_info`, one for each scheduler, which stamp
    the tokens; `/model_info` has that of the process in front of them, which learns of successful updates alone. None
    where they differ, or say nothing."""
    states = _object(server_info).get("internal_states")
    each_says = states if isinstance(states, list) else ()
    versions = {weight_version(each) if isinstance(each, dict) else None for each in each_says}
    return versions.pop() if len(versions) == 1 else None


@functools.lru_cache(maxsize=16)  # each kind of engine looks at it, at every check and at the end of many a turn
def _object(body: bytes | None) -> Mapping[str, Any]:
    try:
        parsed = orjson.loads(body or b"")
        orjson.dumps(parsed)  # it reads more levels than it writes, and parts of this are written
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _text(info: Mapping[str, Any], name: str) -> str | None:
    """A text; "" for one that is said to be none."""
    value = info.get(name, False)
    return "" if value is None else value if isinstance(value, str) else None


def _count(info: Mapping[str, Any], name: str) -> int | None:
    value = info.get(name)
    return value if type(value) is int and value > 0 else None


def _adapters(server: Mapping[str, Any]) -> frozenset[str] | None:
    """An engine names them by the arguments of its start, or one by one with all that it knows of each."""
    told = server.get("lora_paths")
    if not isinstance(told, (list, dict)):
        return None
    names = [each.get(ADAPTER_NAME) if isinstance(each, dict) else each for each in told]
    return frozenset(name.partition("=")[0] for name in names if isinstance(name, str))


def _window(server: Mapping[str, Any]) -> int | None:
    """SGLang says it only where it was set at the start; else it says how long a prompt may be, which is less."""
    said, longest = _count(server, "context_length"), _count(server, "max_req_input_len")
    return said or (None if longest is None else longest + 6)


def _ranks(server: Mapping[str, Any]) -> int | None:
    """SGLang 0.5.23 has one kind or the other (`runtime_context.num_dp_ranks_of`); before, both had the first name."""
    replicas, groups = _count(server, "dp_size"), _count(server, "attn_dp_size")
    return None if replicas is None else replicas * (groups or 1)


def _flag(info: Mapping[str, Any], *names: str) -> bool | None:
    """The first of these names that is there: newer engines say the same under another one."""
    value = next((info[name] for name in names if name in info), None)
    return value if isinstance(value, bool) else None


def _mapping(info: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """An object; {} for one that is said to be none. Older SGLang gives it as it was written, JSON in a text."""
    value = info.get(name, False)
    if isinstance(value, str):
        return _object(value.encode()) or None
    return {} if value is None else value if isinstance(value, dict) else None


def _process(server: Mapping[str, Any]) -> bytes | None:
    """A digest of what a process says, if that includes how long it took to start: two have hardly the same to the
    last digit."""
    if not server.get(STARTUP):
        return None
    lasting = {name: value for name, value in server.items() if name not in VOLATILE}
    return hashlib.sha256(orjson.dumps(lasting, option=orjson.OPT_SORT_KEYS)).digest()


@functools.lru_cache(maxsize=8)  # the workers of a fleet mostly have the same, and it may have a megabyte
def _read_schema(body: bytes) -> tuple[frozenset[str] | None, Mapping[str, frozenset[str]] | None]:
    schema = _object(body)
    paths, components = schema.get("paths"), schema.get("components")
    schemas = components.get("schemas") if isinstance(components, dict) else None
    return (
        frozenset(paths) if isinstance(paths, dict) else None,
        {name: frozenset(_properties(each)) for name, each in schemas.items()} if isinstance(schemas, dict) else None,
    )


def _properties(schema: object) -> Mapping[str, Any]:
    found = schema.get("properties") if isinstance(schema, dict) else None
    return found if isinstance(found, dict) else {}

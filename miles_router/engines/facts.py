"""Facts: what one engine process says about itself. Pure.

Source: SGLang 0.5.23, `entrypoints/http_server.py`: `/model_info`, `/server_info` (every server argument, flat) and
`/openapi.json`; the older `/get_model_info` and `/get_server_info` have the same shapes.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import orjson

from miles_router.engines import sglang_jax
from miles_router.engines.disaggregation.request import PROFILE as HALF_OF_A_PAIR
from miles_router.engines.models import ADAPTER_NAME
from miles_router.engines.profile import USUAL, Profile

Learned = TypeVar("Learned")
#: Of `/server_info`: what changes while one process lives.
VOLATILE = frozenset({"internal_states", "weight_version"})
#: Of `/server_info`: how long this very process took to start, in parts of a second.
STARTUP = "startup_time"
#: What an engine says of itself that is one half of a pair, as one of these.
HALF, HALVES = "disaggregation_mode", frozenset({"prefill", "decode"})
TEMPLATE_SETTINGS = (
    "chat_template",
    "hf_chat_template_name",
    "default_chat_template_kwargs",
    "trust_request_chat_template",
)


@dataclass(frozen=True, eq=False)
class Facts:
    """What one engine process is and can do. None always means that it did not say; "" or {}, that it has none.

    All of it holds for this process alone. What depends on more: `weight_version` is the one of the moment when the
    engine was asked (`Worker.weight_version` follows it); `model_path` and `served_model_name` change with an update
    from disk that names another model, after which the facts are dropped.
    """

    #: How it is dealt with.
    profile: Profile | None = None
    version: str | None = None
    model_path: str | None = None
    served_model_name: str | None = None
    tokenizer_path: str | None = None
    #: `model_type` of the model's configuration, as "qwen3_moe".
    model_type: str | None = None
    weight_version: str | None = None
    #: "prefill" or "decode" of one half of a pair; "null" of an engine that does both.
    half: str | None = None
    #: Data-parallel ranks behind this one address, be they replicas or groups of attention.
    dp_size: int | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    #: The chat template's settings that it has, by SGLang's names for them.
    template: Mapping[str, Any] | None = None
    #: Whether an event of a stream has only what is new; by default each has all so far.
    incremental_streaming: bool | None = None
    #: Sampling parameters that it assumes where a request names none.
    preferred_sampling_params: Mapping[str, Any] | None = None
    #: Whether its chat assumes what the model's `generation_config.json` has ("model"), or the API's own ("openai").
    sampling_defaults: str | None = None
    #: Whether it applies LoRA adapters.
    lora: bool | None = None
    #: Those that it was started with, by name.
    adapters: frozenset[str] | None = None
    #: Whether it cuts prompts that are too long, and answers them, in place of refusing them.
    auto_truncate: bool | None = None
    #: Tokens of a prompt and its answer together.
    context_length: int | None = None
    #: Tokens whose keys and values each of its ranks has memory for.
    token_capacity: int | None = None
    #: The paths that it answers.
    endpoints: frozenset[str] | None = None
    #: The fields of each schema of its API, by the schema's name, as "ChatCompletionRequest".
    schemas: Mapping[str, frozenset[str]] | None = None
    #: Tells this process from every other; only some engines say enough for that.
    process: bytes | None = None
    _learned: dict[type[Any], Any] = field(default_factory=dict, repr=False)

    def learned(self, kind: type[Learned]) -> Learned:
        """What a layer has learned of this very engine, as its end tokens: an object of a class of the layer's own,
        made by `kind()` at the first call. It goes when the facts do, so none of it outlives its engine."""
        if kind not in self._learned:
            self._learned[kind] = kind()
        known: Learned = self._learned[kind]
        return known

    def after(self, before: Facts | None) -> Facts:
        """These facts, with what was learned before if the same process said them."""
        if before is None or self.process is None or before.process != self.process or self.contradicts(before):
            return self
        return replace(self, _learned=before._learned)

    def takes_field(self, schema: str, name: str) -> bool | None:
        """Whether requests of this schema may have this field; None where the engine shows no schema."""
        return None if self.schemas is None else name in self.schemas.get(schema, ())

    @property
    def counts_prompts(self) -> bool:
        """Whether its chat tells how many tokens a prompt has. For Kimi K3, SGLang leaves out the three that open the
        answer (`serving_chat.py`, `_reported_prompt_tokens`)."""
        return not (self.model_type or "").startswith("kimi_k3")

    def answers(self, path: str) -> bool | None:
        """Whether it answers this path; None where it does not say."""
        return None if self.endpoints is None else path in self.endpoints

    def contradicts(self, other: Facts) -> bool:
        """Whether another process or model has said the other, as far as both say something. Another weight version
        is no contradiction."""
        pairs = ((getattr(self, name), getattr(other, name)) for name in _LASTING)
        return any(mine is not None and its is not None and mine != its for mine, its in pairs)


_LASTING = tuple(each.name for each in fields(Facts) if each.name not in ("weight_version", "_learned"))


def read_facts(
    *, model_info: bytes | None = None, server_info: bytes | None = None, schema: bytes | None = None
) -> Facts:
    """The facts in an engine's answers; each is None where there was none. What cannot be read says nothing."""
    model, server = _object(model_info), _object(server_info)
    # `/model_info` follows what control requests change after the start; `/server_info` keeps what was launched.
    both = {**server, **model}
    endpoints, schemas = (None, None) if schema is None else _read_schema(schema)
    profile = _profile(model, server)
    translated = profile is not None and profile.translate is not None  # then every event says all so far
    return Facts(
        profile=profile,
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
        incremental_streaming=False if translated else _flag(server, "incremental_streaming_output", "stream_output"),
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


def _profile(model: Mapping[str, Any], server: Mapping[str, Any]) -> Profile | None:
    """By the arguments of the start; that an engine names its weights says it too."""
    if sglang_jax.MARK in server:
        return sglang_jax.PROFILE if server.get("enable_lora") else sglang_jax.WITHOUT_ADAPTERS
    if {server.get(HALF), model.get(HALF)} & HALVES:
        return HALF_OF_A_PAIR
    return USUAL if server or "weight_version" in model else None


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

"""The facts that one engine process reports about itself. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from miles_router.engines.engine import Engine

Learned = TypeVar("Learned")
#: The values of `Facts.half` for the two halves of a prefill/decode pair.
HALVES = frozenset({"prefill", "decode"})


@dataclass(frozen=True, eq=False)
class Facts:
    """The properties of one engine process. None means that the engine did not report it; "" or {} that it has none.

    Facts hold for this process alone. `weight_version` is the version at the time of the request
    (`Worker.weight_version` follows updates). `model_path` and `served_model_name` change with an update from disk that
    names another model, after which the facts are dropped.
    """

    engine: Engine | None = None
    version: str | None = None
    model_path: str | None = None
    served_model_name: str | None = None
    tokenizer_path: str | None = None
    #: `model_type` in the model's configuration, such as "qwen3_moe".
    model_type: str | None = None
    weight_version: str | None = None
    #: "prefill" or "decode" for one half of a pair; "null" for an engine that does both.
    half: str | None = None
    #: The number of data-parallel ranks behind this address, either replicas or attention groups.
    dp_size: int | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    #: The chat template's settings, by SGLang's names.
    template: Mapping[str, Any] | None = None
    #: Whether an event of a stream contains only new tokens. By default each contains all tokens so far.
    incremental_streaming: bool | None = None
    #: Sampling parameters that the engine uses where a request names none.
    preferred_sampling_params: Mapping[str, Any] | None = None
    #: The source of chat's sampling defaults: the model's `generation_config.json` ("model"), or the API ("openai").
    sampling_defaults: str | None = None
    #: Whether it applies LoRA adapters.
    lora: bool | None = None
    #: The names of the adapters that it was started with.
    adapters: frozenset[str] | None = None
    #: Whether it truncates prompts that are too long instead of refusing them.
    auto_truncate: bool | None = None
    #: Maximum tokens of a prompt and its answer together.
    context_length: int | None = None
    #: Tokens that fit into the KV cache of each rank.
    token_capacity: int | None = None
    #: The paths that it serves.
    endpoints: frozenset[str] | None = None
    #: The fields of each schema of its API, by the schema's name, such as "ChatCompletionRequest".
    schemas: Mapping[str, frozenset[str]] | None = None
    #: Texts about flags that it was started without, and what the router refuses because of each.
    lacks: Sequence[str] | None = None
    #: A value that is different for every process. Only some engines report enough to compute it.
    process: bytes | None = None
    _learned: dict[type[Any], Any] = field(default_factory=dict, repr=False)

    def learned(self, kind: type[Learned]) -> Learned:
        """Return the object in which a layer keeps what it learns about this engine, such as its end tokens. `kind()`
        creates it at the first call. It is dropped with the facts, so it never outlives the engine process."""
        if kind not in self._learned:
            self._learned[kind] = kind()
        known: Learned = self._learned[kind]
        return known

    def after(self, before: Facts | None) -> Facts:
        """Return these facts with the learned objects of `before`, if both come from the same process."""
        if before is None or self.process is None or before.process != self.process or self.contradicts(before):
            return self
        return replace(self, _learned=before._learned)

    def takes_field(self, schema: str, name: str) -> bool | None:
        """Return whether requests of this schema may have this field; None if the engine reports no schema."""
        return None if self.schemas is None else name in self.schemas.get(schema, ())

    @property
    def is_half(self) -> bool:
        """Whether the engine is one half of a prefill/decode pair."""
        return self.half in HALVES

    @property
    def counts_prompts(self) -> bool:
        """Whether the chat API reports the exact prompt length. For Kimi K3, SGLang leaves out the three tokens that
        open the answer (`serving_chat.py`, `_reported_prompt_tokens`)."""
        return not (self.model_type or "").startswith("kimi_k3")

    def answers(self, path: str) -> bool | None:
        """Return whether the engine serves this path; None if it is unknown."""
        return None if self.endpoints is None else path in self.endpoints

    def contradicts(self, other: Facts) -> bool:
        """Return whether the other facts come from another process or model, as far as both report a value. A different
        weight version is no contradiction."""
        pairs = ((getattr(self, name), getattr(other, name)) for name in _LASTING)
        return any(mine is not None and its is not None and mine != its for mine, its in pairs)


_LASTING = tuple(each.name for each in fields(Facts) if each.name not in ("weight_version", "_learned"))


class UnkeyedPaths(set[str]):
    """The paths of one engine process whose requests cannot contain a prefix cache key. Stored with its facts."""

"""Facts: what one engine process says about itself. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from miles_router.engines.engine import Engine

Learned = TypeVar("Learned")
#: What one half of a pair says of itself.
HALVES = frozenset({"prefill", "decode"})


@dataclass(frozen=True, eq=False)
class Facts:
    """What one engine process is and can do. None always means that it did not say; "" or {}, that it has none.

    All of it holds for this process alone. What depends on more: `weight_version` is the one of the moment when the
    engine was asked (`Worker.weight_version` follows it); `model_path` and `served_model_name` change with an update
    from disk that names another model, after which the facts are dropped.
    """

    #: The kind of engine that it is.
    engine: Engine | None = None
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
    #: Flags that it was started without, and what is refused for that.
    lacks: Sequence[str] | None = None
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
    def is_half(self) -> bool:
        """Whether the engine is one half of a prefill/decode pair."""
        return self.half in HALVES

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

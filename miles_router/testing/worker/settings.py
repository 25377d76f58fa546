"""What a simulated worker is told about itself at start."""

from dataclasses import dataclass
from typing import Literal

from miles_router.testing.worker.model.indexer import IndexerShape
from miles_router.testing.worker.model.moe import MoeShape
from miles_router.testing.worker.model.script import Script
from miles_router.testing.worker.pairing import Pairing

#: Whose API a worker speaks, mistakes included.
ProfileName = Literal["sglang", "sglang-jax"]
JAX: ProfileName = "sglang-jax"


@dataclass(frozen=True, slots=True)
class Settings:
    """Facts that the HTTP answers show."""

    model_path: str
    served_model_name: str
    tokenizer_path: str
    moe: MoeShape | None
    indexer: IndexerShape | None
    script: Script | None
    incremental_streaming_output: bool
    api_key: str | None
    context_len: int
    auto_truncate: bool
    tool_call_parser: str | None
    reasoning_parser: str | None
    health_latency_s: float
    """SGLang looks for the health token once a second."""
    health_timeout_s: float
    started_at: int
    startup_s: float
    """How long the start took, as a process measures it: no two have the same."""
    profile: ProfileName = "sglang"
    pairing: Pairing | None = None
    """What makes it one half of a prefill/decode pair."""

    @property
    def disaggregation_mode(self) -> str:
        """As SGLang names it."""
        return self.pairing.mode if self.pairing is not None else "null"

    @property
    def has_parser(self) -> bool:
        """Whether a tool call or reasoning parser was configured, whatever a request asks."""
        return bool(self.tool_call_parser or self.reasoning_parser)

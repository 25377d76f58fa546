"""The settings of a simulated worker."""

from dataclasses import dataclass

from miles_router.testing.worker.model.indexer import IndexerShape
from miles_router.testing.worker.model.moe import MoeShape
from miles_router.testing.worker.model.script import Script


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a worker that its HTTP answers depend on."""

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
    """Delay of `/health`. SGLang checks for its health token once per second."""
    health_timeout_s: float
    started_at: int
    startup_s: float
    """Seconds that the start took; different for each worker, as for real processes."""
    disaggregation_mode: str = "null"
    """SGLang's name of what the worker does: `null` (everything), `prefill` or `decode`."""

    @property
    def has_parser(self) -> bool:
        """True if a tool call or reasoning parser is configured, whatever the request contains."""
        return bool(self.tool_call_parser or self.reasoning_parser)

"""Testing tools: a simulated SGLang worker without a model, for tests and for writing rollout code on a laptop."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miles_router.testing.middleware_contract import check_middleware
    from miles_router.testing.worker.engine import Engine, PauseMode
    from miles_router.testing.worker.exchange_log import Exchange, ExchangeLog, GenerationRecord
    from miles_router.testing.worker.faults import Faults
    from miles_router.testing.worker.model.indexer import IndexerShape
    from miles_router.testing.worker.model.moe import MoeShape
    from miles_router.testing.worker.model.vocabulary import Tokenizer, ToyTokenizer
    from miles_router.testing.worker.simulated_worker import SimulatedWorker

__all__ = [
    "Engine",
    "Exchange",
    "ExchangeLog",
    "Faults",
    "GenerationRecord",
    "IndexerShape",
    "MoeShape",
    "PauseMode",
    "SimulatedWorker",
    "Tokenizer",
    "ToyTokenizer",
    "check_middleware",
]
_MODULES = {
    "ExchangeLog": "worker.exchange_log",
    "Engine": "worker.engine",
    "Exchange": "worker.exchange_log",
    "Faults": "worker.faults",
    "GenerationRecord": "worker.exchange_log",
    "IndexerShape": "worker.model.indexer",
    "MoeShape": "worker.model.moe",
    "PauseMode": "worker.engine",
    "SimulatedWorker": "worker.simulated_worker",
    "Tokenizer": "worker.model.vocabulary",
    "ToyTokenizer": "worker.model.vocabulary",
    "check_middleware": "middleware_contract",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, which keeps `miles-router-worker --help` fast."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)

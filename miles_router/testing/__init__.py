"""Testing tools: a SGLang worker without a model, for tests and for writing rollout code on a laptop."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from miles_router.testing.door import Door, Exchange, GenerationRecord
    from miles_router.testing.engine import Engine, PauseMode
    from miles_router.testing.faults import Faults
    from miles_router.testing.in_thread import worker_in_thread
    from miles_router.testing.middleware_contract import check_middleware
    from miles_router.testing.moe import MoeShape
    from miles_router.testing.simulated_worker import SimulatedWorker
    from miles_router.testing.vocabulary import Tokenizer, ToyTokenizer

__all__ = [
    "Door",
    "Engine",
    "Exchange",
    "Faults",
    "GenerationRecord",
    "MoeShape",
    "PauseMode",
    "SimulatedWorker",
    "Tokenizer",
    "ToyTokenizer",
    "check_middleware",
    "worker_in_thread",
]
_MODULES = {
    "Door": "door",
    "Engine": "engine",
    "Exchange": "door",
    "Faults": "faults",
    "GenerationRecord": "door",
    "MoeShape": "moe",
    "PauseMode": "engine",
    "SimulatedWorker": "simulated_worker",
    "Tokenizer": "vocabulary",
    "ToyTokenizer": "vocabulary",
    "check_middleware": "middleware_contract",
    "worker_in_thread": "in_thread",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `miles-router-worker --help` need not."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)

"""Testing tools: a SGLang worker without a model, for tests and for writing rollout code on a laptop."""

from miles_router.testing.door import Door, Exchange, GenerationRecord
from miles_router.testing.engine import Engine, PauseMode
from miles_router.testing.faults import Faults
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
]

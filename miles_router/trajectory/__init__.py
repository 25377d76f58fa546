"""The exact-token kernel: what the engine was given and what it sampled, position by position.

    Piece        a run of positions of one origin: given, or sampled by one weight version
    Trajectory   pieces in a row; cutting and joining share them, materialising makes flat arrays
    wire         the same as JSON and as safetensors

Knows nothing of HTTP, tokenizers or engines.
"""

from miles_router.trajectory.pieces import InvalidTrajectory, Piece, VersionRun
from miles_router.trajectory.trajectory import Trajectory, from_arrays
from miles_router.trajectory.wire import from_bytes, from_json, to_bytes, to_json

__all__ = [
    "InvalidTrajectory",
    "Piece",
    "Trajectory",
    "VersionRun",
    "from_arrays",
    "from_bytes",
    "from_json",
    "to_bytes",
    "to_json",
]

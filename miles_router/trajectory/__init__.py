"""The exact-token kernel: what the engine was given and what it sampled, position by position.

    Piece        a run of positions of one origin: given, or sampled by one weight version
    Trajectory   pieces in a row; cutting and appending share them, materialising makes flat arrays
    Sample       flat arrays with what a trainer wants to know of them, written by the router and read by its client
    Retrieved    a trajectory and the text that it spells, written and read likewise
    safetensors  the file format that both are written in
    json_parts   JSON of both, in parts that are each written quickly
    json_items   JSON of many samples, read one at a time

Knows nothing of HTTP, tokenizers or engines.
"""

from miles_router.trajectory.pieces import InvalidTrajectory, Malformed, Piece, VersionRun
from miles_router.trajectory.retrieved import Retrieved
from miles_router.trajectory.sample import Sample
from miles_router.trajectory.trajectory import Trajectory, from_arrays

__all__ = [
    "InvalidTrajectory",
    "Malformed",
    "Piece",
    "Retrieved",
    "Sample",
    "Trajectory",
    "VersionRun",
    "from_arrays",
]

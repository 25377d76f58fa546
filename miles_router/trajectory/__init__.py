"""Exact-token trajectories: the tokens that the engine was given and the tokens that it sampled, by position.

    Piece        a run of positions of one origin: given, or sampled under one weight version
    Trajectory   a sequence of pieces; slices and appended copies share them, properties return flat arrays
    Sample       flat arrays with a trainer's metadata, written by the router and read by its client
    Retrieved    a trajectory and its text, written and read likewise
    TeacherScores  another model's logprobs of the sampled tokens of either
    safetensors  the file format of samples and retrieved texts
    json_parts   JSON of both, in parts that are each written quickly
    json_items   JSON of many samples, read one at a time

Contains nothing of HTTP, tokenizers or engines.
"""

from miles_router.trajectory.pieces import InvalidTrajectory, Malformed, Piece, VersionRun
from miles_router.trajectory.retrieved import Retrieved
from miles_router.trajectory.sample import Sample
from miles_router.trajectory.teacher import TeacherScores
from miles_router.trajectory.trajectory import Trajectory, from_arrays

__all__ = [
    "InvalidTrajectory",
    "Malformed",
    "Piece",
    "Retrieved",
    "Sample",
    "TeacherScores",
    "Trajectory",
    "VersionRun",
    "from_arrays",
]

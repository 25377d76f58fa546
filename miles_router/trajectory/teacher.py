"""`TeacherScores`: another model's logprobs of the sampled tokens of a trajectory, and the fields that carry them.

JSON has them next to the trajectory's own fields: the object `teacher`, and arrays named `teacher_logprobs`,
`teacher_top_positions`, and so on; a safetensors file has the arrays as tensors of these names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from miles_router.trajectory.pieces import InvalidTrajectory, Logprobs, Tokens, frozen, logprob_array

TEACHER = "teacher"
#: What stands for a token that the teacher's engine did not return: no id, and a probability of 0.
NO_ID, NO_LOGPROB = -1, -9999.0
TOPS = ("top_positions", "top_ids", "top_logprobs")
#: The names of the arrays on the wire.
NAMES = tuple(f"{TEACHER}_{name}" for name in ("logprobs", *TOPS))


@dataclass(frozen=True, eq=False, kw_only=True)
class TeacherScores:
    """Another model's logprobs, at temperature 1.

    Attributes:
        model: the `model_id` of its pool.
        weight_version: the weights that computed them; None if its engine reports no version.
        logprobs: float32 [n], aligned with the tokens; 0.0 where not sampled.
        top_positions: int32 [sampled], the positions of all sampled tokens; None unless its likeliest tokens were
            requested.
        top_ids: int32 [sampled, k], its likeliest tokens at these positions, the likeliest first; -1 where its engine
            returned fewer.
        top_logprobs: float32 [sampled, k], their logprobs; -9999.0 where its engine returned fewer.

    Raises:
        InvalidTrajectory: `complete`: the model or an array is missing; `logprobs_are_logprobs`; `teacher_fits`: the
            arrays have other shapes.
    """

    model: str
    weight_version: str | None
    logprobs: Logprobs
    top_positions: Tokens | None = None
    top_ids: Tokens | None = None
    top_logprobs: Logprobs | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "logprobs", logprob_array(self.logprobs, len(self.logprobs)))
        if self.top_positions is None and self.top_ids is None and self.top_logprobs is None:
            return
        try:
            positions = np.asarray(self.top_positions, dtype=np.int32)
            ids, logprobs = np.asarray(self.top_ids, dtype=np.int32), np.asarray(self.top_logprobs, dtype=np.float32)
        except (TypeError, ValueError) as error:
            raise InvalidTrajectory("complete", f"the teacher's likeliest tokens: {error}") from None
        if not len(positions):  # a list in JSON does not tell the second dimension of an empty array
            ids, logprobs = ids.reshape(0, -1 if ids.size else 0), logprobs.reshape(0, -1 if logprobs.size else 0)
        if positions.ndim != 1 or ids.ndim != 2 or ids.shape != logprobs.shape or len(ids) != len(positions):
            shapes = f"{positions.shape}, {ids.shape} and {logprobs.shape}"
            raise InvalidTrajectory("teacher_fits", f"positions, ids and logprobs of likeliest tokens: {shapes}")
        for name, array in zip(TOPS, (positions, ids, logprobs), strict=True):
            object.__setattr__(self, name, frozen(array))

    def check(self, tokens: int) -> None:
        """Check that the scores fit a trajectory of so many tokens.

        Raises:
            InvalidTrajectory: `teacher_fits`: they are not.
        """
        if len(self.logprobs) != tokens:
            raise InvalidTrajectory("teacher_fits", f"{len(self.logprobs)} logprobs of a teacher, {tokens} tokens")

    @property
    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays, by their names on the wire."""
        named = {name: getattr(self, name.removeprefix(f"{TEACHER}_")) for name in NAMES}
        return {name: array for name, array in named.items() if array is not None}

    @property
    def facts(self) -> dict[str, Any]:
        """The object `teacher`."""
        return {"model": self.model, "weight_version": self.weight_version}


def arrays_of(teacher: TeacherScores | None) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays by their names on the wire; {} without a teacher."""
    return {} if teacher is None else teacher.arrays


def facts_of(teacher: TeacherScores | None) -> dict[str, Any]:
    """Return `{"teacher": ...}`, the JSON field next to the arrays; {} without a teacher."""
    return {} if teacher is None else {TEACHER: teacher.facts}


def read_scores(arrays: Mapping[str, Any], facts: Mapping[str, Any], prefix: str = "") -> TeacherScores | None:
    """Return the scores in the fields of a sample, or None if there are none. The names of arrays begin with `prefix`.

    Raises:
        InvalidTrajectory: as `TeacherScores`.
    """
    about = facts.get(TEACHER)
    if about is None:
        return None
    try:
        found = {
            name.removeprefix(f"{TEACHER}_"): arrays[f"{prefix}{name}"] for name in NAMES if f"{prefix}{name}" in arrays
        }
        return TeacherScores(model=about["model"], weight_version=about.get("weight_version"), **found)
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidTrajectory("complete", f"the scores of a teacher: {error!r}") from None

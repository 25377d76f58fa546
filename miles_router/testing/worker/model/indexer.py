"""The positions that a simulated model with sparse attention attends to."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class IndexerShape:
    """The sparse attention of a model: `layers` indexers, each choosing `top_k` positions."""

    layers: int
    top_k: int

    def __post_init__(self) -> None:
        if min(self.layers, self.top_k) < 1:
            raise ValueError(f"need layers >= 1 and top_k >= 1, got {self}")

    @classmethod
    def parse(cls, text: str) -> "IndexerShape":
        """Parse `LAYERSxTOPK`, for example `2x4`.

        Raises:
            ValueError: the text does not have this form.
        """
        parts = text.lower().split("x")
        if len(parts) != 2 or not all(part.isdigit() for part in parts):
            raise ValueError(f"expected LAYERSxTOPK such as 2x4, got {text!r}")
        return cls(*map(int, parts))


def choose(shape: IndexerShape, ids: Sequence[int]) -> NDArray[np.int32]:
    """Return the positions that each token but the last attends to, int32 `[len(ids) - 1, layers, top_k]`.

    They are distinct within a layer and not after the token; -1 fills up if there are fewer than `top_k`. A row is a
    function of the position and its id, so a prefix has the same rows in every request.
    """
    rows = np.arange(max(0, len(ids) - 1), dtype=np.int64)[:, None, None]
    tokens = np.asarray(ids, dtype=np.int64)[: len(rows), None, None]
    layers = np.arange(shape.layers, dtype=np.int64)[None, :, None]
    ranks = np.arange(shape.top_k, dtype=np.int64)[None, None, :]
    first = tokens * 7919 + rows * 104729 + layers * 31
    return np.where(ranks <= rows, (first + ranks) % (rows + 1), -1).astype(np.int32)

"""The entropy of a token's routed experts, in bits.

It is the entropy of the frequencies of expert ids in the token's row, over all layers and top-k ranks. It is 0 if every
layer chose the same expert, and at most log2(layers * top_k).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from miles_router.trajectory.sample import ShapedRows

#: Rows at a time.
CHUNK = 1024


def expert_entropy(rows: ShapedRows) -> npt.NDArray[np.float32]:
    """Return the entropy of each row: float32 [rows] from integers [rows, layers, top_k]."""
    count, width = len(rows), int(np.prod(rows.shape[1:], dtype=np.int64))
    found = np.zeros(count, dtype=np.float32)
    if width:
        for start in range(0, count, CHUNK):
            found[start : start + CHUNK] = _entropy(rows[start : start + CHUNK].reshape(-1, width))
    return found


def _entropy(rows: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.float64]:
    """Return each row's entropy. Sorting a row makes equal ids adjacent, so run lengths are the frequencies."""
    width = rows.shape[1]
    ordered = np.sort(rows, axis=1)
    begins = np.ones(ordered.shape, dtype=bool)
    begins[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    places = np.flatnonzero(begins)
    lengths = np.diff(places, append=ordered.size)
    shares = np.bincount(places // width, weights=lengths * np.log2(lengths), minlength=len(rows))
    entropy: npt.NDArray[np.float64] = np.log2(width) - shares / width
    return entropy

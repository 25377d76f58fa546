"""Routed experts as vLLM tells them: base64 of a `.npy` file, one byte an expert (two where there are more than 256).
`/generate` has them as base64 of int32. Pure."""

from __future__ import annotations

import base64
import io

import numpy as np

from miles_router.engines.answers import UnreadableAnswer
from miles_router.engines.rows import decode_rows

DIMENSIONS = 3  # token, layer, expert of those that were chosen


def rows_of(told: object, rows: int, kept: int) -> str:
    """Return the first `kept` rows of an answer that must have so many `rows`.

    Raises:
        UnreadableAnswer: it has others, or none.
    """
    if not isinstance(told, str):
        raise UnreadableAnswer("incomplete", "routed_experts")
    try:
        experts = np.load(io.BytesIO(decode_rows(told)), allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise UnreadableAnswer("incomplete", f"routed_experts are no array: {error}") from error
    if experts.ndim != DIMENSIONS or len(experts) != rows or experts.dtype.kind not in "iu":
        raise UnreadableAnswer("incomplete", f"routed_experts of the form {experts.shape}, and {rows} rows are due")
    return base64.b64encode(experts[:kept].astype("<i4").tobytes()).decode("ascii")

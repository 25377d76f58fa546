"""Conversion of vLLM's routed experts to the form of `/generate`, base64 of int32. Pure.

vLLM returns base64 of a `.npy` file with one byte for each expert id, or two if there are more than 256 experts.
"""

from __future__ import annotations

import base64
import io

import numpy as np

from miles_router.engines.answers import UnreadableAnswer
from miles_router.engines.rows import decode_rows

DIMENSIONS = 3  # token, layer, chosen expert


def converted_rows(encoded: object, rows: int, kept: int) -> str:
    """Return the first `kept` rows as base64 of int32.

    Args:
        encoded: the `routed_experts` of the engine's answer.
        rows: the number of rows that the answer must have.

    Raises:
        UnreadableAnswer: the rows are missing or malformed, or their number differs.
    """
    if not isinstance(encoded, str):
        raise UnreadableAnswer("incomplete", "routed_experts are missing")
    try:
        experts = np.load(io.BytesIO(decode_rows(encoded)), allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise UnreadableAnswer("incomplete", f"routed_experts are not an array: {error}") from error
    if experts.ndim != DIMENSIONS or len(experts) != rows or experts.dtype.kind not in "iu":
        raise UnreadableAnswer("incomplete", f"routed_experts have the shape {experts.shape}; expected {rows} rows")
    return base64.b64encode(experts[:kept].astype("<i4").tobytes()).decode("ascii")

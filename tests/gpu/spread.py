"""How far logprobs lie apart: quantiles of the differences between some that were recorded and others recomputed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

QUANTILES = (0.5, 0.9, 0.99, 0.999, 1.0)

Differences = npt.NDArray[np.float64]


def differences(recorded: Sequence[float], recomputed: Sequence[float]) -> Differences:
    """Recorded less recomputed, one for each token."""
    assert len(recorded) == len(recomputed)
    return np.asarray(recorded, np.float64) - np.asarray(recomputed, np.float64)


def spread(of: Sequence[Differences]) -> dict[str, Any]:
    """Of absolute values the quantiles, in nats; and the mean with its sign."""
    values = np.concatenate([np.zeros(0), *of])
    if not len(values):
        return {"tokens": 0}
    absolute = np.quantile(np.abs(values), QUANTILES)
    told = {f"{name:g}": round(float(value), 6) for name, value in zip(QUANTILES, absolute, strict=True)}
    return {"tokens": len(values), "absolute": told, "mean": round(float(values.mean()), 6)}

"""The routed experts of a simulated mixture-of-experts model."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class MoeShape:
    """The routing of a model: `layers` routers, each choosing `top_k` of `experts`."""

    layers: int
    experts: int
    top_k: int

    def __post_init__(self) -> None:
        if min(self.layers, self.top_k) < 1 or self.experts < self.top_k:
            raise ValueError(f"need layers >= 1 and experts >= top_k >= 1, got {self}")

    @classmethod
    def parse(cls, text: str) -> "MoeShape":
        """Parse `LAYERSxEXPERTSxTOPK`, for example `4x8x2`.

        Raises:
            ValueError: the text does not have this form.
        """
        parts = text.lower().split("x")
        if len(parts) != 3 or not all(part.isdigit() for part in parts):
            raise ValueError(f"expected LAYERSxEXPERTSxTOPK such as 4x8x2, got {text!r}")
        return cls(*map(int, parts))


def route(shape: MoeShape, ids: Sequence[int], start: int = 0) -> NDArray[np.int32]:
    """Return the experts of positions `start .. len(ids) - 2`, int32 `[rows, layers, top_k]`, distinct within a layer.

    The last position has no row: its token was sampled, not fed through the model. A row is a function of the
    position and its id, so a prefix has the same rows in every request.
    """
    positions = np.arange(start, max(start, len(ids) - 1), dtype=np.uint64)
    tokens = np.asarray(ids, dtype=np.int64).astype(np.uint64)[start : start + len(positions)]
    layers = np.arange(shape.layers, dtype=np.uint64)
    seeds = (tokens * np.uint64(0x9E3779B97F4A7C15) + positions * np.uint64(0xBF58476D1CE4E5B9))[:, None]
    seeds = seeds ^ (layers * np.uint64(0x94D049BB133111EB))[None, :]
    for shift in (30, 27):  # splitmix64's finaliser: layers must not choose the same experts
        seeds = (seeds ^ (seeds >> np.uint64(shift))) * np.uint64(0xBF58476D1CE4E5B9)
    seeds = seeds >> np.uint64(17)
    first = (seeds % np.uint64(shape.experts))[:, :, None]
    ranks = np.arange(shape.top_k, dtype=np.uint64)[None, None, :]
    return np.asarray((first + ranks) % np.uint64(shape.experts), dtype=np.int32)


def encode_routes(routes: NDArray[np.int32]) -> str:
    """Encode expert rows as SGLang does: base64 of the row-major int32 bytes."""
    return base64.b64encode(np.ascontiguousarray(routes).tobytes()).decode("ascii")

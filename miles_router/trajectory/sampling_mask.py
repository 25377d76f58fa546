"""`SamplingMask`: for each token, the ids that top-k, top-p and min-p left to be sampled there.

A trainer needs them to compute the probability that a token was sampled with: with top-p < 1 the engine samples from
the renormalized rest, and ratios of full probabilities are biased.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from miles_router.trajectory.json_parts import object_parts
from miles_router.trajectory.pieces import InvalidTrajectory, Tokens, frozen, token_array

COUNTS = np.dtype("<u4")


class SamplingMask:
    """The ids of n tokens as a ragged array: those of token i are `ids[offsets[i]:offsets[i + 1]]`. Immutable.

    Attributes:
        offsets: int32 [n + 1], from 0 up to the number of ids.
        ids: int32 [offsets[n]], for each token in the engine's order.
    """

    __slots__ = ("ids", "offsets")

    def __init__(self, offsets: npt.NDArray[np.int32], ids: Tokens) -> None:
        self.offsets = frozen(offsets)
        self.ids = frozen(ids)

    @classmethod
    def of(cls, sets: Sequence[Sequence[int]], tokens: Tokens) -> SamplingMask:
        """Return the mask of sampled tokens, given the ids of each as a list.

        Raises:
            InvalidTrajectory: `tokens_are_ids`; `sampling_mask_fits`: the number of lists is not that of the tokens, or
                a list does not have its token.
        """
        if not all(isinstance(each, Sequence) and not isinstance(each, str) for each in sets):
            raise InvalidTrajectory("sampling_mask_fits", "the ids of a token are not a list")
        mask = cls(_offsets(map(len, sets)), token_array(list(chain.from_iterable(sets))))
        mask.check(tokens)
        return mask

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any]) -> SamplingMask:
        """Return the mask of `offsets` and `ids`, as lists or integer arrays.

        Raises:
            InvalidTrajectory: `tokens_are_ids`; `sampling_mask_fits`: the offsets do not rise from 0 to the number of
                ids.
        """
        try:
            offsets, ids = token_array(arrays["offsets"]), token_array(arrays["ids"])
        except (KeyError, TypeError) as error:
            raise InvalidTrajectory("sampling_mask_fits", repr(error)) from None
        if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(ids) or (np.diff(offsets) < 0).any():
            raise InvalidTrajectory("sampling_mask_fits", f"the offsets do not rise from 0 to {len(ids)}")
        return cls(offsets, ids)

    @classmethod
    def singletons(cls, tokens: Tokens) -> SamplingMask:
        """Return the mask of tokens that were given: each has its own id alone."""
        return cls(np.arange(len(tokens) + 1, dtype=np.int32), tokens)

    @classmethod
    def empty(cls, tokens: int) -> SamplingMask:
        """Return the mask of this many tokens of whose sampling nothing is known: none has an id."""
        return cls(np.zeros(tokens + 1, dtype=np.int32), np.zeros(0, dtype=np.int32))

    @classmethod
    def join(cls, masks: Sequence[SamplingMask]) -> SamplingMask:
        """Return the mask of the tokens of all masks in a row."""
        ids = np.concatenate([np.zeros(0, np.int32), *(mask.ids for mask in masks)])
        return cls(_offsets(chain.from_iterable(np.diff(mask.offsets).tolist() for mask in masks)), ids)

    def check(self, tokens: Tokens) -> None:
        """Check that this is a mask of these tokens.

        Raises:
            InvalidTrajectory: `sampling_mask_fits`: another number of tokens, or a token that is not in its own set.
        """
        if len(self) != len(tokens):
            raise InvalidTrajectory("sampling_mask_fits", f"{len(tokens)} tokens have {len(self)} sets of ids")
        counts = np.diff(self.offsets)
        owner = np.repeat(np.arange(len(tokens)), counts)
        found = np.zeros(len(tokens), dtype=bool)
        found[owner[self.ids == tokens[owner]]] = True
        if not found.all():
            at = int(found.argmin())
            raise InvalidTrajectory("sampling_mask_fits", f"token {tokens[at]} at {at} is not in its set of ids")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __repr__(self) -> str:
        return f"<SamplingMask of {len(self)} tokens, {len(self.ids)} ids>"

    @property
    def nbytes(self) -> int:
        """The size of the arrays in bytes, including memory shared with other masks."""
        return self.offsets.nbytes + self.ids.nbytes

    def arrays(self) -> dict[str, npt.NDArray[np.int32]]:
        """Return `offsets` and `ids`."""
        return {"offsets": self.offsets, "ids": self.ids}

    def cut(self, start: int, stop: int) -> SamplingMask:
        """Return the mask of tokens `[start, stop)`, sharing the memory of the ids."""
        offsets = self.offsets[start : stop + 1]
        return SamplingMask(offsets - offsets[0], self.ids[offsets[0] : offsets[-1]])

    def common_length(self, other: SamplingMask) -> int:
        """Return how many leading tokens have the same ids in both, in the same order."""
        length = min(len(self), len(other))
        differ = np.flatnonzero(self.offsets[: length + 1] != other.offsets[: length + 1])
        length = int(differ[0]) - 1 if len(differ) else length
        end = int(self.offsets[length])
        unequal = np.flatnonzero(self.ids[:end] != other.ids[:end])
        return int(np.searchsorted(self.offsets, unequal[0], "right")) - 1 if len(unequal) else length

    def to_bytes(self) -> bytes:
        """Return the mask as bytes: the number of ids of each token, then the ids."""
        return np.diff(self.offsets).astype(COUNTS).tobytes() + self.ids.astype("<i4").tobytes()

    @classmethod
    def from_bytes(cls, data: bytes, tokens: int) -> SamplingMask:
        """Return the mask of this many tokens from its bytes.

        Raises:
            ValueError: the bytes are not such a mask.
        """
        offsets = _offsets(np.frombuffer(data, COUNTS, tokens).tolist())
        ids = np.frombuffer(data, "<i4", offset=tokens * COUNTS.itemsize)
        if len(ids) != offsets[-1]:
            raise ValueError(f"a mask of {offsets[-1]} ids has {len(ids)}")
        return cls(offsets, ids)


def mask_parts(mask: SamplingMask | None) -> Iterator[bytes]:
    """Yield the mask as a further field of a JSON object, in parts; nothing without one."""
    if mask is not None:
        yield b',"sampling_mask":'
        yield from object_parts(mask.arrays(), {})
        yield b"}"


def mask_tensors(mask: SamplingMask | None, prefix: str) -> dict[str, npt.NDArray[Any]]:
    """Return the tensors of a mask in a safetensors file, by name; none without one."""
    arrays = {} if mask is None else mask.arrays()
    return {f"{prefix}sampling_mask.{name}": array for name, array in arrays.items()}


def mask_of_tensors(tensors: Mapping[str, Any], prefix: str) -> SamplingMask | None:
    """Return the mask in the tensors of `mask_tensors`, or None. Raises as `SamplingMask.from_arrays`."""
    found = {
        name: array
        for name in ("offsets", "ids")
        if (array := tensors.get(f"{prefix}sampling_mask.{name}")) is not None
    }
    return SamplingMask.from_arrays(found) if found else None


def _offsets(counts: Iterable[int]) -> npt.NDArray[np.int32]:
    return np.cumsum([0, *counts], dtype=np.int32)

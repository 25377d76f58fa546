"""`SamplingMask`: for each token, the ids that top-k, top-p and min-p left to be sampled there, and the logprob of the
sampled one among them.

A trainer needs them for the ratio of probabilities: with top-p < 1 the engine samples from the renormalized rest, and
ratios of full probabilities are biased.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from miles_router.trajectory.json_parts import array_parts, object_parts
from miles_router.trajectory.pieces import InvalidTrajectory, Logprobs, Tokens, frozen, logprob_array, token_array

COUNTS, IDS, LOGPROBS = np.dtype("<u4"), np.dtype("<i4"), np.dtype("<f4")


class SamplingMask:
    """The ids of n tokens as a ragged array: those of token i are `ids[offsets[i]:offsets[i + 1]]`. Immutable.

    Attributes:
        offsets: int32 [n + 1], from 0 up to the number of ids.
        ids: int32 [offsets[n]], for each token in the engine's order.
        logprobs: float32 [n], of each sampled token in the distribution over its ids alone; 0.0 where not sampled.
    """

    __slots__ = ("ids", "logprobs", "offsets")

    def __init__(self, offsets: npt.NDArray[np.int32], ids: Tokens, logprobs: Logprobs) -> None:
        self.offsets = frozen(offsets)
        self.ids = frozen(ids)
        self.logprobs = frozen(logprobs)

    @classmethod
    def of(cls, sets: Sequence[Sequence[int]], logprobs: Sequence[float], tokens: Tokens) -> SamplingMask:
        """Return the mask of sampled tokens, given the ids of each as a list, and a logprob for each.

        Raises:
            InvalidTrajectory: `tokens_are_ids`; `aligned` and `logprobs_are_logprobs` as `logprob_array`;
                `sampling_mask_fits`: the number of lists is not that of the tokens, or a list does not have its token.
        """
        if not all(isinstance(each, Sequence) and not isinstance(each, str) for each in sets):
            raise InvalidTrajectory("sampling_mask_fits", "the ids of a token are not a list")
        ids = token_array(list(chain.from_iterable(sets)))
        mask = cls(_offsets(map(len, sets)), ids, logprob_array(logprobs, len(tokens)))
        mask.check(tokens)
        return mask

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any], logprobs: Any) -> SamplingMask:
        """Return the mask of `offsets` and `ids`, and of logprobs, all of them lists or arrays.

        Raises:
            InvalidTrajectory: `tokens_are_ids`; `aligned` and `logprobs_are_logprobs` as `logprob_array`;
                `sampling_mask_fits`: the offsets do not rise from 0 to the number of ids, or something is missing.
        """
        try:
            offsets, ids = token_array(arrays["offsets"]), token_array(arrays["ids"])
            if not len(offsets) or offsets[0] != 0 or offsets[-1] != len(ids) or (np.diff(offsets) < 0).any():
                raise InvalidTrajectory("sampling_mask_fits", f"the offsets do not rise from 0 to {len(ids)}")
            return cls(offsets, ids, logprob_array(logprobs, len(offsets) - 1))
        except (KeyError, TypeError) as error:
            raise InvalidTrajectory("sampling_mask_fits", repr(error)) from None

    @classmethod
    def singletons(cls, tokens: Tokens) -> SamplingMask:
        """Return the mask of tokens that were given: each has its own id alone."""
        return cls(np.arange(len(tokens) + 1, dtype=np.int32), tokens, np.zeros(len(tokens), dtype=np.float32))

    @classmethod
    def empty(cls, tokens: int) -> SamplingMask:
        """Return the mask of this many tokens of whose sampling nothing is known: none has an id."""
        offsets, logprobs = np.zeros(tokens + 1, dtype=np.int32), np.zeros(tokens, dtype=np.float32)
        return cls(offsets, np.zeros(0, dtype=np.int32), logprobs)

    @classmethod
    def join(cls, masks: Sequence[SamplingMask]) -> SamplingMask:
        """Return the mask of the tokens of all masks in a row."""
        ids = np.concatenate([np.zeros(0, np.int32), *(mask.ids for mask in masks)])
        logprobs = np.concatenate([np.zeros(0, np.float32), *(mask.logprobs for mask in masks)])
        return cls(_offsets(chain.from_iterable(np.diff(mask.offsets).tolist() for mask in masks)), ids, logprobs)

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
        return self.offsets.nbytes + self.ids.nbytes + self.logprobs.nbytes

    def arrays(self) -> dict[str, npt.NDArray[np.int32]]:
        """Return `offsets` and `ids`."""
        return {"offsets": self.offsets, "ids": self.ids}

    def cut(self, start: int, stop: int) -> SamplingMask:
        """Return the mask of tokens `[start, stop)`, sharing the memory of the ids and logprobs."""
        offsets = self.offsets[start : stop + 1]
        return SamplingMask(offsets - offsets[0], self.ids[offsets[0] : offsets[-1]], self.logprobs[start:stop])

    def common_length(self, other: SamplingMask) -> int:
        """Return how many leading tokens have the same ids in both, in the same order, and the same logprobs."""
        length = min(len(self), len(other))
        differ = np.flatnonzero(self.logprobs[:length].view(np.int32) != other.logprobs[:length].view(np.int32))
        length = int(differ[0]) if len(differ) else length
        differ = np.flatnonzero(self.offsets[: length + 1] != other.offsets[: length + 1])
        length = int(differ[0]) - 1 if len(differ) else length
        end = int(self.offsets[length])
        unequal = np.flatnonzero(self.ids[:end] != other.ids[:end])
        return int(np.searchsorted(self.offsets, unequal[0], "right")) - 1 if len(unequal) else length

    def to_bytes(self) -> bytes:
        """Return the mask as bytes: the number of ids of each token, the ids, the logprobs."""
        parts = np.diff(self.offsets).astype(COUNTS), self.ids.astype(IDS), self.logprobs.astype(LOGPROBS)
        return b"".join(part.tobytes() for part in parts)

    @classmethod
    def from_bytes(cls, data: bytes, tokens: int) -> SamplingMask | None:
        """Return the mask of this many tokens from its bytes; None if they end before the logprobs, as those of masks
        without logprobs did.

        Raises:
            ValueError: the bytes are not such a mask.
        """
        offsets = _offsets(np.frombuffer(data, COUNTS, tokens).tolist())
        count, begin = int(offsets[-1]), tokens * COUNTS.itemsize
        end = begin + count * IDS.itemsize
        if len(data) == end:
            return None
        if len(data) != end + tokens * LOGPROBS.itemsize:
            raise ValueError(f"a mask of {count} ids and {tokens} tokens has {len(data)} bytes")
        return cls(offsets, np.frombuffer(data, IDS, count, begin), np.frombuffer(data, LOGPROBS, tokens, end))


def mask_parts(mask: SamplingMask | None) -> Iterator[bytes]:
    """Yield the mask and its logprobs as further fields of a JSON object, in parts; nothing without one."""
    if mask is not None:
        yield b',"sampling_mask":'
        yield from object_parts(mask.arrays(), {})
        yield b'},"sampling_logprobs":'
        yield from array_parts(mask.logprobs)


def mask_tensors(mask: SamplingMask | None, prefix: str) -> dict[str, npt.NDArray[Any]]:
    """Return the tensors of a mask in a safetensors file, by name; none without one."""
    if mask is None:
        return {}
    arrays = {f"{prefix}sampling_mask.{name}": array for name, array in mask.arrays().items()}
    return {**arrays, f"{prefix}sampling_logprobs": mask.logprobs}


def mask_of_tensors(tensors: Mapping[str, Any], prefix: str) -> SamplingMask | None:
    """Return the mask in the tensors of `mask_tensors`, or None. Raises as `SamplingMask.from_arrays`."""
    found = {
        name: array
        for name in ("offsets", "ids")
        if (array := tensors.get(f"{prefix}sampling_mask.{name}")) is not None
    }
    return SamplingMask.from_arrays(found, tensors.get(f"{prefix}sampling_logprobs")) if found else None


def _offsets(counts: Iterable[int]) -> npt.NDArray[np.int32]:
    return np.cumsum([0, *counts], dtype=np.int32)

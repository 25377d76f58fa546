"""`Trajectory`, a rollout's exact tokens with everything aligned to them. Branches share their common pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from miles_router.trajectory.pieces import (
    InvalidTrajectory,
    Logprobs,
    Mask,
    Piece,
    Tokens,
    VersionRun,
    frozen,
    logprob_array,
    misaligned,
    token_array,
)
from miles_router.trajectory.sampling_mask import SamplingMask


class Trajectory:
    """A sequence of pieces. Immutable: slices and `append` return new trajectories that share the pieces' memory.

    For n positions: `tokens` int32 [n], `logprobs` float32 [n] (0.0 where not sampled), `loss_mask` uint8 [n] (1 =
    sampled by the engine and trained here), `weight_versions` runs over the sampled positions.
    """

    __slots__ = ("_ends", "pieces")

    def __init__(self, pieces: Iterable[Piece] = ()) -> None:
        self.pieces: tuple[Piece, ...] = tuple(filter(len, pieces))
        self._ends: tuple[int, ...] = tuple(accumulate(map(len, self.pieces)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __repr__(self) -> str:
        return f"<Trajectory of {len(self)} tokens, {int(self.loss_mask.sum())} in the loss>"

    def __eq__(self, other: object) -> bool:
        """Return whether all positions are equal, however they are split into pieces."""
        if not isinstance(other, Trajectory):
            return NotImplemented
        return len(self) == len(other) and common_prefix(self, other) == len(self)

    __hash__ = None  # type: ignore[assignment]  # compared by content, too large to hash

    def append(self, *pieces: Piece) -> Trajectory:
        """Return this trajectory with more positions at its end."""
        return Trajectory((*self.pieces, *pieces))

    def __getitem__(self, positions: slice) -> Trajectory:
        """Return positions `[start, stop)`.

        Raises:
            ValueError: the step is not 1.
        """
        start, stop, step = positions.indices(len(self))
        if step != 1:
            raise ValueError("a trajectory can only be cut into contiguous parts")
        parts = []
        for piece, begin in self._located():
            if begin < stop and begin + len(piece) > start:
                parts.append(piece.cut(max(start - begin, 0), min(stop - begin, len(piece))))
        return Trajectory(parts)

    def _located(self) -> Iterator[tuple[Piece, int]]:
        begin = 0
        for piece, end in zip(self.pieces, self._ends, strict=True):
            yield piece, begin
            begin = end

    @property
    def tokens(self) -> Tokens:
        """Token ids, int32 [n]."""
        return _joined([piece.tokens for piece in self.pieces], np.int32)

    @property
    def logprobs(self) -> Logprobs:
        """Float32 [n]; 0.0 where not sampled.

        Raises:
            InvalidTrajectory: `aligned`: a piece does not have one logprob per token.
        """
        flat = np.zeros(len(self), dtype=np.float32)
        for piece, begin in self._located():
            if piece.logprobs is not None:
                if len(piece.logprobs) != len(piece):  # numpy would broadcast a single one
                    raise misaligned(len(piece), len(piece.logprobs))
                flat[begin : begin + len(piece)] = piece.logprobs
        return flat

    @property
    def loss_mask(self) -> Mask:
        """Uint8 [n]; 1 = sampled by the engine and trained in this trajectory."""
        return self._mask(lambda piece: piece.trained)

    @property
    def sampled(self) -> Mask:
        """Uint8 [n]; 1 = sampled by the engine, trained in this trajectory or not."""
        return self._mask(lambda piece: piece.logprobs is not None)

    def _mask(self, is_set: Callable[[Piece], bool]) -> Mask:
        flat = np.zeros(len(self), dtype=np.uint8)
        for piece, begin in self._located():
            if is_set(piece):
                flat[begin : begin + len(piece)] = 1
        return flat

    @property
    def sampling_mask(self) -> SamplingMask | None:
        """The ids that could have been sampled at each of the n positions; at one that was given, its own id. None
        where a sampled position has none."""
        if self.unmasked or all(piece.sampling_mask is None for piece in self.pieces):
            return None
        return SamplingMask.join([each.sampling_mask or SamplingMask.singletons(each.tokens) for each in self.pieces])

    @property
    def unmasked(self) -> int:
        """The number of sampled positions without a sampling mask, if others have one."""
        sampled = [piece for piece in self.pieces if piece.logprobs is not None]
        missing = sum(len(piece) for piece in sampled if piece.sampling_mask is None)
        return missing if missing < sum(map(len, sampled)) else 0

    @property
    def weight_versions(self) -> list[VersionRun]:
        """Runs over sampled positions, in order; adjacent runs of the same version are merged."""
        runs: list[VersionRun] = []
        for piece, begin in self._located():
            if piece.logprobs is None or piece.version is None:
                continue
            if runs and runs[-1].version == piece.version and runs[-1].end == begin:
                runs[-1] = runs[-1]._replace(end=begin + len(piece))
            else:
                runs.append(VersionRun(piece.version, begin, begin + len(piece)))
        return runs

    @property
    def nbytes(self) -> int:
        """The size of the arrays in bytes, including memory shared with other trajectories."""
        return sum(piece.nbytes for piece in self.pieces)


def common_prefix(first: Trajectory, second: Trajectory) -> int:
    """Return the number of leading positions that agree in token, origin, version and (bit for bit) logprob."""
    shared = 0
    mine, theirs = _Reader(first), _Reader(second)
    while (length := min(mine.left, theirs.left)) and mine.piece.same_origin(theirs.piece):
        one, other = mine.take(length), theirs.take(length)
        same_mask = one.sampling_mask is other.sampling_mask
        if one.tokens is not other.tokens or one.logprobs is not other.logprobs or not same_mask:
            agree = _common_length(one, other)
            shared += agree
            if agree < length:
                return shared
        else:
            shared += length
    return shared


class _Reader:
    """A cursor that reads a trajectory in runs of any length."""

    def __init__(self, trajectory: Trajectory) -> None:
        self._pieces = trajectory.pieces
        self._index = 0
        self._offset = 0

    @property
    def piece(self) -> Piece:
        return self._pieces[self._index]

    @property
    def left(self) -> int:
        return len(self.piece) - self._offset if self._index < len(self._pieces) else 0

    def take(self, length: int) -> Piece:
        piece = self.piece.cut(self._offset, self._offset + length)
        self._offset += length
        if self._offset == len(self.piece):
            self._index, self._offset = self._index + 1, 0
        return piece


def _common_length(one: Piece, other: Piece) -> int:
    differ = one.tokens != other.tokens
    if one.logprobs is not None and other.logprobs is not None:
        differ = differ | (one.logprobs.view(np.int32) != other.logprobs.view(np.int32))
    first = int(differ.argmax()) if len(differ) else 0
    length = first if len(differ) and differ[first] else len(differ)
    if one.sampling_mask is not None and other.sampling_mask is not None:
        return min(length, one.sampling_mask.common_length(other.sampling_mask))
    return length


def _joined(parts: Sequence[Tokens], dtype: type[np.int32]) -> Tokens:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.zeros(0, dtype=dtype)


class Arrays(NamedTuple):
    """The flat arrays of a trajectory: `tokens` int32 [n], `logprobs` float32 [n], `loss_mask` uint8 [n], and version
    runs."""

    tokens: Tokens
    logprobs: Logprobs
    loss_mask: Mask
    weight_versions: tuple[VersionRun, ...]


def checked_arrays(
    tokens: Sequence[int] | Tokens,
    logprobs: Sequence[float] | Logprobs,
    loss_mask: Sequence[int] | Mask,
    weight_versions: Iterable[tuple[str, int, int]] = (),
) -> Arrays:
    """Validate flat arrays and return them as new read-only arrays.

    Raises:
        InvalidTrajectory: naming the first broken invariant, in this order: `tokens_are_ids`, `aligned`,
            `mask_is_binary`, `logprobs_are_logprobs`, `versions_in_order`, `versions_cover_the_loss`.
    """
    ids = token_array(tokens)
    if not len(ids) == len(logprobs) == len(loss_mask):
        lengths = f"{len(ids)} tokens, {len(logprobs)} logprobs, {len(loss_mask)} mask entries"
        raise InvalidTrajectory("aligned", lengths)
    try:
        mask = np.asarray(loss_mask)
    except ValueError as error:
        raise InvalidTrajectory("mask_is_binary", str(error)) from None
    if len(mask) and (mask.ndim != 1 or not np.isin(mask, (0, 1)).all()):
        raise InvalidTrajectory("mask_is_binary", "the loss mask must contain only 0 and 1")
    values = logprob_array(logprobs, len(ids))
    runs = _checked_runs(weight_versions, len(ids))
    if runs and bool(((mask == 1) & (_run_indices(runs, len(ids)) < 0)).any()):
        raise InvalidTrajectory("versions_cover_the_loss", "a position in the loss has no weight version")
    return Arrays(ids, values, frozen(mask.astype(np.uint8)), tuple(runs))


def from_arrays(
    tokens: Sequence[int] | Tokens,
    logprobs: Sequence[float] | Logprobs,
    loss_mask: Sequence[int] | Mask,
    weight_versions: Iterable[tuple[str, int, int]] = (),
    sampling_mask: SamplingMask | None = None,
) -> Trajectory:
    """Return a trajectory of flat arrays. Raises as `checked_arrays` and `SamplingMask.check`."""
    arrays = checked_arrays(tokens, logprobs, loss_mask, weight_versions)
    if sampling_mask is not None:
        sampling_mask.check(arrays.tokens)
    return Trajectory(_pieces(arrays, sampling_mask))


def _checked_runs(weight_versions: Iterable[tuple[str, int, int]], length: int) -> list[VersionRun]:
    runs = [VersionRun(str(version), start, end) for version, start, end in weight_versions]
    before = 0
    for run in runs:
        if not before <= run.start < run.end <= length:
            raise InvalidTrajectory("versions_in_order", f"run {tuple(run)} overlaps, is empty or leaves [0, {length})")
        before = run.end
    return runs


def _run_indices(runs: Sequence[VersionRun], length: int) -> npt.NDArray[np.int64]:
    """Return for each position the index of its run, or -1."""
    owner = np.full(length, -1, dtype=np.int64)
    for index, run in enumerate(runs):
        owner[run.start : run.end] = index
    return owner


def _pieces(arrays: Arrays, sampling_mask: SamplingMask | None) -> Iterator[Piece]:
    ids, values, mask, runs = arrays
    owner = _run_indices(runs, len(ids))
    sampled = (mask == 1) | (values != 0) | (owner >= 0)
    key = np.stack([sampled.astype(np.int64), mask.astype(np.int64), owner]) if len(ids) else np.zeros((3, 0))
    bounds = [0, *(np.flatnonzero((key[:, 1:] != key[:, :-1]).any(axis=0)) + 1).tolist(), len(ids)]
    for start, stop in pairwise(bounds):
        if start == stop:
            continue
        if not sampled[start]:
            yield Piece(ids[start:stop])
            continue
        version = runs[int(owner[start])].version if owner[start] >= 0 else None
        sets = None if sampling_mask is None else sampling_mask.cut(start, stop)
        yield Piece(ids[start:stop], values[start:stop], version, trained=bool(mask[start]), sampling_mask=sets)

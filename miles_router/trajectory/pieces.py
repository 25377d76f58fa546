"""`Piece`, a run of token positions of one origin, and checked read-only arrays for it."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from miles_router.trajectory.sampling_mask import SamplingMask

Tokens = npt.NDArray[np.int32]
Logprobs = npt.NDArray[np.float32]
Mask = npt.NDArray[np.uint8]
Scalar = TypeVar("Scalar", bound=np.generic)

#: Engines compute in low precision: the logprob of a certain token can be slightly above zero.
LOGPROB_TOLERANCE = 1e-2
MAX_TOKEN = 2**31 - 1
#: Minimum and maximum of an array; NaN if it contains NaN. `array.min` and `array.max` are slower wrappers.
_least, _largest = np.minimum.reduce, np.maximum.reduce


#: The invariant that an invalid logprob breaks.
NO_LOGPROB = "logprobs_are_logprobs"


class InvalidTrajectory(ValueError):
    """An error about arrays that no rollout can produce. `invariant` names the first broken invariant."""

    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(f"{invariant}: {message}")
        self.invariant = invariant


def misaligned(tokens: int, logprobs: int) -> InvalidTrajectory:
    """Return the error for sampled tokens and logprobs whose counts differ."""
    return InvalidTrajectory("aligned", f"{tokens} sampled tokens have {logprobs} logprobs")


class Malformed(ValueError):
    """An error about bytes that do not have the expected format, so that their content is unknown."""


class VersionRun(NamedTuple):
    """A run of positions `[start, end)` that were sampled by weights `version`."""

    version: str
    start: int
    end: int


class Piece:
    """A run of positions of one origin: given to the engine (`logprobs` is None), or sampled under one weight version.

    A sampled run has a `sampling_mask` if the engine told which ids could have been sampled. `trained=False` keeps the
    logprobs of a sampled run and excludes it from the loss, for example for a turn that another sample trains. Pieces
    are immutable; `cut` returns views of the same memory.
    """

    __slots__ = ("logprobs", "sampling_mask", "tokens", "trained", "version")

    def __init__(
        self,
        tokens: Tokens,
        logprobs: Logprobs | None = None,
        version: str | None = None,
        *,
        trained: bool = True,
        sampling_mask: SamplingMask | None = None,
    ) -> None:
        self.tokens = tokens
        self.logprobs = logprobs
        self.version = version
        self.sampling_mask = sampling_mask
        self.trained = trained and logprobs is not None

    @classmethod
    def given(cls, ids: Sequence[int] | npt.NDArray[np.integer]) -> Piece:
        """Return a piece of tokens that the engine was given.

        Raises:
            InvalidTrajectory: an id is not an integer from 0 to 2**31 - 1.
        """
        return cls(token_array(ids))

    @classmethod
    def sampled(
        cls,
        ids: Sequence[int] | npt.NDArray[np.integer],
        logprobs: Sequence[float] | npt.NDArray[np.floating],
        version: str | None,
    ) -> Piece:
        """Return a piece of tokens that the engine sampled, with one logprob each and one weight version (None: not
        reported).

        Raises:
            InvalidTrajectory: the lengths differ, or an id or logprob is invalid.
        """
        tokens = token_array(ids)
        try:
            return cls(tokens, logprob_array(logprobs, len(tokens)), version)
        except InvalidTrajectory as error:
            if error.invariant != NO_LOGPROB:
                raise
            raise InvalidTrajectory(NO_LOGPROB, _first_invalid_logprob(ids, logprobs)) from None

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        origin = "given" if self.logprobs is None else f"sampled by {self.version!r}"
        return f"<Piece of {len(self)} tokens, {origin}>"

    @property
    def nbytes(self) -> int:
        """The size of the arrays in bytes, including memory shared with other pieces."""
        return sum(each.nbytes for each in (self.tokens, self.logprobs, self.sampling_mask) if each is not None)

    def cut(self, start: int, stop: int) -> Piece:
        """Return positions `[start, stop)`, sharing this piece's memory."""
        if start == 0 and stop == len(self):
            return self
        logprobs = None if self.logprobs is None else self.logprobs[start:stop]
        mask = None if self.sampling_mask is None else self.sampling_mask.cut(start, stop)
        return Piece(self.tokens[start:stop], logprobs, self.version, trained=self.trained, sampling_mask=mask)

    def untrained(self) -> Piece:
        """Return the same positions, excluded from the loss."""
        return Piece(self.tokens, self.logprobs, self.version, trained=False, sampling_mask=self.sampling_mask)

    def of_version(self, version: str | None) -> Piece:
        """Return the same sampled positions under another weight version."""
        return Piece(self.tokens, self.logprobs, version, trained=self.trained, sampling_mask=self.sampling_mask)

    def masked(self, sampling_mask: SamplingMask) -> Piece:
        """Return the same sampled positions with this sampling mask."""
        return Piece(self.tokens, self.logprobs, self.version, trained=self.trained, sampling_mask=sampling_mask)

    def same_origin(self, other: Piece) -> bool:
        """Return whether both pieces have the same kind, version and loss flag, so that one piece could contain
        both."""
        return self._origin == other._origin

    @property
    def _origin(self) -> tuple[bool, str | None, bool, bool]:
        return self.logprobs is None, self.version, self.trained, self.sampling_mask is None


def token_array(ids: Sequence[int] | npt.NDArray[np.integer]) -> Tokens:
    """Return the token ids as a new read-only int32 array.

    Raises:
        InvalidTrajectory: `tokens_are_ids`: an id is not an integer from 0 to 2**31 - 1.
    """
    try:
        array = np.asarray(ids) if len(ids) else np.zeros(0, dtype=np.int32)
    except ValueError as error:
        raise InvalidTrajectory("tokens_are_ids", str(error)) from None
    # Check the original type first: a direct conversion to integers would truncate fractions.
    if array.dtype.kind not in "iu" or array.ndim != 1 or _largest(_unsigned(array), initial=0) > MAX_TOKEN:
        raise InvalidTrajectory("tokens_are_ids", "token ids must be a flat list of integers from 0 to 2**31 - 1")
    return frozen(array.astype(np.int32))


def logprob_array(logprobs: Sequence[float] | npt.NDArray[np.floating], length: int) -> Logprobs:
    """Return `length` logprobs as a new read-only float32 array.

    Raises:
        InvalidTrajectory: `aligned`: the number is not `length`; `logprobs_are_logprobs`: one is above zero or not
            finite.
    """
    if len(logprobs) != length:
        raise misaligned(length, len(logprobs))
    # Check the original types first: numpy would parse strings and convert booleans.
    if not isinstance(logprobs, np.ndarray) and not all(map(_is_number, set(map(type, logprobs)))):
        raise InvalidTrajectory(NO_LOGPROB, "a logprob is not a number")
    # Numbers too large for float32 become infinite, and are refused below like NaN.
    with np.errstate(over="ignore", invalid="ignore"):
        try:
            array = np.array(logprobs, dtype=np.float32) if length else np.zeros(0, dtype=np.float32)
        except (TypeError, ValueError) as error:
            raise InvalidTrajectory(NO_LOGPROB, str(error)) from None
        # A sampled token has a probability above zero; and JSON cannot write minus infinity.
        fits = array.ndim == 1 and (length == 0 or -np.inf < _least(array) <= _largest(array) <= LOGPROB_TOLERANCE)
    if not fits:
        raise InvalidTrajectory(NO_LOGPROB, "a logprob is above zero or not finite")
    return frozen(array)


def _is_number(kind: type) -> bool:
    return issubclass(kind, float | int | np.floating | np.integer) and kind is not bool


def _first_invalid_logprob(ids: Sequence[Any] | npt.NDArray[Any], logprobs: Sequence[Any] | npt.NDArray[Any]) -> str:
    """Describe the first position with an invalid logprob: its index, token and value."""
    for position, (token, logprob) in enumerate(zip(ids, logprobs, strict=True)):
        try:
            logprob_array([logprob], 1)
        except InvalidTrajectory:
            shown = reprlib.repr(logprob)
            return f"position {position}, token {token}: {shown} is not a logprob (a finite number of at most 0)"
    return "a logprob is above zero or not finite"


def _unsigned(array: npt.NDArray[np.integer]) -> npt.NDArray[np.uint64]:
    """Return integers as unsigned, so that negative ones become larger than any valid id."""
    return array.astype(np.int64, copy=False).view(np.uint64)


def frozen(array: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
    """Return a read-only view. Pieces share memory, so no code may change it in place."""
    view: npt.NDArray[Scalar] = array.view()
    view.flags.writeable = False
    return view

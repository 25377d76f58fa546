"""Runs of token positions that came about in one way, as compact read-only arrays."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
Logprobs = npt.NDArray[np.float32]
Mask = npt.NDArray[np.uint8]
Scalar = TypeVar("Scalar", bound=np.generic)

#: Engines compute in low precision: a certain token's logprob can come out a little above zero.
LOGPROB_TOLERANCE = 1e-2
MAX_TOKEN = 2**31 - 1
#: Of an array's values; none where one of them is no number. `array.min` and `array.max` say the same, later.
_least, _largest = np.minimum.reduce, np.maximum.reduce


#: The invariant that a logprob of another kind breaks.
NO_LOGPROB = "logprobs_are_logprobs"


class InvalidTrajectory(ValueError):
    """Arrays that no rollout can have; `invariant` names the first one broken."""

    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(f"{invariant}: {message}")
        self.invariant = invariant


def misaligned(tokens: int, logprobs: int) -> InvalidTrajectory:
    """Sampled tokens that have not a logprob each."""
    return InvalidTrajectory("aligned", f"{tokens} sampled tokens have {logprobs} logprobs")


class Malformed(ValueError):
    """Bytes that do not have the form they should have, so that nothing can be said of what is in them."""


class VersionRun(NamedTuple):
    """Positions `[start, end)` were sampled by weights `version`."""

    version: str
    start: int
    end: int


class Piece:
    """Positions of one origin: given to the engine (`logprobs` is None) or sampled by it under one weight version.

    `trained=False` keeps a sampled run's logprobs and takes it out of the loss, as for a turn that another sample
    trains. Pieces never change; `cut` gives views of the same memory.
    """

    __slots__ = ("logprobs", "tokens", "trained", "version")

    def __init__(
        self, tokens: Tokens, logprobs: Logprobs | None = None, version: str | None = None, *, trained: bool = True
    ) -> None:
        self.tokens = tokens
        self.logprobs = logprobs
        self.version = version
        self.trained = trained and logprobs is not None

    @classmethod
    def given(cls, ids: Sequence[int] | npt.NDArray[np.integer]) -> Piece:
        """Tokens the engine was given.

        Raises:
            InvalidTrajectory: an id is not an int32 from 0.
        """
        return cls(token_array(ids))

    @classmethod
    def sampled(
        cls,
        ids: Sequence[int] | npt.NDArray[np.integer],
        logprobs: Sequence[float] | npt.NDArray[np.floating],
        version: str | None,
    ) -> Piece:
        """Tokens the engine sampled, each with its logprob, all under one weight version (None: it names none).

        Raises:
            InvalidTrajectory: the lengths differ, or a value cannot be what it claims to be.
        """
        tokens = token_array(ids)
        try:
            return cls(tokens, logprob_array(logprobs, len(tokens)), version)
        except InvalidTrajectory as error:
            if error.invariant != NO_LOGPROB:
                raise
            raise InvalidTrajectory(NO_LOGPROB, _first_that_is_none(ids, logprobs)) from None

    def __len__(self) -> int:
        return len(self.tokens)

    def __repr__(self) -> str:
        origin = "given" if self.logprobs is None else f"sampled by {self.version!r}"
        return f"<Piece of {len(self)} tokens, {origin}>"

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays; memory shared with other pieces is counted here too."""
        return self.tokens.nbytes + (0 if self.logprobs is None else self.logprobs.nbytes)

    def cut(self, start: int, stop: int) -> Piece:
        """Positions `[start, stop)`, sharing this piece's memory."""
        if start == 0 and stop == len(self):
            return self
        logprobs = None if self.logprobs is None else self.logprobs[start:stop]
        return Piece(self.tokens[start:stop], logprobs, self.version, trained=self.trained)

    def untrained(self) -> Piece:
        """The same positions outside the loss."""
        return Piece(self.tokens, self.logprobs, self.version, trained=False)

    def same_origin(self, other: Piece) -> bool:
        """Whether both could be cut from one piece: same kind, same version."""
        return (self.logprobs is None, self.version, self.trained) == (
            other.logprobs is None,
            other.version,
            other.trained,
        )


def token_array(ids: Sequence[int] | npt.NDArray[np.integer]) -> Tokens:
    """Token ids as a read-only int32 array of their own.

    Raises:
        InvalidTrajectory: `tokens_are_ids`: an id is no integer from 0 to 2**31 - 1.
    """
    try:
        array = np.asarray(ids) if len(ids) else np.zeros(0, dtype=np.int32)
    except ValueError as error:
        raise InvalidTrajectory("tokens_are_ids", str(error)) from None
    # Its own type first: told to make integers, numpy would cut fractions off.
    if array.dtype.kind not in "iu" or array.ndim != 1 or _largest(_unsigned(array), initial=0) > MAX_TOKEN:
        raise InvalidTrajectory("tokens_are_ids", "token ids must be a flat list of integers from 0 to 2**31 - 1")
    return frozen(array.astype(np.int32))


def logprob_array(logprobs: Sequence[float] | npt.NDArray[np.floating], length: int) -> Logprobs:
    """Logprobs of `length` sampled tokens as a read-only float32 array of their own.

    Raises:
        InvalidTrajectory: `aligned`: not `length` of them; `logprobs_are_logprobs`: one is above zero or not finite.
    """
    if len(logprobs) != length:
        raise misaligned(length, len(logprobs))
    # Their own types first: numpy would read texts, and take truths for numbers.
    if not isinstance(logprobs, np.ndarray) and not all(map(_is_number, set(map(type, logprobs)))):
        raise InvalidTrajectory(NO_LOGPROB, "a logprob is no number")
    # What is too large becomes infinite, and is refused here; as is what is no number.
    with np.errstate(over="ignore", invalid="ignore"):
        try:
            array = np.array(logprobs, dtype=np.float32) if length else np.zeros(0, dtype=np.float32)
        except (TypeError, ValueError) as error:
            raise InvalidTrajectory(NO_LOGPROB, str(error)) from None
        # What was sampled had a probability; and JSON has no number for the logarithm of none.
        fits = array.ndim == 1 and (length == 0 or -np.inf < _least(array) <= _largest(array) <= LOGPROB_TOLERANCE)
    if not fits:
        raise InvalidTrajectory(NO_LOGPROB, "a logprob is above zero or no finite number")
    return frozen(array)


def _is_number(kind: type) -> bool:
    return issubclass(kind, float | int | np.floating | np.integer) and kind is not bool


def _first_that_is_none(ids: Sequence[Any] | npt.NDArray[Any], logprobs: Sequence[Any] | npt.NDArray[Any]) -> str:
    """Name the first position whose logprob is none, its token and what stands there."""
    for position, (token, logprob) in enumerate(zip(ids, logprobs, strict=True)):
        try:
            logprob_array([logprob], 1)
        except InvalidTrajectory:
            shown = reprlib.repr(logprob)
            return f"position {position}, token {token}: {shown} is no logprob, which is a finite number of at most 0"
    return "a logprob is above zero or no finite number"


def _unsigned(array: npt.NDArray[np.integer]) -> npt.NDArray[np.uint64]:
    """Integers as they are from 0 on; what is below is larger than any."""
    return array.astype(np.int64, copy=False).view(np.uint64)


def frozen(array: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
    """A view that cannot be written: pieces share memory, so nobody may change it in place."""
    view: npt.NDArray[Scalar] = array.view()
    view.flags.writeable = False
    return view

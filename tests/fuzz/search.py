"""Looks for an input that a target's oracle refuses, and makes it small."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from types import FrameType

from tests.fuzz.mutations import mutate
from tests.fuzz.target import CORPUS, Target

#: Seconds of the processor that one input may take. Nearly all take milliseconds; 65,536 requests in one take 5 to 10.
PATIENCE = 30.0
#: Inputs kept because they showed something new.
MOST_KEPT = 400
#: Checks spent on making a finding small, and seconds.
EFFORT, EFFORT_SECONDS = 400, 30.0


@dataclass(frozen=True)
class Finding:
    """An input that broke an oracle, and how to see it again."""

    target: str
    data: bytes
    problem: str

    @property
    def file_name(self) -> str:
        return f"found-{sha256(self.data).hexdigest()[:12]}"

    def save(self) -> str:
        """Write it into the corpus; gives the path."""
        path = CORPUS / self.target / self.file_name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.data)
        return str(path)


@dataclass
class Search:
    """Runs over one target. With the same seed, corpus and number of runs it is always the same."""

    target: Target
    seed: int
    kept: list[bytes] = field(default_factory=list)
    runs: int = 0
    _seen: set[Hashable] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._dice = random.Random(f"{self.target.name}/{self.seed}")
        self._corpus = [data for _, data in corpus(self.target.name)]

    def run(self, *, runs: int | None = None, seconds: float | None = None) -> Finding | None:
        """Try so many inputs, or for so long; the first that breaks the oracle."""
        end = None if seconds is None else time.monotonic() + seconds
        while (runs is None or self.runs < runs) and (end is None or time.monotonic() < end):
            self.runs += 1
            data = self._next()
            problem = self._problem(data)
            if problem is not None:
                return self._smallest(data, problem)
        return None

    def _next(self) -> bytes:
        dice = self._dice
        if dice.random() < 0.25 or not (self._corpus or self.kept):
            return self.target.generate(dice)
        known = self.kept if self.kept and dice.random() < 0.6 else self._corpus or self.kept
        data = self.target.generate(dice) if dice.random() < 0.2 else dice.choice(known)
        words = [*self.target.tokens, dice.choice(known), self.target.generate(dice)]
        return mutate(dice, data, words)

    def _problem(self, data: bytes) -> str | None:
        try:
            with bounded():
                traits = self.target.check(data)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
            return f"{type(error).__name__}: {error}"
        if traits not in self._seen:
            self._seen.add(traits)
            self.kept.append(data)
            if len(self.kept) > MOST_KEPT:
                self.kept.pop(self._dice.randrange(MOST_KEPT))
        return None

    def _smallest(self, data: bytes, problem: str) -> Finding:
        """The input with everything left out that the problem does not need."""
        kind, effort = problem.split(":", 1)[0], EFFORT
        size, end = max(1, len(data) // 2), time.monotonic() + EFFORT_SECONDS
        while size and effort and time.monotonic() < end:
            at = 0
            while at < len(data) and effort and time.monotonic() < end:
                effort -= 1
                shorter = data[:at] + data[at + size :]
                found = self._problem(shorter)
                if found is not None and found.split(":", 1)[0] == kind:
                    data, problem = shorter, found
                else:
                    at += size
            size //= 2
        return Finding(self.target.name, data, problem)


def corpus(name: str) -> list[tuple[str, bytes]]:
    """The inputs of a target, with their names."""
    return [(path.name, path.read_bytes()) for path in sorted((CORPUS / name).glob("*"))]


class Hang(AssertionError):
    """An input took too long."""


@contextmanager
def bounded(seconds: float = PATIENCE) -> Iterator[None]:
    """Raises:
    Hang: what is done within took so many seconds of the processor.
    """
    late: list[bool] = []

    def ring(number: int, frame: FrameType | None) -> None:
        late.append(True)
        raise Hang(f"one input took over {seconds:g} s")

    before = signal.signal(signal.SIGVTALRM, ring)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
    if late:  # an event loop has logged it and gone on
        raise Hang(f"one input took over {seconds:g} s")

"""What can be fuzzed: an entrance of the router with an oracle."""

from __future__ import annotations

import itertools
import random
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import ClassVar

CORPUS = Path(__file__).with_name("corpus")
#: `<<70000*abc>>` in an input stands for so many copies: what is large has a small file.
_REPEATED = re.compile(rb"<<(\d{1,7})\*([^<>]{1,64})>>")
#: Bytes that one of these may stand for.
LARGEST = 1024 * 1024
#: Bytes that are read from a socket at once.
AT_ONCE = 64 * 1024


class Target(ABC):
    """One entrance. A target is made once and checks many inputs; `close` ends what it started."""

    name: ClassVar[str]
    #: What mutations put into inputs, beside pieces of other inputs.
    tokens: ClassVar[Sequence[bytes]] = ()
    #: Inputs of one run in `make test`.
    runs: ClassVar[int]

    @abstractmethod
    def generate(self, dice: random.Random) -> bytes:
        """An input by the grammar, mostly a good one."""

    @abstractmethod
    def check(self, data: bytes) -> Hashable:
        """Hold one input against the oracle; the same input is always checked in the same way.

        Returns:
            What was seen, in few words. An input that shows something new is kept as a beginning of others.

        Raises:
            AssertionError: the oracle disagrees. Any other error is a fault as well.
        """

    def close(self) -> None:  # noqa: B027 - many have nothing to end
        """No more inputs come."""


def expand(data: bytes, largest: int = LARGEST) -> bytes:
    """An input with its repeated parts written out, each up to so many bytes."""

    def written(part: re.Match[bytes]) -> bytes:
        return part[2] * min(int(part[1]), largest // len(part[2]))

    return _REPEATED.sub(written, data, count=2)


def dice_of(data: bytes) -> random.Random:
    """Choices that belong to an input."""
    return random.Random(zlib.crc32(data))


def splits(data: bytes, *, singly: int = 160) -> list[list[bytes]]:
    """Ways in which `data` may arrive: whole, in a few pieces, in many, and, if it is short, byte by byte."""
    dice = dice_of(data)
    whole = [data[at : at + AT_ONCE] for at in range(0, len(data), AT_ONCE)]
    ways = [whole, _cut(data, dice, 3), _cut(data, dice, 24)]
    if len(data) <= singly:
        ways.append([data[at : at + 1] for at in range(len(data))])
    return ways


def _cut(data: bytes, dice: random.Random, pieces: int) -> list[bytes]:
    marks = sorted({*range(0, len(data), AT_ONCE), len(data), *(dice.randint(0, len(data)) for _ in range(pieces - 1))})
    return [data[start:end] for start, end in itertools.pairwise(marks)]

"""How one input becomes another: a few bytes, numbers, words and slices changed."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

MOST_BYTES = 16 * 1024
NUMBERS: tuple[bytes, ...] = (b"0", b"1", b"-1", b"2", b"255", b"65535", b"65536", b"2147483647", b"2147483648")
NUMBERS += (b"4294967296", b"9223372036854775807", b"18446744073709551616", b"1e999", b"0.5", b"ffffffffffffffff")
BYTES = (0, 9, 10, 13, 32, 34, 44, 58, 91, 92, 93, 123, 125, 127, 128, 192, 239, 255)
_DIGITS = re.compile(rb"\d+")

Mutation = Callable[[random.Random, bytes, Sequence[bytes]], bytes]


def mutate(dice: random.Random, data: bytes, words: Sequence[bytes]) -> bytes:
    """A neighbour of `data`; `words` are tokens of the target and pieces of other inputs."""
    for _ in range(dice.choice((1, 1, 1, 2, 3, 6))):
        data = dice.choice(MUTATIONS)(dice, data, words)
    return data[:MOST_BYTES]


def _slice(dice: random.Random, data: bytes) -> tuple[int, int]:
    start = dice.randint(0, len(data))
    return start, min(len(data), start + dice.choice((1, 1, 2, 4, 8, 16, 64)))


def _set_byte(dice: random.Random, data: bytes, words: Sequence[bytes]) -> bytes:
    if not data:
        return data
    at = dice.randrange(len(data))
    byte = dice.choice((dice.randrange(256), dice.choice(BYTES), data[at] ^ (1 << dice.randrange(8))))
    return data[:at] + bytes((byte,)) + data[at + 1 :]


def _remove(dice: random.Random, data: bytes, words: Sequence[bytes]) -> bytes:
    start, end = _slice(dice, data)
    return data[:start] + data[end:]


def _repeat(dice: random.Random, data: bytes, words: Sequence[bytes]) -> bytes:
    start, end = _slice(dice, data)
    return data[:end] + data[start:end] * dice.choice((1, 1, 2, 7)) + data[end:]


def _insert(dice: random.Random, data: bytes, words: Sequence[bytes]) -> bytes:
    at = dice.randint(0, len(data))
    return data[:at] + dice.choice(words) + data[at:]


def _overwrite(dice: random.Random, data: bytes, words: Sequence[bytes]) -> bytes:
    start, end = _slice(dice, data)
    return data[:start] + dice.choice(words) + data[end:]


def _move(dice: random.Random, data: bytes, words: Sequence[bytes]) -> bytes:
    start, end = _slice(dice, data)
    rest = data[:start] + data[end:]
    at = dice.randint(0, len(rest))
    return rest[:at] + data[start:end] + rest[at:]


def _number(dice: random.Random, data: bytes, words: Sequence[bytes]) -> bytes:
    numbers = list(_DIGITS.finditer(data))
    if not numbers:
        return data
    old = dice.choice(numbers)
    near = b"%d" % max(0, int(old[0][:12]) + dice.choice((-1, 1, 1)))
    return data[: old.start()] + dice.choice((near, dice.choice(NUMBERS))) + data[old.end() :]


def _truncate(dice: random.Random, data: bytes, words: Sequence[bytes]) -> bytes:
    return data[: dice.randint(0, len(data))]


def _splice(dice: random.Random, data: bytes, words: Sequence[bytes]) -> bytes:
    other = max((dice.choice(words) for _ in range(4)), key=len)
    return data[: dice.randint(0, len(data))] + other[dice.randint(0, len(other)) :]


MUTATIONS: Sequence[Mutation] = (
    _set_byte,
    _set_byte,
    _remove,
    _repeat,
    _insert,
    _insert,
    _overwrite,
    _move,
    _number,
    _truncate,
    _splice,
)

"""JSON looked at as bytes: scanners of `engines/json_bytes.py`, and what `engines/answers.py` sees without parsing."""

from __future__ import annotations

import json
import random
from collections.abc import Hashable
from contextlib import suppress
from typing import Any

from miles_router.engines.answers import contains_abort, finish_reasons, index_of, is_abort, is_unfinished, progress_of
from miles_router.engines.json_bytes import Field, Incomplete
from tests.fuzz.target import Target, dice_of, expand

NAMES = ("finish_reason", "index", "weight_version", "text")
FIELDS = {name: Field(name) for name in NAMES}
SPACES = (b"", b"", b" ", b"\n\t", b" \r\n ")
VALUES: tuple[bytes, ...] = (
    b"null",
    b"true",
    b"-0.5e3",
    b"1",
    b'"a"',
    b'"\\"finish_reason\\": 1"',
    b'"\\\\"',
    b"[]",
    b"{}",
    b'"\xc3\xa9"',
)
VALUES += (b'{"type": "abort"}', b'{"type": "stop", "matched": "\\u00e9"}', b'"abort"', b"<<600*1>>", b'"<<2000*a>>"')
VALUES += (b"<<300*[>>1<<300*]>>", b'"\\ud83d\\ude00"', b'"\xf0\x9f\x98\x80"', b"12345678901234567890")


class JsonBytes(Target):
    """Any bytes.

    - In a JSON document the values found are those of a full parse, in their order; of its beginning, the first ones.
    - It does not matter in which pieces a document is looked through.
    - What an event says of its answer is what a full parse says, or is not seen.
    - Of anything else, `Incomplete` is the only error.
    """

    name = "json-bytes"
    runs = 6000
    tokens = (
        *VALUES,
        *(b'"%b"' % name.encode() for name in NAMES),
        b'"finish_reason": ',
        b"\\",
        b'"',
        b"\\u0066",
        b",",
    )

    def generate(self, dice: random.Random) -> bytes:
        return _document(dice, 3)

    def check(self, data: bytes) -> Hashable:
        data = expand(data)
        pairs = pairs_of(data)
        counts = []
        for name, field in FIELDS.items():
            found = _found(field, data)
            if pairs is None or b"\\u00" in data:  # a name spelled with escapes is not found
                counts.append(-1)
                continue
            expected = [value for key, value in pairs if key == name]
            assert found == expected, f"{name}: {found}, not {expected}"
            cut = dice_of(data).randint(0, len(data))
            beginning = _found(field, data[:cut])
            assert beginning == expected[: len(beginning)], f"{name} in the first {cut} bytes: {beginning}"
            _places_in_pieces(field, data)
            counts.append(min(len(found), 3))
        return (pairs is None, tuple(counts), _seen_of_answer(data, pairs))


def _document(dice: random.Random, depth: int) -> bytes:
    kind = dice.random()
    if not depth or kind < 0.3:
        return dice.choice(VALUES)
    inner = [_document(dice, depth - 1) for _ in range(dice.randint(0, 3))]
    space = dice.choice(SPACES)
    if kind < 0.45:
        return b"[" + (b"," + space).join(inner) + b"]"
    names = [dice.choice((*NAMES, "meta_info", "x", 'a\\"finish_reason')).encode() for _ in inner]
    pairs = [b'"%b"%b:%b%b' % (name, space, space, value) for name, value in zip(names, inner, strict=True)]
    return b"{" + (b"," + space).join(pairs) + b"}"


def pairs_of(data: bytes) -> list[tuple[str, Any]] | None:
    """Every name and value of a document, in the order in which the values begin; None if it is no JSON."""

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    try:
        whole = json.loads(data.decode("utf-8"), object_pairs_hook=tuple, parse_constant=refuse)
    except (ValueError, RecursionError):
        return None
    found: list[tuple[str, Any]] = []

    def walk(value: Any) -> None:
        if isinstance(value, tuple):
            for name, inner in value:
                found.append((name, _plain(inner)))
                walk(inner)
        elif isinstance(value, list):
            for inner in value:
                walk(inner)

    walk(whole)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return {name: _plain(inner) for name, inner in value}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value


def _found(field: Field, data: bytes) -> list[object]:
    found: list[object] = []
    with suppress(Incomplete):
        found.extend(field.values(data))
    for look in (field.only, field.last):
        with suppress(Incomplete):
            look(data)
    return found


def _places_in_pieces(field: Field, data: bytes) -> None:
    """The way in which rows are found in answers: piece by piece, with what may begin at a piece's end carried over."""
    expected, found = list(field.places(data)), list[int]()
    dice, start, carried = dice_of(data), 0, b""
    while start < len(data):
        end = min(len(data), start + dice.choice((1, 2, 7, 40)))
        piece, begins = carried + data[start:end], start - len(carried)
        cut = field.beginning(piece) if end < len(data) else len(piece)
        before = data[max(0, begins - 1) : begins]
        at = field.find(piece[:cut], before=before)
        while at is not None and at[1] <= cut:
            found.append(begins + at[1])
            at = field.find(piece[:cut], at[1], before=before)
        carried, start = piece[cut:], end
    assert [place for place in found if place < len(data)] == [place for place in expected if place < len(data)]


def _seen_of_answer(data: bytes, pairs: list[tuple[str, Any]] | None) -> Hashable:
    """What is seen of an event agrees with its parse, where it can be parsed."""
    index, progress, abort, on = index_of(data), progress_of(data), contains_abort(data), is_unfinished(data)
    reasons = finish_reasons(data, 1)
    if pairs is None or b"\\u00" in data:
        return None
    finishes = [value for name, value in pairs if name == "finish_reason"]
    indexes = [value for name, value in pairs if name == "index"]
    assert index is None or index in indexes, f"index {index} of {indexes}"
    assert (progress is None) == (not finishes), f"{progress} of {finishes}"
    assert progress is None or progress.finish == finishes[0], f"{progress} of {finishes}"
    assert reasons == (finishes if len(finishes) == 1 else None), f"{reasons} of {finishes}"
    assert abort == any(map(is_abort, finishes)), f"an abort in {finishes}: {abort}"
    assert on == (finishes == [None]), f"{finishes} go on: {on}"
    return (index is None, progress is None, abort, on, len(value_kinds(finishes)))


def value_kinds(values: list[Any]) -> set[str]:
    return {type(value).__name__ for value in values}

"""Rows that stay what they came as, apart from the JSON around them: an answer may have 60 MB of them. Pure.

They are taken out of an answer while it comes, which leaves a short one with marks in their place. When that has been
changed, they are put in again, the first of them from the other half.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from miles_router.engines.answers import UnreadableAnswer
from miles_router.engines.extraction import Extractor
from miles_router.engines.rows import RowFields, decode_rows

QUANTUM, CHARS = 3, 4  # bytes, and what base64 spells them with
QUOTE, PAD = b'"', b"="
#: In place of rows in the one answer, and of those that were taken out of a half's.
JOINED = "joined:"
_MARK = re.compile(rb'"(joined:)?(\d+)"')


class HeldString:
    """The characters of one string, in the pieces in which they came."""

    def __init__(self) -> None:
        self.length = 0
        self._pieces: list[bytes] = []

    def feed(self, data: memoryview) -> int:
        """More characters, up to a quotation mark; how many they are."""
        piece = bytes(data)
        end = piece.find(QUOTE)
        self._pieces.append(piece if end < 0 else piece[:end])
        self.length += len(self._pieces[-1])
        return len(self._pieces[-1])

    def end(self) -> None:
        """It has ended."""

    @property
    def decoded_length(self) -> int:
        """The bytes that base64 spells.

        Raises:
            UnreadableAnswer: it is none.
        """
        if self.length % CHARS:
            raise UnreadableAnswer("incomplete", "rows are no base64")
        last = b"".join(self.part(self.length - 2, self.length)) if self.length else b""
        return self.length // CHARS * QUANTUM - last.count(PAD)

    def part(self, start: int, stop: int) -> Iterator[bytes]:
        """Some of its characters, in pieces."""
        at = 0
        for piece in self._pieces:
            if at < stop and at + len(piece) > start:
                yield piece[max(0, start - at) : stop - at]
            at += len(piece)


class JoinedString(NamedTuple):
    """The decode half's rows, the first of which are the prefill half's; where the decode half has none, all are."""

    prompts: HeldString
    own: HeldString | None

    def pieces(self) -> Iterator[bytes]:
        """Its characters. Only what both have a part of is decoded.

        Raises:
            UnreadableAnswer: one of them is no base64.
        """
        prompts, own = self
        if own is None:
            yield from prompts.part(0, prompts.length)
            return
        whole, rest = divmod(min(prompts.decoded_length, own.decoded_length), QUANTUM)
        at = behind = whole * CHARS
        yield from prompts.part(0, at)
        if rest:
            behind += CHARS
            theirs, ours = (decode_rows(b"".join(each.part(at, behind)).decode("latin-1")) for each in (prompts, own))
            yield base64.b64encode(theirs[:rest] + ours[rest:])
        yield from own.part(behind, own.length)


class RowStrings:
    """The rows of some kinds, taken out of one half's answer, and joined ones put into the one answer."""

    def __init__(self, kinds: Sequence[RowFields]) -> None:
        self._extractors = {fields: Extractor(fields.rows, HeldString) for fields in kinds}
        self._joined: list[JoinedString] = []

    def feed(self, data: bytes) -> bytes:
        """Take bytes that came; gives what remains of them, as far as that is clear. Raises as `Extractor.feed`."""
        for extractor in self._extractors.values():
            data = extractor.feed(data)
        return data

    def end(self) -> bytes:
        """What is withheld, once nothing more comes."""
        rest = b""
        for extractor in self._extractors.values():
            rest = (extractor.feed(rest) if rest else b"") + extractor.end()
        return rest

    def of(self, fields: RowFields, meta: Mapping[str, Any]) -> HeldString | None:
        """What was taken out of an answer's `meta_info`."""
        return self._extractors[fields].consumer_of(fields.of(meta))

    def put(self, fields: RowFields, meta: dict[str, Any], joined: JoinedString) -> None:
        """Have rows in an answer's `meta_info`."""
        meta[fields.rows.name] = f"{JOINED}{len(self._joined)}"
        self._joined.append(joined)

    def whole(self, written: bytes) -> list[bytes]:
        """An answer with rows in place of their marks, in pieces.

        Raises:
            UnreadableAnswer: rows are no base64, or stood where no answer has any.
        """
        pieces = list(self._pieces(written, joined=True))
        self._joined = []
        return pieces

    def as_it_came(self, remains: bytes) -> list[bytes]:
        """An answer with its own rows, in pieces."""
        return list(self._pieces(remains, joined=False))

    def _pieces(self, written: bytes, *, joined: bool) -> Iterator[bytes]:
        at = 0
        places = ((place, each) for fields, each in self._extractors.items() for place in fields.rows.places(written))
        for place, extractor in sorted(places, key=lambda each: each[0]):
            mark = _MARK.match(written, place)
            if mark is None:
                continue
            if joined and mark[1] is None:
                raise UnreadableAnswer("incomplete", "rows that are no answer's")
            yield written[at : place + 1]
            if joined:
                yield from self._joined[int(mark[2])].pieces()
            else:
                own = extractor.consumers[int(mark[2])]
                yield from own.part(0, own.length)
            at = mark.end() - 1
        yield written[at:]

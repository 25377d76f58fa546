"""Rows kept as base64 apart from the JSON around them, since an answer may contain 60 MB of rows. Pure.

Rows are taken out of an answer while it arrives, and a short mark stays in their place. After the JSON was changed,
rows replace the marks; the first rows come from the prefill half.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from miles_router.engines.answers import UnreadableAnswer
from miles_router.engines.extraction import Extractor
from miles_router.engines.rows import RowFields, decode_rows

QUANTUM, CHARS = 3, 4  # base64 writes 3 bytes as 4 characters
QUOTE, PAD = b'"', b"="
#: The prefix of marks for joined rows. Marks for the rows of one half are plain numbers.
JOINED = "joined:"
_MARK = re.compile(rb'"(joined:)?(\d+)"')


class HeldString:
    """The characters of one JSON string, in the pieces in which they arrived."""

    def __init__(self) -> None:
        self.length = 0
        self._pieces: list[bytes] = []

    def feed(self, data: memoryview) -> int:
        """Append the characters up to the next quotation mark. Return their number."""
        piece = bytes(data)
        end = piece.find(QUOTE)
        self._pieces.append(piece if end < 0 else piece[:end])
        self.length += len(self._pieces[-1])
        return len(self._pieces[-1])

    def end(self) -> None:
        """Do nothing: only the `Taker` protocol needs this method."""

    @property
    def decoded_length(self) -> int:
        """The number of bytes that the base64 decodes to.

        Raises:
            UnreadableAnswer: no base64 text has this length.
        """
        if self.length % CHARS:
            raise UnreadableAnswer("incomplete", "the rows are not base64")
        last = b"".join(self.slice(self.length - 2, self.length)) if self.length else b""
        return self.length // CHARS * QUANTUM - last.count(PAD)

    def slice(self, start: int, stop: int) -> Iterator[bytes]:
        """Yield the characters from `start` to `stop`, in pieces."""
        at = 0
        for piece in self._pieces:
            if at < stop and at + len(piece) > start:
                yield piece[max(0, start - at) : stop - at]
            at += len(piece)


class JoinedString(NamedTuple):
    """The rows of both halves as one string: all of `prefill`, then the rest of `decode`, unless that is None."""

    prefill: HeldString
    decode: HeldString | None

    def pieces(self) -> Iterator[bytes]:
        """Yield the characters. Only the quantum of 3 bytes that contains the boundary is decoded.

        Raises:
            UnreadableAnswer: one of the strings is not base64.
        """
        prefill, decode = self
        if decode is None:
            yield from prefill.slice(0, prefill.length)
            return
        whole, rest = divmod(min(prefill.decoded_length, decode.decoded_length), QUANTUM)
        at = behind = whole * CHARS
        yield from prefill.slice(0, at)
        if rest:
            behind += CHARS
            theirs, ours = (
                decode_rows(b"".join(each.slice(at, behind)).decode("latin-1")) for each in (prefill, decode)
            )
            yield base64.b64encode(theirs[:rest] + ours[rest:])
        yield from decode.slice(behind, decode.length)


class RowStrings:
    """The rows of the given kinds that were taken out of one half's answer, and the joined rows of the final answer."""

    def __init__(self, kinds: Sequence[RowFields]) -> None:
        self._extractors = {fields: Extractor(fields.rows, HeldString) for fields in kinds}
        self._joined: list[JoinedString] = []

    def feed(self, data: bytes) -> bytes:
        """Return `data` without its rows; bytes that may begin a row field are returned later.

        Raises:
            UpstreamError: kilobytes of space follow a field's name.
        """
        for extractor in self._extractors.values():
            data = extractor.feed(data)
        return data

    def end(self) -> bytes:
        """Return the bytes that are still withheld, at the end of the answer."""
        rest = b""
        for extractor in self._extractors.values():
            rest = (extractor.feed(rest) if rest else b"") + extractor.end()
        return rest

    def held(self, fields: RowFields, meta: Mapping[str, Any]) -> HeldString | None:
        """Return the rows that were taken out of this `meta_info`; None if it had none."""
        return self._extractors[fields].consumer_of(fields.of(meta))

    def insert(self, fields: RowFields, meta: dict[str, Any], joined: JoinedString) -> None:
        """Write a mark for joined rows into `meta`."""
        meta[fields.rows.name] = f"{JOINED}{len(self._joined)}"
        self._joined.append(joined)

    def with_joined_rows(self, written: bytes) -> list[bytes]:
        """Return an answer with joined rows in place of their marks, in pieces.

        Raises:
            UnreadableAnswer: rows are not base64, or stood outside of every `meta_info`.
        """
        pieces = list(self._pieces(written, joined=True))
        self._joined = []
        return pieces

    def with_own_rows(self, remains: bytes) -> list[bytes]:
        """Return an answer with its own rows put back, in pieces."""
        return list(self._pieces(remains, joined=False))

    def _pieces(self, written: bytes, *, joined: bool) -> Iterator[bytes]:
        at = 0
        places = ((place, each) for fields, each in self._extractors.items() for place in fields.rows.places(written))
        for place, extractor in sorted(places, key=lambda each: each[0]):
            mark = _MARK.match(written, place)
            if mark is None:
                continue
            if joined and mark[1] is None:
                raise UnreadableAnswer("incomplete", "rows stand outside of every answer")
            yield written[at : place + 1]
            if joined:
                yield from self._joined[int(mark[2])].pieces()
            else:
                string = extractor.consumers[int(mark[2])]
                yield from string.slice(0, string.length)
            at = mark.end() - 1
        yield written[at:]

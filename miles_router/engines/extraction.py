"""Long strings taken out of JSON, or out of events of JSON, while its bytes go by. Pure.

`"routed_experts":"AAAA..."` becomes `"routed_experts":"0"`, the number of what was taken out: whoever parses the rest
knows where it belongs. Since every string in the field is taken out, one that remains is always such a mark.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from miles_router.engines.scan import Field
from miles_router.errors import UpstreamInvalidResponse

#: Bytes of a field's name and the space around its colon; they are looked at again with each piece that comes.
LONGEST = 4096
QUOTE, COMMA = b'"', b","
_MARK = re.compile(rb'"\d+"(\s*,?)')


class Taker(Protocol):
    """Takes the characters of one string."""

    def feed(self, data: memoryview) -> int:
        """More characters, up to a quotation mark; how many they are."""
        ...

    def end(self) -> None:
        """The string has ended."""
        ...


AnyTaker = TypeVar("AnyTaker", bound=Taker)


class Extractor(Generic[AnyTaker]):
    """Takes out every string in a field.

    Args:
        field: the one that has them.
        make: makes what takes one string.
    """

    def __init__(self, field: Field, make: Callable[[], AnyTaker]) -> None:
        #: What took each string, in the order in which they came.
        self.takers: list[AnyTaker] = []
        self._field = field
        self._make = make
        self._within = False  # a string of the field
        self._withheld = b""  # what may be the beginning of the field's name and value
        self._before = b""  # the byte before what comes next

    def feed(self, data: bytes) -> bytes:
        """Take bytes that came; gives what remains of them, as far as that is clear."""
        if self._withheld:
            data, self._withheld = self._withheld + data, b""
        if not self._within and self._field.quoted not in data:
            return self._without_a_beginning(data)
        remains: list[bytes] = []
        at = 0
        while at < len(data):
            at = self._through_a_string(data, at) if self._within else self._up_to_a_string(data, at, remains)
        return b"".join(remains)

    def _through_a_string(self, data: bytes, at: int) -> int:
        end = at + self.takers[-1].feed(memoryview(data)[at:])
        if end == len(data):
            return end
        self._within = False
        self._before = QUOTE
        self.takers[-1].end()
        return end + 1

    def _up_to_a_string(self, data: bytes, at: int, remains: list[bytes]) -> int:
        """Keep what stands before the next string in `remains`, its number behind it."""
        found = self._field.find(data, at, before=self._before)
        while found is not None:
            value = found[1]
            if data.startswith(QUOTE, value):
                remains += (data[at:value], b'"%d"' % len(self.takers))
                self.takers.append(self._make())
                self._within = True
                return value + 1
            found = self._field.find(data, value)
        remains.append(self._without_a_beginning(data[at:]))
        return len(data)

    def _without_a_beginning(self, data: bytes) -> bytes:
        """Withhold what may be the beginning of the field's name and value."""
        end = self._field.beginning(data)
        if end < len(data):
            data, self._withheld = data[:end], data[end:]
            if len(self._withheld) > LONGEST:
                raise UpstreamInvalidResponse("the worker's answer has kilobytes of space behind a field's name")
        self._before = data[-1:] or self._before
        return data

    @property
    def pending(self) -> int:
        """Bytes that are withheld."""
        return len(self._withheld)

    def marked(self, mark: Any) -> AnyTaker | None:
        """What took the string in whose place a mark stands; None for what is no mark."""
        known = isinstance(mark, str) and mark.isdecimal() and int(mark) < len(self.takers)
        return self.takers[int(mark)] if known else None

    def has_marks(self, remains: bytes) -> bool:
        """Whether strings were taken out here."""
        return self.without_marks(remains) is not remains

    def end(self) -> bytes:
        """What is withheld, once nothing more comes."""
        withheld, self._withheld = self._withheld, b""
        return withheld

    def without_marks(self, remains: bytes) -> bytes:
        """JSON without the fields whose strings were taken out."""
        if not self.takers:
            return remains
        kept: list[bytes] = []
        begin = 0
        found = self._field.find(remains)
        while found is not None:
            name, at = found
            mark = _MARK.match(remains, at)
            if mark is not None:
                before = remains[begin:name].rstrip()
                one_less = before.endswith(COMMA)  # one comma goes with the field
                kept.append(before[:-1] if one_less else remains[begin:name])
                begin = at = mark.start(1) if one_less else mark.end()
            found = self._field.find(remains, at)
        return b"".join((*kept, remains[begin:])) if kept else remains

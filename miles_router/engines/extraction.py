"""An extractor that takes long strings out of JSON, or events of JSON, while the bytes stream through. No I/O.

`"routed_experts":"AAAA..."` becomes `"routed_experts":"0"`, where 0 numbers the extracted string. Every string of the
field is extracted, so a string that remains in the field is always such a marker.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from miles_router.engines.json_bytes import Field
from miles_router.errors import UpstreamError

#: Maximum bytes of a field's name and the whitespace around its colon. They are scanned again with each piece.
LONGEST = 4096
QUOTE, COMMA = b'"', b","
_MARK = re.compile(rb'"\d+"(\s*,?)')


class StringConsumer(Protocol):
    """A consumer of the characters of one extracted string."""

    def feed(self, data: memoryview) -> int:
        """Consume characters up to a quotation mark, and return their number."""
        ...

    def end(self) -> None:
        """Note the end of the string."""
        ...


Consumer = TypeVar("Consumer", bound=StringConsumer)


class Extractor(Generic[Consumer]):
    """A filter that extracts every string of one field.

    Args:
        field: the field whose strings are extracted.
        make: creates the consumer of one string.
    """

    def __init__(self, field: Field, make: Callable[[], Consumer]) -> None:
        #: The consumer of each string, in the order of arrival.
        self.consumers: list[Consumer] = []
        self._field = field
        self._make = make
        self._within = False  # inside a string of the field
        self._withheld = b""  # possibly the beginning of the field's name and value
        self._before = b""  # the byte in front of the next piece

    def feed(self, data: bytes) -> bytes:
        """Process `data` and return the bytes that remain, as far as they are already certain."""
        if self._withheld:
            data, self._withheld = self._withheld + data, b""
        if not self._within and self._field.quoted not in data:
            return self._withhold_partial_field(data)
        remains: list[bytes] = []
        at = 0
        while at < len(data):
            at = self._consume_string(data, at) if self._within else self._copy_up_to_string(data, at, remains)
        return b"".join(remains)

    def _consume_string(self, data: bytes, at: int) -> int:
        end = at + self.consumers[-1].feed(memoryview(data)[at:])
        if end == len(data):
            return end
        self._within = False
        self._before = QUOTE
        self.consumers[-1].end()
        return end + 1

    def _copy_up_to_string(self, data: bytes, at: int, remains: list[bytes]) -> int:
        """Append the bytes in front of the next string, and the string's number, to `remains`; return the next
        position."""
        found = self._field.find(data, at, before=self._before)
        while found is not None:
            value = found[1]
            if data.startswith(QUOTE, value):
                remains += (data[at:value], b'"%d"' % len(self.consumers))
                self.consumers.append(self._make())
                self._within = True
                return value + 1
            found = self._field.find(data, value)
        remains.append(self._withhold_partial_field(data[at:]))
        return len(data)

    def _withhold_partial_field(self, data: bytes) -> bytes:
        """Withhold a possible beginning of the field's name and value; return the rest."""
        end = self._field.beginning(data)
        if end < len(data):
            data, self._withheld = data[:end], data[end:]
            if len(self._withheld) > LONGEST:
                raise UpstreamError("the worker's answer has kilobytes of whitespace behind a field name")
        self._before = data[-1:] or self._before
        return data

    @property
    def pending(self) -> int:
        """The number of withheld bytes."""
        return len(self._withheld)

    def consumer_of(self, mark: Any) -> Consumer | None:
        """Return the consumer of the string that a marker replaces; None if `mark` is not a marker."""
        known = isinstance(mark, str) and mark.isdecimal() and int(mark) < len(self.consumers)
        return self.consumers[int(mark)] if known else None

    def has_marks(self, remains: bytes) -> bool:
        return self.without_marks(remains) is not remains

    def end(self) -> bytes:
        """Return the withheld bytes at the end of the input."""
        withheld, self._withheld = self._withheld, b""
        return withheld

    def without_marks(self, remains: bytes) -> bytes:
        """Return the JSON without the fields whose strings were extracted."""
        if not self.consumers:
            return remains
        kept: list[bytes] = []
        begin = 0
        found = self._field.find(remains)
        while found is not None:
            name, at = found
            mark = _MARK.match(remains, at)
            if mark is not None:
                before = remains[begin:name].rstrip()
                one_less = before.endswith(COMMA)  # drop one comma with the field
                kept.append(before[:-1] if one_less else remains[begin:name])
                begin = at = mark.start(1) if one_less else mark.end()
            found = self._field.find(remains, at)
        return b"".join((*kept, remains[begin:])) if kept else remains

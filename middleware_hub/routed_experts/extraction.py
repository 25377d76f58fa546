"""Expert ids taken out of JSON, or out of events of JSON, while its bytes go by.

`"routed_experts":"AAAA..."` becomes `"routed_experts":0`, the number of what was taken out: whoever parses the rest
knows where it belongs. An unescaped `"routed_experts"` before a colon is always a field's name: within a string its
quotes would be escaped, and a string that ends before it would need a comma.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from middleware_hub.routed_experts.decoding import Decoder

NAME = b'"routed_experts"'
_VALUE = re.compile(rb'\s*:\s*"')
_BEFORE_A_VALUE = re.compile(rb"\s*(:\s*)?\Z")
_MARK = re.compile(rb":\d+(?=[\s,}])(\s*,?)")
QUOTE, ESCAPE, COMMA = b'"', b"\\", b","


class Extractor:
    """Takes out every value of the field. `found` has one decoder for each, `made` makes them."""

    def __init__(self, made: Callable[[], Decoder]) -> None:
        self.found: list[Decoder] = []
        self._made = made
        self._within = False  # a value
        self._held = b""  # what may be the beginning of the field's name or value
        self._last = b""  # the byte before what comes next

    def feed(self, data: bytes) -> bytes:
        """Bytes that came; what remains of them, as far as that is clear."""
        if self._held:
            data, self._held = self._held + data, b""
        if not self._within and NAME not in data:
            return self._without_the_beginning_of_a_name(data)
        remains: list[bytes] = []
        at = 0
        while at < len(data):
            at = self._through_a_value(data, at) if self._within else self._up_to_a_value(data, at, remains)
        return b"".join(remains)

    def _through_a_value(self, data: bytes, at: int) -> int:
        end = at + self.found[-1].feed(memoryview(data)[at:])
        if end == len(data):
            return end
        self._within = False
        self._last = QUOTE
        self.found[-1].end()
        return end + 1

    def _up_to_a_value(self, data: bytes, at: int, remains: list[bytes]) -> int:
        """Keep what stands before the next value in `remains`, its number behind it."""
        begin = at
        while (name := data.find(NAME, at)) >= 0:
            at = name + len(NAME)
            value = _VALUE.match(data, at)
            escaped = (data[name - 1 : name] if name else self._last) == ESCAPE
            if value is not None and not escaped:
                remains += (data[begin:name], NAME, b":%d" % len(self.found))
                self.found.append(self._made())
                self._within = True
                return value.end()
            if value is None and _BEFORE_A_VALUE.match(data, at):
                remains.append(data[begin:name])
                self._last = data[name - 1 : name] if name else self._last
                self._held = data[name:]
                return len(data)
        remains.append(self._without_the_beginning_of_a_name(data[begin:]))
        return len(data)

    def _without_the_beginning_of_a_name(self, data: bytes) -> bytes:
        quote = data.rfind(QUOTE, -len(NAME) + 1)
        if quote >= 0 and NAME.startswith(data[quote:]) and len(data) - quote < len(NAME):
            data, self._held = data[:quote], data[quote:]
        if data:
            self._last = data[-1:]
        return data

    @property
    def pending(self) -> int:
        """Bytes that are held back."""
        return len(self._held)

    def taken(self, mark: object) -> Decoder | None:
        """What the number in a value's place stands for; None for what is no such number."""
        return self.found[mark] if type(mark) is int and 0 <= mark < len(self.found) else None

    def end(self) -> bytes:
        """What was held back, once nothing more comes."""
        held, self._held = self._held, b""
        return held


def without_marks(remains: bytes) -> bytes:
    """JSON without the fields whose values were taken out."""
    kept: list[bytes] = []
    begin = at = 0
    while (name := remains.find(NAME, at)) >= 0:
        at = name + len(NAME)
        mark = _MARK.match(remains, at)
        if mark is None or remains[name - 1 : name] == ESCAPE:
            continue
        before = remains[begin:name].rstrip()
        if before.endswith(COMMA):  # one comma goes with the field
            kept.append(before[:-1])
            begin = at = mark.start(1)
        else:
            kept.append(remains[begin:name])
            begin = at = mark.end()
    return b"".join((*kept, remains[begin:]))

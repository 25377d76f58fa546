"""A check that a stream which passes unparsed contains the end of its answer. No I/O.

Clients accept a stream that closes normally as a complete answer, even if parts are missing. Text inside an answer
cannot scan like an end marker: its quotes are escaped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from miles_router.engines.paths import CHAT, COMPLETIONS, GENERATE, MESSAGES, RESPONSES

_FINISH = re.compile(rb'"finish_reason":\s*["{]|"error":\s*["{]')
#: The marker of a finish reason or an error, by path. `/generate` needs only `[DONE]`.
_MARKS: Mapping[str, re.Pattern[bytes]] = {
    CHAT: _FINISH,
    COMPLETIONS: _FINISH,
    MESSAGES: re.compile(rb'"type":\s*"(?:message_stop|error)"'),
    RESPONSES: re.compile(rb'"type":\s*"(?:response\.(?:completed|incomplete|failed|cancelled)|error)"'),
}
#: The paths whose streams end with the event `[DONE]`.
DONE_PATHS = frozenset({GENERATE, CHAT, COMPLETIONS})
PATHS = DONE_PATHS | _MARKS.keys()
#: The maximum length of a marker; so many bytes are kept to find one that spans two pieces.
_LONGEST = 64
_WHOLE = re.compile(rb"\n\r?\n\s*\Z")


class StreamEnd:
    """A scanner of the pieces of one stream.

    Attributes:
        has_end: whether an event has reported how the answer ends; True if the path needs no such event.
    """

    def __init__(self, path: str) -> None:
        self._mark = _MARKS.get(path)
        self.has_end = self._mark is None
        self._done = path in DONE_PATHS
        self._last = b""

    def scan(self, piece: bytes) -> bool:
        """Scan the next piece. Always return False: later pieces matter too."""
        seen = self._last + piece
        self.has_end = self.has_end or (self._mark is not None and self._mark.search(seen) is not None)
        self._last = seen[-_LONGEST:]
        return False

    def missing(self) -> str | None:
        """Return the missing part of a stream that has ended, for an error message; None if the stream is complete."""
        if self._done and not self._last.rstrip().endswith(b"data: [DONE]"):
            return "'data: [DONE]'"
        if not self.has_end:
            return "a finish reason"
        return None if self._done or _WHOLE.search(self._last) else "the end of its last event"

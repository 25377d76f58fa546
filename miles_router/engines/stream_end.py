"""Whether a stream that passes unread has told how its answer ends. Pure.

Clients take a stream that ends in order for a whole answer, whatever is missing in it. What stands within the text of
an answer is not mistaken for its end: there, quotes are escaped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from miles_router.engines.paths import CHAT, COMPLETIONS, GENERATE, MESSAGES, RESPONSES

_FINISH = re.compile(rb'"finish_reason":\s*["{]|"error":\s*["{]')
#: What says of an answer how it ended, or that there is none. For `/generate`, `[DONE]` is enough.
_MARKS: Mapping[str, re.Pattern[bytes]] = {
    CHAT: _FINISH,
    COMPLETIONS: _FINISH,
    MESSAGES: re.compile(rb'"type":\s*"(?:message_stop|error)"'),
    RESPONSES: re.compile(rb'"type":\s*"(?:response\.(?:completed|incomplete|failed|cancelled)|error)"'),
}
#: Whose streams have `[DONE]` as their last event.
DONE_PATHS = frozenset({GENERATE, CHAT, COMPLETIONS})
PATHS = DONE_PATHS | _MARKS.keys()
#: As long as a mark may be, so that one in two pieces is found.
_LONGEST = 64
_WHOLE = re.compile(rb"\n\r?\n\s*\Z")


class StreamEnd:
    """Looks at the pieces of one stream.

    Attributes:
        told: an event has said how the answer ends, where one must.
    """

    def __init__(self, path: str) -> None:
        self._mark = _MARKS.get(path)
        self.told = self._mark is None
        self._done = path in DONE_PATHS
        self._last = b""

    def look(self, piece: bytes) -> bool:
        """Look at the next piece; return whether enough was seen, which is never so: what comes last counts."""
        seen = self._last + piece
        self.told = self.told or (self._mark is not None and self._mark.search(seen) is not None)
        self._last = seen[-_LONGEST:]
        return False

    def missing(self) -> str | None:
        """Return what a stream lacks that has ended; None where it is whole."""
        if self._done and not self._last.rstrip().endswith(b"data: [DONE]"):
            return "'data: [DONE]'"
        if not self.told:
            return "a finish reason"
        return None if self._done or _WHOLE.search(self._last) else "the end of its last event"

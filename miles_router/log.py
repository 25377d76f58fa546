"""Log lines: an event name and fields, as text for people or JSON for machines. Prompts and keys never go in.

Nobody waits for a line to be written. It goes into a bounded queue, and a thread writes what is in it: where nobody
reads standard error, or its disk is full, lines are dropped and counted.
"""

from __future__ import annotations

import json
import logging
import os
import select
import sys
import threading
import time
from collections import deque
from typing import Literal, TextIO

import orjson

LogFormat = Literal["text", "json"]

#: Bytes of lines that wait to be written.
MAX_WAITING = 4 * 1024 * 1024
#: Bytes of one line; the rest is cut off.
MAX_LINE = 64 * 1024
#: Seconds that the end of the process waits for them.
LAST_WORDS = 2.0


class TextFormatter(logging.Formatter):
    """`2026-05-01 12:00:00.123 WARNING worker_quarantined worker=http://... reason="..."`."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        parts = [f"{moment}.{int(record.msecs):03d} {record.levelname:<7} {_escaped(record.getMessage())}"]
        parts += [f"{name}={_shown(value)}" for name, value in _fields(record).items()]
        if not record.exc_info:
            return " ".join(parts)
        # Indented: what an exception says is no line of ours.
        trace = [f"    {_escaped(line)}" for line in self.formatException(record.exc_info).split("\n")]
        return "\n".join([" ".join(parts), *trace])


class JsonFormatter(logging.Formatter):
    """One JSON object a line: `time` (Unix seconds), `level`, `event`, `logger`, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            "logger": record.name,
            **_fields(record),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        try:
            return orjson.dumps(entry, default=str).decode()
        except TypeError:  # a text with half of a surrogate pair, which this one can write
            return json.dumps(entry, default=str)


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields: dict[str, object] = getattr(record, "fields", {})
    return fields


def _shown(value: object) -> str:
    text = str(value)
    if text and all(c.isprintable() and c not in ' "=' for c in text):
        return text
    return f'"{_escaped(text, also=QUOTED)}"'


QUOTED = '"\\'


def _escaped(text: str, *, also: str = "") -> str:
    """Text that stays in its line and changes nothing around it: control characters, those of C1 and those that turn
    the direction of writing included, are written as JSON escapes them."""
    if text.isprintable() and not also:
        return text
    return "".join(c if c.isprintable() and c not in also else json.dumps(c)[1:-1] for c in text)


class LogWriter(logging.Handler):
    """Writes lines to a stream, in a thread of its own."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        #: Lines that nobody took, or that found no room.
        self.dropped = 0
        self._stream = stream
        self._descriptor = _descriptor(stream)
        self._lines: deque[str] = deque()
        self._size = 0  # of these, about
        self._untold = 0  # lines that were dropped since a line was written
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Put a record's line into the queue."""
        self.put(self.format(record))

    def put(self, line: str) -> None:
        """Have a line written; it is dropped where too many wait."""
        line = line[:MAX_LINE]
        with self._changed:
            if self._size + len(line) > MAX_WAITING:
                self._drop()
                return
            self._lines.append(line)
            self._size += len(line)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="log", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until all lines are written, but not for ever."""
        with self._changed:
            self._changed.wait_for(lambda: not self._size, LAST_WORDS)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._lines))
                line, untold = self._lines.popleft(), self._untold
            written = self._write(f"{self._of_dropped(untold)}{line}\n")
            with self._changed:
                if written:
                    self._untold -= untold
                else:
                    self._drop()
                self._size -= len(line)
                self._changed.notify_all()

    def _drop(self) -> None:
        self.dropped += 1
        self._untold += 1

    def _of_dropped(self, count: int) -> str:
        if not count:
            return ""
        record = logging.LogRecord(__name__, logging.WARNING, __file__, 0, "log_lines_dropped", (), None)
        record.fields = {"count": count}
        return f"{self.format(record)}\n"

    def _write(self, text: str) -> bool:
        """Write to the descriptor itself: what a stream has buffered when its disk is full would fail again at the end
        of the process."""
        data = text.encode("utf-8", "backslashreplace")
        try:
            if self._descriptor is None:
                self._stream.write(text)
                return True
            while data:
                try:
                    data = data[os.write(self._descriptor, data) :]
                except BlockingIOError:
                    select.select([], [self._descriptor], [])
        except (OSError, ValueError):  # nobody reads any more, the disk is full, or the stream is closed
            return False
        return True


def _descriptor(stream: TextIO) -> int | None:
    try:
        return stream.fileno()
    except (OSError, ValueError):  # a stream in memory
        return None


def configure(level: str, log_format: LogFormat) -> None:
    """Send all logs to standard error in one format."""
    handler = LogWriter(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("uvicorn.error").setLevel(max(logging.WARNING, logging.getLogger().level))


def writers() -> list[LogWriter]:
    """Those that logs go to; none before `configure`."""
    return [handler for handler in logging.getLogger().handlers if isinstance(handler, LogWriter)]


def show(text: str) -> None:
    """Show people a text as it is, where logs go."""
    for writer in writers():
        writer.put(text)


def flush() -> None:
    """Wait until all lines are written, but not for ever."""
    for writer in writers():
        writer.flush()


def dropped_lines() -> int:
    """Lines that were dropped."""
    return sum(writer.dropped for writer in writers())

"""Log lines: an event name and fields, as text or JSON. Prompts and keys are never logged.

Logging does not block: lines go into a bounded queue, and a thread writes them. If standard error is not read, or its
disk is full, lines are dropped and counted.
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

#: The most characters of lines that wait to be written.
MAX_WAITING = 4 * 1024 * 1024
#: The most characters of one line; the rest is cut off.
MAX_LINE = 64 * 1024
#: Seconds that `flush`, also at the end of the process, waits for the queue.
LAST_WORDS = 2.0


class TextFormatter(logging.Formatter):
    """A formatter for text: `2026-05-01 12:00:00.123 WARNING worker_quarantined worker=http://... reason="..."`."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        parts = [f"{moment}.{int(record.msecs):03d} {record.levelname:<7} {_escaped(record.getMessage())}"]
        parts += [f"{name}={_shown(value)}" for name, value in _fields(record).items()]
        if not record.exc_info:
            return " ".join(parts)
        # Indented, so that text of an exception cannot look like a log line.
        trace = [f"    {_escaped(line)}" for line in self.formatException(record.exc_info).split("\n")]
        return "\n".join([" ".join(parts), *trace])


class JsonFormatter(logging.Formatter):
    """A formatter for one JSON object a line: `time` (Unix seconds), `level`, `event`, `logger`, then the fields."""

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
        except TypeError:  # a lone surrogate, which orjson refuses and json writes
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
    """Escape unprintable characters as JSON does, so that a text cannot break its line or change how it is displayed.

    This includes C1 control characters and bidirectional overrides.
    """
    if text.isprintable() and not also:
        return text
    return "".join(c if c.isprintable() and c not in also else json.dumps(c)[1:-1] for c in text)


class LogWriter(logging.Handler):
    """A handler that writes lines to a stream in its own thread."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        #: Lines that could not be written or did not fit into the queue.
        self.dropped = 0
        self._stream = stream
        self._descriptor = _descriptor(stream)
        self._lines: deque[str] = deque()
        self._size = 0  # characters in the queue, including the line being written
        self._untold = 0  # dropped lines that `log_lines_dropped` has not reported yet
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record's line."""
        self.put(self.format(record))

    def put(self, line: str) -> None:
        """Queue a line, or drop it if the queue is full."""
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
        """Wait until all lines are written, at most `LAST_WORDS` seconds."""
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
        """Write to the descriptor itself, and return False on failure.

        A stream would keep its buffer when the disk is full, and fail again when it is flushed at exit.
        """
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
        except (OSError, ValueError):  # the pipe has no reader, the disk is full, or the stream is closed
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
    """Return the log writers; empty before `configure`."""
    return [handler for handler in logging.getLogger().handlers if isinstance(handler, LogWriter)]


def show(text: str) -> None:
    """Write a text unformatted to where logs go."""
    for writer in writers():
        writer.put(text)


def flush() -> None:
    """Wait until all lines are written, at most `LAST_WORDS` seconds."""
    for writer in writers():
        writer.flush()


def dropped_lines() -> int:
    """Return the number of dropped lines."""
    return sum(writer.dropped for writer in writers())

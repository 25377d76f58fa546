"""Log lines: an event name and fields, as text for people or JSON for machines. Prompts and keys never go in."""

from __future__ import annotations

import logging
import sys
import time
from typing import Literal

import orjson

LogFormat = Literal["text", "json"]


class TextFormatter(logging.Formatter):
    """`2026-05-01 12:00:00.123 WARNING worker_quarantined worker=http://... reason="..."`."""

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        parts = [f"{moment}.{int(record.msecs):03d} {record.levelname:<7} {record.getMessage()}"]
        parts += [f"{name}={_shown(value)}" for name, value in _fields(record).items()]
        line = " ".join(parts)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


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
        return orjson.dumps(entry, default=str).decode()


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields: dict[str, object] = getattr(record, "fields", {})
    return fields


def _shown(value: object) -> str:
    text = str(value)
    return text if text and all(c.isprintable() and c not in ' "=' for c in text) else orjson.dumps(text).decode()


def configure(level: str, log_format: LogFormat) -> None:
    """Send all logs to standard error in one format."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger("uvicorn.error").setLevel(max(logging.WARNING, logging.getLogger().level))

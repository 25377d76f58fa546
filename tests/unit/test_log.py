"""Log lines for people and for machines."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from miles_router import log


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """`configure` changes the root logger of this process."""
    root, uvicorn = logging.getLogger(), logging.getLogger("uvicorn.error")
    handlers, level, uvicorn_level = root.handlers[:], root.level, uvicorn.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    uvicorn.setLevel(uvicorn_level)


def written(capsys: pytest.CaptureFixture[str], log_format: log.LogFormat, **fields: object) -> str:
    log.configure("info", log_format)
    logging.getLogger("test.log").warning("something_happened", extra={"fields": fields})
    return shown(capsys)


def shown(capsys: pytest.CaptureFixture[str]) -> str:
    """What has been written, once it is."""
    (writer,) = log.writers()
    writer.flush()
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "char", ["\x00", "\x1b", "\x7f", "\x85", "\x9b", "\u200e", "\u2028", "\u202e", "\u2069", "\ud800"]
)
def test_what_could_change_the_lines_around_it_is_escaped(capsys: pytest.CaptureFixture[str], char: str) -> None:
    log.configure("info", "text")
    try:
        raise ValueError(f"in {char} an exception")
    except ValueError:
        logging.getLogger("test.log").exception(f"in {char} a message", extra={"fields": {"reason": f"in {char}"}})
    text = shown(capsys)
    assert char not in text
    assert text.count(f"\\u{ord(char):04x}") == 3
    entry = json.loads(written(capsys, "json", reason=f"in {char}"))
    assert entry["reason"] == f"in {char}"


class _Stream:
    """Both ends of a pipe: a log writer on one, and nobody on the other until somebody reads."""

    def __init__(self) -> None:
        reading, writing = os.pipe()
        self.reader, self.stream = os.fdopen(reading, "rb"), os.fdopen(writing, "w")
        self.writer = log.LogWriter(self.stream)
        self.writer.setFormatter(log.TextFormatter())


def test_lines_that_nobody_reads_are_dropped_and_counted_and_the_log_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "MAX_WAITING", 10_000)
    pipe = _Stream()
    for _ in range(2000):
        pipe.writer.put("x" * 100)
    assert pipe.writer.dropped > 0
    reading = ThreadPoolExecutor(1).submit(pipe.reader.read)
    pipe.writer.flush()
    pipe.writer.put("the last")
    pipe.writer.flush()
    pipe.stream.close()
    lines = reading.result().decode().splitlines()
    pipe.reader.close()
    told = [int(line.partition("log_lines_dropped count=")[2]) for line in lines if "log_lines_dropped" in line]
    assert sum(told) == pipe.writer.dropped
    assert (lines.count("x" * 100), lines[-1]) == (2000 - sum(told), "the last")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_traceback_is_shown_in_both_formats(capsys: pytest.CaptureFixture[str], log_format: log.LogFormat) -> None:
    log.configure("info", log_format)
    try:
        raise ZeroDivisionError("by nought")
    except ZeroDivisionError:
        logging.getLogger("test.log").exception("failed")
    line = shown(capsys)
    assert "ZeroDivisionError: by nought" in line
    if log_format == "json":
        assert "by nought" in json.loads(line)["traceback"]

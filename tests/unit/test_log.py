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


def test_text_is_time_level_event_and_fields(capsys: pytest.CaptureFixture[str]) -> None:
    line = written(capsys, "text", worker="http://a:1", count=3)
    date, time, level, rest = line.split(maxsplit=3)
    assert (len(date), len(time), level) == (10, 12, "WARNING")
    assert rest == "something_happened worker=http://a:1 count=3\n"


@pytest.mark.parametrize(
    ("value", "shown"),
    [("a b", '"a b"'), ("", '""'), ('say "x"', '"say \\"x\\""'), ("a=b", '"a=b"'), ("two\nlines", '"two\\nlines"')],
)
def test_a_field_cannot_break_out_of_its_place(capsys: pytest.CaptureFixture[str], value: str, shown: str) -> None:
    line = written(capsys, "text", reason=value)
    assert line.endswith(f"something_happened reason={shown}\n")
    assert line.count("\n") == 1


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


def test_an_exception_cannot_write_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("info", "text")
    try:
        raise ValueError("first\n2026-01-01 00:00:00.000 INFO    forged")
    except ValueError:
        logging.getLogger("test.log").exception("failed")
    assert all(line.startswith("    ") for line in shown(capsys).splitlines()[1:] if line)


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


def test_a_reader_that_is_gone_costs_lines_and_nothing_else() -> None:
    pipe = _Stream()
    pipe.reader.close()
    pipe.writer.put("unread")
    pipe.writer.flush()
    assert pipe.writer.dropped == 1
    pipe.stream.close()


def test_json_is_one_object_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    line = written(capsys, "json", reason='two\n"lines"', odd={1})
    assert line.count("\n") == 1
    entry = json.loads(line)
    assert entry.pop("time") > 1_700_000_000
    assert entry == {
        "level": "warning",
        "event": "something_happened",
        "logger": "test.log",
        "reason": 'two\n"lines"',
        "odd": "{1}",
    }


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


def test_a_line_without_fields_is_the_event_alone(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("info", "text")
    logging.getLogger("test.log").info("bare")
    assert shown(capsys).endswith("INFO    bare\n")


def test_what_is_below_the_level_is_not_written(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("error", "text")
    logging.getLogger("test.log").warning("unseen")
    assert shown(capsys) == ""


def test_the_server_is_silent_about_what_is_no_problem(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("debug", "text")
    server = logging.getLogger("uvicorn.error")
    server.info("Started server process")
    server.error("something else")
    assert shown(capsys).endswith("ERROR   something else\n")

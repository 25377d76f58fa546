"""Log lines for people and for machines."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

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
    line = capsys.readouterr().err
    assert "ZeroDivisionError: by nought" in line
    if log_format == "json":
        assert "by nought" in json.loads(line)["traceback"]


def test_a_line_without_fields_is_the_event_alone(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("info", "text")
    logging.getLogger("test.log").info("bare")
    assert capsys.readouterr().err.endswith("INFO    bare\n")


def test_what_is_below_the_level_is_not_written(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("error", "text")
    logging.getLogger("test.log").warning("unseen")
    assert capsys.readouterr().err == ""


def test_the_server_is_silent_about_what_is_no_problem(capsys: pytest.CaptureFixture[str]) -> None:
    log.configure("debug", "text")
    server = logging.getLogger("uvicorn.error")
    server.info("Started server process")
    server.error("something else")
    assert capsys.readouterr().err.endswith("ERROR   something else\n")

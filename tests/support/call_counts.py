"""Counts the router's own modules and functions that a request passes: how much one must hold in mind to follow it."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
from pathlib import Path
from types import CodeType, FrameType

import orjson

import middleware_hub
import miles_router

PACKAGES = tuple(str(Path(package.__path__[0])) for package in (miles_router, middleware_hub))
TESTING = str(Path(PACKAGES[0]) / "testing")
SUSPENDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


class CallCount:
    """Counts calls in this thread while it is entered, and what they parse and write as JSON. A coroutine that goes on
    after a wait is no new call."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.calls = self.parsed = self.written = 0

    def __enter__(self) -> CallCount:
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, called: object) -> None:
        code = frame.f_code
        if not _is_counted(code):
            return
        if event == "call" and frame.f_lasti <= _beginning(code):
            self.modules.add(code.co_filename)
            self.calls += 1
        elif event == "c_call":
            self.parsed += called is orjson.loads
            self.written += called is orjson.dumps


@functools.cache
def _is_counted(code: CodeType) -> bool:
    return code.co_filename.startswith(PACKAGES) and not code.co_filename.startswith(TESTING)


@functools.cache
def _beginning(code: CodeType) -> int:
    """Return the last place at which a function is called, and has not gone on."""
    if not code.co_flags & SUSPENDS:
        return len(code.co_code)
    made = (each.offset for each in dis.get_instructions(code) if each.opname == "RETURN_GENERATOR")
    return next(made, -1)  # before Python 3.11 a coroutine is made without a frame of its own

"""The type of auxiliary requests to an engine: tokenize, detokenize, render, parse. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class EngineQuestion(Generic[Answer]):
    """One auxiliary request.

    Attributes:
        path: the path to POST to.
        body: the JSON object to send.
        read: parses the JSON answer; returns None if a part is missing or has another type.
    """

    path: str
    body: Mapping[str, Any]
    read: Callable[[Mapping[str, Any]], Answer | None]

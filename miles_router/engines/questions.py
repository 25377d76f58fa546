"""Requests to an engine beside generations: tokenize, detokenize, render, parse. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class EngineQuestion(Generic[Answer]):
    """One such request.

    Attributes:
        path: where it is posted.
        body: the JSON object that is sent.
        read: parses the JSON of the answer; returns None if something is missing or of another type.
    """

    path: str
    body: Mapping[str, Any]
    read: Callable[[Mapping[str, Any]], Answer | None]

"""What an engine can be asked beside generations: tokens of texts, texts of tokens, what its parsers read. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class EngineQuestion(Generic[Answer]):
    """One request, and how its answer is read.

    Attributes:
        path: where it is posted.
        body: as JSON.
        read: returns what the answer says; None where it does not say what was asked.
    """

    path: str
    body: Mapping[str, Any]
    read: Callable[[Mapping[str, Any]], Answer | None]

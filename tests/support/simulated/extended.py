"""Requests of engines that read more of them than the shipped worker does."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

from miles_router.testing.worker.model.generation import GenerationRequest

Extended = TypeVar("Extended", bound=GenerationRequest)


def extended(sample: GenerationRequest, kind: type[Extended], **more: Any) -> Extended:
    """Return the sample as a `kind`, with more fields."""
    return kind(**{field.name: getattr(sample, field.name) for field in fields(sample)}, **more)

"""Errors: what goes to the client, and what the tree promises."""

from __future__ import annotations

import inspect
import pickle

import pytest

from miles_router import errors
from miles_router.errors import (
    RouterError,
)

CLASSES = [found for _, found in inspect.getmembers(errors, inspect.isclass) if issubclass(found, RouterError)]


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_has_an_answer_a_place_in_the_tree_and_a_docstring(cls: type[RouterError]) -> None:
    assert 400 <= cls.status <= 599
    assert cls.type.isidentifier() or cls is RouterError
    assert cls.__doc__
    assert cls.__name__ in (errors.__doc__ or "")


def test_only_errors_that_are_safe_to_repeat_have_retry_after() -> None:
    assert {cls.__name__ for cls in CLASSES if "Retry-After" in cls.headers} == {
        "FleetPaused",
        "NoWorkerAvailable",
        "StateHeld",
        "Unavailable",
    }


@pytest.mark.parametrize("cls", CLASSES)
def test_errors_survive_a_process_boundary(cls: type[RouterError]) -> None:
    copy = pickle.loads(pickle.dumps(cls("the message")))
    assert (type(copy), str(copy)) == (cls, "the message")

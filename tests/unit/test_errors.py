"""Errors: what goes to the client, and what the tree promises."""

from __future__ import annotations

import inspect
import pickle

import pytest

from miles_router import errors
from miles_router.errors import (
    ConfigError,
    NoWorkerAvailable,
    RouterError,
    UpstreamUnreachable,
)

CLASSES = [found for _, found in inspect.getmembers(errors, inspect.isclass) if issubclass(found, RouterError)]


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_has_an_answer_a_place_in_the_tree_and_a_docstring(cls: type[RouterError]) -> None:
    assert 400 <= cls.status <= 599
    assert cls.type.isidentifier() or cls is RouterError
    assert cls.__doc__
    assert cls.__name__ in (errors.__doc__ or "")


def test_the_body_is_type_message_and_request_id() -> None:
    assert NoWorkerAvailable("none is there").body("id-1") == {
        "error": {"type": "no_worker_available", "message": "none is there", "request_id": "id-1"}
    }


def test_only_errors_that_are_safe_to_repeat_have_retry_after() -> None:
    assert {cls.__name__ for cls in CLASSES if "Retry-After" in cls.headers} == {
        "FleetPaused",
        "NoWorkerAvailable",
        "StateHeld",
        "Unavailable",
    }


def test_a_configuration_error_is_a_value_error_too() -> None:
    assert issubclass(ConfigError, ValueError)


def test_a_refused_connection_is_told_from_a_lost_one() -> None:
    assert UpstreamUnreachable("gone", refused=True).refused
    assert not UpstreamUnreachable("gone").refused


@pytest.mark.parametrize("cls", CLASSES)
def test_errors_survive_a_process_boundary(cls: type[RouterError]) -> None:
    copy = pickle.loads(pickle.dumps(cls("the message")))
    assert (type(copy), str(copy)) == (cls, "the message")

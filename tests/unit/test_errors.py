"""Errors: what goes to the client, and what the tree promises."""

from __future__ import annotations

import inspect
import pickle

import pytest

from miles_router import errors
from miles_router.errors import (
    ConfigError,
    FleetPaused,
    NoWorkerAvailable,
    OwnerUnavailable,
    RouterError,
    TooManyConnections,
    UpstreamUnreachable,
)

CLASSES = [found for _, found in inspect.getmembers(errors, inspect.isclass) if issubclass(found, RouterError)]


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_has_an_answer_a_place_in_the_tree_and_a_docstring(cls: type[RouterError]) -> None:
    assert 400 <= cls.status <= 599
    assert cls.type.isidentifier()
    assert cls.__doc__
    assert cls.__name__ in (errors.__doc__ or "")


def test_no_two_errors_with_an_answer_share_a_type_but_for_load_errors() -> None:
    types = [cls.type for cls in CLASSES if cls is not errors.MiddlewareLoadError]
    assert len(types) == len({*types})


def test_the_body_is_type_message_and_request_id() -> None:
    assert NoWorkerAvailable("none is there").body("id-1") == {
        "error": {"type": "no_worker_available", "message": "none is there", "request_id": "id-1"}
    }


def test_only_errors_without_any_part_of_a_reply_may_be_tried_again() -> None:
    assert {cls.__name__ for cls in CLASSES if cls.retryable} == {
        "FleetFull",
        "FleetPaused",
        "NodeUnleased",
        "OwnerUnavailable",
        "TooManyConnections",
        "NoWorkerAvailable",
        "UpstreamUnreachable",
    }


@pytest.mark.parametrize("cls", [FleetPaused, NoWorkerAvailable, OwnerUnavailable, TooManyConnections])
def test_who_cannot_be_served_now_is_told_when_to_come_back(cls: type[RouterError]) -> None:
    assert int(cls.headers["Retry-After"]) >= 1


def test_a_configuration_error_is_a_value_error_too() -> None:
    assert issubclass(ConfigError, ValueError)


def test_a_refused_connection_is_told_from_a_lost_one() -> None:
    assert UpstreamUnreachable("gone", refused=True).refused
    assert not UpstreamUnreachable("gone").refused


@pytest.mark.parametrize("cls", CLASSES)
def test_errors_survive_a_process_boundary(cls: type[RouterError]) -> None:
    copy = pickle.loads(pickle.dumps(cls("the message")))
    assert (type(copy), str(copy)) == (cls, "the message")

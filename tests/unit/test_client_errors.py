"""The client's errors: read from every form of reply, retryable only where the router says so, fit for pickling."""

from __future__ import annotations

import inspect
import json
import pickle
from typing import Any

import pytest

from miles_router.client import errors
from miles_router.client.errors import (
    ErrorReply,
    FanOutFailed,
    InvalidReply,
    InvalidSample,
    NotFound,
    RouterClientError,
    convert_errors,
    read_error,
)
from miles_router.trajectory import InvalidTrajectory
from miles_router.trajectory.sample import read_json

CLASSES = [found for _, found in inspect.getmembers(errors, inspect.isclass) if issubclass(found, RouterClientError)]


def own(kind: str, message: str = "said so", **beside: Any) -> bytes:
    return json.dumps({"error": {"type": kind, "message": message, "request_id": "mr-1"}, **beside}).encode()


@pytest.mark.parametrize("cls", CLASSES)
def test_errors_survive_a_process_boundary_with_all_they_know(cls: type[RouterClientError]) -> None:
    error = cls("the message", status=503, type="t", request_id="r", retryable=True, retry_after=2.0, body={"a": 1})
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert (str(copy), vars(copy)) == (str(error), vars(error))


def test_the_routers_error_is_read_whole() -> None:
    error = read_error(503, {"Retry-After": "2"}, own("unavailable", "held too long"))
    assert type(error) is ErrorReply
    assert (error.status, error.type, error.message, error.request_id) == (503, "unavailable", "held too long", "mr-1")
    assert (error.retryable, error.retry_after) == (True, 2.0)
    assert str(error) == "held too long (503 unavailable, request mr-1)"


LATER = {"Retry-After": "1"}


@pytest.mark.parametrize(
    ("status", "headers", "kind", "expected", "retryable"),
    [
        (404, {}, "not_found", NotFound, False),
        (410, {}, "not_found", NotFound, False),
        (502, {}, "fan_out_failed", FanOutFailed, False),
        (422, {}, "invalid_sample", InvalidSample, False),
        (400, {}, "invalid_request", ErrorReply, False),
        (503, LATER, "no_worker_available", ErrorReply, True),
        (503, {}, "no_worker_available", ErrorReply, False),
        (502, {}, "upstream_unreachable", ErrorReply, True),
        (502, {}, "upstream_error", ErrorReply, False),
    ],
)
def test_an_errors_type_says_its_class_and_whether_it_may_be_asked_again(
    status: int, headers: dict[str, str], kind: str, expected: type[RouterClientError], retryable: bool
) -> None:
    error = read_error(status, headers, own(kind))
    assert (type(error), error.retryable) == (expected, retryable)


@pytest.mark.parametrize(
    ("raw", "message", "kind"),
    [
        (b'{"error": {"message": "too long", "type": "BadRequestError"}}', "too long", "BadRequestError"),
        (b'{"error": {"type": "not_found", "message": "no model"}}', "no model", "not_found"),
        (b'{"error": "Unauthorized"}', "Unauthorized", ""),
        (b'{"detail": "Not Found"}', "Not Found", ""),
        (b'{"success": false, "message": "no such file"}', "no such file", ""),
        (b"Flush cache failed.\n", "Flush cache failed.\n", ""),
        (b"\xff", "\N{REPLACEMENT CHARACTER}", ""),
        (b"", "status 503 without a message", ""),
        (b"{}", "status 503 without a message", ""),
    ],
)
def test_a_workers_error_is_shown_in_its_own_words_and_never_retried(raw: bytes, message: str, kind: str) -> None:
    error = read_error(503, {"Retry-After": "1", "X-Request-Id": "mr-2"}, raw)
    assert type(error) is ErrorReply
    assert (error.message, error.type, error.request_id) == (message, kind, "mr-2")
    assert not error.retryable


def test_a_reply_that_cannot_be_read_is_told_from_one_that_must_not_be_trained_on() -> None:
    with (
        pytest.raises(InvalidReply, match="the reply of /x has an unexpected form: no samples in JSON"),
        convert_errors("/x"),
    ):
        read_json(b"{}")
    with pytest.raises(InvalidSample) as caught, convert_errors("/x"):
        raise InvalidTrajectory("aligned", "3 tokens, 2 logprobs")
    assert (caught.value.invariant, caught.value.status) == ("aligned", 0)
    assert str(caught.value) == "aligned: 3 tokens, 2 logprobs"


@pytest.mark.parametrize("value", ["", "soon", "-1", "1.5", "Wed, 21 Oct 2026 07:28:00 GMT", "²"])
def test_a_time_that_is_no_number_of_seconds_is_none(value: str) -> None:
    assert read_error(503, {"Retry-After": value}, own("unavailable")).retry_after is None


def test_a_failed_fan_out_names_its_workers() -> None:
    workers = {"http://a": {"status": 0, "body": "no answer within 60 s"}}
    error = read_error(502, {}, own("fan_out_failed", workers=workers))
    assert isinstance(error, FanOutFailed)
    assert error.workers == workers
    assert FanOutFailed("without a body").workers == {}


def test_a_refused_sample_names_its_invariant() -> None:
    error = read_error(422, {}, own("invalid_sample", "versions_cover_the_loss: a position has none"))
    assert isinstance(error, InvalidSample)
    assert (error.invariant, error.status) == ("versions_cover_the_loss", 422)

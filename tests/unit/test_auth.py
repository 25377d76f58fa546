"""Keys: who may enter, and what goes on to the worker."""

from __future__ import annotations

from typing import Any

import pytest

from miles_router.asgi.keys import Key
from miles_router.errors import Unauthorized

Pairs = list[tuple[bytes, bytes]]


def scope(*headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return {"headers": [(b"accept", b"*/*"), *headers]}


def test_without_a_key_everybody_enters_with_all_they_carry() -> None:
    carried = scope((b"authorization", b"Bearer for the worker"))
    assert Key(None).check(carried) is carried
    assert carried["headers"] == scope((b"authorization", b"Bearer for the worker"))["headers"]


@pytest.mark.parametrize(
    "credential",
    [
        (b"authorization", b"Bearer secret"),
        (b"authorization", b"bearer secret"),
        (b"authorization", b"Bearer   secret "),
        (b"x-api-key", b"secret"),
    ],
)
def test_the_right_key_enters_and_is_left_at_the_door(credential: tuple[bytes, bytes]) -> None:
    assert Key("secret").check(scope(credential))["headers"] == scope()["headers"]


def test_only_the_credential_that_opened_is_taken_away() -> None:
    other = (b"authorization", b"Bearer for the worker")
    assert Key("secret").check(scope(other, (b"x-api-key", b"secret")))["headers"] == scope(other)["headers"]


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"")],
        [(b"authorization", b"Bearer")],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"secret")],
        [(b"authorization", b"Basic secret")],
        [(b"authorization", b"Bearer secret2")],
        [(b"authorization", b"Bearer secre")],
        [(b"authorization", b"Bearer SECRET")],
        [(b"authorization", b"Bearer caf\xc3\xa9")],
        [(b"x-api-key", b"")],
        [(b"x-api-key", b"Bearer secret")],
        [(b"x-other", b"secret")],
    ],
)
def test_anything_else_is_turned_away(headers: Pairs) -> None:
    carried = scope(*headers)
    with pytest.raises(Unauthorized, match="api key"):
        Key("secret").check(carried)
    assert carried == scope(*headers)

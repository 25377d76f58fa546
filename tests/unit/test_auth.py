"""Keys: who may enter, and what goes on to the worker."""

from __future__ import annotations

import pytest

from miles_router.asgi.keys import Keys
from miles_router.errors import Unauthorized

Pairs = list[tuple[bytes, bytes]]
ACCEPT = (b"accept", b"*/*")
OVERRIDE = (b"x-override-rid", b"of somebody else")


def bearer(key: str) -> tuple[bytes, bytes]:
    return b"authorization", f"Bearer {key}".encode()


def test_without_a_key_everybody_enters_with_all_they_carry() -> None:
    carried = [ACCEPT, bearer("for-the-worker")]
    keys = Keys()
    for key in (keys.data, keys.admin, keys.no_key):
        assert keys.authorize(key, carried) == [ACCEPT, bearer("for-the-worker")]


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
    keys = Keys(["secret"])
    assert keys.authorize(keys.data, [ACCEPT, credential]) == [ACCEPT]


def test_only_the_routers_own_keys_are_taken_away_whichever_door_they_open() -> None:
    keys = Keys(["data", "data-of-before"], ["admin"])
    carried = [bearer("for-the-worker"), (b"x-api-key", b"data-of-before"), ACCEPT, bearer("admin"), bearer("data")]
    for key in (keys.data, keys.admin, keys.no_key):
        assert keys.authorize(key, carried) == [bearer("for-the-worker"), ACCEPT]


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
        [(b"authorization", b"Bearer secret,other")],
        [(b"x-api-key", b"")],
        [(b"x-api-key", b"Bearer secret")],
        [(b"x-other", b"secret")],
    ],
)
def test_anything_else_is_turned_away(headers: Pairs) -> None:
    keys = Keys(["secret", "other"])
    with pytest.raises(Unauthorized, match="api key"):
        keys.authorize(keys.data, [ACCEPT, *headers])
    assert keys.authorize(keys.no_key, [ACCEPT, *headers]) == [ACCEPT, *headers]


def test_every_one_of_several_keys_opens() -> None:
    keys = Keys(["old", "new"])
    for key in ("old", "new"):
        assert keys.authorize(keys.data, [bearer(key)]) == []


def test_administration_is_never_more_open_than_the_data_plane() -> None:
    assert not Keys().admin.required
    one, both, admin_alone = Keys(["data"]), Keys(["data"], ["admin"]), Keys([], ["admin"])
    assert one.authorize(one.admin, [bearer("data")]) == []
    for keys in (both, admin_alone):
        assert keys.authorize(keys.admin, [bearer("admin")]) == []
        with pytest.raises(Unauthorized, match="admin key"):
            keys.authorize(keys.admin, [bearer("data")])
    with pytest.raises(Unauthorized, match="api key"):
        both.authorize(both.data, [bearer("admin")])


@pytest.mark.parametrize(
    ("keys", "credentials", "kept"),
    [
        (Keys(), [], False),
        (Keys(["data"], ["admin"]), [bearer("data")], False),
        (Keys(["data"], ["admin"]), [bearer("data"), (b"x-api-key", b"admin")], True),
        (Keys([], ["admin"]), [], False),
        (Keys([], ["admin"]), [bearer("admin")], True),
        (Keys(["data"]), [bearer("data")], True),
    ],
    ids=["no keys", "data", "both", "no data key", "admin", "one key for all"],
)
def test_what_overrides_an_engines_choices_takes_the_key_of_administration(
    keys: Keys, credentials: Pairs, kept: bool
) -> None:
    passed = keys.authorize(keys.data, [OVERRIDE, ACCEPT, *credentials])
    assert passed == ([OVERRIDE, ACCEPT] if kept else [ACCEPT])

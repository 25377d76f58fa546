"""Prefix caches: which generations may share one, whose weights may have filled it, and how a request names it."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from miles_router.engines import paths
from miles_router.engines.facts import Facts
from miles_router.engines.known import GENERATION
from miles_router.engines.sglang.caches import takes_cache_key, with_cache_key
from miles_router.engines.sglang.facts import sampling_version
from miles_router.fleet.caches import MAX_VERSIONS, PrefixCaches, new_number


def test_while_no_weights_have_changed_there_is_one_cache() -> None:
    caches = PrefixCaches()
    assert (caches.number, caches.choose(None), caches.choose(0)) == (0, 0, 0)
    assert caches.versions(0, "1") == ["1"]
    assert caches.versions(0, None) == [None], "nobody has named them"


def test_a_new_generation_has_a_cache_of_the_new_weights_alone() -> None:
    caches = PrefixCaches()
    caches.change("1", new_number())
    first = caches.choose(None)
    assert first == caches.choose(None) == caches.number != 0
    caches.change("2", new_number())
    second = caches.choose(None)
    assert second not in (0, first)
    assert [caches.versions(cache, "3") for cache in (0, first, second)] == [["1", "2", "3"], ["2", "3"], ["3"]]


def test_what_goes_on_keeps_its_cache() -> None:
    caches = PrefixCaches()
    caches.change("1", new_number())
    cache = caches.choose(None)
    caches.change("2", new_number())
    assert (caches.choose(cache), caches.choose(0)) == (cache, 0)


def test_a_flush_leaves_nothing_to_keep_apart() -> None:
    caches = PrefixCaches()
    caches.change("1", new_number())
    older = caches.choose(None)
    caches.flushed()
    assert (caches.choose(None), caches.choose(older)) == (0, 0)
    assert caches.versions(0, "2") == ["2"]
    caches.change("2", new_number())
    assert caches.choose(None) > older


def test_while_weights_change_no_two_generations_share_a_cache() -> None:
    caches = PrefixCaches()
    caches.change("1", new_number(), under_way=True)
    begun = [caches.choose(None), caches.choose(None)]
    caches.change("1", new_number())
    assert len({*begun, caches.choose(None)}) == 3
    assert caches.choose(None) == caches.choose(None)
    assert caches.versions(begun[0], "2") == ["1", "2"], "it may have run before or behind the change"


def test_of_a_worker_that_was_used_before_no_older_cache_is_kept() -> None:
    caches = PrefixCaches(new_number())
    assert caches.number != 0
    assert caches.choose(0) == caches.choose(caches.number - 1) == caches.choose(None) == caches.number


def test_so_many_versions_are_known_and_no_more() -> None:
    caches = PrefixCaches()
    for version in range(MAX_VERSIONS + 1):
        caches.change(str(version), new_number(), under_way=True)
        caches.change(str(version), new_number())
    assert caches.choose(0) == caches.number, "whose weights filled that one is forgotten"
    assert caches.versions(0, "now") == [*map(str, range(1, MAX_VERSIONS + 1)), "now"]


KEY = b"weights-12345678-7"


def test_keys_of_two_numbers_differ_and_need_no_escape() -> None:
    assert PrefixCaches().key(7) != PrefixCaches().key(8)
    assert orjson.dumps(PrefixCaches().key(7)) == b'"%b"' % PrefixCaches().key(7).encode()


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"text": "a"}', b'{"text": "a","extra_key":"%b"}' % KEY),
        (b" {} \n", b' {"extra_key":"%b"}' % KEY),
        (b'{"text":"say \\"extra_key\\""}', b'{"text":"say \\"extra_key\\"","extra_key":"%b"}' % KEY),
        (b'{"a":{"extra_key":"b"}}', b'{"a":{"extra_key":"b"},"extra_key":"%b"}' % KEY),
        (b'{"extra_key":null}', b'{"extra_key":"%b"}' % KEY),
        (b'{"extra_key":""}', b'{"extra_key":"%b"}' % KEY),
        (b'{"extra_key":"mine","n":1}', b'{"extra_key":"%b/mine","n":1}' % KEY),
        (b'{"extra_key":["a",""]}', b'{"extra_key":["%b/a","%b"]}' % (KEY, KEY)),
    ],
)
def test_a_request_gets_the_key_in_front_of_its_own(body: bytes, expected: bytes) -> None:
    assert with_cache_key(body, KEY.decode()) == expected


@pytest.mark.parametrize("body", [b"", b"[1]", b'{"extra_key":7}', b'{"extra_key":[7]}', b'{"extra_key"', b"nonsense"])
def test_a_request_that_no_engine_takes_stays_as_it_is(body: bytes) -> None:
    assert with_cache_key(body, "k") == body


def test_an_engine_says_which_of_its_requests_take_a_key() -> None:
    facts = Facts(schemas={"GenerateReqInput": frozenset({"extra_key"}), "ChatCompletionRequest": frozenset({"n"})})
    taking = {path for path in GENERATION if takes_cache_key(facts, path)}
    assert taking == {paths.GENERATE}
    assert not any(takes_cache_key(Facts(), path) for path in GENERATION)


@pytest.mark.parametrize(
    ("info", "version"),
    [
        ({"weight_version": "old", "internal_states": [{"weight_version": 2}, {"weight_version": "2"}]}, "2"),
        ({"internal_states": [{"weight_version": "1"}, {"weight_version": "2"}]}, None),
        ({"internal_states": [{}, 7]}, None),
        ({"internal_states": []}, None),
        ({"internal_states": 7}, None),
        ([], None),
    ],
)
def test_the_version_that_samples_is_the_schedulers(info: Any, version: str | None) -> None:
    assert sampling_version(orjson.dumps(info)) == version

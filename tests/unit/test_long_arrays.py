"""Long arrays are taken out of JSON in pieces."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from miles_router.engines.long_arrays import PIECE, take_array

TOP = [[-0.5, 7, 'a "[]{}\\', None], [None, 8, "ü"]]
PLACES = {"7": {"logprob": -0.5, "rank": 1, "decoded_token": '}]"'}, "8": {"logprob": None}}


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("array", [[], [None], [None, TOP, [], TOP], [[None, 7, None], [-0.5, 8, "]"]], [None, PLACES]])
def test_an_array_is_taken_out_of_its_document(array: list[Any], indent: int | None) -> None:
    document = {"text": '"rows": [1]', "meta": {"rows": array, "other": [1, {"rows": 2}]}}
    for repeated in (1, 1 + PIECE // 40):
        document["meta"] = {"rows": array * repeated, "other": [1]}
        rest, pieces = take_array(json.dumps(document, indent=indent).encode(), "rows")
        assert pieces is not None
        assert [element for piece in pieces for element in orjson.loads(piece)] == array * repeated
        assert orjson.loads(rest) == {**document, "meta": {"rows": None, "other": [1]}}
        assert max(map(len, pieces), default=0) < PIECE + 1000


@pytest.mark.parametrize("value", [None, 7, {"a": [1]}, [1, 2], ["a"], [[[[1]]]], [TOP, 7]])
def test_what_is_not_such_an_array_stays_where_it_is(value: Any) -> None:
    document = json.dumps({"rows": value, "rows_too": [[1]]}).encode()
    assert take_array(document, "rows") == (document, None)
    assert take_array(document[:-4], "rows") == (document[:-4], None)
    assert take_array(document, "others") == (document, None)

"""Expert ids are taken out of whatever JSON they are in, wherever it is cut, and nothing else of it changes."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from middleware_hub.routed_experts.decoding import Decoder
from miles_router.engines.events import EventReader
from miles_router.engines.extraction import Extractor
from miles_router.engines.rows import EXPERT_FIELDS
from miles_router.errors import UpstreamError
from miles_router.trajectory.rows import ROUTED_EXPERTS
from tests.support.tiers import examples

FIELD = "routed_experts"
IDS = [1, 2, 3, 255, 0]
OTHERS = [300, 7]


def sent(ids: Sequence[int]) -> str:
    return base64.b64encode(np.asarray(ids, dtype="<i4").tobytes()).decode()


A, B = sent(IDS).encode(), sent(OTHERS).encode()


def extractor_of_experts() -> Extractor[Decoder]:
    return Extractor(EXPERT_FIELDS.rows, lambda: Decoder(ROUTED_EXPERTS, 1 << 20))


def feed(extractor: Extractor[Decoder], pieces: Iterable[bytes]) -> tuple[bytes, list[list[int]]]:
    """What remains, marks and all, and the ids of each string."""
    remains = b"".join([*(extractor.feed(piece) for piece in pieces), extractor.end()])
    return remains, [decoder.finish().flat.tolist() for decoder in extractor.consumers]


def through(pieces: Iterable[bytes]) -> tuple[bytes, list[list[int]]]:
    """What the client gets, and the ids."""
    extractor = extractor_of_experts()
    remains, found = feed(extractor, pieces)
    return extractor.without_marks(remains), found


def halves(data: bytes) -> list[list[bytes]]:
    return [[data[:place], data[place:]] for place in range(len(data) + 1)]


def singly(data: bytes) -> list[bytes]:
    return [data[place : place + 1] for place in range(len(data))]


def cut(data: bytes, places: Iterable[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[begin:end] for begin, end in pairwise(edges)]


#: A document, what remains of it, and the values that were taken out.
CASES: dict[str, tuple[bytes, bytes, list[list[int]]]] = {
    "alone": (b'{"routed_experts":"%b"}' % A, b"{}", [IDS]),
    "first": (b'{"routed_experts":"%b","a":1}' % A, b'{"a":1}', [IDS]),
    "last": (b'{"a":1,"routed_experts":"%b"}' % A, b'{"a":1}', [IDS]),
    "between": (b'{"a":1,"routed_experts":"%b","b":2}' % A, b'{"a":1,"b":2}', [IDS]),
    "empty": (b'{"a":1,"routed_experts":"","b":2}', b'{"a":1,"b":2}', [[]]),
    "deep": (b'{"a":[{"b":{"routed_experts":"%b","c":[]}}]}' % A, b'{"a":[{"b":{"c":[]}}]}', [IDS]),
    "in a list": (b'[{"routed_experts":"%b"},{"routed_experts":"%b"}]' % (A, B), b"[{},{}]", [IDS, OTHERS]),
    "in two parts": (
        b'{"m":{"x":1,"routed_experts":"%b"},"n":{"routed_experts":"%b","y":2}}' % (A, B),
        b'{"m":{"x":1},"n":{"y":2}}',
        [IDS, OTHERS],
    ),
    "null": (b'{"a":1,"routed_experts":null,"b":2}', b'{"a":1,"routed_experts":null,"b":2}', []),
    "null beside others": (
        b'[{"routed_experts":null},{"a":1,"routed_experts":"%b"}]' % A,
        b'[{"routed_experts":null},{"a":1}]',
        [IDS],
    ),
    "an object": (b'{"routed_experts":{"routed_experts":"%b"}}' % A, b'{"routed_experts":{}}', [IDS]),
    "a list": (b'{"routed_experts":["AAAA"]}', b'{"routed_experts":["AAAA"]}', []),
    "a value of that name": (b'{"a":"routed_experts","b":"x"}', b'{"a":"routed_experts","b":"x"}', []),
    "a list of names": (b'["routed_experts","routed_experts"]', b'["routed_experts","routed_experts"]', []),
    "longer names": (
        b'{"routed_experts_start_len":"x","my_routed_experts":"y","routed_expert":"z"}',
        b'{"routed_experts_start_len":"x","my_routed_experts":"y","routed_expert":"z"}',
        [],
    ),
    "quoted in a text": (
        rb'{"text":"say \"routed_experts\":\"AAAA\" now","a":1}',
        rb'{"text":"say \"routed_experts\":\"AAAA\" now","a":1}',
        [],
    ),
    "quoted in a text beside the field": (
        rb'{"text":"\"routed_experts\":\"AAAA\"","routed_experts":"%b","more":",\"routed_experts\":0,"}' % A,
        rb'{"text":"\"routed_experts\":\"AAAA\"","more":",\"routed_experts\":0,"}',
        [IDS],
    ),
    "a name that begins with a quote": (
        rb'{"\"routed_experts":"AAAA","a":{"\"routed_experts":0,"b":1},"routed_experts":"%b"}' % A,
        rb'{"\"routed_experts":"AAAA","a":{"\"routed_experts":0,"b":1}}',
        [IDS],
    ),
    "a text that is a quote and the name": (
        rb'{"a":"\"routed_experts","b":["\"routed_experts"],"routed_experts":"%b"}' % A,
        rb'{"a":"\"routed_experts","b":["\"routed_experts"]}',
        [IDS],
    ),
    "a text that ends in backslashes": (
        rb'{"text":"\\","routed_experts":"%b","b":"\\\\\\"}' % A,
        rb'{"text":"\\","b":"\\\\\\"}',
        [IDS],
    ),
    "a text that ends in an escaped quote": (
        rb'{"text":"\\\"","routed_experts":"%b"}' % A,
        rb'{"text":"\\\""}',
        [IDS],
    ),
    "a text that ends like the name begins": (
        rb'{"text":"\"routed_exp","routed_experts":"%b","b":"\""}' % A,
        rb'{"text":"\"routed_exp","b":"\""}',
        [IDS],
    ),
    "spaced": (b'{"a": 1, "routed_experts": "%b", "b": 2}' % A, b'{"a": 1, "b": 2}', [IDS]),
    "not JSON at all": (b'"routed_ex', b'"routed_ex', []),
    "no more than the name": (b'"routed_experts"', b'"routed_experts"', []),
    "no more than the name and a colon": (b'{"routed_experts" :\n', b'{"routed_experts" :\n', []),
    "nothing": (b"", b"", []),
}
each_case = pytest.mark.parametrize("case", CASES)


@each_case
def test_the_field_goes_and_the_rest_stays(case: str) -> None:
    document, remains, found = CASES[case]
    assert through([document]) == (remains, found)


@each_case
def test_it_does_not_matter_where_the_document_is_cut(case: str) -> None:
    document, remains, found = CASES[case]
    for pieces in halves(document):
        assert through(pieces) == (remains, found), pieces
    assert through(singly(document)) == (remains, found)


@pytest.mark.parametrize("case", ["between", "in two parts", "quoted in a text beside the field"])
def test_it_does_not_matter_where_the_document_is_cut_twice(case: str) -> None:
    document, remains, found = CASES[case]
    for first in range(0, len(document), 3):
        for second in range(first, len(document), 2):
            pieces = [document[:first], document[first:second], document[second:]]
            assert through(pieces) == (remains, found), pieces


def test_a_mark_tells_whoever_parses_the_rest_which_value_was_there() -> None:
    document = b'[{"x":{"routed_experts" : "%b"}},{"routed_experts":null},{"routed_experts":"%b","y":1}]' % (A, B)
    for pieces in ([document], singly(document)):
        remains, found = feed(extractor_of_experts(), pieces)
        assert json.loads(remains) == [{"x": {FIELD: "0"}}, {FIELD: None}, {FIELD: "1", "y": 1}]
        assert found == [IDS, OTHERS]


def test_nothing_of_a_value_remains() -> None:
    extractor = extractor_of_experts()
    document = b'{"a":1,"routed_experts":"%b","b":2}' % sent(range(200)).encode()
    passed = [extractor.feed(piece) for piece in singly(document)]
    assert b"".join(passed) == b'{"a":1,"routed_experts":"0","b":2}'
    assert extractor.end() == b""


def test_what_cannot_be_the_field_is_not_held_back() -> None:
    extractor = extractor_of_experts()
    for piece in (b'data: {"text":"a', b"bc", b'"routed" ', b'", "x', b' {"x":1', b"\\", b'{"routed_experts":null'):
        assert extractor.feed(piece) == piece
    assert extractor.end() == b""


@pytest.mark.parametrize("before", ["", " ", "\n\t ", "  "])
@pytest.mark.parametrize("behind", ["", " ", "\r\n  "])
@pytest.mark.parametrize("comma", ["", " ", "\n"])
def test_whitespace_around_colons_and_commas_is_no_matter(before: str, behind: str, comma: str) -> None:
    def document(*fields: str) -> bytes:
        return ("{" + f"{comma},{behind}".join(fields) + comma + "}").encode()

    field = f'"{FIELD}"{before}:{behind}"{sent(IDS)}"'
    others = ['"a":1', '"b":[2]']
    for place in range(3):
        fields = [*others[:place], field, *others[place:]]
        expected = {"a": 1, "b": [2]}
        for pieces in ([document(*fields)], singly(document(*fields))):
            remains, found = through(pieces)
            assert (json.loads(remains), found) == (expected, [IDS]), remains
    assert json.loads(through([document(field)])[0]) == {}


@pytest.mark.parametrize("text", ["\\" * count + '"' * quotes for count in range(5) for quotes in range(3)])
@pytest.mark.parametrize("name", [FIELD, f'"{FIELD}', f'\\"{FIELD}', f'{FIELD}"', f'"{FIELD}"'])
def test_backslashes_and_quotes_before_a_name_are_no_matter(text: str, name: str) -> None:
    """The last character of a text is not mistaken for an escape of the quote behind it."""
    tree: dict[str, Any] = {
        text + "a": text,
        name: sent(IDS),
        "b": {name: sent(OTHERS)},
        "c": [text, name, text + name],
    }
    expected = {key: value for key, value in tree.items() if key != FIELD}
    expected["b"] = {} if name == FIELD else expected["b"]
    for document in (orjson.dumps(tree), json.dumps(tree, separators=(",", ":")).encode()):
        for pieces in ([document], singly(document)):
            remains, found = through(pieces)
            assert orjson.loads(remains) == expected
            assert found == ([IDS, OTHERS] if name == FIELD else [])


# Any document


class Ids(list[int]):
    """A value of the field."""


names = st.sampled_from(
    [
        *("a", "", "b", "routed_expert", "routed_experts_", "meta_info", '"', "\\", f'"{FIELD}', f'{FIELD}"'),
        *(f'"{FIELD}"', f"{FIELD}\\", f'\\"{FIELD}', f"x{FIELD}"),
    ]
)
texts = (
    st.text(alphabet='",:\\{}[] routed_experts\n0Aé世🚀', max_size=12)
    | names
    | st.sampled_from([f'"{FIELD}":"AAAA"', f',"{FIELD}":0,', f'say "{FIELD}" : "AAAA" now', f'"{FIELD}":0'])
)
leaves = (
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | texts
)
ids = st.lists(st.integers(0, 65535), max_size=6).map(Ids)


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with the field at any place: with ids, with null, or without."""
    pairs = st.lists(st.tuples(names | texts.filter(lambda name: name != FIELD), inner), max_size=4)
    field = st.none() | st.tuples(st.just(FIELD), st.none() | ids)
    return st.builds(
        lambda pairs, field, place: dict([*pairs[:place], *([field] if field else []), *pairs[place:]]),
        pairs,
        field,
        st.integers(0, 4),
    )


documents = objects(st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | objects(inner), max_leaves=12))


def plain(tree: Any) -> Any:
    """As the engine sends it."""
    if isinstance(tree, Ids):
        return sent(tree)
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items()}
    return [plain(each) for each in tree] if isinstance(tree, list) else tree


def bare(tree: Any) -> Any:
    """Without the field."""
    if isinstance(tree, dict):
        return {key: bare(value) for key, value in tree.items() if not isinstance(value, Ids)}
    return [bare(each) for each in tree] if isinstance(tree, list) else tree


def put_in(tree: Any) -> list[list[int]]:
    """All ids, in the order of the document."""
    if isinstance(tree, Ids):
        return [list(tree)]
    inner = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return [found for each in inner for found in put_in(each)]


def compact(tree: Any) -> bytes:
    return json.dumps(tree, separators=(",", ":"), ensure_ascii=False).encode()


WRITERS: dict[str, Callable[[Any], bytes]] = {
    "compact": compact,
    "ascii": lambda tree: json.dumps(tree, separators=(",", ":")).encode(),
    "orjson": orjson.dumps,
    "spaced": lambda tree: json.dumps(tree).encode(),
    "indented": lambda tree: json.dumps(tree, indent=2).encode(),
    "odd": lambda tree: json.dumps(tree, separators=(" ,\n", "\t: ")).encode(),
}
#: Those that leave no whitespace beside a comma: what remains is what they would have written without the field.
EXACT = ("compact", "ascii", "orjson")
places = st.lists(st.integers(0, 2000), max_size=10)


@settings(max_examples=examples(300))
@given(documents, st.sampled_from(sorted(WRITERS)), places)
@example({"a": "\\", FIELD: Ids(IDS)}, "compact", [5, 6])
@example({f'"{FIELD}': sent(IDS), "a": f'"{FIELD}":0'}, "odd", [3])
def test_any_document_loses_the_field_and_nothing_else(tree: Any, writer: str, places: list[int]) -> None:
    write = WRITERS[writer]
    document = write(plain(tree))
    remains, found = through(cut(document, places))
    assert found == put_in(tree)
    assert json.loads(remains) == json.loads(json.dumps(bare(tree)))
    if writer in EXACT:
        assert remains == write(bare(tree))
    assert through(singly(document)) == (remains, found)


@given(st.lists(documents, max_size=4), places, st.booleans())
def test_any_stream_of_events_loses_the_field_and_nothing_else(trees: list[Any], places: list[int], done: bool) -> None:
    end = b"data: [DONE]\n\n" if done else b""
    stream = b"".join(b"data: " + compact(plain(tree)) + b"\n\n" for tree in trees) + end
    extractor, events = extractor_of_experts(), EventReader()
    shown = []
    for piece in cut(stream, places):
        shown += [extractor.without_marks(event) for event in events.feed(extractor.feed(piece))]
    shown += [events.rest, extractor.end()]
    assert b"".join(shown) == b"".join(b"data: " + compact(bare(tree)) + b"\n\n" for tree in trees) + end
    assert [decoder.finish().flat.tolist() for decoder in extractor.consumers] == [
        one for tree in trees for one in put_in(tree)
    ]


@given(st.binary(max_size=60) | st.text(alphabet='"\\:,routed_experts {}\n', max_size=60).map(str.encode), places)
def test_bytes_without_the_field_pass_as_they_are(data: bytes, places: list[int]) -> None:
    extractor = extractor_of_experts()
    passed = [extractor.feed(piece) for piece in cut(data, places)]
    assume(not extractor.consumers)
    assert b"".join([*passed, extractor.end()]) == data


def test_bytes_that_nothing_was_taken_out_of_have_no_marks() -> None:
    extractor = extractor_of_experts()
    remains, _ = feed(extractor, [b'{"routed_experts":"%b"}' % A])
    assert extractor.has_marks(remains)
    document = rb'{"a":"\"routed_experts\":\"5\",","\"routed_experts":"3","routed_experts":null,"c":"\\"}'
    assert not extractor.has_marks(document)
    assert extractor.without_marks(document) == document


def test_space_without_end_is_refused_before_it_costs_anything() -> None:
    extractor = extractor_of_experts()
    extractor.feed(b'{"routed_experts"' + b" " * 4000)
    with pytest.raises(UpstreamError, match="space"):
        extractor.feed(b" " * 1000)

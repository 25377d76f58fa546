"""Rows on an engine's wire: asked for, taken out of any JSON wherever it is cut, decoded piece by piece, and held."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from middleware_hub.routed_experts.decoding import QUANTUM, Decoder
from middleware_hub.routed_experts.shapes import (
    RowWidth,
    ShapeCheck,
    configured_indexer_shape,
    configured_shape,
    parse_indexer_shape,
)
from miles_router import Exchange
from miles_router.engines.events import Event
from miles_router.engines.extraction import Extractor
from miles_router.engines.rows import EXPERT_FIELDS, GenerateRows, RowAnswer, RowRequest
from miles_router.errors import ConfigError, UpstreamError
from miles_router.trajectory import InvalidTrajectory
from miles_router.trajectory.rows import INDEXER_TOPK, ROUTED_EXPERTS, Blocks, RowArray, RowKind, RowShape
from tests.support.tiers import examples

PLENTY = 1 << 30


def sent(ids: npt.ArrayLike) -> bytes:
    """As an engine sends them, by numpy and the standard library alone."""
    return base64.b64encode(np.asarray(ids, dtype="<i4").tobytes())


def fed(pieces: Iterable[bytes], limit: int = PLENTY, kind: RowKind = ROUTED_EXPERTS) -> Decoder:
    decoder = Decoder(kind, limit)
    for piece in pieces:
        decoder.feed(memoryview(piece))
    return decoder


def cut(data: bytes, places: Iterable[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[begin:end] for begin, end in pairwise(edges)]


def every(data: bytes, size: int) -> list[bytes]:
    return [data[begin : begin + size] for begin in range(0, len(data), size)]


def refusal(pieces: Iterable[bytes], limit: int = PLENTY, kind: RowKind = ROUTED_EXPERTS) -> str:
    with pytest.raises(InvalidTrajectory) as error:
        fed(pieces, limit, kind).finish()
    return error.value.invariant


chunked = st.lists(st.integers(0, 400), max_size=12)


@given(st.lists(st.integers(0, 65535) | st.integers(0, 255), max_size=120), chunked)
@example([0] * 3, [QUANTUM])
@example([255, 256, 255], [1, 15, 16])
@example([1] * 30 + [256], [0, 0, 160])
def test_any_pieces_give_what_numpy_makes_of_the_whole(ids: list[int], places: list[int]) -> None:
    data = sent(ids)
    decoder = fed(cut(data, places))
    flat = decoder.finish().flat
    expected = np.frombuffer(base64.b64decode(data), dtype="<i4")
    assert np.array_equal(flat, expected)
    assert decoder.largest == max(ids, default=-1)
    assert flat.dtype == (np.uint16 if decoder.largest > 255 else np.uint8)


@given(st.lists(st.integers(-1, 2**31 - 1) | st.integers(-1, 32767), max_size=120), chunked)
@example([-1, 32767, -1, 32768], [20])
def test_positions_take_two_bytes_each_up_to_32767_and_four_beyond_it(ids: list[int], places: list[int]) -> None:
    data = sent(ids)
    decoder = fed(cut(data, places), kind=INDEXER_TOPK)
    flat = decoder.finish().flat
    assert flat.tolist() == ids
    if ids:
        assert flat.dtype == (np.int32 if max(ids) > 32767 else np.int16)


@pytest.mark.parametrize("wrong", [-2, -(2**31)])
def test_of_what_is_negative_positions_have_minus_one_alone(wrong: int) -> None:
    assert refusal([sent([5, -1, wrong, 70_000])], kind=INDEXER_TOPK) == "positions_of_the_model"


WHOLE = sent(range(100))


def spoiled(place: int, characters: bytes) -> bytes:
    return WHOLE[:place] + characters + WHOLE[place + len(characters) :]


BROKEN: Sequence[bytes] = [
    *(
        spoiled(place, bad)
        for place in (0, 17, 200, 400, len(WHOLE) - 8)
        for bad in (b"*", b"-", b" ", b"\n", b"\\", b"\xff")
    ),
    *(spoiled(place, b"=") for place in (0, 3, 15, 31, 200)),
    spoiled(14, b"=="),
    sent([1]) + sent([2]),
    WHOLE + b"AAAA",
    b"=",
    b"AAAA",
    b"AAAAAAA=",
    *(WHOLE[:end] for end in range(len(WHOLE) - 16, len(WHOLE))),
]


@pytest.mark.parametrize("size", [1, 7, 16, 64, 10**6])
@pytest.mark.parametrize("broken", range(len(BROKEN)))
def test_what_is_no_base64_of_whole_ids_is_refused(broken: int, size: int) -> None:
    data = BROKEN[broken]
    if len(data) % QUANTUM == 0 and data == WHOLE[: len(data)]:
        assert fed(every(data, size)).finish().flat.tolist() == list(range(len(data) * 3 // 16)), "cut between two ids"
    else:
        assert refusal(every(data, size)) == "experts_are_rows"


@pytest.mark.parametrize(("ids", "taken"), [([1] * 60, 60), ([1] * 59 + [256], 120), ([256] + [1] * 59, 120)])
@pytest.mark.parametrize("size", [1, 16, 30, 1000])
def test_the_limit_is_of_bytes_that_are_kept(ids: list[int], taken: int, size: int) -> None:
    assert fed(every(sent(ids), size), taken).finish().flat.nbytes == taken
    assert refusal(every(sent(ids), size), taken - 1) == "experts_fit"


FIELD = "routed_experts"
IDS = [1, 2, 3, 255, 0]


def extractor_of_experts() -> Extractor[Decoder]:
    return Extractor(EXPERT_FIELDS.rows, lambda: Decoder(ROUTED_EXPERTS, 1 << 20))


def through(pieces: Iterable[bytes]) -> tuple[bytes, list[list[int]]]:
    """What the client gets, and the ids of each string."""
    extractor = extractor_of_experts()
    remains = b"".join([*(extractor.feed(piece) for piece in pieces), extractor.end()])
    found = [decoder.finish().flat.tolist() for decoder in extractor.consumers]
    return extractor.without_marks(remains), found


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
    if isinstance(tree, Ids):
        return sent(tree).decode()
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items()}
    return [plain(each) for each in tree] if isinstance(tree, list) else tree


def bare(tree: Any) -> Any:
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
@example({f'"{FIELD}': sent(IDS).decode(), "a": f'"{FIELD}":0'}, "odd", [3])
def test_any_document_loses_the_field_and_nothing_else(tree: Any, writer: str, places: list[int]) -> None:
    write = WRITERS[writer]
    document = write(plain(tree))
    remains, found = through(cut(document, places))
    assert found == put_in(tree)
    assert json.loads(remains) == json.loads(json.dumps(bare(tree)))
    if writer in EXACT:
        assert remains == write(bare(tree))
    assert through(every(document, 1)) == (remains, found)


@given(st.binary(max_size=60) | st.text(alphabet='"\\:,routed_experts {}\n', max_size=60).map(str.encode), places)
def test_bytes_without_the_field_pass_as_they_are(data: bytes, places: list[int]) -> None:
    extractor = extractor_of_experts()
    passed = [extractor.feed(piece) for piece in cut(data, places)]
    assume(not extractor.consumers)
    assert b"".join([*passed, extractor.end()]) == data


def test_space_without_end_is_refused_before_it_costs_anything() -> None:
    extractor = extractor_of_experts()
    extractor.feed(b'{"routed_experts"' + b" " * 4000)
    with pytest.raises(UpstreamError, match="space"):
        extractor.feed(b" " * 1000)


QWEN: dict[str, Any] = {"num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8, "model_type": "it"}


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (QWEN, RowShape(48, 8, 128)),
        ({"num_hidden_layers": 61, "n_routed_experts": 256, "num_experts_per_tok": 8}, RowShape(61, 8, 256)),
        ({"num_hidden_layers": 32, "num_local_experts": 8, "num_experts_per_tok": 2}, RowShape(32, 2, 8)),
        ({"num_hidden_layers": 32, "num_experts_per_tok": 2}, RowShape(32, 2, None)),
        ({"text_config": QWEN, "vision_config": {"num_hidden_layers": 3}}, RowShape(48, 8, 128)),
        ({**QWEN, "text_config": {"num_hidden_layers": 32}}, None),
        ({"num_experts": 128, "num_experts_per_tok": 8}, None),
        ({**QWEN, "num_experts_per_tok": None}, None),
        ({**QWEN, "num_experts_per_tok": [8] * 48}, None),
        ({**QWEN, "num_hidden_layers": True}, None),
        ({**QWEN, "num_experts": None}, RowShape(48, 8, None)),
        ({**QWEN, "num_experts": None, "n_routed_experts": 64}, RowShape(48, 8, 64)),
    ],
)
def test_a_checkpoints_configuration_tells_the_shape(config: dict[str, Any], shape: RowShape | None) -> None:
    assert configured_shape(config) == shape


SPARSE: dict[str, Any] = {"num_hidden_layers": 61, "index_topk": 2048, "model_type": "it"}


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (SPARSE, RowShape(61, 2048)),
        ({"text_config": SPARSE}, RowShape(61, 2048)),
        ({**SPARSE, "num_indexer_layers": 12}, RowShape(12, 2048)),
        ({**SPARSE, "compress_ratios": [0, 4, 128, 4]}, RowShape(2, 2048)),
        ({**SPARSE, "compress_ratios": [0, 128]}, None),
        ({**SPARSE, "index_topk": None}, None),
        ({**SPARSE, "index_topk": 0}, None),
        ({"index_topk": 2048}, None),
        (QWEN, None),
    ],
)
def test_a_checkpoints_configuration_tells_the_shape_of_chosen_positions(
    config: dict[str, Any], shape: RowShape | None
) -> None:
    assert configured_indexer_shape(config) == shape


def test_a_position_behind_its_rows_own_is_refused() -> None:
    check, engine = ShapeCheck(INDEXER_TOPK, RowShape(1, 2)), RowWidth()
    told = np.zeros((600, 2), dtype=np.int16)
    told[:, 1] = np.arange(600) + 7

    def rows() -> Blocks:
        return check.rows(Blocks([told.reshape(-1)]), int(told.max()), 7, 600, engine)

    assert len(rows()) == 600
    told[300, 0] = 308
    with pytest.raises(InvalidTrajectory, match="positions_are_causal: row 307 has position 308, which is"):
        rows()


def flat(count: int, width: int) -> RowArray:
    ids: RowArray = (np.arange(count * width) % 7).astype(np.uint8)
    return ids


class Model:
    """A model's shape, or none, and an engine that shows its rows."""

    def __init__(self, shape: RowShape | None = None) -> None:
        self.check = ShapeCheck(ROUTED_EXPERTS, shape)
        self.learned = RowWidth()

    def rows(self, ids: RowArray, start: int, expected: int) -> RowArray:
        """Ids as the rows that the model takes them for."""
        return self.check.rows(Blocks([ids]), int(ids.max(initial=0)), start, expected, self.learned)[:]

    def refusal(self, ids: RowArray, start: int, expected: int) -> str:
        with pytest.raises(InvalidTrajectory) as error:
            self.rows(ids, start, expected)
        return f"{error.value}"


SHAPE = RowShape(2, 2, 8)


@pytest.mark.parametrize("expected", [0, -1])
@pytest.mark.parametrize("shape", [SHAPE, None])
def test_where_no_row_is_missing_none_may_come(expected: int, shape: RowShape | None) -> None:
    one = Model(shape)
    assert len(one.rows(flat(0, 4), 7, expected)) == 0
    assert one.refusal(flat(1, 4), 7, expected).startswith("experts_without_overlap")
    assert one.learned == RowWidth(), "an answer without rows has shown nothing"
    assert one.rows(flat(1, 4), 7, 1).shape == (1, 4)


def test_a_length_that_only_one_answer_had_is_given_up_for_one_that_two_have() -> None:
    one = Model()
    assert one.rows(flat(10, 3), 0, 10).shape == (10, 3), "half the ids of ten rows of six"
    said = "experts_of_the_model: 24 ids are not 4 rows of 3, as in this engine's first answer"
    assert one.refusal(flat(4, 6), 0, 4) == said
    for count in (4, 5, 6):
        assert one.rows(flat(count, 6), 0, count).shape == (count, 6)
    assert one.refusal(flat(10, 3), 0, 10).startswith("experts_without_gap")


def test_a_first_answer_whose_ids_are_no_rows_tells_nothing() -> None:
    one = Model()
    assert one.refusal(flat(1, 7), 0, 5).startswith("experts_are_rows: 7 ids are not 5 rows")
    assert one.refusal(flat(0, 0), 3, 5) == "experts_without_gap: rows 3 to 7 are missing"
    assert one.rows(flat(5, 9), 0, 5).shape == (5, 9)


def request(body: bytes, start: int = 7) -> RowRequest:
    return RowRequest.write(body, EXPERT_FIELDS, start, parse=Exchange("it").loads, client_may=True)


keys = st.text(max_size=6) | st.sampled_from(["{", "}", '"', "return_routed", '"return_routed_experts', "text"])
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | keys,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(keys, values, max_size=4), st.sampled_from([None, 0, 1]), st.sampled_from(["", " ", "\n\t "]))
@example({'"return_routed_experts"': '"return_routed_experts":true'}, None, "")
def test_any_object_has_its_fields_and_the_two(client: dict[str, Any], indent: int | None, behind: str) -> None:
    body = (json.dumps(client, indent=indent) + behind).encode()
    changed = request(body, start=12)
    expected = {**client, "return_routed_experts": True, "routed_experts_start_len": 12}
    assert json.loads(changed.body) == expected
    assert (changed.start, changed.by_client) == (12, False)
    if b'return_routed_experts"' not in body:
        assert changed.body.startswith(body.rstrip()[:-1]), "nothing that the client wrote was written anew"


def meta(*, rows: Any = None, finish: Any = "stop", **fields: Any) -> dict[str, Any]:
    reason = {"type": finish} if isinstance(finish, str) else finish
    return {"id": "r", "finish_reason": reason, **({} if rows is None else {"routed_experts": rows}), **fields}


SPACINGS = st.sampled_from([(",", ":"), (", ", ": "), (" ,\t", " :  ")])


@given(
    st.sampled_from([None, {"type": "stop"}, {"type": "length", "length": 3}, {"type": "abort", "message": "x"}]),
    st.sampled_from([None, "0", 7]),
    st.permutations(["text", "meta_info", "index"]),
    st.permutations(["id", "finish_reason", "routed_experts", "completion_tokens"]),
    SPACINGS,
)
def test_an_event_of_generate_says_what_a_full_parse_says_however_it_is_written(
    finish: Any, rows: Any, order: list[str], inner: list[str], spacing: tuple[str, str]
) -> None:
    said = meta(rows=rows, finish=finish, completion_tokens=3)
    said = {name: said[name] for name in inner if name in said}
    whole = {"text": 'a "finish_reason":{}', "meta_info": said, "index": 2}
    data = json.dumps({name: whole[name] for name in order}, separators=spacing).encode()
    answer = GenerateRows().event(Event.read(b"data: " + data + b"\n\n"), has_rows=rows is not None)
    if finish is None and rows is None:
        assert answer is None
    else:
        assert answer == RowAnswer(2, said, finish is not None, finish is not None and finish["type"] == "abort")


@pytest.mark.parametrize(
    "body", [b'["return_routed_experts"]', b'"return_routed_experts"', b'["routed_experts_start_len"]']
)
def test_what_names_the_fields_and_is_no_object_goes_to_the_engine_as_it_is(body: bytes) -> None:
    assert request(body) == RowRequest(body, 7, by_client=False)


@pytest.mark.parametrize("text", ["61", "61x", "0x4", "4x0", "2x3x4", "2x-1", "ax4", "61x99999999"])
def test_what_is_no_shape_of_chosen_positions_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="61x2048"):
        parse_indexer_shape(text)

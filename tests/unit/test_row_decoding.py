"""Base64 of int32, piece by piece: the same ids as decoding it at once, in as few bytes, or a refusal by name."""

from __future__ import annotations

import base64
import gc
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any
from weakref import ref

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from middleware_hub.routed_experts import decoding
from middleware_hub.routed_experts.decoding import AT_ONCE, BLOCK, QUANTUM, Decoder, encoded
from miles_router.trajectory import InvalidTrajectory
from miles_router.trajectory.rows import INDEXER_TOPK, ROUTED_EXPERTS, RowKind

PLENTY = 1 << 30


def sent(ids: npt.ArrayLike) -> bytes:
    """As an engine sends them, by numpy and the standard library alone."""
    return base64.b64encode(np.asarray(ids, dtype="<i4").tobytes())


def fed(pieces: Iterable[bytes], limit: int = PLENTY, kind: RowKind = ROUTED_EXPERTS) -> Decoder:
    decoder = Decoder(kind, limit)
    for piece in pieces:
        decoder.feed(memoryview(piece))
    return decoder


def cut(data: bytes, *places: int) -> list[bytes]:
    edges = [0, *sorted(places), len(data)]
    return [data[begin:end] for begin, end in pairwise(edges)]


def every(data: bytes, size: int) -> list[bytes]:
    return [data[begin : begin + size] for begin in range(0, len(data), size)]


def refusal(pieces: Iterable[bytes], limit: int = PLENTY, kind: RowKind = ROUTED_EXPERTS) -> str:
    with pytest.raises(InvalidTrajectory) as error:
        fed(pieces, limit, kind).finish()
    return error.value.invariant


@pytest.mark.parametrize("count", range(14))
@pytest.mark.parametrize("size", range(1, 20))
def test_pieces_of_any_size_give_the_ids(count: int, size: int) -> None:
    ids = [(7 * place) % 251 for place in range(count)]
    decoder = fed(every(sent(ids), size))
    flat = decoder.finish().flat
    assert flat.tolist() == ids
    assert (flat.dtype.name, flat.ndim, decoder.largest) == ("uint8", 1, max(ids, default=-1))


@pytest.mark.parametrize("count", [3, 4, 5, 6])
def test_a_cut_at_any_place_loses_nothing(count: int) -> None:
    ids = list(range(200, 200 + count))
    data = sent(ids)
    for first in range(len(data) + 1):
        for second in range(first, len(data) + 1):
            assert fed(cut(data, first, second)).finish().flat.tolist() == ids


chunked = st.lists(st.integers(0, 400), max_size=12)


@given(st.lists(st.integers(0, 65535) | st.integers(0, 255), max_size=120), chunked)
@example([0] * 3, [QUANTUM])
@example([255, 256, 255], [1, 15, 16])
@example([1] * 30 + [256], [0, 0, 160])
def test_any_pieces_give_what_numpy_makes_of_the_whole(ids: list[int], places: list[int]) -> None:
    data = sent(ids)
    decoder = fed(cut(data, *(min(place, len(data)) for place in places)))
    flat = decoder.finish().flat
    expected = np.frombuffer(base64.b64decode(data), dtype="<i4")
    assert np.array_equal(flat, expected)
    assert decoder.largest == max(ids, default=-1)
    assert flat.dtype == (np.uint16 if decoder.largest > 255 else np.uint8)


@given(st.lists(st.integers(-1, 2**31 - 1) | st.integers(-1, 32767), max_size=120), chunked)
@example([-1, 32767, -1, 32768], [20])
def test_positions_take_two_bytes_each_up_to_32767_and_four_beyond_it(ids: list[int], places: list[int]) -> None:
    data = sent(ids)
    decoder = fed(cut(data, *(min(place, len(data)) for place in places)), kind=INDEXER_TOPK)
    flat = decoder.finish().flat
    assert flat.tolist() == ids
    if ids:
        assert flat.dtype == (np.int32 if max(ids) > 32767 else np.int16)


@pytest.mark.parametrize("wrong", [-2, -(2**31)])
def test_of_what_is_negative_positions_have_minus_one_alone(wrong: int) -> None:
    assert refusal([sent([5, -1, wrong, 70_000])], kind=INDEXER_TOPK) == "positions_of_the_model"


@given(st.integers(1, 64).map(lambda quanta: quanta * QUANTUM), st.integers(0, 600), st.integers(0, 600))
def test_what_is_decoded_at_once_may_be_of_any_size(at_once: int, count: int, wide: int) -> None:
    ids = [place % 256 for place in range(count)]
    ids[wide : wide + 1] = [40_000] if wide < count else []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "AT_ONCE", at_once)
        flat = fed([sent(ids)]).finish().flat
    assert flat.tolist() == ids


@pytest.mark.parametrize("wide", [0, 65_000, 65_536, 199_999])
@pytest.mark.parametrize("size", [4096, 65_537, AT_ONCE + 1, 10**7])
def test_an_id_above_a_byte_widens_those_before_and_behind_it(wide: int, size: int) -> None:
    ids = np.arange(200_000) % 256
    ids[wide] = 300
    data = sent(ids)
    assert len(data) > 2 * AT_ONCE
    flat = fed(every(data, size)).finish().flat
    assert flat.dtype == np.uint16
    assert np.array_equal(flat, ids)


def test_ids_take_a_byte_each_up_to_255_and_two_up_to_65535() -> None:
    for largest, size in ((0, 1), (255, 1), (256, 2), (65535, 2)):
        flat = fed([sent([0, largest])]).finish().flat
        assert (flat.tolist(), flat.nbytes) == ([0, largest], 2 * size)


@pytest.mark.parametrize("count", [0, 10, 100_000, 2 * BLOCK, 2 * BLOCK + 1])
@pytest.mark.parametrize("wide", [False, True])
def test_what_is_decoded_holds_no_more_memory_than_its_ids_take(count: int, wide: bool) -> None:
    ids = np.arange(count) % 256 + (300 if wide else 0)
    made = fed(every(sent(ids), 50_000)).finish()
    assert np.array_equal(made.flat, ids)
    blocks = [block.base if block.base is not None else block for block in made.blocks]
    assert sum(block.nbytes for block in blocks) == made.nbytes == count * (2 if wide and count else 1)


@given(st.integers(1, 40), st.integers(0, 300), st.integers(0, 300), st.integers(1, 200))
def test_blocks_follow_each_other_as_ids_come(block: int, count: int, wide: int, size: int) -> None:
    ids = [place % 256 for place in range(count)]
    ids[wide : wide + 1] = [256] if wide < count else []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "BLOCK", 2 * block)
        made = fed(every(sent(ids), size)).finish()
    assert made.flat.tolist() == ids
    assert made.size == len(ids)


def test_the_end_may_be_told_before_the_ids_are_asked_for() -> None:
    decoder = fed(every(sent([1, 2, 300, 4]), 5))
    decoder.end()
    assert decoder.finish().flat.tolist() == decoder.finish().flat.tolist() == [1, 2, 300, 4]


def test_no_characters_are_no_ids() -> None:
    for pieces in ([], [b""], [b"", b""]):
        flat = fed(pieces).finish().flat
        assert (flat.size, flat.dtype.name) == (0, "uint8")


@pytest.mark.parametrize("bad", [-1, -(2**31), 65536, 2**31 - 1])
@pytest.mark.parametrize("place", [0, 5, 99])
@pytest.mark.parametrize("size", [1, 16, 50, 10**6])
def test_ids_that_no_expert_has_are_refused(bad: int, place: int, size: int) -> None:
    ids = [1] * 100
    ids[place] = bad
    assert refusal(every(sent(ids), size)) == "experts_of_the_model"


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
    spoiled(12, b"===="),
    spoiled(14, b"=="),
    sent([1]) + sent([2]),
    sent([1, 2]) + sent([1, 2]),
    WHOLE + b"AAAA",
    WHOLE + b"=",
    b"=",
    b"====",
    b"A",
    b"AA==",
    b"AAAA",
    b"AAAAAAA=",
    b"AAAAAA=",
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


@given(st.binary(max_size=80), chunked)
def test_bytes_of_any_kind_give_ids_or_a_refusal_by_name(data: bytes, places: list[int]) -> None:
    data = data.replace(b'"', b"*")
    expected: Any
    try:
        raw = base64.b64decode(data, validate=True)
        expected = np.frombuffer(raw, "<i4").tolist() if len(raw) % 4 == 0 else None
    except ValueError:
        expected = None
    decoder = fed(cut(data, *(min(place, len(data)) for place in places)))
    if expected is None or any(not 0 <= each <= 65535 for each in expected):
        with pytest.raises(InvalidTrajectory, match="experts_") as error:
            decoder.finish()
        assert error.value.invariant in ("experts_are_rows", "experts_of_the_model")
    else:
        assert decoder.finish().flat.tolist() == expected


@given(st.lists(st.integers(0, 255), max_size=40), st.binary(max_size=40), st.integers(0, 60), chunked)
def test_a_quotation_mark_ends_what_is_read_wherever_it_stands(
    ids: list[int], behind: bytes, garbage: int, places: list[int]
) -> None:
    inside = sent(ids)
    inside = inside[:garbage] + b"*" + inside[garbage:] if garbage < len(inside) else inside
    data = inside + b'"' + behind
    decoder, read = Decoder(ROUTED_EXPERTS, PLENTY), 0
    for piece in cut(data, *(min(place, len(data)) for place in places)):
        taken = decoder.feed(memoryview(piece))
        read += taken
        if taken < len(piece):
            break
    assert read == len(inside)
    if b"*" in inside:
        with pytest.raises(InvalidTrajectory, match="experts_are_rows"):
            decoder.finish()
    else:
        assert decoder.finish().flat.tolist() == ids


def test_the_first_thing_that_is_wrong_is_told() -> None:
    wrong = sent([-1] * 6)
    assert refusal([wrong, b"*" * 32]) == "experts_of_the_model"
    assert refusal([b"*" * 32, wrong]) == "experts_are_rows"


def test_characters_behind_what_is_wrong_change_nothing() -> None:
    assert refusal([b"*" * 16, *every(WHOLE, 16)]) == "experts_are_rows"
    assert refusal([b"*" * 8, *every(WHOLE, 9)]) == "experts_are_rows"


@pytest.mark.parametrize(("ids", "taken"), [([1] * 60, 60), ([1] * 59 + [256], 120), ([256] + [1] * 59, 120)])
@pytest.mark.parametrize("size", [1, 16, 30, 1000])
def test_the_limit_is_of_bytes_that_are_kept(ids: list[int], taken: int, size: int) -> None:
    assert fed(every(sent(ids), size), taken).finish().flat.nbytes == taken
    assert refusal(every(sent(ids), size), taken - 1) == "experts_fit"


def test_of_what_is_longer_than_the_limit_nothing_is_kept() -> None:
    decoder = fed(every(sent([1] * 3000), 100), 500)
    assert (decoder._full, decoder._block.nbytes) == ([], 0)


@given(st.integers(0, 6), st.integers(1, 5), st.integers(1, 4), st.booleans(), st.data())
def test_what_is_encoded_is_what_the_engine_sends(
    rows: int, layers: int, top_k: int, wide: bool, data: st.DataObject
) -> None:
    count, top = rows * layers * top_k, 65535 if wide else 255
    ids = data.draw(st.lists(st.integers(0, top), min_size=count, max_size=count))
    array = np.array(ids, dtype=np.uint16 if wide else np.uint8).reshape(rows, layers, top_k)
    assert encoded(array) == sent(ids)
    assert fed([encoded(array)]).finish().flat.tolist() == ids
    assert encoded(array[:, ::-1]) == sent(array[:, ::-1])


def test_a_refusal_leads_back_to_nothing_that_only_the_garbage_collector_frees() -> None:
    gc.collect()
    gc.disable()
    try:
        decoder = fed([b"*" * 16])
        watched = ref(decoder)
        with pytest.raises(InvalidTrajectory):
            decoder.finish()
        del decoder
        assert watched() is None
    finally:
        gc.enable()

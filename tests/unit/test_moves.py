"""Which running request moves, and which can."""

from __future__ import annotations

from typing import Any

import pytest

from miles_router.engines.facts import Facts
from miles_router.partial_rollouts.moves.balance import choose_move
from miles_router.partial_rollouts.moves.checks import Immovable, check_size, read_movable

SAYS = Facts(context_length=4096, preferred_sampling_params={})


@pytest.mark.parametrize(
    ("loads", "movable", "expected"),
    [
        ({"a": 2, "b": 0}, "a", ("a", "b")),
        ({"a": 1, "b": 0}, "a", None),
        ({"a": 4, "b": 2}, "a", ("a", "b")),
        ({"a": 3, "b": 2}, "a", None),
        ({"a": 10, "b": 7}, "a", None),
        ({"a": 11, "b": 7}, "a", ("a", "b")),
        ({"a": 9, "b": 5, "c": 1}, "bc", ("b", "c")),
        ({"a": 9, "b": 2, "c": 1}, "bc", None),
        ({"a": 9, "b": 1}, "", None),
        ({"a": 9}, "a", None),
        ({}, "", None),
    ],
)
def test_fullest_movable_worker_gives_to_the_idlest_when_far_apart(
    loads: dict[str, int], movable: str, expected: tuple[str, str] | None
) -> None:
    assert choose_move(loads, {place: ["a request"] if place in movable else [] for place in loads}) == expected


def body(**fields: Any) -> dict[str, Any]:
    return {"input_ids": [1, 2], "rid": "a-name", "sampling_params": {"max_new_tokens": 100}, **fields}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"input_ids": None, "text": "Hi"},
        {"return_logprob": True, "return_routed_experts": True, "stream": False},
        {"rid": "0123456789abcdef"},
        {"sampling_params": {"max_new_tokens": 4086, "stop": ["x"], "temperature": 0.5, "sampling_seed": 7, "n": 1}},
    ],
)
def test_one_whole_answer_with_a_name_can_move(fields: dict[str, Any]) -> None:
    assert read_movable(body(**fields), [SAYS, SAYS]).body["rid"]


@pytest.mark.parametrize(
    ("reason", "fields", "engine"),
    [
        ("unreadable", {"input_ids": None, "prompt": "Hi"}, SAYS),
        ("unreadable", {"sampling_params": {"max_new_tokens": "5"}}, SAYS),
        ("unreadable", {"sampling_params": {"max_new_tokens": 1.5}}, SAYS),
        ("streamed", {"stream": True}, SAYS),
        ("several", {"sampling_params": {"n": 2}}, SAYS),
        ("several", {"input_ids": [[1]]}, SAYS),
        ("placed", {"data_parallel_rank": 0}, SAYS),
        ("placed", {"bootstrap_room": 7}, SAYS),
        ("media", {"image_data": ["data:"]}, SAYS),
        ("unnamed", {"rid": None}, SAYS),
        ("unnamed", {"rid": ""}, SAYS),
        ("named_alike", {"rid": "12"}, SAYS),
        ("named_alike", {"rid": "0123456789abcde"}, SAYS),
        ("stateful", {"session_params": {"id": "s"}}, SAYS),
        ("stateful", {}, Facts(context_length=4096, preferred_sampling_params={"repetition_penalty": 1.1})),
        ("too_long", {"sampling_params": {"max_new_tokens": 4087}}, SAYS),
        ("too_long", {"sampling_params": {"max_new_tokens": None}}, SAYS),
        ("too_long", {"input_ids": None, "text": "é" * 2000}, SAYS),
        ("too_long", {}, Facts()),
    ],
)
def test_what_might_not_be_carried_on_is_known_before(reason: str, fields: dict[str, Any], engine: Facts) -> None:
    with pytest.raises(Immovable) as refusal:
        read_movable(body(**fields), [SAYS, engine])
    assert refusal.value.reason == reason


def test_a_body_that_cannot_fit_is_not_read() -> None:
    check_size(b" " * 16 * 4096, [SAYS])
    for engine in (SAYS, Facts()):
        with pytest.raises(Immovable, match="too_long"):
            check_size(b" " * (16 * 4096 + 1), [SAYS, engine])

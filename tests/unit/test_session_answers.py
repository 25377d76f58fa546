"""What the engine sampled, out of its answer: ids, logprobs, versions and the message; anything less is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from middleware_hub.openai_session.errors import UnusableAnswer
from middleware_hub.openai_session.faces.answers import Generated, GrowingMessage, Spans, chat_choice, spans_of
from miles_router.trajectory import Trajectory

#: As SGLang 0.5.23 gives it, cut to what counts.
CHOICE: Mapping[str, Any] = {
    "index": 0,
    "message": {"role": "assistant", "content": " ...\n\n绚", "reasoning_content": None},
    "logprobs": {"content": []},
    "finish_reason": "stop",
    "matched_stop": 151645,
    "prompt_token_ids": [151644, 872, 198],
    "meta_info": {
        "id": "f83d",
        "finish_reason": {"type": "stop", "matched": 151645},
        "prompt_tokens": 3,
        "weight_version": "2",
        "num_retractions": 1,
        "output_token_logprobs": [[-12.092743873596191, 5468, " ..."], [-0.5, 103814, "绚"], [0.0, 151645, None]],
        "output_token_logprobs_length": 3,
        "output_top_logprobs": [None, None, None],
        "input_token_logprobs": [],
        "input_top_logprobs": [],
        "completion_tokens": 3,
        "cached_tokens": 2,
        "weight_versions": [{"version": "1", "start": 0, "end": 2}, {"version": "2", "start": 2, "end": 3}],
    },
}


def changed(**meta: Any) -> dict[str, Any]:
    return {**CHOICE, "meta_info": {**CHOICE["meta_info"], **meta}}


def generated(versions: Spans, ids: tuple[int, ...] = (1, 2, 3), logprobs: Any = (-1.0, -2.0, -3.0)) -> Generated:
    return Generated(0, {"role": "assistant"}, "stop", None, ids, logprobs, versions)


def test_a_choice_tells_what_was_sampled() -> None:
    choice = chat_choice(CHOICE)
    assert (choice.ids, choice.logprobs) == ([5468, 103814, 151645], [-12.092743873596191, -0.5, 0.0])
    assert (choice.index, choice.finish_reason, choice.matched) == (0, "stop", 151645)
    assert choice.message == CHOICE["message"]
    assert choice.prompt == [151644, 872, 198]
    assert choice.versions == [("1", 0, 2), ("2", 2, 3)]
    assert choice.facts == {"rid": "f83d", "cached_tokens": 2, "retractions": 1, "versions": "engine"}


def test_sampled_tokens_are_one_piece_for_each_version() -> None:
    pieces = chat_choice(CHOICE).pieces()
    assert [(piece.version, piece.tokens.tolist()) for piece in pieces] == [("1", [5468, 103814]), ("2", [151645])]
    assert Trajectory(pieces).logprobs.tolist() == pytest.approx([-12.092744, -0.5, 0.0])
    assert all(piece.trained for piece in pieces)


def test_a_tool_call_has_no_matched_stop() -> None:
    calls = {**changed(finish_reason={"type": "tool_calls", "matched": None}), "finish_reason": "tool_calls"}
    assert (chat_choice(calls).finish_reason, chat_choice(calls).matched) == ("tool_calls", None)
    length = {**changed(finish_reason={"type": "length", "length": 3}), "matched_stop": None}
    assert chat_choice(length).matched is None


def test_an_answer_without_tokens_has_no_pieces() -> None:
    choice = chat_choice(changed(output_token_logprobs=[], completion_tokens=0, weight_versions=[]))
    assert (choice.pieces(), choice.versions) == ((), [("2", 0, 0)])


LACKING: Mapping[str, Any] = {
    "no meta_info": {name: value for name, value in CHOICE.items() if name != "meta_info"},
    "meta_info null": {**CHOICE, "meta_info": None},
    "no logprobs": changed(output_token_logprobs=None),
    "fewer logprobs": changed(completion_tokens=4),
    "no completion tokens": changed(completion_tokens=None),
    "pairs": changed(output_token_logprobs=[[-1.0]] * 3),
    "no spans": changed(weight_versions=[{"version": "1"}]),
    "no finish reason": {**CHOICE, "finish_reason": None},
    "message null": {**CHOICE, "message": None},
    "message a text": {**CHOICE, "message": "hello"},
    "no choice": None,
    "a text": "hello",
    "a strange finish reason": changed(finish_reason="stop"),
}


@pytest.mark.parametrize("choice", LACKING.values(), ids=LACKING)
def test_an_answer_that_lacks_something_is_unusable(choice: Any) -> None:
    with pytest.raises(UnusableAnswer):
        chat_choice(choice)


@pytest.mark.parametrize(
    ("ids", "logprobs"),
    [
        ((1, 2), (-1.0,)),
        ((1,), (-1.0, -2.0)),
        ((-1,), (-1.0,)),
        ((2**31,), (-1.0,)),
        (("a",), (-1.0,)),
        ((1,), (None,)),
        ((1,), (float("nan"),)),
        ((1,), (0.5,)),
    ],
)
def test_what_no_engine_can_have_sampled_is_refused(ids: Any, logprobs: Any) -> None:
    with pytest.raises(UnusableAnswer, match="cannot be recorded"):
        generated([], ids, logprobs).pieces()


@pytest.mark.parametrize(
    ("versions", "reason"),
    [
        ([("1", 1, 3)], "gaps"),
        ([("1", 0, 1), ("2", 2, 3)], "gaps"),
        ([("1", 0, 2), ("2", 1, 3)], "overlap"),
        ([("1", 0, 3), ("2", 3, 1), ("3", 1, 3)], "overlap"),
        ([("1", 0, 2)], "do not cover"),
        ([("1", 0, 4)], "do not cover"),
    ],
)
def test_versions_that_do_not_fit_the_tokens_are_refused(versions: Spans, reason: str) -> None:
    with pytest.raises(UnusableAnswer, match=reason):
        generated(versions).pieces()


def test_an_empty_span_is_nobody_s() -> None:
    pieces = generated([("1", 0, 0), ("2", 0, 3), ("3", 3, 3)]).pieces()
    assert [(piece.version, len(piece)) for piece in pieces] == [("2", 3)]


def test_without_versions_a_piece_has_none() -> None:
    assert [(piece.version, len(piece)) for piece in generated([]).pieces()] == [(None, 3)]
    assert generated([], (), ()).pieces() == ()


def test_an_engine_without_spans_tells_one_version_for_all() -> None:
    assert spans_of({"weight_version": 7}, 3) == [("7", 0, 3)]
    assert spans_of({"weight_versions": [], "weight_version": "a"}, 3) == [("a", 0, 3)]
    assert spans_of({}, 3) == []


def test_a_message_grows_out_of_deltas() -> None:
    message = GrowingMessage()
    for delta in (
        {"role": "assistant", "content": "", "reasoning_content": None},
        {"reasoning_content": "I "},
        {"reasoning_content": "add."},
        {"content": "So"},
        {"content": None},
        {"content": ": "},
    ):
        message.take(delta)
    assert message.message() == {"role": "assistant", "content": "So: ", "reasoning_content": "I add."}


def test_calls_grow_side_by_side() -> None:
    message = GrowingMessage()
    for call in (
        {"index": 1, "id": "call_b", "type": "function", "function": {"name": "sub", "arguments": ""}},
        {"index": 0, "id": "call_a", "type": "function", "function": {"name": "add", "arguments": None}},
        {"index": 1, "id": None, "function": {"name": None, "arguments": '{"a"'}},
        {"index": 0, "function": {"arguments": "{}"}},
        {"index": 1, "function": {"arguments": ": 1}"}},
        {"index": 1, "function": None},
    ):
        message.take({"tool_calls": [call]})
    assert message.message() == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "call_a", "type": "function", "function": {"name": "add", "arguments": "{}"}},
            {"id": "call_b", "type": "function", "function": {"name": "sub", "arguments": '{"a": 1}'}},
        ],
    }


def test_a_delta_without_an_index_belongs_to_the_first_call() -> None:
    message = GrowingMessage()
    message.take({"tool_calls": [{"index": None, "id": "c", "function": {"name": "add", "arguments": "{"}}]})
    message.take({"tool_calls": [{"function": {"arguments": "}"}}]})
    assert message.message()["tool_calls"][0]["function"] == {"name": "add", "arguments": "{}"}

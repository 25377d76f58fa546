"""The last delta of a tool call waits for what comes behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from miles_router.engines.answers import MALFORMED
from miles_router.engines.openai.held_deltas import HeldDelta


def chunk(delta: Any, told: str | None = None) -> dict[str, Any]:
    logprobs = None if told is None else {"content": [{"logprob": -0.5, "bytes": list(told.encode())}]}
    return {"id": "r", "choices": [{"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": None}]}


def call(arguments: str, name: str | None = None) -> dict[str, Any]:
    return {"tool_calls": [{"index": 0, "id": name, "function": {"name": name, "arguments": arguments}}]}


def shown(chunks: Sequence[Any]) -> str:
    deltas = [each["choices"][0]["delta"] for each in chunks]
    return "".join(
        (delta.get("content") or "")
        + "".join(each["function"]["name"] or each["function"]["arguments"] for each in delta.get("tool_calls", ()))
        for delta in deltas
    )


NAMED, COMPLETE = chunk(call("", "add")), chunk(call('{"a": 1}'))
SHOWN = 'add{"a": 1}'
ENDED: dict[str, tuple[list[Any], str, str]] = {
    "closed by the engine": ([NAMED, chunk({}, ' {"a"'), COMPLETE, chunk({}, ": 1")], "length", "add"),
    "sampled": ([NAMED, chunk({}, ' {"a": 1}'), COMPLETE], "length", SHOWN),
    "sampled with other spaces": ([NAMED, chunk({}, '{"a":1}}'), COMPLETE], "abort", SHOWN),
    "in tags": ([NAMED, chunk({}, "<parameter=a>1</parameter></function>"), COMPLETE], "length", SHOWN),
    "in tags, closed": ([NAMED, chunk({}, "<parameter=a>1"), COMPLETE], "length", "add"),
    "in tags, with an object": (
        [NAMED, chunk({}, "<parameter=a>{}</parameter></function>"), COMPLETE],
        "length",
        SHOWN,
    ),
    "cut in a text that ends as a call": ([NAMED, chunk({}, ' {"a": "</tool_call>'), COMPLETE], "length", "add"),
    "nested too deep": ([NAMED, chunk(call('{"a": ' + "[" * 100_000))], "length", "add"),
    "of too many digits": ([NAMED, chunk(call('{"a": 1' + "1" * 5000))], "length", "add"),
    "not complete": ([NAMED, chunk(call('{"a'))], "length", 'add{"a'),
    "the model's own end": ([NAMED, COMPLETE], "tool_calls", SHOWN),
}


@pytest.mark.parametrize(("chunks", "finish", "expected"), [*ENDED.values()], ids=[*ENDED])
def test_at_an_early_end_a_call_is_complete_only_if_it_was_sampled(
    chunks: list[Any], finish: str, expected: str
) -> None:
    held = HeldDelta()
    seen = [piece for each in chunks for piece in held.pieces(each)]
    assert shown([*seen, *held.at_end(finish)]) == expected


@pytest.mark.parametrize("told", [1 << 40, [256], [-1], [True], ["a"], "a", {"a": 1}], ids=repr)
def test_bytes_of_a_token_that_are_none_make_no_chunk(told: Any) -> None:
    """A number of them would be as much memory."""
    held, entry = HeldDelta(), {"logprob": -0.5, "bytes": told}
    with pytest.raises(MALFORMED):
        held.pieces({"choices": [{"index": 0, "delta": {}, "logprobs": {"content": [entry]}}]})


def test_logprobs_do_not_wait() -> None:
    held = HeldDelta()
    (piece,) = held.pieces(chunk(call("{}"), "{}"))
    assert piece["choices"][0]["delta"] == {}
    assert piece["choices"][0]["logprobs"]["content"]
    (late,) = held.release()
    assert late["choices"][0]["logprobs"] is None


def test_a_text_that_may_be_the_end_of_the_answer_waits_where_it_may_be_cut() -> None:
    held = HeldDelta(texts=True)
    assert shown(held.pieces(chunk({"content": "a"}, "a"))) == "a"
    assert shown(held.pieces(chunk({"content": "<|im_end|>"}, "<|im_end|>"))) == ""
    assert held.drop() == []
    assert shown(held.pieces(chunk({"content": ">"}, ">"))) == ""
    assert shown(held.pieces(chunk({"content": "b"}, "b"))) == ">b"


def test_where_a_worker_may_be_lost_no_text_is_shown_before_its_tokens_are_told() -> None:
    held = HeldDelta(texts=True, until_logprobs=True)
    assert shown(held.pieces(chunk({"content": "a"}))) == ""
    assert shown(held.pieces(chunk({}, "a"))) == "a"
    assert shown(held.pieces(chunk(call("", "add")))) == ""
    assert shown(held.pieces(chunk({}, "x"))) == "", "what the engine may have closed waits for what follows"


def test_a_stop_string_and_what_may_begin_one_wait_where_they_may_be_cut() -> None:
    held = HeldDelta(texts=True, stops=["##", "end"])
    assert shown(held.pieces(chunk({"content": "a"}, "a"))) == "a"
    assert shown(held.pieces(chunk({"content": "b#"}, "b#"))) == ""
    assert shown(held.pieces(chunk({"content": "#c"}, "#c"))) == "b##c"
    assert shown(held.pieces(chunk({"content": "the ending"}, "the ending"))) == "", "it is in there"
    assert held.drop() == []
    assert shown(held.pieces(chunk({"content": "the e"}, "the e"))) == ""
    assert shown(held.at_end("stop")) == "the e"

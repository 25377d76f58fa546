"""The completions endpoint: what is asked so that a turn can be recorded, what its answers say was sampled, whole and
in chunks, and what of them is a client's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
import pytest

from miles_router.engines.answers import UnreadableAnswer
from miles_router.engines.facts import Facts
from miles_router.engines.openai.choices import Choice
from miles_router.engines.openai.completions import CompletionsEndpoint

COMPLETIONS = CompletionsEndpoint()


def choice(
    text: str = "ab",
    ids: Sequence[int] = (11, 12),
    prompt: Sequence[int] | None = (5, 6),
    index: int = 0,
    finish: str | None = "length",
) -> dict[str, Any]:
    """As SGLang 0.5.23 gives it with `logprobs: 0`, which asks for those of the sampled tokens alone."""
    logprobs = {
        "text_offset": [-1] * len(ids),
        "token_logprobs": [-1.0 / each for each in ids],
        "tokens": [],
        "top_logprobs": [],
    }
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": finish,
        "matched_stop": None,
        "token_ids": list(ids),
        **({} if prompt is None else {"prompt_token_ids": list(prompt)}),
    }


def answer(*choices: dict[str, Any], versions: Sequence[str] = ("1",)) -> dict[str, Any]:
    spans = [{"version": version, "start": place, "end": place + 1} for place, version in enumerate(versions)]
    if len(versions) == 1:
        spans[0]["end"] = len(choices[0]["token_ids"])
    metadata = {"weight_version": versions[-1], "weight_versions": spans}
    return {"id": "r", "object": "text_completion", "choices": list(choices), "usage": {}, "metadata": metadata}


# What is asked, and what is the client's


def test_ids_and_logprobs_are_asked_for_and_nothing_else_changes() -> None:
    fields = {"prompt": [5, 6], "n": 2, "suffix": "x", "stream": True, "unknown": [1]}
    asked = {"return_token_ids": True, "logprobs": 0, "stream_options": {"include_usage": True}}
    assert orjson.loads(COMPLETIONS.request(fields, stream=True)) == {**fields, **asked}
    assert orjson.loads(COMPLETIONS.request({"logprobs": 3}, stream=False))["logprobs"] == 3


def test_what_the_client_did_not_ask_for_is_taken_out() -> None:
    whole = answer(choice(), choice(index=1))
    seen = COMPLETIONS.for_client(whole, {"n": 2})
    assert [set(each) for each in seen["choices"]] == [
        {"index", "text", "logprobs", "finish_reason", "matched_stop"}
    ] * 2
    assert [each["logprobs"] for each in seen["choices"]] == [None, None]
    assert {**seen, "choices": whole["choices"]} == whole


@pytest.mark.parametrize("logprobs", [0, 1])
def test_what_the_client_asked_for_itself_it_gets(logprobs: int) -> None:
    assert COMPLETIONS.for_client(answer(choice()), {"logprobs": logprobs, "return_token_ids": True}) == answer(
        choice()
    )


def test_a_chunk_that_another_layer_emptied_is_not_shown() -> None:
    assert COMPLETIONS.chunk_for_client({"choices": [], "sglext": {}}, {}) is None
    assert COMPLETIONS.chunk_for_client({"choices": [], "sglext": {}, "usage": {"a": 1}}, {}) is None
    asked = {"stream_options": {"include_usage": True}}
    usage = {"choices": [], "usage": {"a": 1}}
    assert COMPLETIONS.chunk_for_client({**usage, "sglext": {}}, asked) == usage
    assert COMPLETIONS.chunk_for_client({"choices": [], "sglext": {"a": 1}}, {}) == {"choices": [], "sglext": {"a": 1}}


def test_no_engine_s_streams_fall_short() -> None:
    assert COMPLETIONS.shortfall(Facts(schemas={}, tool_call_parser="", reasoning_parser="")) is None
    assert COMPLETIONS.chunks is None


# What a whole answer says


def test_a_whole_answer_tells_what_was_sampled() -> None:
    (read,) = COMPLETIONS.choices(answer(choice(), versions=("1", "2")))
    assert (read.ids, read.logprobs, read.prompt) == ([11, 12], [-1 / 11, -1 / 12], [5, 6])
    assert (read.versions, read.facts["versions"], read.facts["rid"]) == ([("1", 0, 1), ("2", 1, 2)], "engine", "r")
    assert (read.message, read.finish, read.matched) == ({"role": "assistant", "content": "ab"}, "length", None)


def test_the_versions_of_the_first_choice_hold_for_all_if_they_are_one() -> None:
    whole = answer(choice(), choice(ids=[13, 14, 15], index=1))
    whole["metadata"]["weight_version"] = "later"
    read = COMPLETIONS.choices(whole)
    assert [each.versions for each in read] == [[("1", 0, 2)], [("1", 0, 3)]]
    assert [each.facts for each in read] == [
        {"rid": None, "first_token_at": None, "versions": "engine_first_choice"}
    ] * 2
    with pytest.raises(UnreadableAnswer, match="weights changed"):
        COMPLETIONS.choices(answer(choice(), choice(index=1), versions=("1", "2")))


def test_an_engine_that_tells_no_version_is_taken_at_its_word() -> None:
    assert [each.versions for each in COMPLETIONS.choices({"choices": [choice()]})] == [[]]
    two = [choice(), choice(index=1)]
    assert [each.versions for each in COMPLETIONS.choices({"choices": two})] == [[], []]


@pytest.mark.parametrize(
    "bad",
    [None, "a", {}, {**choice(), "finish_reason": None}, {**choice(), "token_ids": 3}, {**choice(), "logprobs": [1]}],
)
def test_an_answer_that_lacks_something_is_refused(bad: Any) -> None:
    with pytest.raises(UnreadableAnswer):
        COMPLETIONS.choices({"choices": [choice(), bad], "metadata": {"weight_version": "1"}})


@pytest.mark.parametrize("metadata", ["1", {"weight_versions": [{"start": 0}]}, {"weight_versions": [3]}])
@pytest.mark.parametrize("count", [1, 2])
def test_versions_of_another_form_are_refused(metadata: object, count: int) -> None:
    with pytest.raises(UnreadableAnswer):
        COMPLETIONS.choices({"choices": [choice()] * count, "metadata": metadata})


def test_versions_that_leave_a_gap_are_refused() -> None:
    metadata = {"weight_versions": [{"version": "1", "start": 0, "end": 1}]}
    with pytest.raises(UnreadableAnswer, match="versions_end_elsewhere"):
        COMPLETIONS.choices({"choices": [choice()], "metadata": metadata})


# What a stream says


def grown(*chunks: Sequence[dict[str, Any]], rid: str = "r") -> list[Choice]:
    growing = COMPLETIONS.growing()
    for choices in chunks:
        growing.add({"id": rid, "choices": choices}, lambda: "4")
    return growing.choices()


def test_ids_and_logprobs_come_with_each_chunk() -> None:
    end = {**choice("b", [13], None, finish="stop"), "matched_stop": 13}
    (read,) = grown([choice("a", [11], finish=None)], [choice("", [12], None, finish=None)], [end], [])
    assert (read.ids, read.logprobs, read.prompt) == ([11, 12, 13], [-1 / 11, -1 / 12, -1 / 13], [5, 6])
    assert (read.message, read.versions) == ({"role": "assistant", "content": "ab"}, [("4", 0, 3)])
    assert (read.finish, read.matched, read.facts) == ("stop", 13, {"rid": "r"})


def test_choices_of_a_stream_are_told_apart() -> None:
    growing = COMPLETIONS.growing()
    for rid, each in (
        ("c", choice("x", [1], [5], 2, finish=None)),
        ("a", choice("y", [2], [5], 0)),
        ("b", choice("z", [3], [5], 1)),
        ("c", choice("!", [4], None, 2)),
    ):
        growing.add({"id": rid, "choices": [each]}, lambda: None)
    assert [(each.index, each.ids, each.facts["rid"]) for each in growing.choices()] == [
        (0, [2], "a"),
        (1, [3], "b"),
        (2, [1, 4], "c"),
    ]


def test_a_stream_that_is_cut_is_refused() -> None:
    with pytest.raises(UnreadableAnswer, match="no finish reason"):
        grown([choice(finish=None)])
    with pytest.raises(UnreadableAnswer, match="a malformed chunk"):
        grown([{**choice(), "token_ids": 3}])

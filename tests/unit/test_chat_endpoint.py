"""The chat endpoint: what is asked so that a turn can be recorded, what its answers say was sampled, whole and in
chunks, and what of them is a client's. Anything that lacks something is refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import orjson
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from miles_router.engines.answers import UnreadableAnswer
from miles_router.engines.facts import Facts
from miles_router.engines.openai.chat import ChatEndpoint
from miles_router.engines.openai.chat_stream import GrowingMessage
from miles_router.engines.openai.choices import Choice, StreamShortfall
from tests.support.sessions import call

CHAT = ChatEndpoint()
#: As SGLang 0.5.23 gives it, cut to what counts.
CHOICE: Mapping[str, Any] = {
    "index": 0,
    "message": {"role": "assistant", "content": " ...\n\n绚", "reasoning_content": None},
    "logprobs": {"content": [{"token": "a"}]},
    "finish_reason": "stop",
    "matched_stop": 151645,
    "prompt_token_ids": [151644, 872, 198],
    "response_token_ids": [5468, 103814, 151645],
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
ANSWER: dict[str, Any] = {
    "id": "f83d",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [CHOICE],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
    "metadata": {"weight_version": "2"},
}
OWN = {"prompt_token_ids", "response_token_ids", "meta_info"}


def whole(**choice: Any) -> Choice:
    (read,) = CHAT.choices({"choices": [{**CHOICE, **choice}]})
    return read


def with_meta(**meta: Any) -> dict[str, Any]:
    return {**CHOICE, "meta_info": {**CHOICE["meta_info"], **meta}}


# What is asked


def sent(fields: Mapping[str, Any], *, stream: bool, ids: list[int] | None = None) -> dict[str, Any]:
    written = None if ids is None else (b"[", *(b"%d" % each for each in ids), b"]")
    return dict(orjson.loads(CHAT.request(fields, stream=stream, ids=written)))


def test_whole_answers_ask_for_ids_logprobs_and_versions_streams_for_what_exists() -> None:
    fields = {"model": "m", "messages": [1], "logprobs": False, "unknown": [1.5, None]}
    known = {**fields, "logprobs": True}
    assert sent(fields, stream=False) == {**known, "return_meta_info": True, "return_prompt_token_ids": True}
    asked = {"return_output_ids_in_sglext": True, "return_cached_tokens_details": True}
    usage = {"stream_options": {"include_usage": True}}
    assert sent(fields, stream=True) == {**known, **asked, **usage, "return_input_ids_in_sglext": True}


def test_ids_take_the_place_of_the_messages_and_are_not_asked_for() -> None:
    assert sent({"messages": [], "input_ids": None}, stream=False, ids=[5]) == {
        "messages": [],
        "logprobs": True,
        "return_meta_info": True,
        "input_ids": [5],
    }
    assert "return_input_ids_in_sglext" not in sent({}, stream=True, ids=[5])


def test_a_stream_that_is_generated_whole_is_asked_for_as_a_whole_answer() -> None:
    fields = {"messages": [], "stream": True, "stream_options": {"include_usage": True}, "n": 2}
    assert {"stream", "stream_options"} & sent(fields, stream=False).keys() == set()
    assert sent(fields, stream=True)["stream_options"] == {"include_usage": True}


# What a whole answer says


def test_a_choice_tells_what_was_sampled() -> None:
    choice = whole()
    assert (choice.ids, choice.logprobs) == ([5468, 103814, 151645], [-12.092743873596191, -0.5, 0.0])
    assert (choice.index, choice.finish, choice.matched) == (0, "stop", 151645)
    assert choice.message == CHOICE["message"]
    assert choice.prompt == [151644, 872, 198]
    assert choice.versions == [("1", 0, 2), ("2", 2, 3)]
    assert choice.facts == {"rid": "f83d", "cached_tokens": 2, "retractions": 1, "versions": "engine"}


def test_a_tool_call_has_no_matched_stop() -> None:
    calls = {**with_meta(finish_reason={"type": "tool_calls", "matched": None}), "finish_reason": "tool_calls"}
    assert (whole(**calls).finish, whole(**calls).matched) == ("tool_calls", None)
    length = {**with_meta(finish_reason={"type": "length", "length": 3}), "matched_stop": None}
    assert whole(**length).matched is None


def test_an_answer_without_tokens_has_no_pieces() -> None:
    choice = whole(**with_meta(output_token_logprobs=[], completion_tokens=0, weight_versions=[]))
    assert (choice.pieces(), choice.versions) == ((), [])


def test_every_choice_is_read() -> None:
    answer = {**ANSWER, "choices": [{**CHOICE, "index": index} for index in range(3)]}
    assert [choice.index for choice in CHAT.choices(answer)] == [0, 1, 2]
    with pytest.raises(UnreadableAnswer):
        CHAT.choices({**answer, "choices": [CHOICE, None]})


LACKING: Mapping[str, Any] = {
    "no meta_info": {name: value for name, value in CHOICE.items() if name != "meta_info"},
    "meta_info null": {**CHOICE, "meta_info": None},
    "no logprobs": with_meta(output_token_logprobs=None),
    "fewer logprobs": with_meta(completion_tokens=4),
    "no completion tokens": with_meta(completion_tokens=None),
    "pairs": with_meta(output_token_logprobs=[[-1.0]] * 3),
    "no spans": with_meta(weight_versions=[{"version": "1"}]),
    "a gap": with_meta(weight_versions=[{"version": "1", "start": 1, "end": 3}]),
    "no finish reason": {**CHOICE, "finish_reason": None},
    "message null": {**CHOICE, "message": None},
    "message a text": {**CHOICE, "message": "hello"},
    "a nameless call": {**CHOICE, "message": {"tool_calls": [{"function": {"name": 7}}]}},
    "no choice": None,
    "a text": "hello",
    "a strange finish reason": with_meta(finish_reason="stop"),
}


@pytest.mark.parametrize("choice", LACKING.values(), ids=LACKING)
def test_an_answer_that_lacks_something_is_refused(choice: Any) -> None:
    with pytest.raises(UnreadableAnswer):
        CHAT.choices({"choices": [choice]})


# What of it is the client's


def seen(**fields: Any) -> dict[str, Any]:
    """The first choice as a client sees it that asked for these fields."""
    choice: dict[str, Any] = CHAT.for_client(ANSWER, fields)["choices"][0]
    return choice


def test_what_the_client_did_not_ask_for_is_taken_out() -> None:
    answer = CHAT.for_client(ANSWER, {})
    (only,) = answer["choices"]
    assert only.keys() == CHOICE.keys() - OWN | {"response_token_ids"}
    assert only["logprobs"] is None
    assert only["message"] is CHOICE["message"]
    assert {**answer, "choices": ANSWER["choices"]} == ANSWER
    assert "meta_info" in CHOICE, "what is recorded stays as it is"


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("return_prompt_token_ids", {"prompt_token_ids", "response_token_ids"}),
        ("return_token_ids", {"prompt_token_ids", "response_token_ids"}),
        ("return_meta_info", {"meta_info", "response_token_ids"}),
        ("logprobs", {"response_token_ids"}),
    ],
)
def test_what_the_client_asked_for_itself_it_gets(field: str, given: set[str]) -> None:
    assert seen(**{field: True}).keys() & OWN == given
    assert seen(**{field: False}).keys() & OWN == {"response_token_ids"}
    assert (seen(**{field: True})["logprobs"] is None) is (field != "logprobs")


def test_meta_info_has_logprobs_only_where_they_were_asked_for() -> None:
    meta = CHOICE["meta_info"]
    assert seen(return_meta_info=True, logprobs=True)["meta_info"] == meta
    assert meta.keys() - seen(return_meta_info=True)["meta_info"].keys() == {
        "output_token_logprobs",
        "output_token_logprobs_length",
        "output_top_logprobs",
        "input_token_logprobs",
        "input_top_logprobs",
    }


# Chunks


def delta(index: int = 0, finish: str | None = None, logprobs: Iterable[float] = (), **fields: Any) -> dict[str, Any]:
    entries = [{"token": "t", "logprob": logprob} for logprob in logprobs]
    return {
        "index": index,
        "delta": fields,
        "logprobs": {"content": entries} if entries else None,
        "finish_reason": finish,
        "matched_stop": 13 if finish == "stop" else None,
    }


def chunk(*choices: Any, rid: str = "rid", **fields: Any) -> dict[str, Any]:
    return {"id": rid, "choices": list(choices), **fields}


IDS = chunk(sglext={"input_ids": [5, 6], "output_ids": [[11, 12]], "cached_tokens_details": {"device": 4, "host": 1}})
TEXT = chunk(delta(logprobs=[-0.5, 0.0], content="Hello"))
END = chunk(delta(finish="stop"))


def grown(*chunks: Any, version: str | None = "1") -> list[Choice]:
    growing = CHAT.growing()
    for each in chunks:
        growing.add(each, lambda: version)
    return growing.choices()


def test_a_stream_s_ids_and_cached_tokens_come_with_its_last_chunk() -> None:
    (choice,) = grown(chunk(delta(role="assistant", content="")), TEXT, END, IDS)
    assert (choice.ids, choice.logprobs, choice.prompt) == ([11, 12], [-0.5, 0.0], [5, 6])
    assert (choice.finish, choice.matched, choice.message["content"]) == ("stop", 13, "Hello")
    assert (choice.versions, choice.facts) == ([("1", 0, 2)], {"rid": "rid", "cached_tokens": 5})


def test_a_chunk_says_whether_it_brings_tokens() -> None:
    growing = CHAT.growing()
    assert [growing.add(each, lambda: None) for each in (chunk(delta(role="assistant")), TEXT, END, IDS)] == [
        False,
        True,
        False,
        False,
    ]


def test_choices_of_a_stream_are_told_apart() -> None:
    first, second = grown(
        chunk(delta(0, logprobs=[-1.0], content="x"), rid="a"),
        chunk(delta(1, logprobs=[-2.0, -3.0], content="y"), rid="b"),
        chunk(delta(1, "length"), rid="b"),
        chunk(delta(0, "stop"), rid="b"),
        chunk(sglext={"input_ids": [5], "output_ids": [[1], [2, 3]]}, rid="b"),
    )
    assert (first.index, first.ids, first.message["content"], first.finish, first.matched) == (0, [1], "x", "stop", 13)
    assert (second.index, second.ids, second.message["content"], second.matched) == (1, [2, 3], "y", None)
    assert (first.facts["rid"], second.facts["rid"]) == ("a", "b")
    assert first.prompt is second.prompt


@pytest.mark.parametrize(
    ("chunks", "reason"),
    [
        ([TEXT, END], "a stream ended without the sampled ids"),
        ([TEXT, END, chunk(sglext={"output_ids": [[11, 12, 13]]})], "a stream left out logprobs"),
        ([TEXT, IDS], "incomplete: a stream ended without a finish reason"),
        ([TEXT], "incomplete: a stream ended without a finish reason"),
        ([TEXT, END, chunk(sglext={"output_ids": [[11, 12], [1]]})], r"choices are \[0\], but there are ids for 2"),
        ([chunk(delta(0, "stop"), delta(2, "stop")), chunk(sglext={"output_ids": [[], []]})], r"choices are \[0, 2\]"),
        ([chunk(delta(content=7)), END, IDS], "incomplete"),
        ([chunk(delta(tool_calls=[{"index": 0, "id": "nameless"}])), END, IDS], "incomplete"),
        ([chunk(delta("a", "stop")), END, IDS], "incomplete"),  # type: ignore[arg-type]
    ],
)
def test_a_stream_that_lacks_something_is_refused(chunks: list[Any], reason: str) -> None:
    with pytest.raises(UnreadableAnswer, match=reason) as error:
        grown(*chunks)
    assert isinstance(error.value, StreamShortfall) is ("sampled ids" in reason or "logprobs" in reason)


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"choices": None},
        {"choices": [3]},
        {"choices": [{"delta": {}}]},
        {"choices": [{"index": 0, "delta": "a"}]},
        {"choices": [], "sglext": 3},
        {"choices": [], "sglext": {"output_ids": [7]}},
    ],
)
def test_a_chunk_of_another_form_is_refused(bad: Any) -> None:
    with pytest.raises(UnreadableAnswer, match=r"a malformed chunk|the ids of a stream are not lists"):
        CHAT.growing().add(bad, lambda: "1")


# Messages


def test_a_message_grows_out_of_deltas() -> None:
    message = GrowingMessage()
    for each in (
        {"role": "assistant", "content": "", "reasoning_content": None},
        {"reasoning_content": "I "},
        {"reasoning_content": "add."},
        {"content": "So"},
        {"content": None},
        {"content": ": "},
    ):
        message.add(each)
    assert message.message() == {"role": "assistant", "content": "So: ", "reasoning_content": "I add."}


def test_calls_grow_side_by_side() -> None:
    message = GrowingMessage()
    for each in (
        {"index": 1, "id": "call_b", "type": "function", "function": {"name": "sub", "arguments": ""}},
        {"index": 0, "id": "call_a", "type": "function", "function": {"name": "add", "arguments": None}},
        {"index": 1, "id": None, "function": {"name": None, "arguments": '{"a"'}},
        {"index": 0, "function": {"arguments": "{}"}},
        {"index": 1, "function": {"arguments": ": 1}"}},
        {"index": 1, "function": None},
    ):
        message.add({"tool_calls": [each]})
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
    message.add({"tool_calls": [{"index": None, "id": "c", "function": {"name": "add", "arguments": "{"}}]})
    message.add({"tool_calls": [{"function": {"arguments": "}"}}]})
    assert message.message()["tool_calls"][0]["function"] == {"name": "add", "arguments": "{}"}


# A whole answer as a stream

CALLS = [call("add", '{"a": 1}', "call_1"), call("sub", "{}", "call_2")]
LOGPROBS = {"content": [{"token": "a", "bytes": [97], "logprob": -0.5, "top_logprobs": []}]}


def said(index: int = 0, finish: str = "stop", logprobs: Any = None, **message: Any) -> dict[str, Any]:
    return {
        "index": index,
        "message": {"role": "assistant", "content": "", **message},
        "logprobs": logprobs,
        "finish_reason": finish,
        "matched_stop": 151645,
    }


def chunks(*choices: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    return list(CHAT.chunks({**ANSWER, "choices": choices}, fields))


def test_openai_s_client_puts_the_answer_together_again() -> None:
    state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
    for each in chunks(
        said(0, content="a", reasoning_content="hm", logprobs=LOGPROBS), said(1, "tool_calls", tool_calls=CALLS)
    ):
        state.handle_chunk(ChatCompletionChunk.model_validate(each))
    text, calls = state.get_final_completion().choices
    assert (text.message.content, text.message.model_dump()["reasoning_content"]) == ("a", "hm")
    assert text.finish_reason == "stop"
    assert text.logprobs is not None
    assert text.logprobs.content is not None
    assert text.logprobs.content[0].logprob == -0.5
    assert calls.finish_reason == "tool_calls"
    assert [(each.id, each.function.name, each.function.arguments) for each in calls.message.tool_calls or []] == [
        ("call_1", "add", '{"a": 1}'),
        ("call_2", "sub", "{}"),
    ]


def test_each_choice_is_a_role_then_its_answer_then_why_it_ended() -> None:
    found = chunks(said(0, content="a"), said(1, "length"))
    assert [each["choices"][0]["index"] for each in found] == [0, 0, 0, 1, 1, 1]
    assert {each["object"] for each in found} == {"chat.completion.chunk"}
    assert {(each["id"], each["created"], each["model"]) for each in found} == {("f83d", 1, "m")}
    role, answer, end = (each["choices"][0] for each in found[:3])
    assert role["delta"] == {"role": "assistant", "content": ""}
    assert (answer["delta"], answer["finish_reason"]) == ({"content": "a"}, None)
    assert (end["delta"], end["finish_reason"], end["matched_stop"]) == ({}, "stop", 151645)
    assert found[4]["choices"][0]["delta"] == {}
    assert found[5]["choices"][0]["finish_reason"] == "length"
    assert all(each["choices"][0].keys() >= {"finish_reason", "logprobs"} for each in found)


def test_our_own_reader_puts_the_message_together_as_it_was() -> None:
    message = {"content": "a", "reasoning_content": "hm", "tool_calls": CALLS}
    growing = GrowingMessage()
    for each in chunks(said(0, "tool_calls", **message)):
        growing.add(each["choices"][0]["delta"])
    assert growing.message() == {"role": "assistant", **message}


def test_usage_comes_last_and_only_if_it_was_asked_for() -> None:
    assert all(each["choices"] for each in chunks(said(content="a")))
    *others, usage = chunks(said(content="a"), stream_options={"include_usage": True})
    assert (usage["choices"], usage["usage"]) == ([], ANSWER["usage"])
    assert not any("usage" in each for each in others)


# Engines


FIELD = "return_output_ids_in_sglext"


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (Facts(), None),
        (Facts(schemas={"ChatCompletionRequest": frozenset({FIELD})}, tool_call_parser="qwen25"), None),
        (Facts(schemas={"ChatCompletionRequest": frozenset({"messages"})}), FIELD),
        (Facts(tool_call_parser="", reasoning_parser=""), "parser"),
        (Facts(tool_call_parser="", reasoning_parser="qwen3"), None),
        (Facts(tool_call_parser=""), None),
    ],
)
def test_an_engine_s_facts_say_what_its_streams_do_not_tell(facts: Facts, reason: str | None) -> None:
    shortfall = CHAT.shortfall(facts)
    assert shortfall is None if reason is None else reason in str(shortfall)

"""The chat and completions endpoints: what is asked to record a turn, and what answers say was sampled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest

from middleware_hub.openai_session.agent_apis.agent_api import ReplyWriter
from middleware_hub.openai_session.turns.stream import TurnStream
from miles_router.engines.answers import UnreadableAnswer
from miles_router.engines.events import Event
from miles_router.engines.openai.chat import ChatEndpoint
from miles_router.engines.openai.chat_stream import GrowingChat, GrowingMessage
from miles_router.engines.openai.choices import Choice, StreamShortfall, VersionTrack
from miles_router.engines.openai.held_deltas import HeldDelta
from miles_router.engines.openai.text_reader import REPARSE_FRACTION, LiveText
from miles_router.engines.parsers.growing import GrowingText
from miles_router.middlewares.generation import ResumeServices
from miles_router.trajectory import VersionRun
from tests.support.sessions import SYSTEM, Scene, user

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


def with_meta(**meta: Any) -> dict[str, Any]:
    return {**CHOICE, "meta_info": {**CHOICE["meta_info"], **meta}}


def test_whole_answers_ask_for_ids_logprobs_and_versions_streams_for_what_exists() -> None:
    fields = {"model": "m", "messages": [1], "logprobs": False, "unknown": [1.5, None]}
    known = {**fields, "logprobs": True}
    whole, streamed = (orjson.loads(CHAT.request(fields, stream=stream)) for stream in (False, True))
    assert whole == {**known, "return_meta_info": True, "return_prompt_token_ids": True}
    asked = {"return_output_ids_in_sglext": True, "return_cached_tokens_details": True}
    usage = {"stream_options": {"include_usage": True}}
    assert streamed == {**known, **asked, **usage, "return_input_ids_in_sglext": True}


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


def delta(index: int = 0, finish: str | None = None, logprobs: Iterable[float] = (), **fields: Any) -> dict[str, Any]:
    entries = [{"token": "t", "logprob": logprob} for logprob in logprobs]
    return {
        "index": index,
        "delta": fields,
        "logprobs": {"content": entries} if entries else None,
        "finish_reason": finish,
        "matched_stop": 13 if finish == "stop" else None,
    }


def chunk(*choices: Any, **fields: Any) -> dict[str, Any]:
    return {"id": "rid", "choices": list(choices), **fields}


IDS = chunk(sglext={"input_ids": [5, 6], "output_ids": [[11, 12]], "cached_tokens_details": {"device": 4, "host": 1}})
TEXT = chunk(delta(logprobs=[-0.5, 0.0], content="Hello"))
END = chunk(delta(finish="stop"))


def grown(chunks: Iterable[Any]) -> list[Choice]:
    growing = CHAT.growing()
    for each in chunks:
        growing.add(each, lambda: "1")
    return growing.choices()


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
        grown(chunks)
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


Runs = Sequence[tuple[str, int, int]]


@pytest.mark.parametrize(
    ("versions", "reason"),
    [
        ([("1", 1, 3)], "versions_leave_gaps"),
        ([("1", 0, 1), ("2", 2, 3)], "versions_leave_gaps"),
        ([("1", 0, 2), ("2", 1, 3)], "versions_leave_gaps"),
        ([("1", 0, 3), ("2", 3, 1), ("3", 1, 3)], "versions_leave_gaps"),
        ([("1", 0, 2)], "versions_end_elsewhere"),
        ([("1", 0, 4)], "versions_end_elsewhere"),
    ],
)
def test_versions_that_do_not_fit_the_tokens_are_refused(versions: Runs, reason: str) -> None:
    runs = [VersionRun(*run) for run in versions]
    with pytest.raises(UnreadableAnswer, match=reason):
        Choice(0, {"role": "assistant"}, "stop", None, [1, 2, 3], [-1.0, -2.0, -3.0], runs).pieces()


@pytest.mark.parametrize(
    ("seen", "runs"),
    [
        (["1", "1", "1"], [("1", 0, 3)]),
        (["1", None, None], [("1", 0, 3)]),
        ([None, None, None], []),
        ([None, "1", "1"], []),
        (["1", "2", "1"], [("1", 0, 1), ("2", 1, 2), ("1", 2, 3)]),
    ],
)
def test_worker_that_left_keeps_its_version_and_an_unknown_one_has_none(seen: Sequence[str | None], runs: Runs) -> None:
    track = VersionTrack()
    for end, version in enumerate(seen, start=1):
        track.record(end, version)
        track.record(end, "no token came")
    assert track.runs == runs


SAID = {"index": 0, "delta": {"content": "a"}, "logprobs": {"content": [{"logprob": -0.5, "bytes": [97]}]}}
NO_CHUNKS = {
    "a choice of a great number": {"choices": [{**SAID, "index": 10**12}]},
    "a choice without a number": {"choices": [{**SAID, "index": "0"}]},
    "a choice below all": {"choices": [{**SAID, "index": -1}]},
    "memory for bytes": {"choices": [{**SAID, "logprobs": {"content": [{"logprob": -0.5, "bytes": 1 << 40}]}}]},
    "ids that are one": {"choices": [], "sglext": {"output_ids": 5}},
    "ids that are a number": {"choices": [], "sglext": {"output_ids": [5]}},
}
#: What a stream tells at its end that is nothing to go on from, or nothing at all.
ODD_ENDS = {
    "ids that are texts": {"choices": [], "sglext": {"output_ids": [["5"]]}},
    "logprobs of other tokens": {"choices": [], "sglext": {"output_ids": [[5, 6]]}},
    "usage that is a text": {"choices": [], "usage": {"prompt_tokens": "5"}},
}


def opened() -> TurnStream:
    request = Scene().ask([SYSTEM, user("Add.")], stream=True).request
    resume = cast(ResumeServices, SimpleNamespace(resume_lost=False))
    return TurnStream(request, {}, ChatEndpoint(), ReplyWriter(), lambda: "1", None, resume)


def told(stream: TurnStream, chunk: Any) -> bytes:
    return stream.feed(Event.read(b"data: " + orjson.dumps(chunk) + b"\n\n"))


@pytest.mark.parametrize("chunk", NO_CHUNKS.values(), ids=NO_CHUNKS)
def test_what_no_engine_says_is_no_chunk(chunk: Any) -> None:
    stream = opened()
    assert not stream.mark_lost()
    assert orjson.loads(told(stream, {"choices": [SAID]}).removeprefix(b"data: "))["choices"][0]["index"] == 0
    told(stream, chunk)
    assert not stream.mark_lost(), "what followed is not known"


@pytest.mark.parametrize("chunk", ODD_ENDS.values(), ids=ODD_ENDS)
def test_an_odd_end_is_nothing_to_go_on_from(chunk: Any) -> None:
    stream = opened()
    for each in ({"choices": [SAID]}, chunk):
        told(stream, each)
    assert isinstance(stream.growing, GrowingChat)
    assert stream.growing.usage is None
    with pytest.raises(UnreadableAnswer):
        stream.growing.as_generate(0, 1, None)


def test_a_text_that_grows_by_tokens_is_read_ever_more_seldom() -> None:
    reads: list[int] = []

    class Counting:
        def message(self, text: str) -> tuple[dict[str, Any], str]:
            reads.append(len(text))
            return {"role": "assistant", "content": text}, text

    live = LiveText(cast(GrowingText, Counting()), GrowingMessage())
    for length in range(1, 20_001):
        live.new_deltas("a" * length)
        if length < REPARSE_FRACTION:
            assert len(live.shown.message()["content"]) == length
    assert len(reads) < 256 * 8, "its square would be 20 000"
    assert length - reads[-1] <= length // REPARSE_FRACTION


def held_chunk(delta: Any, told: str | None = None) -> dict[str, Any]:
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


NAMED, COMPLETE = held_chunk(call("", "add")), held_chunk(call('{"a": 1}'))
SHOWN = 'add{"a": 1}'
ENDED: dict[str, tuple[list[Any], str, str]] = {
    "closed by the engine": ([NAMED, held_chunk({}, ' {"a"'), COMPLETE, held_chunk({}, ": 1")], "length", "add"),
    "sampled": ([NAMED, held_chunk({}, ' {"a": 1}'), COMPLETE], "length", SHOWN),
    "sampled with other spaces": ([NAMED, held_chunk({}, '{"a":1}}'), COMPLETE], "abort", SHOWN),
    "in tags": ([NAMED, held_chunk({}, "<parameter=a>1</parameter></function>"), COMPLETE], "length", SHOWN),
    "in tags, closed": ([NAMED, held_chunk({}, "<parameter=a>1"), COMPLETE], "length", "add"),
    "in tags, with an object": (
        [NAMED, held_chunk({}, "<parameter=a>{}</parameter></function>"), COMPLETE],
        "length",
        SHOWN,
    ),
    "cut in a text that ends as a call": ([NAMED, held_chunk({}, ' {"a": "</tool_call>'), COMPLETE], "length", "add"),
    "nested too deep": ([NAMED, held_chunk(call('{"a": ' + "[" * 100_000))], "length", "add"),
    "of too many digits": ([NAMED, held_chunk(call('{"a": 1' + "1" * 5000))], "length", "add"),
    "not complete": ([NAMED, held_chunk(call('{"a'))], "length", 'add{"a'),
    "the model's own end": ([NAMED, COMPLETE], "tool_calls", SHOWN),
}


@pytest.mark.parametrize(("chunks", "finish", "expected"), [*ENDED.values()], ids=[*ENDED])
def test_at_an_early_end_a_call_is_complete_only_if_it_was_sampled(
    chunks: list[Any], finish: str, expected: str
) -> None:
    held = HeldDelta()
    seen = [piece for each in chunks for piece in held.pieces(each)]
    assert shown([*seen, *held.at_end(finish)]) == expected

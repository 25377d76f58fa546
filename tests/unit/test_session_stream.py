"""A streamed turn: the agent sees each chunk as it comes, less what it did not ask for; all of it is recorded."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import orjson
import pytest

from middleware_hub.openai_session.faces.face import ReplyWriter
from middleware_hub.openai_session.turns.stream import TurnStream
from miles_router.engines.answers import UnreadableAnswer
from miles_router.engines.events import DATA, END, LAST_EVENT, Event, EventReader
from miles_router.engines.openai.chat import ChatEndpoint
from miles_router.engines.openai.choices import OpenAIEndpoint, StreamShortfall
from miles_router.engines.openai.completions import CompletionsEndpoint
from tests.support.sessions import SYSTEM, Scene, user

MESSAGES = [SYSTEM, user("Add.")]
EXTRA = {"input_ids": [5, 6], "output_ids": [[11, 12, 13]], "cached_tokens_details": {"device": 4, "host": 1}}
ASKED_EXTRA: dict[str, Any] = {
    "return_input_ids_in_sglext": True,
    "return_output_ids_in_sglext": True,
    "return_cached_tokens_details": True,
}
ASKED_USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}


def event(*choices: dict[str, Any], **fields: Any) -> bytes:
    head = {"id": "rid", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return DATA + orjson.dumps({**head, "choices": choices, **fields}) + END


def choice(
    text: str | None = None,
    *logprobs: float,
    index: int = 0,
    finish: str | None = None,
    matched: int | str | None = None,
    **delta: Any,
) -> dict[str, Any]:
    entries = [{"token": "t", "bytes": [116], "logprob": logprob, "top_logprobs": []} for logprob in logprobs]
    shown = {"reasoning_content": None, **delta} | ({} if text is None else {"content": text})
    return {
        "index": index,
        "delta": shown,
        "logprobs": {"content": entries} if entries else None,
        "finish_reason": finish,
        "matched_stop": matched,
    }


def choice_of_text(text: str, ids: Sequence[int], finish: str | None = None, index: int = 0) -> dict[str, Any]:
    """A choice of a completion's chunk."""
    logprobs = {"token_logprobs": [-1.0] * len(ids)}
    tokens = {"token_ids": list(ids), "prompt_token_ids": [5, 6]}
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish, **tokens}


def role(index: int = 0) -> dict[str, Any]:
    return choice("", index=index, role="assistant")


FINISH = event(choice(finish="stop", matched=13))
IDS = event(sglext=EXTRA, usage=None)
#: As SGLang 0.5.23 streams with a parser: what shows no text comes in a chunk of its own.
STREAM = [
    event(role()),
    event(choice("Hel", -0.5)),
    event(choice("lo", -0.25)),
    event(choice(None, 0.0)),
    FINISH,
    IDS,
    LAST_EVENT,
]
USAGE = event(usage={"prompt_tokens": 2, "completion_tokens": 3})


class Reading:
    """A stream that is read to its end, and what the agent saw before and after it was recorded."""

    endpoint: OpenAIEndpoint = ChatEndpoint()

    def __init__(self, events: Iterable[bytes], version: Callable[[], str | None] = lambda: "1", **fields: Any) -> None:
        plan = Scene().ask(MESSAGES, stream=True, **fields)
        self.stream = TurnStream(plan.request, plan.grant.fields, self.endpoint, ReplyWriter(), version)
        self.live = [self.stream.feed(Event.read(each)) for each in events]
        self.at_the_end = self.stream.release()

    @property
    def chunks(self) -> list[dict[str, Any]]:
        return [orjson.loads(each[len(DATA) :]) for each in self.events if each not in (b"", LAST_EVENT)]

    @property
    def events(self) -> list[bytes]:
        return [*self.live, *EventReader().feed(self.at_the_end)]


def test_what_was_sampled_is_known_at_the_end() -> None:
    (generated,) = Reading(STREAM).stream.choices()
    assert (generated.ids, generated.logprobs) == ([11, 12, 13], [-0.5, -0.25, 0.0])
    assert generated.prompt == [5, 6]
    assert (generated.finish, generated.matched) == ("stop", 13)
    assert generated.message == {"role": "assistant", "content": "Hello"}
    assert generated.versions == [("1", 0, 3)]
    facts = generated.facts
    assert (facts["rid"], facts["cached_tokens"], facts["versions"]) == ("rid", 5, "router")
    assert facts["first_token_at"] is not None
    assert [piece.tokens.tolist() for piece in generated.pieces()] == [[11, 12, 13]]


def test_each_chunk_is_shown_when_it_comes_and_the_end_waits_until_it_is_recorded() -> None:
    reading = Reading(STREAM)
    assert [bool(shown) for shown in reading.live] == [True, True, True, False, False, False, False]
    assert reading.at_the_end.startswith(FINISH[: FINISH.index(b'"logprobs"')])
    assert reading.at_the_end.endswith(LAST_EVENT)


def test_an_agent_that_asked_for_nothing_sees_a_plain_stream() -> None:
    chunks = Reading(STREAM).chunks
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks] == ["", "Hel", "lo", None]
    assert all(each["logprobs"] is None for chunk in chunks for each in chunk["choices"])
    assert not any("sglext" in chunk for chunk in chunks)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]


def test_an_agent_that_asked_for_all_sees_every_chunk_as_it_was() -> None:
    reading = Reading([*STREAM[:-1], USAGE, LAST_EVENT], logprobs=True, **ASKED_EXTRA, **ASKED_USAGE)
    assert [orjson.loads(each[6:]) for each in [*STREAM[:-1], USAGE]] == reading.chunks


@pytest.mark.parametrize(
    ("field", "name"), list(zip(ASKED_EXTRA, ("input_ids", "output_ids", "cached_tokens_details"), strict=True))
)
def test_of_the_engine_s_own_fields_the_agent_gets_those_it_asked_for(field: str, name: str) -> None:
    asked: dict[str, Any] = {field: True}
    assert Reading(STREAM, **asked).chunks[-1]["sglext"] == {name: EXTRA[name]}


def test_a_field_of_the_engine_that_nothing_here_asks_for_is_the_agent_s() -> None:
    ids = event(sglext={**EXTRA, "routed_experts": "AAAA", "spec_tokens_details": None})
    assert Reading([*STREAM[:-2], ids, LAST_EVENT]).chunks[-1]["sglext"] == {"routed_experts": "AAAA"}


def test_usage_beside_the_ids_stays_and_the_ids_go() -> None:
    ids = event(sglext=EXTRA, usage={"prompt_tokens": 2})
    last = Reading([*STREAM[:-2], ids, LAST_EVENT], **ASKED_USAGE).chunks[-1]
    assert last["usage"] == {"prompt_tokens": 2}
    assert "sglext" not in last


def test_usage_that_was_not_asked_for_is_not_shown() -> None:
    reading = Reading([*STREAM[:-1], USAGE, LAST_EVENT])
    assert all(chunk["choices"] for chunk in reading.chunks)
    assert reading.stream.growing.prompt_tokens is not None


def test_usage_comes_behind_the_finish_reason() -> None:
    reading = Reading([*STREAM[:-1], USAGE, LAST_EVENT], **ASKED_USAGE)
    assert not any(b'"usage":{' in shown for shown in reading.live)
    assert [bool(chunk["choices"]) for chunk in reading.chunks[-2:]] == [True, False]
    assert reading.chunks[-1]["usage"]["completion_tokens"] == 3


def test_continuous_usage_stays_on_the_chunks_that_say_something() -> None:
    usage = {"completion_tokens": 1}
    events = [event(choice("a", -1.0), usage=usage), event(choice(None, -1.0), usage=usage)]
    assert [chunk["usage"] for chunk in Reading(events).chunks] == [usage]


def test_logprobs_alone_are_shown_only_to_who_asked_for_them() -> None:
    events = [event(choice(None, -1.0)), event(choice("", -1.0, tool_calls=[]))]
    assert Reading(events).live == [b"", b""]
    assert len(Reading(events, logprobs=True).chunks) == 2


def test_a_chunk_that_never_had_logprobs_is_shown_even_if_it_is_empty() -> None:
    assert len(Reading([event(choice(None))]).chunks) == 1


def test_choices_are_told_apart() -> None:
    events = [
        event(role(0), id="a"),
        event(choice("x", -1.0, index=0), id="a"),
        event(role(1), id="b"),
        event(choice("y", -2.0, -3.0, index=1), id="b"),
        event(choice(index=1, finish="length"), id="b"),
        event(choice(index=0, finish="stop", matched="x"), id="b"),
        event(sglext={"input_ids": [5], "output_ids": [[1], [2, 3]]}, id="b"),
        LAST_EVENT,
    ]
    reading = Reading(events, n=2)
    first, second = reading.stream.choices()
    assert (first.index, first.ids, first.message["content"], first.finish) == (0, [1], "x", "stop")
    assert (second.index, second.ids, second.message["content"], second.finish) == (1, [2, 3], "y", "length")
    assert (first.facts["rid"], second.facts["rid"]) == ("a", "b")
    assert (first.matched, second.matched) == ("x", None)
    assert first.prompt is second.prompt
    assert [bool(shown) for shown in reading.live] == [True] * 4 + [False] * 4


def test_the_end_of_one_choice_does_not_keep_back_another() -> None:
    events = [event(choice(finish="stop")), event(choice("still", -1.0, index=1))]
    assert [bool(shown) for shown in Reading(events, n=2).live] == [False, True]


def test_a_tool_call_is_put_together_and_its_logprobs_kept() -> None:
    def piece(arguments: str, **fields: Any) -> dict[str, Any]:
        return {
            "index": 0,
            "id": None,
            "type": "function",
            "function": {"name": None, "arguments": arguments},
            **fields,
        }

    events = [
        event(role()),
        event(choice(None, -0.1)),
        event(choice(tool_calls=[piece("", id="call_1", function={"name": "add", "arguments": ""})])),
        event(choice(None, -0.2)),
        event(choice(tool_calls=[piece('{"a":')])),
        event(choice(tool_calls=[piece(" 1}")])),
        event(choice(None, -0.3)),
        event(choice(finish="tool_calls")),
        IDS,
        LAST_EVENT,
    ]
    reading = Reading(events)
    (generated,) = reading.stream.choices()
    (made,) = generated.message["tool_calls"]
    assert (made["id"], made["function"]) == ("call_1", {"name": "add", "arguments": '{"a": 1}'})
    assert (generated.logprobs, generated.finish) == ([-0.1, -0.2, -0.3], "tool_calls")
    assert [bool(shown) for shown in reading.live] == [
        True,
        False,
        False,
        False,
        True,
        True,
        False,
        True,
        False,
        False,
    ], "the last piece of a call waits"


@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
def test_events_cut_anywhere_are_read_all_the_same(size: int) -> None:
    reader, data = EventReader(), b"".join(STREAM)
    pieces = [data[begin : begin + size] for begin in range(0, len(data), size)]
    reading = Reading(whole for piece in pieces for whole in reader.feed(piece))
    assert reading.events == Reading(STREAM).events
    (generated,), (expected,) = reading.stream.choices(), Reading(STREAM).stream.choices()
    expected.facts["first_token_at"] = reading.stream.first_token_at
    assert generated == expected
    assert reader.rest == b""


# Versions


def test_versions_are_those_that_the_router_saw_when_the_tokens_came() -> None:
    seen = iter(["1", "1", "2"])
    (generated,) = Reading(STREAM, version=lambda: next(seen)).stream.choices()
    assert generated.versions == [("1", 0, 2), ("2", 2, 3)]


# What goes wrong


def refused(stream: TurnStream) -> UnreadableAnswer:
    """Why a stream cannot be recorded."""
    with pytest.raises(UnreadableAnswer) as error:
        stream.choices()
    return error.value


def test_an_engine_that_does_not_tell_the_ids_or_leaves_out_logprobs_is_known_by_it() -> None:
    silent = [each for each in STREAM if b'"logprob":0.0' not in each]
    for events in ([*STREAM[:-2], LAST_EVENT], silent):
        assert isinstance(refused(Reading(events).stream), StreamShortfall)


def test_a_stream_that_is_cut_says_nothing_of_the_engine_and_is_unusable() -> None:
    for cut in range(1, STREAM.index(FINISH) + 1):
        stream = Reading(STREAM[:cut]).stream
        assert stream.began
        assert not isinstance(refused(stream), StreamShortfall)


ERROR = b'data: {"error": {"message": "timeout", "code": 408}}\n\n'


@pytest.mark.parametrize("place", range(6))
def test_an_error_inside_a_stream_is_shown_in_its_place_and_nothing_is_recorded(place: int) -> None:
    reading = Reading([*STREAM[:place], ERROR, *STREAM[place:]])
    events = [each for each in reading.events if each]
    plain = [each for each in Reading(STREAM).events if each]
    assert [each for each in events if each != ERROR] == plain
    before = [each for each in Reading(STREAM[:place]).events if each]
    assert events.index(ERROR) == len(before)
    assert refused(reading.stream).args == ("incomplete: the stream ended with an error",)


def test_one_choice_s_error_is_the_whole_answer_s() -> None:
    events = [event(choice("x", -1.0)), ERROR, event(choice(finish="stop")), LAST_EVENT]
    stream = Reading(events, n=2).stream
    assert refused(stream).args == ("incomplete: the stream ended with an error",)


MALFORMED = [
    b"data: []\n\n",
    b"data: 3\n\n",
    b"data: {}\n\n",
    b'data: {"choices": null}\n\n',
    b'data: {"choices": [3]}\n\n',
    b'data: {"choices": [{"delta": {"content": "no index"}}]}\n\n',
    b'data: {"choices": [{"index": 0, "delta": "a"}]}\n\n',
    b'data: {"choices": [], "sglext": 3}\n\n',
]


@pytest.mark.parametrize("bad", MALFORMED)
def test_a_chunk_that_is_none_goes_on_as_it_is_and_nothing_is_recorded(bad: bytes) -> None:
    reading = Reading([STREAM[0], bad, *STREAM[1:]])
    assert reading.live[1] == bad
    assert reading.at_the_end == Reading(STREAM).at_the_end
    assert re.search("malformed chunk", str(refused(reading.stream)))
    assert not isinstance(refused(reading.stream), StreamShortfall)


def test_a_stream_without_a_chunk_never_began() -> None:
    assert not Reading([ERROR, LAST_EVENT]).stream.began
    assert not Reading([b": ping\n\n", event(usage={}), LAST_EVENT]).stream.began


def test_comments_and_events_of_other_names_pass() -> None:
    odd = b"event: odd\ndata: no chunk\n\n"
    reading = Reading([*STREAM[:2], b": data: ping\n\n", odd, *STREAM[2:5], b": late\n\n", *STREAM[5:]])
    assert reading.live[2:4] == [b": data: ping\n\n", odd]
    assert reading.live[7] == b""
    assert b": late\n\n" in reading.at_the_end
    assert len(reading.stream.choices()) == 1


def test_ids_in_an_event_of_their_own_are_read_too() -> None:
    """As SGLang sends them to who asks for that with `X-SGLExt-Ids-Framed`."""
    framed = b"event: sglext_ids\n" + IDS
    assert Reading([*STREAM[:-2], framed, LAST_EVENT]).stream.choices()[0].ids == [11, 12, 13]
    assert (
        Reading([*STREAM[:-2], framed, LAST_EVENT], **ASKED_EXTRA).events[-2].startswith(b"event: sglext_ids\ndata: ")
    )
    assert b"sglext" not in Reading([*STREAM[:-2], framed, LAST_EVENT]).at_the_end


# Completions


class CompletionReading(Reading):
    """The same of a completion."""

    endpoint = CompletionsEndpoint()


COMPLETION = [
    event(choice_of_text("a", [11])),
    event(choice_of_text("", [12])),
    event(choice_of_text("b", [13], "stop")),
    event(usage={"completion_tokens": 3}),
    LAST_EVENT,
]


def test_a_completion_s_end_waits_until_it_is_recorded_and_its_ids_are_taken_out() -> None:
    reading = CompletionReading(COMPLETION, **ASKED_USAGE)
    (generated,) = reading.stream.choices()
    assert (generated.ids, generated.versions) == ([11, 12, 13], [("1", 0, 3)])
    facts = {"rid": "rid", "first_token_at": reading.stream.first_token_at, "versions": "router"}
    assert generated.facts == facts
    assert [bool(shown) for shown in reading.live] == [True, True, False, False, False]
    assert reading.at_the_end.endswith(COMPLETION[3] + LAST_EVENT)
    assert not any(name in shown for shown in reading.events for name in (b"token_ids", b"token_logprobs"))


def test_a_completion_shows_what_the_client_asked_for() -> None:
    events = CompletionReading(COMPLETION, logprobs=0, return_token_ids=True, **ASKED_USAGE).events
    assert [each for each in events if each] == COMPLETION


def test_choices_of_a_completion_end_each_on_its_own() -> None:
    events = [
        event(choice_of_text("x", [1], index=2)),
        event(choice_of_text("y", [2], "length", index=0)),
        event(choice_of_text("z", [3], "length", index=1)),
        event(choice_of_text("!", [4], "length", index=2)),
        LAST_EVENT,
    ]
    reading = CompletionReading(events, n=3)
    assert [(each.index, each.ids) for each in reading.stream.choices()] == [(0, [2]), (1, [3]), (2, [1, 4])]
    assert [bool(shown) for shown in reading.live] == [True, False, False, False, False]


def test_a_completion_that_ends_with_an_error_is_unusable() -> None:
    reading = CompletionReading([COMPLETION[2], ERROR, *COMPLETION[3:]])
    assert reading.live[1] == b""
    assert b"timeout" in reading.at_the_end
    assert refused(reading.stream).args == ("incomplete: the stream ended with an error",)

"""Streams of turns that may be carried on: what no engine says is no chunk; what follows costs no more than it says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest

from middleware_hub.openai_session.faces.face import ReplyWriter
from middleware_hub.openai_session.turns.stream import TurnStream
from miles_router.engines.answers import UnreadableAnswer
from miles_router.engines.events import Event
from miles_router.engines.openai.chat import ChatEndpoint
from miles_router.engines.openai.chat_stream import GrowingChat, GrowingMessage
from miles_router.engines.openai.text_reader import REPARSE_FRACTION, LiveText
from miles_router.engines.parsers.growing import GrowingText
from miles_router.middlewares.generation import ResumeServices
from tests.support.sessions import SYSTEM, Scene, user

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


def test_what_is_no_logprob_is_nothing_to_go_on_from() -> None:
    stream = opened()
    said = {"choices": [{**SAID, "logprobs": {"content": [{}]}}]}
    for chunk in (said, {"choices": [], "sglext": {"output_ids": [[5]]}}):
        told(stream, chunk)
    assert isinstance(stream.growing, GrowingChat)
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

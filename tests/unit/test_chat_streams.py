"""Streams of chat that may be carried on: what no engine says is no chunk; what follows costs no more than it says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import orjson
import pytest

from miles_router.asgi.replies import drop
from miles_router.engines.events import Event
from miles_router.engines.openai.chat_stream import GrowingMessage
from miles_router.engines.openai.text_reader import FINENESS, LiveText
from miles_router.engines.parsers.growing import GrowingText
from miles_router.partial_rollouts.chat.opening import OpeningChatStream
from miles_router.partial_rollouts.generation import CannotResume
from miles_router.partial_rollouts.leg import Leg, ResumeContext

SAID = {"index": 0, "delta": {"content": "a"}, "logprobs": {"content": [{"logprob": -0.5, "bytes": [97]}]}}
NO_CHUNKS = {
    "a choice of a great number": {"choices": [{**SAID, "index": 10**12}]},
    "a choice without a number": {"choices": [{**SAID, "index": "0"}]},
    "a choice below all": {"choices": [{**SAID, "index": -1}]},
    "memory for bytes": {"choices": [{**SAID, "logprobs": {"content": [{"logprob": -0.5, "bytes": 1 << 40}]}}]},
    "ids that are one": {"choices": [], "sglext": {"output_ids": 5}},
    "ids that are a number": {"choices": [], "sglext": {"output_ids": [5]}},
    "ids that are texts": {"choices": [], "sglext": {"output_ids": [["5"]]}},
    "a prompt that is a text": {"choices": [], "sglext": {"input_ids": "abc"}},
    "usage that is a text": {"choices": [], "usage": {"prompt_tokens": "5"}},
}


def opened() -> OpeningChatStream:
    router = SimpleNamespace(metrics=None, pool=SimpleNamespace(find=lambda _: None))
    context = cast(ResumeContext, SimpleNamespace(router=router, resume_lost=False))
    leg = cast(Leg, SimpleNamespace(exchange=SimpleNamespace(flight=SimpleNamespace(worker_url=None))))
    stream = OpeningChatStream(drop, context, leg, 1)
    stream.keep = lambda *_, **__: None  # type: ignore[method-assign]
    return stream


@pytest.mark.parametrize("chunk", NO_CHUNKS.values(), ids=NO_CHUNKS)
async def test_what_no_engine_says_is_no_chunk(chunk: Any) -> None:
    stream = opened()
    assert not stream.lose()
    event = Event.read(b"data: " + orjson.dumps({"choices": [SAID]}) + b"\n\n")
    assert orjson.loads((await stream.event(event)).removeprefix(b"data: "))["choices"][0]["index"] == 0
    event = Event.read(b"data: " + orjson.dumps(chunk) + b"\n\n")
    assert (await stream.event(event)).endswith(event.raw)
    assert list(stream.choices) == [0]
    assert not stream.lose(), "what followed is not known"


async def test_what_is_no_logprob_is_nothing_to_go_on_from() -> None:
    stream = opened()
    said = {"choices": [{**SAID, "logprobs": {"content": [{}]}}]}
    for chunk in (said, {"choices": [], "sglext": {"output_ids": [[5]]}}):
        await stream.event(Event.read(b"data: " + orjson.dumps(chunk) + b"\n\n"))
    with pytest.raises(CannotResume):
        stream.leg_of_choice(0, 1)


def test_a_text_that_grows_by_tokens_is_read_ever_more_seldom() -> None:
    reads: list[int] = []

    class Counting:
        def message(self, text: str) -> tuple[dict[str, Any], str]:
            reads.append(len(text))
            return {"role": "assistant", "content": text}, text

    live = LiveText(cast(GrowingText, Counting()), GrowingMessage())
    for length in range(1, 20_001):
        live.certain("a" * length)
        if length < FINENESS:
            assert len(live.shown.message()["content"]) == length
    assert len(reads) < 256 * 8, "its square would be 20 000"
    assert length - reads[-1] <= length // FINENESS

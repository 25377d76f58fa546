"""Answers of SGLang-Jax that are none: they are known for that, whatever stands in them."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from miles_router.engines.answers import UnreadableAnswer
from miles_router.engines.events import Event
from miles_router.engines.generate import GenerateRequest
from miles_router.engines.sglang_jax.generate import GenerateTranslation

META = {"id": "r", "prompt_tokens": 1, "completion_tokens": 1, "finish_reason": {"type": "stop"}}
ANSWER: dict[str, Any] = {"text": "a", "meta_info": {**META, "output_token_logprobs": [[-1.0, 5, None]]}}
DEEP = b"[" * 400 + b"]" * 400
NONE = {
    "a text for what is told": orjson.dumps({**ANSWER, "meta_info": "told"}),
    "a list for what is told": orjson.dumps({**ANSWER, "meta_info": [[]]}),
    "nested too deep": orjson.dumps({**ANSWER, "text": "DEEP"}).replace(b'"DEEP"', DEEP),
}


def translation(*, stream: bool) -> GenerateTranslation:
    request = {"input_ids": [1], "return_logprob": True, "stream": stream}
    return GenerateTranslation(GenerateRequest.read(request))


@pytest.mark.parametrize("answer", NONE.values(), ids=NONE)
def test_an_answer_that_is_none_is_unreadable(answer: bytes) -> None:
    assert translation(stream=False).whole(orjson.dumps(ANSWER), None)
    with pytest.raises(UnreadableAnswer):
        translation(stream=False).whole(answer, None)
    with pytest.raises(UnreadableAnswer):
        translation(stream=True).event(Event.read(b"data: " + answer + b"\n\n"), None)

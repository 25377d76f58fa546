"""How many tokens an answer says that it has."""

from __future__ import annotations

import pytest

from miles_router.engines.footprint import sampled_tokens

TELLING = {
    "SGLang": b'..."meta_info":{"id":"a","completion_tokens":123,"cached_tokens":0,"e2e_latency":0.1}}',
    "SGLang's events": b'data: {"text":"","meta_info":{"completion_tokens":123,"cached_tokens":0}}\n\ndata: [DONE]\n\n',
    "several": b'[{"meta_info":{"completion_tokens":7}},{"meta_info":{"completion_tokens":123}}]',
    "usage": b'"usage":{"prompt_tokens":5,"completion_tokens":123,"completion_tokens_details":null}}',
    "usage with spaces": b'"usage": {"prompt_tokens": 5, "completion_tokens": 123, "prompt_tokens_details": null}}',
    "usage that ends with it": b'"usage": {"prompt_tokens": 5, "completion_tokens": 123}}\n',
}
SILENT = {
    "nothing": b"",
    "another": b'{"total_tokens":123}',
    "null": b'{"completion_tokens":null,"a":1}',
    "a text that speaks of it": b'{"content":"it says \\"completion_tokens\\":123, or so"}',
    "cut": b'{"completion_tokens":',
    "below zero": b'{"completion_tokens":-5,"a":1}',
    "a fraction": b'{"completion_tokens":1.5,"a":1}',
    "a text": b'{"completion_tokens":"12","a":1}',
}


@pytest.mark.parametrize("end", TELLING.values(), ids=TELLING)
def test_the_end_of_an_answer_tells_its_tokens(end: bytes) -> None:
    assert sampled_tokens(end) == 123


@pytest.mark.parametrize("end", SILENT.values(), ids=SILENT)
def test_what_does_not_tell_them_is_no_number(end: bytes) -> None:
    assert sampled_tokens(end) == 0

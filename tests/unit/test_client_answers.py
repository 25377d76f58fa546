"""What `/generate` answered, read."""

from __future__ import annotations

from typing import Any

import pytest

from miles_router.client.answers import Generation
from miles_router.client.errors import InvalidReply

META: dict[str, Any] = {"id": "r", "prompt_tokens": 3, "finish_reason": {"type": "stop", "matched": 2}}
ANSWER: dict[str, Any] = {"text": "ab", "output_ids": [4, 5], "meta_info": META}


def test_a_generation_is_read() -> None:
    made = Generation.from_json(ANSWER)
    assert (made.text, made.output_ids, made.rid, made.prompt_tokens) == ("ab", [4, 5], "r", 3)
    assert (made.finish_reason, made.status, made.logprobs) == ("stop", "completed", None)


@pytest.mark.parametrize(("reason", "status"), [("stop", "completed"), ("length", "truncated"), ("abort", "aborted")])
def test_how_it_ended_says_what_a_sample_of_it_is(reason: str, status: str) -> None:
    assert Generation.from_json({**ANSWER, "meta_info": {**META, "finish_reason": {"type": reason}}}).status == status


@pytest.mark.parametrize("reason", [None, {"type": "unheard of"}])
def test_what_has_not_ended_in_a_known_way_is_no_sample(reason: Any) -> None:
    made = Generation.from_json({**ANSWER, "meta_info": {**META, "finish_reason": reason}})
    with pytest.raises(InvalidReply, match="finish reason"):
        _ = made.status


def test_logprobs_are_those_of_the_sampled_ids() -> None:
    meta = {**META, "output_token_logprobs": [[-0.5, 4, None], [-0.25, 5, None]]}
    assert Generation.from_json({**ANSWER, "meta_info": meta}).logprobs == [-0.5, -0.25]


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        [ANSWER],
        {},
        {**ANSWER, "meta_info": None},
        *({name: value for name, value in ANSWER.items() if name != gone} for gone in ANSWER),
        *({**ANSWER, "meta_info": {name: META[name] for name in META if name != gone}} for gone in META),
    ],
)
def test_what_is_no_generation_is_refused(answer: Any) -> None:
    with pytest.raises(InvalidReply):
        Generation.from_json(answer)

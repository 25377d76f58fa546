"""Answers of `/generate` as they grow in a stream."""

from __future__ import annotations

from typing import Any

import pytest

from middleware_hub.radix_tree.replies import Growing, Unusable, stripped


def event(text: str, ids: list[int], total: int, finish: str | None = None) -> dict[str, Any]:
    meta = {
        "completion_tokens": total,
        "output_token_logprobs": [[-1.0, token, None] for token in ids],
        "finish_reason": None if finish is None else {"type": finish},
    }
    return {"text": text, "output_ids": ids, "meta_info": meta}


@pytest.mark.parametrize(
    "events",
    [
        [event("a", [1], 1), event("ab", [1, 2], 2), event("abc", [1, 2, 3], 3, "stop")],
        [event("a", [1], 1), event("b", [2], 2), event("c", [3], 3, "stop")],
        [event("a", [1, 2], 1), event("ab", [1, 2, 3], 2), event("abc", [1, 2, 3], 3, "stop")],
    ],
    ids=["everything so far", "what is new", "ids that came while an event was written"],
)
def test_a_stream_grows_to_its_answer_however_it_tells_it(events: list[dict[str, Any]]) -> None:
    growing = Growing()
    *before, whole = [growing.take(each) for each in events]
    assert before == [None, None]
    assert whole is not None
    assert (whole["text"], whole["output_ids"]) == ("abc", [1, 2, 3])
    assert [entry[1] for entry in whole["meta_info"]["output_token_logprobs"]] == [1, 2, 3]


def test_an_event_that_leaves_ids_out_is_none() -> None:
    growing = Growing()
    growing.take(event("a", [1], 1))
    with pytest.raises(Unusable, match="incomplete"):
        growing.take(event("c", [3], 3))


@pytest.mark.parametrize("odd", [7, [7], None, {"text": "a"}, {"meta_info": None}])
def test_what_is_no_answer_stays_as_it_is(odd: object) -> None:
    assert stripped(odd) == odd

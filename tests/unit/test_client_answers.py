"""What `/generate` and `/retrieve_from_text` answered, read."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from miles_router.client.answers import Generation, Retrieved
from miles_router.client.errors import InvalidReply, InvalidSample
from miles_router.trajectory import Piece, Trajectory, to_bytes
from miles_router.trajectory.wire import pack

META: dict[str, Any] = {"id": "r", "prompt_tokens": 3, "finish_reason": {"type": "stop", "matched": 2}}
ANSWER: dict[str, Any] = {"text": "ab", "output_ids": [4, 5], "meta_info": META}
TRAJECTORY = Trajectory([Piece.given([1, 2, 3]), Piece.sampled([4, 5], [-0.5, -0.25], "v")])
FACTS: dict[str, Any] = {
    "response": "xyzab",
    "token_length": 5,
    "loss_mask_length": 5,
    "matched_tokens": 5,
    "ambiguous": True,
    "candidates": ["q", "r"],
    "rid": "r",
    "finish_reason": "stop",
    "finished": True,
    "weight_versions": [{"version": "v", "start": 3, "end": 5}],
}


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


def retrieval(trajectory: Trajectory = TRAJECTORY, **facts: Any) -> bytes:
    return to_bytes(trajectory, {"facts": orjson.dumps({**FACTS, **facts}).decode()})


def test_a_retrieval_is_read() -> None:
    found = Retrieved.from_bytes(retrieval())
    assert found.trajectory == TRAJECTORY
    assert (len(found), found.tokens.tolist(), found.loss_mask.tolist()) == (5, [1, 2, 3, 4, 5], [0, 0, 0, 1, 1])
    assert (found.logprobs.tolist(), found.weight_versions) == ([0, 0, 0, -0.5, -0.25], [("v", 3, 5)])
    assert (found.text, found.matched_tokens, found.ambiguous, found.candidates) == ("xyzab", 5, True, ("q", "r"))
    assert (found.rid, found.finish_reason, found.finished) == ("r", "stop", True)


def test_a_retrieval_of_what_no_rollout_can_have_is_refused() -> None:
    with pytest.raises(InvalidSample) as caught:
        Retrieved.from_bytes(retrieval(weight_versions=[{"version": "v", "start": 3, "end": 4}]))
    assert caught.value.invariant == "versions_cover_the_loss"


@pytest.mark.parametrize("data", [b"", b'{"tokens": []}', pack({}, {}), pack({}, {"facts": "{}"}), retrieval()[:-1]])
def test_what_is_no_retrieval_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidReply):
        Retrieved.from_bytes(data)

"""What `/retrieve_from_text` answers: written by the router, read by its client."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import orjson
import pytest
from safetensors.numpy import load, save

from miles_router.trajectory import InvalidTrajectory, Malformed, Piece, Retrieved, Trajectory
from miles_router.trajectory.retrieved import read_safetensors, write_safetensors
from miles_router.trajectory.safetensors import pack, unpack

TRAJECTORY = Trajectory([Piece.given([1, 2, 3]), Piece.sampled([4, 5], [-0.5, -0.1], "é")])
FOUND = Retrieved(TRAJECTORY, "xyzab", 5, ("q", "r"), "r", "stop", True, ("1",))
NEVER = Retrieved(Trajectory([Piece.given([9])]), "never", 0)
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
    "cache_versions": ["1"],
}
RUNS = [{"version": "é", "start": 3, "end": 5}]


def file_of(**facts: Any) -> bytes:
    """The answer as the official library writes it."""
    arrays = {"tokens": FOUND.tokens, "logprobs": FOUND.logprobs, "loss_mask": FOUND.loss_mask}
    told = json.dumps({**FACTS, "weight_versions": RUNS, **facts})
    return save({name: np.array(each) for name, each in arrays.items()}, {"facts": told})


def check_found(found: Retrieved) -> None:
    assert found.trajectory == TRAJECTORY
    assert (len(found), found.tokens.tolist(), found.loss_mask.tolist()) == (5, [1, 2, 3, 4, 5], [0, 0, 0, 1, 1])
    assert found.logprobs.tolist() == np.array([0, 0, 0, -0.5, -0.1], dtype=np.float32).tolist()
    assert found.weight_versions == [("é", 3, 5)]
    assert (found.text, found.matched_tokens, found.ambiguous, found.candidates) == ("xyzab", 5, True, ("q", "r"))
    assert (found.rid, found.finish_reason, found.finished) == ("r", "stop", True)
    assert found.cache_versions == ("1",)


def test_what_the_router_writes_its_client_reads() -> None:
    check_found(read_safetensors(write_safetensors([FOUND], many=False)))
    never = read_safetensors(write_safetensors([NEVER], many=False))
    assert (never.tokens.tolist(), never.rid, never.ambiguous, never.finished) == ([9], None, False, None)


def test_the_official_library_reads_and_writes_the_same() -> None:
    check_found(read_safetensors(file_of()))
    tensors = load(write_safetensors([NEVER, FOUND], many=True))
    assert {name: (str(each.dtype), each.tolist()) for name, each in tensors.items() if name.startswith("1.")} == {
        "1.tokens": ("int32", [1, 2, 3, 4, 5]),
        "1.logprobs": ("float32", FOUND.logprobs.tolist()),
        "1.loss_mask": ("uint8", [0, 0, 0, 1, 1]),
    }
    facts = orjson.loads(unpack(write_safetensors([NEVER, FOUND], many=True))[1]["facts"])
    assert facts[1] == {**FACTS, "weight_versions": RUNS}


def test_json_has_the_same_and_leaves_logprobs_out_where_nobody_wants_them() -> None:
    shown = orjson.loads(b"".join(FOUND.json_parts()))
    assert shown == {
        **FACTS,
        "tokens": [1, 2, 3, 4, 5],
        "loss_mask": [0, 0, 0, 1, 1],
        "rollout_logp": [0.0, 0.0, 0.0, -0.5, -0.1],
        "weight_versions": RUNS,
    }
    assert "rollout_logp" not in orjson.loads(b"".join(FOUND.json_parts(with_logprobs=False)))


def test_a_retrieval_of_what_no_rollout_can_have_is_refused() -> None:
    with pytest.raises(InvalidTrajectory) as caught:
        read_safetensors(file_of(weight_versions=[{"version": "v", "start": 3, "end": 4}]))
    assert caught.value.invariant == "versions_cover_the_loss"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b'{"tokens": []}',
        pack({}, {}),
        pack({}, {"facts": "{}"}),
        pack({"tokens": np.array([1], dtype=np.int32)}, {"facts": json.dumps({**FACTS, "weight_versions": []})}),
        file_of()[:-1],
        file_of(candidates=None),
        file_of(weight_versions=[{}]),
        write_safetensors([FOUND], many=True),
    ],
)
def test_what_is_no_retrieval_is_malformed(data: bytes) -> None:
    with pytest.raises(Malformed):
        read_safetensors(data)

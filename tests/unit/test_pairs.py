"""Prefill/decode pairs on the wire: what both halves are asked, and the one answer that their two make."""

from __future__ import annotations

import base64
import random
from typing import Any

import orjson
import pytest

from miles_router.engines.answers import UnreadableAnswer
from miles_router.engines.engine import CannotServe
from miles_router.engines.events import write_event
from miles_router.engines.pairs.held_rows import RowStrings
from miles_router.engines.pairs.joining import LostByRetraction, join_answer
from miles_router.engines.pairs.prefill import PrefillAnswer
from miles_router.engines.pairs.request import PairedRequest
from miles_router.engines.rows import EXPERT_FIELDS, INDEXER_FIELDS
from miles_router.engines.sglang.pairs import paired

GENERATE = "/generate"


def asked(path: str = GENERATE, **body: Any) -> PairedRequest:
    return paired(path, orjson.dumps(body), orjson.loads)


def handed(**meta: Any) -> PrefillAnswer:
    told = {
        "id": "p",
        "finish_reason": {"type": "length", "length": 0},
        "completion_tokens": 1,
        "weight_version": "1",
        **meta,
    }
    body = {"text": "", "output_ids": [7], "meta_info": told}
    return read(orjson.dumps(body))


def taken(body: bytes) -> tuple[bytes, RowStrings]:
    """An answer without its rows, which came in pieces, and these."""
    rows = RowStrings([EXPERT_FIELDS, INDEXER_FIELDS])
    remains = b"".join(rows.feed(body[at : at + 7]) for at in range(0, len(body), 7))
    return remains + rows.end(), rows


def read(body: bytes, *, streamed: bool = False) -> PrefillAnswer:
    return PrefillAnswer.read(GENERATE, *taken(body), streamed=streamed)


def one(body: bytes, prefill: PrefillAnswer, request: PairedRequest, *, changed: bool = False) -> bytes:
    return b"".join(join_answer(*taken(body), prefill, request, changed=changed))


def answer(versions: list[tuple[str, int, int]] = [("1", 0, 3)], **meta: Any) -> bytes:  # noqa: B006
    spans = [{"version": version, "start": start, "end": end} for version, start, end in versions]
    told = {"num_retractions": 0, "weight_version": spans[-1]["version"], "weight_versions": spans, **meta}
    return orjson.dumps({"text": "", "output_ids": [7, 8, 9], "meta_info": told})


def joined(body: bytes, prefill: PrefillAnswer, request: PairedRequest | None = None, *, changed: bool = False) -> Any:
    return orjson.loads(one(body, prefill, request or asked(), changed=changed))["meta_info"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/api/chat", {}),
        ("/v1/audio/transcriptions", {}),
        ("/v1/chat/completions", {"n": 2}),
        ("/v1/completions", {"n": 2}),
        ("/v1/completions", {"echo": True, "logprobs": 1}),
        ("/v1/chat/completions", {"return_routed_experts": True}),
        ("/v1/chat/completions", {"return_routed_experts": True, "return_meta_info": True, "stream": True}),
        ("/v1/messages", {"return_routed_experts": True}),
        (GENERATE, {"input_embeds": [[1.0]], "sampling_params": {"n": 2}}),
    ],
)
def test_what_a_pair_cannot_do_is_refused(path: str, body: dict[str, Any]) -> None:
    with pytest.raises(CannotServe):
        asked(path, **body)


@pytest.mark.parametrize(
    ("finishes", "outcome"),
    [
        ([{"type": "length", "length": 0}] * 2, "handed_over"),
        ([{"type": "abort", "status_code": None}] * 2, "aborted"),
        ([{"type": "abort", "status_code": None}, {"type": "length", "length": 0}], "partly_aborted"),
        ([{"type": "abort", "status_code": 500}, {"type": "length", "length": 0}], "failed"),
    ],
)
def test_what_became_of_a_prompt_is_seen(finishes: list[Any], outcome: str) -> None:
    answers = [{"meta_info": {"finish_reason": each, "completion_tokens": 1}} for each in finishes]
    assert read(orjson.dumps(answers)).outcome == outcome
    events = b"".join(write_event({**each, "index": index}) for index, each in enumerate(answers))
    assert read(events, streamed=True).outcome == outcome


@pytest.mark.parametrize(
    ("told", "is_so"),
    [
        ([("2", 0, 3)], [("1", 0, 1), ("2", 1, 3)]),
        ([("2", 0, 1)], [("1", 0, 1)]),
        ([("2", 0, 1), ("3", 1, 3)], [("1", 0, 1), ("3", 1, 3)]),
        ([("2", 0, 2), ("3", 2, 3)], [("1", 0, 1), ("2", 1, 2), ("3", 2, 3)]),
        ([("1", 0, 2), ("3", 2, 3)], [("1", 0, 2), ("3", 2, 3)]),
        ([("2", 0, 0)], [("2", 0, 0)]),
    ],
)
def test_the_first_token_is_stamped_by_the_half_that_sampled_it(
    told: list[tuple[str, int, int]], is_so: list[tuple[str, int, int]]
) -> None:
    meta = joined(answer(told), handed())
    assert [(each["version"], each["start"], each["end"]) for each in meta["weight_versions"]] == is_so
    assert meta["weight_version"] == is_so[-1][0]


def test_what_was_retracted_over_an_update_is_refused() -> None:
    for told, changed in ((answer([("2", 0, 3)], num_retractions=1), False), (answer(num_retractions=1), True)):
        with pytest.raises(LostByRetraction, match="the weight versions"):
            one(told, handed(), asked(), changed=changed)
    assert joined(answer(num_retractions=1), handed())["num_retractions"] == 1


def test_rows_that_the_prefill_half_does_not_tell_are_missed() -> None:
    with pytest.raises(UnreadableAnswer, match="prefill half returned no routed_experts"):
        one(answer(routed_experts="AAAA"), handed(), asked(return_routed_experts=True))


def test_rows_that_are_no_answers_are_refused() -> None:
    told = orjson.dumps({**orjson.loads(answer()), "sglext": {"routed_experts": "AAAA"}})
    with pytest.raises(UnreadableAnswer, match="outside of every answer"):
        one(told, handed(routed_experts="AAAA"), asked(return_routed_experts=True))


def joint(own: bytes, prompts: bytes) -> bytes:
    told, request = answer(routed_experts=base64.b64encode(own).decode()), asked(return_routed_experts=True)
    meta = joined(told, handed(routed_experts=base64.b64encode(prompts).decode()), request)
    return base64.b64decode(meta["routed_experts"], validate=True)


@pytest.mark.parametrize("width", [1, 2, 3, 8, 12])
def test_rows_are_joined_at_any_place(width: int) -> None:
    dice = random.Random(width)
    for prompts in range(5):
        for sampled in range(-1, 4):
            theirs = dice.randbytes(prompts * width)
            own = dice.randbytes(max(0, prompts + sampled) * width)
            assert joint(own, theirs) == (theirs + own[len(theirs) :])[: len(own)]


@pytest.mark.parametrize("broken", ["AAA", "A===", "****"])
def test_rows_that_are_no_base64_are_refused(broken: str) -> None:
    with pytest.raises(UnreadableAnswer):
        joined(answer(routed_experts=broken), handed(routed_experts="YWI="), asked(return_routed_experts=True))

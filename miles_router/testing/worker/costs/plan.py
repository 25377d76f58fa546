"""What a generation will say, known before it begins: a schedule needs to know how long it is."""

from __future__ import annotations

from functools import lru_cache

import numpy
import numpy.typing

from miles_router.testing.worker.model.constrained import stop_id
from miles_router.testing.worker.model.generation import Generation, GenerationRequest, Model

#: The key of `custom_labels` that says how many tokens an answer has, the stop id among them. A client of a real engine
#: does not know that; it tells `max_new_tokens`, which is what routers and schedules may go by. The field is SGLang's,
#: for metrics, and one of few that sglang-router 0.3.2 passes on as it came (it drops `custom_params`).
OUTPUT_TOKENS = "output_tokens"
#: The key that says how long the prompt was in front of such an answer: of a request whose prompt is longer, the rest
#: of the prompt is a part of the answer that has been said.
PROMPT_TOKENS = "prompt_tokens"


def planned(model: Model, request: GenerationRequest) -> list[int]:
    """The ids that will be sampled, at least one; ValueError for an `output_tokens` or a `prompt_tokens` that is no
    count."""
    labels = request.custom_labels or {}
    if OUTPUT_TOKENS in labels:
        wanted = _count(OUTPUT_TOKENS, labels[OUTPUT_TOKENS])
        if PROMPT_TOKENS in labels:
            wanted -= len(request.input_ids) - _count(PROMPT_TOKENS, labels[PROMPT_TOKENS])
        return _made_up(model, request, max(1, wanted))
    ahead = Generation(model, request)
    while ahead.finish_reason is None:
        ahead.step("")
    return ahead.output_ids or [stop_id(model.tokenizer)]  # a budget of 0 samples one all the same


def _count(name: str, told: str) -> int:
    if not told.isdecimal() or int(told) < 1:
        raise ValueError(f"{name} must be a positive integer, got {told!r}")
    return int(told)


def _made_up(model: Model, request: GenerationRequest, wanted: int) -> list[int]:
    """So many ids, within the budget: any but stop ids, then one of those. Far quicker than sampling."""
    most = request.sampling.max_new_tokens
    count = wanted if most is None else max(1, min(wanted, most))
    chosen = numpy.random.default_rng(request.noise).choice(
        _ordinary(model.tokenizer.size, model.tokenizer.eos_token_ids), count
    )
    ids: list[int] = chosen.tolist()
    return ids if count < wanted else [*ids[:-1], stop_id(model.tokenizer)]


@lru_cache(maxsize=8)
def _ordinary(size: int, stops: frozenset[int]) -> numpy.typing.NDArray[numpy.int_]:
    """The ids that end nothing."""
    return numpy.setdiff1d(numpy.arange(size), list(stops))

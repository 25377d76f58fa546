"""What a generation will say, known before it begins: a schedule needs to know how long it is."""

from __future__ import annotations

import numpy

from miles_router.testing.worker.model.constrained import stop_id
from miles_router.testing.worker.model.generation import Generation, GenerationRequest, Model

#: The key of `sampling_params.custom_params` that says how many tokens an answer has, the stop id among them. A client
#: of a real engine does not know that; it tells `max_new_tokens`, which is what routers and schedules may go by.
OUTPUT_TOKENS = "output_tokens"


def planned(model: Model, request: GenerationRequest) -> list[int]:
    """The ids that will be sampled, at least one; ValueError for an `output_tokens` that is no count."""
    told = (request.sampling.custom_params or {}).get(OUTPUT_TOKENS)
    if told is not None:
        return _made_up(model, request, told)
    ahead = Generation(model, request)
    while ahead.finish_reason is None:
        ahead.step("")
    return ahead.output_ids or [stop_id(model.tokenizer)]  # a budget of 0 samples one all the same


def _made_up(model: Model, request: GenerationRequest, told: object) -> list[int]:
    """So many ids, within the budget: any but stop ids, then one of those. Far quicker than sampling."""
    if not isinstance(told, int) or told < 1:
        raise ValueError(f"{OUTPUT_TOKENS} must be a positive integer, got {told!r}")
    most = request.sampling.max_new_tokens
    count = told if most is None else max(1, min(told, most))
    stops = model.tokenizer.eos_token_ids
    ordinary = numpy.setdiff1d(numpy.arange(model.tokenizer.size), list(stops))
    chosen = numpy.random.default_rng(request.noise).choice(ordinary, count)
    ids: list[int] = chosen.tolist()
    return ids if count < told else [*ids[:-1], stop_id(model.tokenizer)]

"""Compute the output of a generation before it begins, since the schedule needs its length."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy
import numpy.typing

from miles_router.testing.worker.model.constrained import stop_id
from miles_router.testing.worker.model.generation import Generation, GenerationRequest, Model

#: Key of `custom_labels` with the number of tokens of the answer, stop id included. A real client does not know it, so
#: routers and schedules may use only `max_new_tokens`. `custom_labels` is SGLang's field for metrics, and one of few
#: that sglang-router 0.3.2 forwards unchanged (it drops `custom_params`).
OUTPUT_TOKENS = "output_tokens"
#: Key of `custom_labels` with the length of the prompt before such an answer. If the request's prompt is longer, its
#: rest is the part of the answer that was generated earlier.
PROMPT_TOKENS = "prompt_tokens"


def planned(model: Model, request: GenerationRequest, labels: Mapping[str, str]) -> list[int]:
    """Return the ids that will be sampled, at least one.

    Args:
        labels: the request's `custom_labels`.

    Raises:
        ValueError: `output_tokens` or `prompt_tokens` is not a positive integer.
    """
    if OUTPUT_TOKENS in labels:
        wanted = _count(OUTPUT_TOKENS, labels[OUTPUT_TOKENS])
        if PROMPT_TOKENS in labels:
            wanted -= len(request.input_ids) - _count(PROMPT_TOKENS, labels[PROMPT_TOKENS])
        return _made_up(model, request, max(1, wanted))
    ahead = Generation(model, request)
    while ahead.finish_reason is None:
        ahead.step("")
    return ahead.output_ids or [stop_id(model.tokenizer)]  # even with a limit of 0 one id is sampled


def _count(name: str, told: str) -> int:
    if not told.isdecimal() or int(told) < 1:
        raise ValueError(f"{name} must be a positive integer, got {told!r}")
    return int(told)


def _made_up(model: Model, request: GenerationRequest, wanted: int) -> list[int]:
    """Return `wanted` random ids that end with a stop id, or `max_new_tokens` ids without one if that is less. This is
    much faster than sampling."""
    most = request.sampling.max_new_tokens
    count = wanted if most is None else max(1, min(wanted, most))
    chosen = numpy.random.default_rng(request.noise).choice(
        _ordinary(model.tokenizer.size, model.tokenizer.eos_token_ids), count
    )
    ids: list[int] = chosen.tolist()
    return ids if count < wanted else [*ids[:-1], stop_id(model.tokenizer)]


@lru_cache(maxsize=8)
def _ordinary(size: int, stops: frozenset[int]) -> numpy.typing.NDArray[numpy.int_]:
    """Return all ids that are not stop ids."""
    return numpy.setdiff1d(numpy.arange(size), list(stops))

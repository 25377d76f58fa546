"""The logprob fields of `meta_info`: for sampled ids, the prompt, the top ids and requested ids."""

import math
from collections.abc import Callable, Iterator
from typing import Any

from miles_router.testing.worker.model.generation import Generation, Model
from miles_router.testing.worker.model.sampling import context_hash

# `[logprob, id, text or null]`, the form of every logprob in SGLang's native answers.
Triple = list[Any]


def logprob_fields(model: Model, generation: Generation) -> dict[str, Any]:
    """Return the fields that `return_logprob` adds, in SGLang's order."""
    request, piece = generation.request, _piece_of(model, generation)
    fields: dict[str, Any] = {
        "input_token_logprobs": [
            [model.sampler.logprob(context, token) if context is not None else None, token, piece(token)]
            for context, token in _prompt_positions(generation)
        ],
        "output_token_logprobs": [
            [logprob, token, piece(token)]
            for logprob, token in zip(generation.logprobs, generation.output_ids, strict=True)
        ],
        "output_token_logprobs_length": len(generation.output_ids),
    }
    count, wanted = request.top_logprobs_num, request.token_ids_logprob
    if count > 0:
        likeliest = model.sampler.top_logprobs

        def top(context: int) -> list[Triple]:
            return [[logprob, token, piece(token)] for logprob, token in likeliest(context, count)]

        fields.update(_rows("top_logprobs", generation, top))
    if wanted:

        def asked(context: int) -> list[Triple]:
            return [[model.sampler.logprob(context, token), token, piece(token)] for token in wanted]

        fields.update(_rows("token_ids_logprobs", generation, asked))
    return fields


def mask_fields(model: Model, generation: Generation) -> dict[str, Any]:
    """Return the fields that `return_sampling_mask` adds."""
    count = 1 if generation.request.sampling.greedy else generation.request.sampling.top_k
    masks, logprobs = [], []
    for context, token in zip(generation.contexts, generation.output_ids, strict=True):
        mask = model.sampler.support(context, token, count)
        total = sum(math.exp(model.sampler.logprob(context, each)) for each in mask)
        masks.append(mask)
        logprobs.append(min(model.sampler.logprob(context, token) - math.log(total), 0.0))
    return {
        "output_token_sampling_mask": masks,
        "output_token_sampling_logprobs": logprobs,
        "output_token_sampling_mask_length": len(masks),
    }


def _rows(name: str, generation: Generation, row: Callable[[int], list[Triple]]) -> dict[str, Any]:
    """Return one field for the prompt and one for the output, with one row per position. The first row of the prompt is
    None, since the first token has no logprob."""
    prompt = [None if context is None else row(context) for context, _ in _prompt_positions(generation)]
    return {f"input_{name}": prompt, f"output_{name}": [row(context) for context in generation.contexts]}


def _prompt_positions(generation: Generation) -> Iterator[tuple[int | None, int]]:
    """Yield (hash of the context, id) of the prompt from `logprob_start_len` on; None as the first context."""
    start, ids = generation.request.logprob_start_len, generation.request.input_ids
    if not 0 <= start < len(ids):
        return
    context = context_hash(ids[: start + 1])
    yield None, ids[start]
    for token in ids[start + 1 :]:
        yield context, token
        context = context_hash((token,), context)


def _piece_of(model: Model, generation: Generation) -> Callable[[int], str | None]:
    if not generation.request.return_text_in_logprobs:
        return lambda token: None
    return lambda token: model.tokenizer.decode([token])

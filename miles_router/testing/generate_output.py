"""What a generation looks like in SGLang's native answers: `text`, `output_ids`, `meta_info`."""

import time
from typing import Any

from miles_router.testing.engine import Engine
from miles_router.testing.generation import ABORTED_WAITING, Generation, sequence_of
from miles_router.testing.moe import encode_routes, route
from miles_router.testing.sampling import context_hash
from miles_router.testing.settings import Settings


class OutputBuilder:
    """Renders one generation, again and again while it streams."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._moe = settings.moe
        self._incremental = settings.incremental_streaming_output
        self._began = time.perf_counter()
        self._sent_ids = 0
        self._sent_text = 0

    def render(self, generation: Generation) -> dict[str, Any]:
        """The answer, or the stream's next event: everything so far, or only what is new."""
        meta = self.meta_info(generation)
        text, ids = generation.text, generation.output_ids
        if generation.request.stream and self._incremental:
            text, ids = text[self._sent_text :], ids[self._sent_ids :]
            if "output_token_logprobs" in meta:
                meta["output_token_logprobs"] = meta["output_token_logprobs"][self._sent_ids :]
            self._sent_text, self._sent_ids = len(generation.text), len(generation.output_ids)
        answer: dict[str, Any] = {"text": text, "output_ids": list(ids), "meta_info": meta}
        if generation.request.return_prompt_token_ids:
            answer["prompt_token_ids"] = generation.request.input_ids
        return answer

    def meta_info(self, generation: Generation) -> dict[str, Any]:
        request, finish = generation.request, generation.finish_reason
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": finish,
            "prompt_tokens": generation.prompt_tokens,
            "weight_version": self._engine.weight_version,
            "num_retractions": generation.retractions,
        }
        if request.return_logprob:
            self._add_logprobs(meta, generation)
        meta["reasoning_tokens"] = 0
        meta["completion_tokens"] = len(generation.output_ids)
        meta["cached_tokens"] = generation.cached_tokens
        if finish is not None:
            self._add_finals(meta, generation)
        return meta

    def _add_finals(self, meta: dict[str, Any], generation: Generation) -> None:
        """What only the last event carries."""
        if generation.spans:
            meta["weight_versions"] = [
                {"version": span.version, "start": span.start, "end": span.end} for span in generation.spans
            ]
            meta["weight_version"] = generation.spans[-1].version
        if generation.request.return_routed_experts and self._moe is not None:
            start = generation.request.routed_experts_start_len
            meta["routed_experts"] = encode_routes(route(self._moe, sequence_of(generation), start))
        if generation.finish_reason == ABORTED_WAITING:
            for absent in ("prompt_tokens", "num_retractions", "reasoning_tokens", "cached_tokens"):
                del meta[absent]
        meta["e2e_latency"] = time.perf_counter() - self._began
        meta["response_sent_to_client_ts"] = time.time()

    def _add_logprobs(self, meta: dict[str, Any], generation: Generation) -> None:
        meta["input_token_logprobs"] = self._input_logprobs(generation)
        pairs = zip(generation.logprobs, generation.output_ids, strict=True)
        meta["output_token_logprobs"] = [[logprob, token, self._piece(generation, token)] for logprob, token in pairs]
        meta["output_token_logprobs_length"] = len(generation.output_ids)
        count = generation.request.top_logprobs_num
        if count > 0:
            top = self._engine.model.sampler.top_logprobs
            meta["input_top_logprobs"] = []
            meta["output_top_logprobs"] = [
                [[logprob, token, self._piece(generation, token)] for logprob, token in top(context, count)]
                for context in generation.contexts
            ]

    def _input_logprobs(self, generation: Generation) -> list[list[Any]]:
        """The prompt's logprobs from `logprob_start_len` on; the first has none, since nothing scored it."""
        start, ids = generation.request.logprob_start_len, generation.request.input_ids
        if start < 0 or start >= len(ids):
            return []
        logprob, context = self._engine.model.sampler.logprob, context_hash(ids[:start])
        scored: list[list[Any]] = []
        for position in range(start, len(ids)):
            token = ids[position]
            value = logprob(context, token) if position > start else None
            scored.append([value, token, self._piece(generation, token)])
            context = context_hash((token,), context)
        return scored

    def _piece(self, generation: Generation, token: int) -> str | None:
        if not generation.request.return_text_in_logprobs:
            return None
        return self._engine.model.tokenizer.decode([token])

"""Build SGLang's native answers from generations: `text`, `output_ids`, `meta_info`."""

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from miles_router.testing.worker.engine import Engine
from miles_router.testing.worker.model.generation import ABORTED_WAITING, Generation, VersionSpan, sequence_of
from miles_router.testing.worker.model.indexer import choose
from miles_router.testing.worker.model.moe import encode_routes, route
from miles_router.testing.worker.settings import Settings
from miles_router.testing.worker.wire.logprob_fields import logprob_fields, mask_fields

_INCREMENTAL_FIELDS = {
    *("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs"),
    *("output_token_sampling_mask", "output_token_sampling_logprobs"),
}
_ABSENT_WHEN_ABORTED_WAITING = (
    "prompt_tokens",
    "num_retractions",
    "reasoning_tokens",
    "cached_tokens",
    "cached_tokens_details",
    "dp_rank",
)


class OutputBuilder:
    """A builder of the answer or the stream events of one generation."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self._engine = engine
        self._moe = settings.moe
        self._indexer = settings.indexer
        self._incremental = settings.incremental_streaming_output
        self._began = time.perf_counter()
        self._sent_ids = 0
        self._sent_text = 0
        self._answered = False

    def render(self, generation: Generation) -> dict[str, Any]:
        """Return the answer, or the stream's next event: the output so far, or with incremental streaming its new
        part."""
        meta = self.meta_info(generation)
        text, ids = generation.text, generation.output_ids
        if generation.request.stream and self._incremental:
            text, ids = text[self._sent_text :], ids[self._sent_ids :]
            for name in meta.keys() & _INCREMENTAL_FIELDS:
                meta[name] = meta[name][self._sent_ids :]
            self._sent_text, self._sent_ids = len(generation.text), len(generation.output_ids)
        answer: dict[str, Any] = {"text": text, "output_ids": list(ids), "meta_info": meta}
        if generation.request.return_prompt_token_ids:
            prompt_ids = generation.request.reported_ids
            answer["prompt_token_ids"] = generation.request.input_ids if prompt_ids is None else prompt_ids
        return answer

    def meta_info(self, generation: Generation) -> dict[str, Any]:
        request, finish = generation.request, generation.finish_reason
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": dict(finish) if finish else None,
            "prompt_tokens": generation.prompt_tokens,
            "weight_version": self._engine.weight_version,
            "num_retractions": generation.retractions,
        }
        if request.return_logprob:
            meta.update(self.logprob_fields(generation))
        if request.return_sampling_mask:
            meta.update(mask_fields(self._engine.model, generation))
        meta["reasoning_tokens"] = 0
        meta["completion_tokens"] = len(generation.output_ids)
        meta["cached_tokens"] = generation.cached_tokens
        if finish is not None:
            self._add_versions(meta, generation)
        cached = generation.cached_tokens
        meta["cached_tokens_details"] = {"device": cached, "host": 0} if cached else None
        if finish and finish != ABORTED_WAITING:
            self._add_rows(meta, generation)
        meta["dp_rank"] = generation.dp_rank
        self._add_times(meta, last=finish is not None)
        if finish == ABORTED_WAITING:
            for absent in _ABSENT_WHEN_ABORTED_WAITING:
                meta.pop(absent, None)
        return meta

    def logprob_fields(self, generation: Generation) -> dict[str, Any]:
        """Return the fields that `return_logprob` adds."""
        return logprob_fields(self._engine.model, generation)

    def version_spans(self, generation: Generation) -> list[VersionSpan]:
        """Return the version spans over the output; without output, one empty span of the current version."""
        return generation.spans or [VersionSpan(self._engine.weight_version, 0, 0)]

    def _add_versions(self, meta: dict[str, Any], generation: Generation) -> None:
        spans = self.version_spans(generation)
        meta["weight_versions"] = [{"version": span.version, "start": span.start, "end": span.end} for span in spans]
        meta["weight_version"] = spans[-1].version

    def _add_rows(self, meta: dict[str, Any], generation: Generation) -> None:
        request = generation.request
        if request.return_routed_experts and self._moe is not None:
            start = request.routed_experts_start_len
            meta["routed_experts"] = self.encode_rows(
                route(self._moe, sequence_of(generation), start), generation, start
            )
        if request.return_indexer_topk and self._indexer is not None:
            meta["indexer_topk"] = self.encode_rows(choose(self._indexer, sequence_of(generation)), generation, 0)

    def encode_rows(self, rows: NDArray[np.int32], generation: Generation, start: int) -> str:
        """Encode the rows of a generation's positions from `start` on."""
        return encode_routes(rows)

    def _add_times(self, meta: dict[str, Any], *, last: bool) -> None:
        """Add the latency to the last answer, and the time of sending to the first."""
        if last:
            meta["e2e_latency"] = time.perf_counter() - self._began
        if not self._answered:
            self._answered = True
            meta["response_sent_to_client_ts"] = time.time()

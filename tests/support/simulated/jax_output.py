"""Build SGLang-Jax's native answers, bugs included (observed at cddbf6f)."""

from typing import Any

from miles_router.testing.worker.engine import Engine
from miles_router.testing.worker.model.generation import ABORTED_WAITING, Generation, GenerationRequest
from miles_router.testing.worker.settings import Settings
from miles_router.testing.worker.wire.generate_output import OutputBuilder

ABORTED_BEFORE_PREFILL = {"type": "abort", "message": "Abort before prefill"}
_UNKNOWN = (
    "weight_version",
    "weight_versions",
    "num_retractions",
    "reasoning_tokens",
    "cached_tokens_details",
    "dp_rank",
    "response_sent_to_client_ts",
    "output_token_logprobs_length",
)
_LOGPROBS = "output_token_logprobs"


class JaxOutputBuilder(OutputBuilder):
    """A builder of the answer or the stream events of one generation.

    Args:
        asked_for_none: the request had `max_new_tokens` 0, but SGLang-Jax samples one token.
    """

    def __init__(self, engine: Engine, settings: Settings, *, asked_for_none: bool) -> None:
        super().__init__(engine, settings)
        self._asked_for_none = asked_for_none
        self._told: list[Any] = []

    def render(self, generation: Generation) -> dict[str, Any]:
        """Return the answer, or the stream's next event with the whole output so far."""
        answer = super().render(generation)
        meta = {name: value for name, value in answer["meta_info"].items() if name not in _UNKNOWN}
        request, finish = generation.request, meta["finish_reason"]
        if finish == ABORTED_WAITING:
            counts = {"prompt_tokens": 0, "completion_tokens": 0}
            return {"text": "", "meta_info": {"id": meta["id"], "finish_reason": ABORTED_BEFORE_PREFILL, **counts}}
        if asks_alone(request):  # its other logprob path appends the logprobs so far at every stream event
            del meta["input_token_logprobs"]
            if request.stream:
                self._told = [*self._told, *meta[_LOGPROBS]]
                meta[_LOGPROBS] = self._told
        elif request.return_logprob and not meta["input_token_logprobs"]:
            meta["input_token_logprobs"] = [[None, request.input_ids[-1], None]]
        if self._moe is not None:
            meta.setdefault("routed_experts", None)
        if finish and finish["type"] == "length" and self._asked_for_none:
            meta["finish_reason"] = {"type": "length", "length": 0}
        meta["cache_miss_count"] = 0
        return {"text": answer["text"], "output_ids": self._ids(generation), "meta_info": meta}

    @staticmethod
    def _ids(generation: Generation) -> list[int]:
        """Return the output ids as SGLang-Jax does: without the stop token, and in a stream with the second id twice
        (its bug with unfinished characters)."""
        ids = list(generation.output_ids)
        finish = generation.finish_reason
        if finish and isinstance(finish.get("matched"), int):
            ids.pop()
        return [*ids[:2], *ids[1:]] if generation.request.stream else ids


def asks_alone(request: GenerationRequest) -> bool:
    """Return True if only output logprobs are requested: no top logprobs, none of the prompt or of given ids."""
    more = request.top_logprobs_num or request.token_ids_logprob or request.logprob_start_len >= 0
    return request.return_logprob and not more

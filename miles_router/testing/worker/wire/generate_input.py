"""Parse `/generate` bodies with one or many prompts, normalised as SGLang does it."""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from miles_router.testing.worker.engine import Engine
from miles_router.testing.worker.model.constrained import script_for
from miles_router.testing.worker.model.generation import HEADROOM, GenerationRequest
from miles_router.testing.worker.visit import InternalError, invalid_body
from miles_router.testing.worker.wire.sampling_params import SamplingParams


class LethalPrompt(Exception):
    """A prompt that crashes a whole SGLang 0.5.23 worker."""


@dataclass(slots=True)
class GenerateInput:
    """A parsed body: the samples to generate; unless `single`, the answer is a list."""

    samples: list[GenerationRequest]
    single: bool
    stream: bool
    copies: int = 1
    """Samples of each prompt."""


def parse_generate(body: Mapping[str, Any], engine: Engine, *, turn: bool = False) -> GenerateInput:
    """Parse a body.

    Args:
        turn: the request is from an agent API. Its random noise then ignores the rid, which the router generates.

    Raises:
        ValueError: SGLang refuses the body with 400; the message is SGLang's.
    """
    _check_types(body)
    prompts, single = _prompts(body)
    _check_lengths(body, len(prompts), single)
    per_prompt = _sampling_dicts(body.get("sampling_params"), len(prompts))
    copies = _parallel_samples(per_prompt)
    rids = _rids(body.get("rid"), len(prompts), copies, single)
    samples = []
    for index, prompt in enumerate(prompts):
        ids = engine.model.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        sampling = SamplingParams.from_json(per_prompt[index])
        for copy in range(copies):
            given, key = rids[index * copies + copy]
            sample = GenerationRequest(
                given, ids, sampling, engine.noise_for(None if turn else key, ids), stream=bool(body.get("stream"))
            )
            _fill_options(sample, body, index)
            sample.script = script_for(sampling, engine.model.tokenizer, sample.noise)
            _check(sample, engine)
            samples.append(sample)
    return GenerateInput(samples, single and copies == 1, bool(body.get("stream")), copies)


def _check_types(body: Mapping[str, Any]) -> None:
    """Check the types of prompts, rids, labels and sampling parameters.

    Raises:
        Refusal: a field has a wrong type.
    """
    for name in ("text", "rid"):
        value = body.get(name)
        if value is not None and not isinstance(value, str) and not _is_list_of(value, str):
            string = {"type": "string_type", "loc": ("body", name, "str"), "msg": "Input should be a valid string"}
            listed = {"type": "list_type", "loc": ("body", name, "list[str]"), "msg": "Input should be a valid list"}
            raise invalid_body(string, listed)
    labels = body.get("custom_labels")
    if labels is not None and not (isinstance(labels, dict) and _is_list_of(list(labels.values()), str)):
        message = "Input should be a valid dictionary of strings"
        raise invalid_body({"type": "dict_type", "loc": ("body", "custom_labels"), "msg": message})
    ids = body.get("input_ids")
    if ids is not None and not _is_list_of(ids, int) and not _is_list_of(ids, list):
        message = "Value error, elements must be int or list"
        raise invalid_body({"type": "value_error", "loc": ("body", "input_ids"), "msg": message})
    given = body.get("sampling_params")
    if given is not None and not isinstance(given, dict) and not _is_list_of(given, dict):
        raise invalid_body(
            {"type": "dict_type", "loc": ("body", "sampling_params"), "msg": "Input should be a dictionary"}
        )


def _check_lengths(body: Mapping[str, Any], count: int, single: bool) -> None:
    """Check lists that must be as long as the prompts.

    Raises:
        InternalError: one is not, where SGLang fails with an IndexError instead of a refusal.
    """
    rid, sampling = body.get("rid"), body.get("sampling_params")
    if single and isinstance(rid, list):
        raise InternalError("rid is a list for one prompt")
    if isinstance(sampling, list) and (single or len(sampling) != count):
        raise InternalError("sampling_params is a list of another length than the prompts")


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= {kind}


def _prompts(body: Mapping[str, Any]) -> tuple[list[Any], bool]:
    """Return each prompt as text or ids, and whether the body has a single prompt."""
    text, ids = body.get("text"), body.get("input_ids")
    if text is None and ids is None:
        raise ValueError("Either text, input_ids or input_embeds should be provided.")
    if text is not None:
        # If both are given, SGLang takes the number of prompts from the text and the tokens from the ids.
        single = isinstance(text, str)
        prompts = ids if ids is not None else text
        return ([prompts] if single else list(prompts)), single
    if not ids:
        raise ValueError("input_ids cannot be empty.")
    single = isinstance(ids[0], int)
    return ([ids] if single else list(ids)), single


def _sampling_dicts(given: Any, count: int) -> list[Mapping[str, Any]]:
    if isinstance(given, list):
        return list(given)
    return [given or {}] * count


def _parallel_samples(per_prompt: list[Mapping[str, Any]]) -> int:
    counts = {params.get("n", 1) for params in per_prompt}
    if len(counts) > 1:
        raise ValueError("The parallel_sample_num should be the same for all samples in sample params.")
    return int(counts.pop()) if counts else 1


def _rids(given: Any, prompts: int, copies: int, single: bool) -> list[tuple[str, str | None]]:
    """Return (rid, noise key or None) of every sample. With `n > 1` every sample gets its own rid."""
    batch = not single or copies > 1
    if given is None:
        return [(uuid.uuid4().hex, None) for _ in range(prompts * copies)]
    if not isinstance(given, (str, list)):
        raise ValueError("The rid should be a string or a list of strings.")
    if isinstance(given, str):
        names = [f"{given}_{index}" for index in range(prompts)] if batch else [given]
    else:
        names = given
    if len(names) != prompts:
        raise ValueError("The specified rids length mismatch with the batch_size for batch processing.")
    _refuse_duplicates(names)
    if copies == 1:
        return [(name, name) for name in names]
    return [(uuid.uuid4().hex, f"{name}/{copy}") for name in names for copy in range(copies)]


def _refuse_duplicates(names: list[str]) -> None:
    if len(set(names)) != len(names):
        duplicates = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"Duplicate request IDs detected within the request: {duplicates}")


#: SGLang's default of `--sampling-mask-max-tokens`.
MAX_MASK = 4096
_PER_PROMPT = (
    *("return_logprob", "logprob_start_len", "top_logprobs_num", "return_sampling_mask"),
    *("lora_path", "extra_key"),
)
_SHARED = (
    "return_text_in_logprobs",
    "return_routed_experts",
    "routed_experts_start_len",
    "return_indexer_topk",
    "return_prompt_token_ids",
    "token_ids_logprob",
    "routed_dp_rank",
)


def _fill_options(sample: GenerationRequest, body: Mapping[str, Any], index: int) -> None:
    for name in _PER_PROMPT:
        value = body.get(name)
        if isinstance(value, list):
            value = value[index]
        if value is not None:
            setattr(sample, name, value)
    for name in _SHARED:
        if body.get(name) is not None:
            setattr(sample, name, body[name])
    if sample.routed_dp_rank is None:
        sample.routed_dp_rank = body.get("data_parallel_rank")


def _check(sample: GenerationRequest, engine: Engine) -> None:
    """Do the checks that SGLang does once the prompt's length is known, and truncate the prompt if enabled."""
    count, limit = len(sample.input_ids), engine.model.context_len
    vocab_size = engine.model.tokenizer.vocab_size
    used = set(sample.input_ids)  # far fewer than the prompt has tokens
    if not count or min(used) < 0 or max(used) >= vocab_size:
        raise LethalPrompt(f"the prompt is empty or has an id outside of the vocabulary (0 to {vocab_size - 1})")
    if engine.model.auto_truncate:
        _truncate(sample, limit)
    elif count >= limit:
        raise ValueError(f"The input ({count} tokens) is longer than the model's context length ({limit} tokens).")
    asked = sample.sampling.max_new_tokens
    if not engine.model.auto_truncate and asked is not None and asked + count > limit:
        raise ValueError(
            f"Requested token count exceeds the model's maximum context length of {limit} tokens. You requested a "
            f"total of {asked + count} tokens: {count} tokens from the input messages and {asked} tokens for the "
            "completion. Please reduce the number of tokens in the input messages or the completion to fit within "
            "the limit."
        )
    _check_starts(sample, count)
    _check_adapter(sample, engine)
    rank, ranks = sample.routed_dp_rank, engine.dp_size
    if rank is not None and not 0 <= rank < ranks:
        raise ValueError(f"routed_dp_rank={rank} out of range [0, {ranks})")
    top_k = sample.sampling.top_k
    if sample.return_sampling_mask and not sample.sampling.greedy and not 0 < top_k <= MAX_MASK:
        raise ValueError(
            f"return_sampling_mask requires top_k=1 for greedy sampling or finite 1 < top_k <= {MAX_MASK}; got "
            f"top_k={top_k}. Lower top_k or increase --sampling-mask-max-tokens."
        )
    wrong = [token for token in sample.token_ids_logprob or () if not 0 <= token < vocab_size]
    if wrong:
        raise ValueError(
            f"token_ids_logprob contains out-of-vocabulary token id {wrong[0]}; valid range is [0, {vocab_size})."
        )


def _truncate(sample: GenerationRequest, limit: int) -> None:
    """Truncate the prompt twice, as SGLang 0.5.23 does with `--allow-auto-truncate`. Its tokenizer manager cuts it to
    the context window, which is the prompt in the answer; its scheduler cuts it further, to leave `HEADROOM`."""
    kept = sample.input_ids[:limit]
    if len(kept) >= limit - HEADROOM:
        sample.reported_ids, sample.input_ids = kept, kept[: limit - HEADROOM]


def _check_adapter(sample: GenerationRequest, engine: Engine) -> None:
    if sample.lora_path is None or sample.lora_path in engine.adapters:
        return
    if not engine.enable_lora:
        raise ValueError(
            f"LoRA adapter '{sample.lora_path}' was requested, but LoRA is not enabled. Please launch the server with "
            "--enable-lora flag and preload adapters using --lora-paths or /load_lora_adapter endpoint."
        )
    raise ValueError(
        f"Got LoRA adapter that has never been loaded: {sample.lora_path}\n"
        f"All loaded adapters: {list(engine.adapters)}."
    )


def _check_starts(sample: GenerationRequest, count: int) -> None:
    """Check that the start positions of logprobs and expert rows lie within the prompt.

    Raises:
        ValueError: a start position is outside the prompt.
    """
    logprobs = sample.logprob_start_len
    if sample.return_logprob and logprobs > count:
        raise ValueError(
            f"req.logprob_start_len={logprobs} is higher than the number of input tokens "
            f"len(req.origin_input_ids)={count}. Please use a smaller logprob_start_len."
        )
    start = sample.routed_experts_start_len
    if sample.return_routed_experts and start < 0:
        raise ValueError(
            f"recv_req.routed_experts_start_len={start} is lower than 0. "
            "Please use a non-negative routed_experts_start_len."
        )
    if sample.return_routed_experts and start > count:
        raise ValueError(
            f"recv_req.routed_experts_start_len={start} is higher than the number of input tokens "
            f"len(req.origin_input_ids)={count}. Please use a smaller routed_experts_start_len."
        )

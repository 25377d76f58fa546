"""One sample during its generation: ids, logprobs, weight versions, text and finish reason. No I/O."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from miles_router.testing.worker.model.detokenizer import IncrementalDetokenizer
from miles_router.testing.worker.model.sampling import Sampler, context_hash, key_of
from miles_router.testing.worker.model.vocabulary import Tokenizer
from miles_router.testing.worker.wire.sampling_params import SamplingParams

ABORTED: dict[str, Any] = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
ABORTED_WAITING: dict[str, Any] = {"type": "abort", "message": "Abort in waiting queue"}
# SGLang detokenizes an unstreamed request after every so many tokens. Texts that a stop string ends depend on it.
FORCED_OUTPUT_INTERVAL = 50


#: Tokens of the context window that a prompt must leave free.
HEADROOM = 6


@dataclass(slots=True)
class GenerationRequest:
    """The request for one sample; `input_ids` are final."""

    rid: str
    input_ids: list[int]
    sampling: SamplingParams
    noise: int = 0
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    token_ids_logprob: list[int] | None = None
    return_text_in_logprobs: bool = False
    return_sampling_mask: bool = False
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0
    return_indexer_topk: bool = False
    return_prompt_token_ids: bool = False
    reported_ids: list[int] | None = None
    """The prompt as the answer reports it, if the engine truncates it further."""
    lora_path: str | None = None
    extra_key: str | None = None
    script: list[int] | None = None
    routed_dp_rank: int | None = None


@dataclass(slots=True)
class VersionSpan:
    """A run of output positions `start .. end - 1` sampled by weights `version`."""

    version: str
    start: int
    end: int


@dataclass(slots=True)
class Model:
    """The tokenizer, weights and limits that all generations of a worker share."""

    tokenizer: Tokenizer
    sampler: Sampler
    context_len: int = 32768
    auto_truncate: bool = False

    @classmethod
    def seeded(
        cls, tokenizer: Tokenizer, seed: int, stop_probability: float, context_len: int, auto_truncate: bool = False
    ) -> Model:
        """Return a model over this vocabulary whose weights are determined by the seed."""
        sampler = Sampler(
            seed=seed,
            vocab_size=tokenizer.vocab_size,
            stop_ids=tokenizer.eos_token_ids,
            stop_probability=stop_probability,
        )
        return cls(tokenizer, sampler, context_len, auto_truncate)


class Generation:
    """A generation that grows by `step()` until `finish_reason` is set. `output_ids` include the stop token."""

    def __init__(self, model: Model, request: GenerationRequest) -> None:
        self.request = request
        self.output_ids: list[int] = []
        self.contexts: list[int] = []
        self._logprobs: list[float] = []  # cache of `logprobs`, since each stream event contains all of them
        self.spans: list[VersionSpan] = []
        self.finish_reason: dict[str, Any] | None = None
        self.cached_tokens = 0
        self.dp_rank: int | None = None
        """The data-parallel rank; None if the worker has only one."""
        self.prompt_tokens = len(request.input_ids)
        self.waiting = False
        self.retractions = 0
        self._model = model
        self._to_finish: dict[str, Any] | None = None
        self._hash: int | None = None
        self._pushed = 0
        self._detokenizer = IncrementalDetokenizer(
            model.tokenizer, request.input_ids, skip_special_tokens=request.sampling.skip_special_tokens
        )
        self.max_new_tokens = self._bounded_max_new_tokens()
        self._stop_ids = self._effective_stop_ids()
        self._stop_windows = self._measure_stop_strings()
        self._choose = self._chooser()

    @property
    def aborted(self) -> bool:
        """True if it is aborted and ends with its next token."""
        return self._to_finish is not None and self.finish_reason is None

    @property
    def text(self) -> str:
        return self._detokenizer.text

    @property
    def logprobs(self) -> list[float]:
        """The logprobs, one per output id."""
        logprob, known = self._model.sampler.logprob, self._logprobs
        for place in range(len(known), len(self.output_ids)):
            known.append(logprob(self.contexts[place], self.output_ids[place]))
        return known

    def abort(self, reason: dict[str, Any] = ABORTED) -> None:
        """End at the next step, which still samples a token, as in SGLang."""
        self._to_finish = reason

    def abort_waiting(self) -> None:
        """End a retracted generation now. Output that was not sent before is dropped."""
        self.finish_reason = dict(ABORTED_WAITING)
        self._withdraw(self._pushed)

    def step(self, version: str) -> None:
        """Sample one id with the given weights and check whether it ends the generation."""
        token = self._choose()
        self._append(token, version)
        self._check_finish(token)

    def due_for_forced_output(self) -> bool:
        """Return True if SGLang would detokenize this unstreamed request now."""
        unseen = self.finish_reason is None and not self.request.stream
        return unseen and len(self.output_ids) % FORCED_OUTPUT_INTERVAL == 0

    def flush(self) -> bool:
        """Bring `text` up to date. Return False if SGLang would hold back this output of a stream, because it may be
        the start of a stop string."""
        if self.finish_reason is not None:
            if self.finish_reason != ABORTED_WAITING:
                self._flush_last()
            return True
        if self.request.stream and self._stop_string_may_be_forming():
            return False
        self._detokenizer.push(self.output_ids[self._pushed :])
        self._pushed = len(self.output_ids)
        return True

    def _flush_last(self) -> None:
        new_ids = self.output_ids[self._pushed :]
        self._pushed = len(self.output_ids)
        matched = (self.finish_reason or {}).get("matched")
        self._detokenizer.finish(new_ids, matched, no_stop_trim=self.request.sampling.no_stop_trim)

    def _bounded_max_new_tokens(self) -> int:
        room = max(0, self._model.context_len - self.prompt_tokens - 2)
        asked = self.request.sampling.max_new_tokens
        return room if asked is None else min(asked, room)

    def _effective_stop_ids(self) -> frozenset[int]:
        if self.request.sampling.ignore_eos:
            return frozenset()
        return self._model.tokenizer.eos_token_ids.union(self.request.sampling.stop_token_ids or ())

    def _measure_stop_strings(self) -> int:
        """Return how many of the last ids SGLang decodes to look for a stop string."""
        encode = self._model.tokenizer.encode
        lengths = [len(encode(stop)) for stop in self.request.sampling.stop_strings]
        return max(lengths, default=-1) + 1

    def _chooser(self) -> Callable[[], int]:
        script = self.request.script
        if script is not None:
            return lambda: script[len(self.output_ids)]
        sampler, sampling, noise = self._model.sampler, self.request.sampling, self.request.noise
        forced = sampling.forced
        if forced is not None:
            return lambda: forced
        if sampling.sampling_seed is not None:
            noise = key_of(str(sampling.sampling_seed))
        if sampling.min_new_tokens:
            return lambda: self._without_early_stop(noise)
        if sampling.greedy:
            return lambda: sampler.greedy(self._context)
        return lambda: sampler.sampled(self._context, noise, len(self.output_ids))

    def _without_early_stop(self, noise: int) -> int:
        """Return the next id, which is not a stop id before `min_new_tokens` are reached."""
        sampler, done = self._model.sampler, len(self.output_ids)
        token = sampler.greedy(self._context)
        if not self.request.sampling.greedy:
            token = sampler.sampled(self._context, noise, done)
        attempt = 0
        while done < self.request.sampling.min_new_tokens and token in self._stop_ids:
            attempt += 1
            token = sampler.sampled(self._context, noise, done + attempt * 1_000_003)
        return token

    @property
    def _context(self) -> int:
        """The hash of all ids so far."""
        if self._hash is None:
            self._hash = context_hash(self.request.input_ids)
        return self._hash

    def _append(self, token: int, version: str) -> None:
        """Append one id and update the context hash."""
        self.contexts.append(self._context)
        self._hash = context_hash((token,), self._context)
        self._take([token], version)

    def _take(self, tokens: list[int], version: str) -> None:
        """Append ids that were sampled by this version."""
        self.output_ids += tokens
        self._note_version(version, len(tokens))

    def _note_version(self, version: str, new: int) -> None:
        count = len(self.output_ids)
        if self.spans and self.spans[-1].version == version:
            self.spans[-1].end = count
        else:
            self.spans.append(VersionSpan(version, count - new, count))

    def _check_finish(self, token: int) -> None:
        """Set the finish reason in SGLang's order: abort, stop strings, stop ids, then the token limit."""
        if self._to_finish is not None:
            self.finish_reason = self._to_finish
        elif not self.max_new_tokens:  # with a limit of 0, the sampled token must not count as a stop
            self._end_at_length()
        elif (matched := self._matched_stop_string()) is not None:
            self.finish_reason = {"type": "stop", "matched": matched}
        elif (pattern := self._matched_stop_regex()) is not None:
            self.finish_reason = {"type": "stop", "matched": pattern}
        elif token in self._stop_ids:
            self.finish_reason = {"type": "stop", "matched": token}
        elif len(self.output_ids) >= self.max_new_tokens:
            self._end_at_length()
        elif self._script_ended():
            self.finish_reason = {"type": "stop", "matched": token}

    def _script_ended(self) -> bool:
        """Return True if the script is complete, which ends the generation even with `ignore_eos`."""
        return self.request.script is not None and len(self.output_ids) >= len(self.request.script)

    def _end_at_length(self) -> None:
        """End with reason length. With a limit of 0 one id was sampled, which is dropped."""
        self.finish_reason = {"type": "length", "length": self.max_new_tokens}
        self._withdraw(self.max_new_tokens)

    def _withdraw(self, kept: int) -> None:
        """Drop the output after its first `kept` ids. Without output, one empty span remains."""
        del self.output_ids[kept:], self.contexts[kept:], self._logprobs[kept:]
        self.spans = [span for span in self.spans if span.start < kept or span.start == 0]
        for span in self.spans:
            span.end = min(span.end, kept)

    def _tail(self) -> str:
        return self._model.tokenizer.decode(self.output_ids[-self._stop_windows :]) if self._stop_windows else ""

    def _matched_stop_string(self) -> str | None:
        if not self._stop_windows:
            return None
        tail = self._tail()
        return next((stop for stop in self.request.sampling.stop_strings if stop in tail), None)

    def _matched_stop_regex(self) -> str | None:
        """Return the stop regex that matches the output, or None. The match is not trimmed from the text."""
        if self.request.sampling.stop_regex is None:
            return None
        text = self._model.tokenizer.decode(self.output_ids)
        return next((pattern for pattern in self.request.sampling.stop_regexes if re.search(pattern, text)), None)

    def _stop_string_may_be_forming(self) -> bool:
        tail = self._tail()
        return any(
            tail.endswith(stop[:length])
            for stop in self.request.sampling.stop_strings
            for length in range(1, min(len(tail), len(stop)) + 1)
        )


def sequence_of(generation: Generation) -> Sequence[int]:
    """Return all ids of a generation: the prompt, then the output."""
    return [*generation.request.input_ids, *generation.output_ids]

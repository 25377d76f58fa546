"""The state of one generation of a `/generate` request between attempts. No I/O."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any

import orjson

from miles_router.engines.answers import ABORT, UNFINISHED, GenerateAnswer, UnreadableAnswer
from miles_router.engines.facts import Facts
from miles_router.engines.generate import DEFAULT_MAX_NEW_TOKENS, PARAMS, RID, GenerateRequest, stop_strings
from miles_router.engines.growing import GrowingAnswer
from miles_router.engines.rows import ROW_FIELDS, RowFields, rows_from_start
from miles_router.generation.joining import RESUMED, ROWS, join
from miles_router.trajectory.rows import RowKind

#: Optional fields of `meta_info` that `join` needs besides the fields about tokens, and their types.
META_TYPES: Mapping[str, type] = {"finish_reason": dict, "prompt_tokens": int, **dict.fromkeys(ROWS, str)}
#: The seed field, and the field of an answer that reports that a resumed attempt ran without the seed.
SEED, SEED_DROPPED = "sampling_seed", "seed_dropped"
#: Fields about the prompt, which the first attempt has already answered.
OF_THE_PROMPT = ("text", "logprob_start_len")


class GenerationState(str, Enum):
    """The state of one generation between and during its attempts."""

    RUNNING = "running"  # an attempt runs, is prepared or has failed
    CUT = "cut"  # a pause, a move or the loss of its worker has ended the attempt; another one may continue it
    OPAQUE = "opaque"  # its stream had an unreadable event; the rest passes unchanged, and nothing can continue it
    ENDED = "ended"  # a worker has ended it, or its last token before a cut was its end
    GIVEN_UP = "given up"  # it cannot be continued, and is returned incomplete


class GenerationEvent(str, Enum):
    """A cause for a generation to change its state."""

    ATTEMPT = "next attempt"
    CUT = "cut"
    END = "end"
    UNREADABLE = "unreadable event"
    GIVE_UP = "giving up"


RUNNING, CUT, OPAQUE, ENDED, GIVEN_UP = GenerationState
#: {state: {event: next state}}. A worker may go on behind its abort, and may be lost behind the end.
TRANSITIONS: Mapping[GenerationState, Mapping[GenerationEvent, GenerationState]] = {
    RUNNING: {
        GenerationEvent.ATTEMPT: RUNNING,
        GenerationEvent.CUT: CUT,
        GenerationEvent.UNREADABLE: OPAQUE,
        GenerationEvent.END: ENDED,
        GenerationEvent.GIVE_UP: GIVEN_UP,
    },
    CUT: {
        GenerationEvent.ATTEMPT: RUNNING,
        GenerationEvent.CUT: CUT,
        GenerationEvent.UNREADABLE: CUT,
        GenerationEvent.END: ENDED,
        GenerationEvent.GIVE_UP: GIVEN_UP,
    },
    OPAQUE: {GenerationEvent.UNREADABLE: OPAQUE, GenerationEvent.END: ENDED},
    ENDED: {GenerationEvent.CUT: ENDED, GenerationEvent.UNREADABLE: ENDED, GenerationEvent.GIVE_UP: ENDED},
    GIVEN_UP: {},
}


class CannotResume(Exception):
    """An error: a generation cannot be resumed exactly, so it is returned as it is. It has no HTTP status and is no
    `RouterError`."""


@dataclass(eq=False)
class ResumableGeneration:
    """The state of one generation between attempts. An attempt is one request to a worker.

    Attributes:
        index: its index among the generations of its request.
        facts: the facts of the engine that sampled the last attempt.
        defaults: the default sampling parameters of the engine that sampled the first token.
        answer: the joined answers of all earlier attempts.
        incremental: whether events to the client contain only new tokens; None while no event has shown it.
        state: changes by `TRANSITIONS` only.
        abort: the `finish_reason` of the last cut that a pause or a move caused; None if none did.
        prompt: the prompt ids, once they are known.
        shown_ids, shown_text: the ids and characters that the client of a stream has received.
        held_back: the text may be shorter than the text of the ids.
        halved: the text before the cut may end inside a character.
        forming: the text before the cut may end inside a stop string.
        rows_from: per kind of rows, the first token whose row has not arrived.
        seed_dropped: resumed attempts run without the client's seed.
        attempt_rid: the `rid` of this attempt at its worker; None for the first, which has the client's `rid`.
    """

    client_request: GenerateRequest
    index: int
    facts: Facts = field(default_factory=Facts)
    defaults: Mapping[str, Any] | None = None
    answer: dict[str, Any] | None = None
    incremental: bool | None = None
    state: GenerationState = field(default=RUNNING, init=False)
    abort: dict[str, Any] | None = None
    prompt: list[int] = field(default_factory=list)
    shown_ids: int = 0
    shown_text: int = 0
    held_back: bool = False
    halved: bool = False
    forming: bool = False
    rows_from: dict[RowKind, int] = field(init=False)
    attempt_rid: str | None = None
    seed_dropped: bool = False
    _attempt: GrowingAnswer = field(default_factory=GrowingAnswer)
    _kept_events: list[tuple[object, bytes]] = field(default_factory=list)  # of this attempt: (weight version, event)

    def __post_init__(self) -> None:
        body = self.client_request.body
        self.rows_from = {kind: fields.start_of(body) for kind, fields in ROW_FIELDS.items()}

    # The state

    def _on(self, event: GenerationEvent) -> None:
        try:
            self.state = TRANSITIONS[self.state][event]
        except KeyError:
            raise RuntimeError(f"impossible for a generation that is {self.state.value}: {event.value}") from None

    @property
    def is_cut(self) -> bool:
        """True if the last attempt was cut, and no further one has begun."""
        return self.state is CUT

    @property
    def has_ended(self) -> bool:
        return self.state is ENDED

    @property
    def is_given_up(self) -> bool:
        return self.state is GIVEN_UP

    def cut(self, facts: Facts, finish: dict[str, Any] | None = None) -> None:
        """Mark the attempt as cut. `finish` is the finish reason that the cut caused; None if the worker was lost.

        Args:
            facts: of the engine that sampled the attempt.
        """
        self._on(GenerationEvent.CUT)
        self.facts, self.abort = facts, finish or self.abort

    def end(self, answer: dict[str, Any] | None = None) -> None:
        """Mark the generation as ended: by the current attempt, or with this joined answer."""
        self._on(GenerationEvent.END)
        if answer is not None:
            self.drop_attempt()
            self.answer = answer

    def mark_unreadable(self, *, ended: bool = False) -> None:
        """Note an unreadable event; `ended`: it has a finish reason."""
        self._on(GenerationEvent.UNREADABLE)
        if ended:
            self.end()

    def give_up(self) -> None:
        """Note that no further attempt is made."""
        self._on(GenerationEvent.GIVE_UP)

    # What was asked for

    @cached_property
    def request(self) -> Mapping[str, Any]:
        """The request for this generation alone."""
        return self.client_request.single(self.index)

    @property
    def params(self) -> Mapping[str, Any]:
        """The sampling parameters, including the engine's defaults."""
        return {**(self.defaults or {}), **self.request[PARAMS]}

    def next_request(self) -> dict[str, Any]:
        """Return the request for the remaining tokens; the original request if nothing was sampled."""
        if self.answer is None or not self.answer["output_ids"]:
            return dict(self.request)
        sampled, params = self.answer["output_ids"], {**self.params}
        if self.budget is not None:  # null: unlimited
            params["max_new_tokens"] = self.budget - len(sampled)
        if self._repeats_noise and params.pop(SEED, None) is not None:
            self.seed_dropped = True
        if params.get("min_new_tokens"):
            params["min_new_tokens"] = max(0, params["min_new_tokens"] - len(sampled))
        request = {name: value for name, value in self.request.items() if name not in OF_THE_PROMPT}
        request |= {"input_ids": [*self.prompt, *sampled], "sampling_params": params}
        for fields in self.wanted_rows:
            request |= fields.request(self.rows_from[fields.kind])
        return request

    @property
    def _repeats_noise(self) -> bool:
        """Whether a resumed attempt with the same seed would repeat the noise of the beginning."""
        return self.facts.engine is not None and self.facts.engine.repeats_noise

    @property
    def budget(self) -> int | None:
        """The maximum number of sampled tokens; None: as many as fit."""
        budget: int | None = self.params.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS)
        return budget

    @property
    def stops(self) -> list[str]:
        return stop_strings(self.params.get("stop"))

    @property
    def rids(self) -> set[str]:
        """All ids of the generation: the client's id and the workers' ids."""
        ids = [each["meta_info"].get("id") for each in (self.answer, self.current) if each is not None]
        return {each for each in [self.request.get(RID), *ids] if isinstance(each, str)}

    @property
    def rid(self) -> str | None:
        """The id that the client sees: its own, or else the one of the first worker."""
        given = self.request.get(RID)
        return given if given is not None or self.answer is None else self.answer["meta_info"].get("id")

    # What has come

    @property
    def current(self) -> dict[str, Any] | None:
        """The answer of the current attempt so far."""
        return self._attempt.answer

    @property
    def tokens(self) -> int:
        """The number of tokens that the current attempt has sampled."""
        return len(self.current["output_ids"]) if self.current is not None else 0

    @property
    def streams_deltas(self) -> bool:
        """Whether events to the client contain only new tokens. By SGLang's default each event contains all tokens."""
        return bool(self.facts.incremental_streaming if self.incremental is None else self.incremental)

    @property
    def wanted_rows(self) -> list[RowFields]:
        """The kinds of rows that the request asks for."""
        return [fields for fields in ROW_FIELDS.values() if self.request.get(fields.wanted)]

    @property
    def lost_rows(self) -> list[RowFields]:
        """The requested kinds of rows of which some rows of earlier attempts have not arrived."""
        answer = self.answer
        if answer is None:
            return []
        tokens: int = answer["meta_info"].get("prompt_tokens", 0) + len(answer["output_ids"])
        return [fields for fields in self.wanted_rows if self.rows_from[fields.kind] < tokens - 1]

    def add(self, answer: object) -> dict[str, Any]:
        """Add an attempt's answer, or one event of it, and return its `meta_info`. The text may be missing: a worker
        without a tokenizer returns none.

        Raises:
            UnreadableAnswer: the answer is invalid or contradicts itself, and is not added.
            CannotResume: the worker used another prompt than the attempt sent.
        """
        meta = answer.get("meta_info") if isinstance(answer, dict) else None
        if not isinstance(answer, dict) or not isinstance(meta, dict):
            raise UnreadableAnswer("incomplete", "meta_info is missing")
        for name, kind in META_TYPES.items():
            if not isinstance(meta.get(name), (kind, type(None))):
                raise UnreadableAnswer("incomplete", f"{name} has the wrong type")
        self._check_prompt(meta)
        named = meta if self.attempt_rid is None or self.rid is None else {**meta, "id": self.rid}
        if self.seed_dropped:
            named = {**named, SEED_DROPPED: True}
        self._attempt.add({"text": "", **answer, "meta_info": named})
        # SGLang includes unfinished characters and partial stop strings only when it ends a running generation, not
        # when it aborts one in its queue. Such an abort does not report the prompt length either.
        self.held_back = meta.get("finish_reason") is None or "prompt_tokens" not in meta
        if self.incremental is None:
            self.incremental = self._attempt.incremental
        return meta

    def _check_prompt(self, meta: Mapping[str, Any]) -> None:
        """Check that an attempt's prompt was the complete earlier text. A worker may be configured to truncate long
        prompts."""
        before = self.answer
        if before is not None and before["output_ids"]:
            expected = before["meta_info"].get("prompt_tokens", 0) + len(before["output_ids"])
            if meta.get("prompt_tokens") not in (None, expected):
                raise CannotResume("the worker did not use all earlier tokens as its prompt; it may truncate prompts")

    def keep(self, event: bytes, version: object) -> None:
        """Keep the JSON of a cumulative event unparsed until `read_kept`. Of events with the same weight version only
        the last is kept."""
        if self._kept_events and self._kept_events[-1][0] == version:
            self._kept_events.pop()
        self._kept_events.append((version, event))

    def read_kept(self) -> None:
        """Add the kept events.

        Raises:
            UnreadableAnswer: as `add`.
        """
        kept, self._kept_events = self._kept_events, []
        for _, event in kept:
            try:
                self.add(orjson.loads(event))
            except orjson.JSONDecodeError as error:
                raise UnreadableAnswer("incomplete", str(error)) from error

    def mark_all_shown(self) -> None:
        """Record that the client of the stream has received everything."""
        if self.current is not None:
            self.shown_ids, self.shown_text = len(self.current["output_ids"]), len(self.current["text"])

    def so_far(self) -> dict[str, Any] | None:
        """Return everything sampled so far, joined over all attempts.

        Raises:
            UnreadableAnswer: the current attempt's answer does not fit the earlier ones.
        """
        if self.current is None:
            return self.answer
        current = self._attempt.with_versions()
        return dict(current) if self.answer is None else join(self.answer, self._with_new_rows(current))

    def _with_new_rows(self, current: Mapping[str, Any]) -> dict[str, Any]:
        """Return an attempt's answer with only the rows that have not arrived before."""
        meta = dict(current["meta_info"])
        for kind, fields in ROW_FIELDS.items():
            if (rows := fields.of(meta)) is not None:
                count = meta.get("prompt_tokens", 0) + len(current["output_ids"]) - 1
                meta[fields.rows.name] = rows_from_start(fields, rows, count, self.rows_from[kind])
        return {**current, "meta_info": meta}

    def next_attempt(self) -> None:
        """Move the current answer into `answer`, and begin a new attempt with a new `rid`.

        Rows that were lost with an answer's end are requested again: an engine also returns the rows of its prompt. The
        new `rid` is needed because SGLang aborts an id 2 s after its stream has ended (0.5.23,
        `TokenizerManager.create_abort_task`).

        Raises:
            UnreadableAnswer: the answer contradicts itself, and cannot be resumed.
        """
        answer, current = self.so_far(), self.current
        if answer is not None:
            self.verify(answer)
            self.halved = answer["text"].endswith(UNFINISHED)
        if current is not None and current["output_ids"]:
            end = current["meta_info"].get("prompt_tokens", 0) + len(current["output_ids"]) - 1
            come = [kind for kind, fields in ROW_FIELDS.items() if fields.of(current["meta_info"]) is not None]
            self.rows_from |= dict.fromkeys(come, end)
        self._on(GenerationEvent.ATTEMPT)
        self.drop_attempt()
        self.answer, self.attempt_rid = answer, uuid.uuid4().hex

    def drop_attempt(self) -> None:
        """Discard the answer of the current attempt."""
        self._attempt = GrowingAnswer()

    def verify(self, answer: Mapping[str, Any]) -> None:
        """Check that a joined answer has one logprob per token, of that token, and weight versions without gaps.

        Raises:
            UnreadableAnswer: the check fails.
        """
        meta = answer["meta_info"]
        ended = {**meta, "finish_reason": meta.get("finish_reason") or {"type": ABORT}}
        GenerateAnswer.read({**answer, "meta_info": ended}, logprobs=bool(self.request.get("return_logprob")))

    def consistent_answer(self) -> dict[str, Any] | None:
        """Return the consistent part of a generation that is not resumed any further. None if nothing was sampled, or
        if it is shorter than what the client was shown."""
        try:
            answer = self.so_far()
            if answer is not None and RESUMED in answer["meta_info"]:
                self.verify(answer)
        except UnreadableAnswer:
            self.drop_attempt()
            answer = self.answer
        return None if answer is None or len(answer["output_ids"]) < self.shown_ids else answer


def generations_of(request: GenerateRequest) -> list[ResumableGeneration]:
    """Return the generations of a request, in the order of their answers."""
    return [ResumableGeneration(request, index) for index in range(request.generations)]

"""One generation of a `/generate` request: what was asked for, and what has come of it so far. Pure."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import orjson

from miles_router.engines.answers import ABORT, UNFINISHED, GenerateAnswer, UnreadableAnswer
from miles_router.engines.facts import Facts
from miles_router.engines.generate import DEFAULT_MAX_NEW_TOKENS, PARAMS, RID, GenerateRequest, stop_strings
from miles_router.engines.growing import GrowingAnswer
from miles_router.engines.rows import ROW_FIELDS, RowFields, new_rows
from miles_router.generation.joining import RESUMED, ROWS, join
from miles_router.trajectory.rows import RowKind

#: Fields of `meta_info` that joining needs beside those of the tokens, and their types where they are there.
META_TYPES: Mapping[str, type] = {"finish_reason": dict, "prompt_tokens": int, **dict.fromkeys(ROWS, str)}
#: The field of a seed, and what an answer says whose rest was sampled without the one that it had.
SEED, SEED_DROPPED = "sampling_seed", "seed_dropped"
#: Fields about the prompt, which the first attempt has answered.
OF_THE_PROMPT = ("text", "logprob_start_len")


class CannotResume(Exception):
    """A generation that cannot be carried on exactly; it is returned as it is. It has no answer of its own: it is no
    `RouterError`."""


@dataclass(eq=False)
class ResumableGeneration:
    """What is known of one generation between the attempts in which it is sampled. An attempt is one request to a
    worker.

    Attributes:
        index: its place among the generations of its request.
        facts: those of the engine that sampled the last attempt.
        defaults: sampling parameters that the engine assumed which sampled the first token.
        answer: the attempts before this one, joined.
        incremental: whether the client is told only what is new; None where no event has shown it.
        done: it has ended.
        opaque: its stream has said something that cannot be read; the rest passes as it comes.
        abort: the `finish_reason` that a pause made.
        given_up: it was cut, and could not be carried on.
        prompt: the ids of the prompt, once they are known.
        shown_ids, shown_text: how much of a stream its client has.
        held_back: the ids that came may say more than the text.
        halved: the text before the cut may end within a character.
        forming: it may end within a stop string.
        rows_from: of each kind, the first token whose row has not come.
        seed_dropped: what is carried on has a seed no more.
        attempt_rid: what this attempt is called by its worker; None for the first, which has the client's name.
    """

    client_request: GenerateRequest
    index: int
    facts: Facts = field(default_factory=Facts)
    defaults: Mapping[str, Any] | None = None
    answer: dict[str, Any] | None = None
    incremental: bool | None = None
    done: bool = False
    opaque: bool = False
    abort: dict[str, Any] | None = None
    given_up: bool = False
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
    _kept_events: list[tuple[object, bytes]] = field(default_factory=list)  # of this attempt, by their weight version

    def __post_init__(self) -> None:
        body = self.client_request.body
        self.rows_from = {kind: fields.start_of(body) for kind, fields in ROW_FIELDS.items()}

    # What was asked for

    @cached_property
    def request(self) -> Mapping[str, Any]:
        """The request for this generation alone."""
        return self.client_request.single(self.index)

    @property
    def params(self) -> Mapping[str, Any]:
        """Its sampling parameters."""
        return {**(self.defaults or {}), **self.request[PARAMS]}

    def next_request(self) -> dict[str, Any]:
        """The request for what is left of it; the whole of it where nothing was sampled."""
        if self.answer is None or not self.answer["output_ids"]:
            return dict(self.request)
        sampled, params = self.answer["output_ids"], {**self.params}
        if self.budget is not None:  # null: as much as fits
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
        """Whether the rest would be sampled with the noise of the beginning, had it the same seed."""
        return self.facts.engine is not None and self.facts.engine.repeats_noise

    @property
    def budget(self) -> int | None:
        """The tokens it may sample at most; None: as many as fit."""
        budget: int | None = self.params.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS)
        return budget

    @property
    def stops(self) -> list[str]:
        """Its stop strings."""
        return stop_strings(self.params.get("stop"))

    @property
    def rids(self) -> set[str]:
        """What it is called: by its client, and by its workers."""
        said = [each["meta_info"].get("id") for each in (self.answer, self.current) if each is not None]
        return {each for each in [self.request.get(RID), *said] if isinstance(each, str)}

    @property
    def rid(self) -> str | None:
        """What its client knows it by: as the client named it, else as the first worker did."""
        given = self.request.get(RID)
        return given if given is not None or self.answer is None else self.answer["meta_info"].get("id")

    # What has come

    @property
    def current(self) -> dict[str, Any] | None:
        """Everything that this attempt has brought."""
        return self._attempt.answer

    @property
    def tokens(self) -> int:
        """How many this attempt has brought."""
        return len(self.current["output_ids"]) if self.current is not None else 0

    @property
    def tells_only_what_is_new(self) -> bool:
        """How its client is told of a stream: by SGLang's default, everything with each event."""
        return bool(self.facts.incremental_streaming if self.incremental is None else self.incremental)

    @property
    def wanted_rows(self) -> list[RowFields]:
        """The kinds of rows that are wanted."""
        return [fields for fields in ROW_FIELDS.values() if self.request.get(fields.wanted)]

    @property
    def lost_rows(self) -> list[RowFields]:
        """The kinds of rows that are wanted and of which not all that were used have come."""
        answer = self.answer
        if answer is None:
            return []
        tokens: int = answer["meta_info"].get("prompt_tokens", 0) + len(answer["output_ids"])
        return [fields for fields in self.wanted_rows if self.rows_from[fields.kind] < tokens - 1]

    def add(self, answer: object) -> dict[str, Any]:
        """Take an attempt's answer, or one event of it; return its `meta_info`. A worker without a tokenizer gives no
        text.

        Raises:
            UnreadableAnswer: it is none, or contradicts itself. Nothing is taken then. So with the next.
            CannotResume: it is to another prompt than was sent.
        """
        meta = answer.get("meta_info") if isinstance(answer, dict) else None
        if not isinstance(answer, dict) or not isinstance(meta, dict):
            raise UnreadableAnswer("incomplete", "meta_info")
        for name, kind in META_TYPES.items():
            if not isinstance(meta.get(name), (kind, type(None))):
                raise UnreadableAnswer("incomplete", f"{name} has another type")
        self._check_prompt(meta)
        named = meta if self.attempt_rid is None or self.rid is None else {**meta, "id": self.rid}
        if self.seed_dropped:
            named = {**named, SEED_DROPPED: True}
        self._attempt.add({"text": "", **answer, "meta_info": named})
        # SGLang shows unfinished characters and stop strings in the making only where it ends a running generation,
        # not where it aborts one in its queue. Such a one does not tell its prompt's length either.
        self.held_back = meta.get("finish_reason") is None or "prompt_tokens" not in meta
        if self.incremental is None:
            self.incremental = self._attempt.incremental
        return meta

    def _check_prompt(self, meta: Mapping[str, Any]) -> None:
        """An attempt's prompt is all that came before. A worker may be set to cut one that is too long."""
        before = self.answer
        if before is not None and before["output_ids"]:
            expected = before["meta_info"].get("prompt_tokens", 0) + len(before["output_ids"])
            if meta.get("prompt_tokens") not in (None, expected):
                raise CannotResume("the worker did not take all that came before as its prompt")

    def keep(self, event: bytes, version: object) -> None:
        """Take the JSON of an event that says everything so far, to be read when somebody wants to know; of those that
        name the same weight version the last will do."""
        if self._kept_events and self._kept_events[-1][0] == version:
            self._kept_events.pop()
        self._kept_events.append((version, event))

    def read_kept(self) -> None:
        """Add what was kept.

        Raises:
            UnreadableAnswer: as `add`.
        """
        kept, self._kept_events = self._kept_events, []
        for _, event in kept:
            try:
                self.add(orjson.loads(event))
            except orjson.JSONDecodeError as error:
                raise UnreadableAnswer("incomplete", str(error)) from error

    def all_shown(self) -> None:
        """The client of a stream has everything."""
        if self.current is not None:
            self.shown_ids, self.shown_text = len(self.current["output_ids"]), len(self.current["text"])

    def so_far(self) -> dict[str, Any] | None:
        """Everything that has come, joined.

        Raises:
            UnreadableAnswer: this attempt's answer and those before do not fit together.
        """
        if self.current is None:
            return self.answer
        current = self._attempt.with_versions()
        return dict(current) if self.answer is None else join(self.answer, self._with_new_rows(current))

    def _with_new_rows(self, current: Mapping[str, Any]) -> dict[str, Any]:
        """An attempt's answer with the rows that have not come before."""
        meta = dict(current["meta_info"])
        for kind, fields in ROW_FIELDS.items():
            if (rows := fields.of(meta)) is not None:
                count = meta.get("prompt_tokens", 0) + len(current["output_ids"]) - 1
                meta[fields.rows.name] = new_rows(fields, rows, count, self.rows_from[kind])
        return {**current, "meta_info": meta}

    def next_attempt(self) -> None:
        """What has come becomes what was before. Rows that were lost with an answer's end are asked for again: an
        engine has those of its prompt too. The next attempt gets a name of its own: SGLang aborts what bears the name
        of a stream 2 s after that has ended (0.5.23, `TokenizerManager.create_abort_task`).

        Raises:
            UnreadableAnswer: it contradicts itself, and cannot be carried on.
        """
        answer, current = self.so_far(), self.current
        if answer is not None:
            self.verify(answer)
            self.halved = answer["text"].endswith(UNFINISHED)
        if current is not None and current["output_ids"]:
            end = current["meta_info"].get("prompt_tokens", 0) + len(current["output_ids"]) - 1
            come = [kind for kind, fields in ROW_FIELDS.items() if fields.of(current["meta_info"]) is not None]
            self.rows_from |= dict.fromkeys(come, end)
        self.drop_attempt()
        self.answer, self.attempt_rid = answer, uuid.uuid4().hex

    def drop_attempt(self) -> None:
        """Forget what this attempt has brought."""
        self._attempt = GrowingAnswer()

    def end(self, answer: dict[str, Any]) -> None:
        """It is over, with this answer."""
        self.drop_attempt()
        self.answer, self.done = answer, True

    def verify(self, answer: Mapping[str, Any]) -> None:
        """See that a joined answer has one logprob for each token, of that token, and versions without gaps.

        Raises:
            UnreadableAnswer: it has not.
        """
        meta = answer["meta_info"]
        ended = {**meta, "finish_reason": meta.get("finish_reason") or {"type": ABORT}}
        GenerateAnswer.read({**answer, "meta_info": ended}, logprobs=bool(self.request.get("return_logprob")))

    def left(self) -> dict[str, Any] | None:
        """What it has where it goes on no more: all of it that fits together. None where that is less than its client
        was shown, or nothing."""
        try:
            answer = self.so_far()
            if answer is not None and RESUMED in answer["meta_info"]:
                self.verify(answer)
        except UnreadableAnswer:
            self.drop_attempt()
            answer = self.answer
        return None if answer is None or len(answer["output_ids"]) < self.shown_ids else answer


def generations_of(request: GenerateRequest) -> list[ResumableGeneration]:
    """The generations a request asks for, in the order of their answers."""
    return [ResumableGeneration(request, index) for index in range(request.generations)]

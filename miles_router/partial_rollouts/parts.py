"""The generations of one `/generate` request, each with what has come of it so far. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from miles_router.engines.events import payload
from miles_router.partial_rollouts import glance
from miles_router.partial_rollouts.joining import CONCATENATED, EXPERTS, UNFINISHED, VERSIONS, join

#: Fields of a request that may hold a list of one value for each prompt.
PER_PROMPT = (
    "sampling_params",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "token_ids_logprob",
    "lora_path",
    "image_data",
    "video_data",
    "audio_data",
    "custom_logit_processor",
    "return_hidden_states",
    "extra_key",
    "cache_salt",
    "rid",
)
DEFAULT_MAX_NEW_TOKENS = 128  # SGLang's `SamplingParams`
MAX_GENERATIONS = 4096  # of one request

#: What an answer that can be carried on says, and as what.
SHAPE: Mapping[str, type] = {"text": str, "output_ids": list, "meta_info": dict}
META_SHAPE: Mapping[str, type] = {
    "finish_reason": dict,
    "completion_tokens": int,
    "prompt_tokens": int,
    VERSIONS: list,
    EXPERTS: str,
    **dict.fromkeys(CONCATENATED, list),
}


@dataclass
class Part:
    """One generation of a request: what was asked, and what has come so far."""

    index: int
    request: Mapping[str, Any]  # for this generation alone
    streamed_index: bool
    defaults: Mapping[str, Any] = field(default_factory=dict)  # sampling parameters that workers assume
    answer: dict[str, Any] | None = None  # of the goes before this one, joined
    current: dict[str, Any] | None = None  # of this go, cumulative
    incremental: bool | None = None  # whether the client is told only what is new; None: it cannot know yet
    done: bool = False
    abort: dict[str, Any] | None = None  # the `finish_reason` that a pause made
    prompt: list[int] = field(default_factory=list)
    shown_ids: int = 0  # of a stream, what its client has
    shown_text: int = 0
    held_back: bool = False  # the ids that came may say more than the text
    halved: bool = False  # the text before the cut may end within a character,
    forming: bool = False  # or within a stop string
    experts_from: int = 0  # the first token whose routed experts are not held yet
    _unread: list[bytes] = field(default_factory=list)  # events of this go
    _spans: list[dict[str, Any]] = field(default_factory=list)  # of this go

    @property
    def params(self) -> Mapping[str, Any]:
        return {**self.defaults, **(self.request.get("sampling_params") or {})}

    @property
    def budget(self) -> int | None:
        """The tokens it may sample at most; None: as many as fit."""
        budget: int | None = self.params.get("max_new_tokens", DEFAULT_MAX_NEW_TOKENS)
        return budget

    @property
    def stops(self) -> list[str]:
        stop = self.params.get("stop") or []
        return [stop] if isinstance(stop, str) else [each for each in stop if each]

    @property
    def ids(self) -> set[str]:
        """What it is called: by its client, and by its worker."""
        said = [each["meta_info"].get("id") for each in (self.answer, self.current) if each is not None]
        return {each for each in [self.request.get("rid"), *said] if isinstance(each, str)}

    @property
    def experts_lost(self) -> bool:
        """Whether routed experts are wanted and not all that were used are held."""
        answer = self.answer
        if not self.request.get("return_routed_experts") or answer is None:
            return False
        tokens: int = answer["meta_info"].get("prompt_tokens", 0) + len(answer["output_ids"])
        return self.experts_from < tokens - 1

    def so_far(self) -> dict[str, Any] | None:
        """Everything that has come, joined. Version spans come with an answer's end; before it, every event has said
        its version."""
        current = self.current
        if current is None:
            return self.answer
        meta = current["meta_info"]
        if meta.get(VERSIONS) is None and "weight_version" in meta and current["output_ids"]:
            told = self._spans or [{"version": meta["weight_version"], "start": 0, "end": len(current["output_ids"])}]
            current = {**current, "meta_info": {**meta, VERSIONS: told}}
        return dict(current) if self.answer is None else join(self.answer, current)

    def next_go(self) -> None:
        """What has come becomes what was before. Routed experts that were lost with an answer's end are asked for
        again: an engine has those of its prompt too."""
        current = self.current
        if current is not None and current["output_ids"] and current["meta_info"].get(EXPERTS) is not None:
            self.experts_from = current["meta_info"].get("prompt_tokens", 0) + len(current["output_ids"]) - 1
        self.answer, self.current = self.so_far(), None
        self._spans = []
        self.halved = self.answer is not None and self.answer["text"].endswith(UNFINISHED)

    def take(self, answer: dict[str, Any]) -> None:
        """All that this go has brought so far."""
        meta = answer["meta_info"]
        # SGLang shows unfinished characters and stop strings in the making only where it ends a running generation,
        # not where it aborts one in its queue. Such a one does not tell its prompt's length either.
        self.held_back = meta.get("finish_reason") is None or "prompt_tokens" not in meta
        self.current = answer

    def absorb(self, answer: dict[str, Any]) -> None:
        """One event of this go: everything so far, or (`--incremental-streaming-output`) what is new."""
        answer = _without_what_came_since(answer)
        known, meta = self.current, answer["meta_info"]
        self.take(answer)
        count = meta.get("completion_tokens", len(answer["output_ids"]))
        self._note_version(meta, count)
        if known is None:
            return
        meta = {**known["meta_info"], **meta}
        ids, text, held = answer["output_ids"], answer["text"], len(known["output_ids"])
        if len(ids) == count and held:
            self._set_style(incremental=False)
        if len(ids) == count:
            self.current = {**answer, "meta_info": meta}
            return
        self._set_style(incremental=True)
        new = held + len(ids) == count  # that of one that was aborted in the queue is not: it has come before
        for name in CONCATENATED:
            if answer["meta_info"].get(name) is not None:
                before = known["meta_info"].get(name) or []
                before += answer["meta_info"][name] if new else []
                meta[name] = before
        whole = known["output_ids"]
        whole += ids if new else []
        self.current = {**answer, "text": known["text"] + text if new else known["text"], "output_ids": whole}
        self.current["meta_info"] = meta

    def _set_style(self, *, incremental: bool) -> None:
        if self.incremental is None:
            self.incremental = incremental

    def _note_version(self, meta: Mapping[str, Any], count: int) -> None:
        version, spans = meta.get("weight_version"), self._spans
        if spans and spans[-1]["version"] == version:
            spans[-1]["end"] = count
        elif count:
            spans.append({"version": version, "start": spans[-1]["end"] if spans else 0, "end": count})

    def keep(self, event: bytes) -> None:
        """Take an event that says everything so far, to be read when somebody wants to know; of those that name the
        same weight version the last will do."""
        if self._unread and glance.version(self._unread[-1]) == glance.version(event):
            self._unread[-1] = event
        else:
            self._unread.append(event)

    def read_up(self) -> None:
        """Absorb what was kept."""
        for event in self._unread:
            answer = understood(payload(event))
            if answer is not None:
                self.absorb(answer)
        self._unread.clear()

    def all_shown(self) -> None:
        """The client of a stream has everything."""
        if self.current is not None:
            self.shown_ids, self.shown_text = len(self.current["output_ids"]), len(self.current["text"])


def _without_what_came_since(answer: dict[str, Any]) -> dict[str, Any]:
    """SGLang writes down an event's list of ids a moment after its counts (0.5.23, `tokenizer_manager.py`): it may have
    more ids by then, which the next event tells again."""
    meta, ids = answer["meta_info"], answer["output_ids"]
    count = meta.get("completion_tokens")
    if count is None or len(ids) <= count:
        return answer
    lists = {name: meta[name][:count] for name in CONCATENATED if meta.get(name) is not None}
    return {**answer, "output_ids": ids[:count], "meta_info": {**meta, **lists}}


def understood(answer: Any) -> dict[str, Any] | None:
    """An answer that can be carried on, or that carries on; None for anything else. A worker without a tokenizer
    gives no text."""
    if not isinstance(answer, dict):
        return None
    answer.setdefault("text", "")
    if not _has(answer, SHAPE) or not _has(answer["meta_info"], META_SHAPE, absent=True):
        return None
    spans = answer["meta_info"].get(VERSIONS) or ()
    return answer if all(_has(span, {"start": int, "end": int}) and "version" in span for span in spans) else None


def _has(value: Any, shape: Mapping[str, type], *, absent: bool = False) -> bool:
    if not isinstance(value, dict):
        return False
    found = ((value.get(name), kind) for name, kind in shape.items())
    return all(isinstance(each, kind) or (absent and each is None) for each, kind in found)


def split(body: Mapping[str, Any]) -> list[Part]:
    """The generations a request asks for, in the order of their answers (prompt-major, `n` each).

    Raises:
        ValueError, and what else comes of values that are not what they should be: no request for an engine.
    """
    text, ids = body.get("text"), body.get("input_ids")
    batch = isinstance(text, list) or (isinstance(ids, list) and bool(ids) and isinstance(ids[0], list))
    given = "input_ids" if ids is not None else "text"  # with both, ids are what the engine takes
    source: Any = ids if ids is not None else text
    prompts = list(source) if batch else [source]
    parts: list[Part] = []
    for place, prompt in enumerate(prompts):
        own = {name: _own(body, name, place, len(prompts) if batch else None) for name in PER_PROMPT if name in body}
        params = dict(own.get("sampling_params") or {})
        samples = params.pop("n", 1)
        request = {**body, **own, "sampling_params": params, given: prompt}
        request.pop("text" if given == "input_ids" else "input_ids", None)
        if len(parts) + samples > MAX_GENERATIONS:
            raise ValueError(f"more than {MAX_GENERATIONS} generations")
        if samples != 1:  # the engine ignores it too
            request.pop("rid", None)
        indexed = batch or samples != 1
        first_row = request.get("routed_experts_start_len") or 0
        parts += [Part(len(parts) + sample, request, indexed, experts_from=first_row) for sample in range(samples)]
    if not parts:
        raise ValueError("no generation")
    return parts


def _own(body: Mapping[str, Any], name: str, place: int, prompts: int | None) -> Any:
    value = body[name]
    if prompts is None:
        return value
    if name == "rid" and isinstance(value, str):
        return f"{value}_{place}"
    each = isinstance(value, list) and len(value) == prompts
    if name == "token_ids_logprob":  # else it is one list of ids, for all prompts
        each = each and isinstance(value[0], list)
    return value[place] if each else value

"""The generations of one `/generate` request, each with what has come of it so far. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from miles_router.joining import CONCATENATED, EXPERTS, UNFINISHED, VERSIONS, join

#: Fields of a request that may hold one value for each prompt.
PER_PROMPT = ("sampling_params", "return_logprob", "top_logprobs_num", "token_ids_logprob", "lora_path", "rid")


@dataclass
class Part:
    """One generation of a request: what was asked, and what has come so far."""

    index: int
    request: Mapping[str, Any]  # for this generation alone
    streamed_index: bool
    answer: dict[str, Any] | None = None  # of the goes before this one, joined
    current: dict[str, Any] | None = None  # of this go, cumulative
    incremental: bool = False
    done: bool = False
    prompt: list[int] = field(default_factory=list)
    shown_ids: int = 0  # of a stream, what its client has
    shown_text: int = 0
    halved: bool = False  # the text before the cut may end within a character
    experts_from: int = 0  # the first token whose routed experts are not held yet
    _spans: list[dict[str, Any]] = field(default_factory=list)  # of this go

    @property
    def params(self) -> Mapping[str, Any]:
        return self.request.get("sampling_params") or {}

    @property
    def stops(self) -> list[str]:
        stop = self.params.get("stop") or []
        return [stop] if isinstance(stop, str) else list(stop)

    @property
    def experts_lost(self) -> bool:
        """Whether routed experts are wanted and not all that were used are held."""
        answer = self.answer
        if not self.request.get("return_routed_experts") or answer is None:
            return False
        return self.experts_from < answer["meta_info"].get("prompt_tokens", 0) + len(answer["output_ids"]) - 1

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
        if self.current is not None and EXPERTS in self.current["meta_info"]:
            self.experts_from = self.current["meta_info"]["prompt_tokens"] + len(self.current["output_ids"]) - 1
        self.answer, self.current = self.so_far(), None
        self._spans = []
        self.halved = self.answer is not None and self.answer["text"].endswith(UNFINISHED)

    def absorb(self, answer: dict[str, Any]) -> None:
        """One event of this go: everything so far, or (`--incremental-streaming-output`) what is new."""
        known = self.current
        count = answer["meta_info"]["completion_tokens"]
        self._note_version(answer["meta_info"], count)
        if known is None or len(answer["output_ids"]) == count:
            self.current = answer
            return
        self.incremental = True
        meta = {**answer["meta_info"]}
        for name in CONCATENATED:
            if meta.get(name) is not None:
                held = known["meta_info"].get(name) or []
                held += meta[name]
                meta[name] = held
        ids = known["output_ids"]
        ids += answer["output_ids"]
        self.current = {**answer, "text": known["text"] + answer["text"], "output_ids": ids, "meta_info": meta}

    def _note_version(self, meta: Mapping[str, Any], count: int) -> None:
        version, spans = meta.get("weight_version"), self._spans
        if spans and spans[-1]["version"] == version:
            spans[-1]["end"] = count
        elif count:
            spans.append({"version": version, "start": spans[-1]["end"] if spans else 0, "end": count})


def split(body: Mapping[str, Any]) -> list[Part]:
    """The generations a request asks for, in the order of their answers (prompt-major, `n` each)."""
    text, ids = body.get("text"), body.get("input_ids", body.get("input_tokens"))
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
        for name in {"text", "input_ids", "input_tokens"} - {given}:
            request.pop(name, None)
        if samples != 1:  # the engine ignores it too
            request.pop("rid", None)
        indexed = batch or samples != 1
        first_row = request.get("routed_experts_start_len") or 0
        parts += [Part(len(parts) + sample, request, indexed, experts_from=first_row) for sample in range(samples)]
    return parts


def _own(body: Mapping[str, Any], name: str, place: int, prompts: int | None) -> Any:
    value = body[name]
    if prompts is None:
        return value
    if name == "rid" and isinstance(value, str):
        return f"{value}_{place}"
    return value[place] if isinstance(value, list) and len(value) == prompts else value

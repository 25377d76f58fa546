"""A `/generate` answer put together from the events of a stream, cumulative or incremental. Pure.

By default SGLang says everything so far with each event; with `--incremental-streaming-output` only what is new.
`completion_tokens` tells which: it always counts all. Events without it must repeat what has come.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_router.engines.answers import OUTPUT_LISTS, VERSION, VERSIONS, UnreadableAnswer, is_abort


class GrowingAnswer:
    """One generation's answer as it grows.

    Attributes:
        answer: everything so far, in the form of a whole answer; None before the first event.
        incremental: whether the stream tells only what is new; None until it can be known.
        spans: the weight versions that the events named, over the tokens so far: `{"version", "start", "end"}`.
    """

    def __init__(self) -> None:
        self.answer: dict[str, Any] | None = None
        self.incremental: bool | None = None
        self.spans: list[dict[str, Any]] = []

    @property
    def ended(self) -> bool:
        """Whether the last event has come."""
        return self.answer is not None and self.answer["meta_info"].get("finish_reason") is not None

    def add(self, event: Mapping[str, Any]) -> dict[str, Any]:
        """Take one event's answer; gives everything so far, which the next event may change.

        Raises:
            UnreadableAnswer: a field is missing, or the counts fit neither kind of stream. Nothing is taken then.
        """
        try:
            text, ids, meta = event["text"], event["output_ids"], event["meta_info"]
            count = meta.get("completion_tokens", len(ids))
            if not (isinstance(text, str) and isinstance(ids, list) and isinstance(count, int)):
                raise UnreadableAnswer("incomplete", "text, output_ids or completion_tokens has another type")
        except (KeyError, TypeError, AttributeError) as error:
            raise UnreadableAnswer("incomplete", repr(error)) from error
        known = self.answer["output_ids"] if self.answer is not None else []
        before = len(known)
        if "completion_tokens" not in meta and ids[:before] != known:
            raise UnreadableAnswer(
                "incomplete", "completion_tokens is missing, and the ids do not repeat what has come"
            )
        if len(ids) >= count >= before:
            grown = self._replaced(event, count)
            if before:
                self.incremental = False
        elif before + len(ids) == count:
            grown = self._appended(event)
            self.incremental = True
        elif self.answer is not None and is_abort(meta.get("finish_reason")):
            grown = self._repeated(event)
        else:
            raise UnreadableAnswer("token_counts_disagree", f"{before} ids, {len(ids)} more, {count} in all")
        self._note_version(meta, len(grown["output_ids"]))
        self.answer = grown
        return grown

    def with_versions(self) -> dict[str, Any]:
        """Everything so far with its weight versions: the engine's own, or those that the events named where it tells
        none, as at the end of a generation that was aborted in its queue. There must be an answer."""
        assert self.answer is not None
        meta = self.answer["meta_info"]
        if meta.get(VERSIONS) or all(span["version"] is None for span in self.spans):
            return self.answer
        return {**self.answer, "meta_info": {**meta, VERSIONS: self.spans}}

    def _replaced(self, event: Mapping[str, Any], count: int) -> dict[str, Any]:
        """Everything so far. SGLang writes an event's ids a moment after its counts (0.5.23, `tokenizer_manager.py`):
        there may be more of them, which the next event tells again."""
        known = self.answer["meta_info"] if self.answer is not None else {}
        meta = {**known, **event["meta_info"]}
        for name in OUTPUT_LISTS:
            if meta.get(name) is not None and len(meta[name]) > count:
                meta[name] = meta[name][:count]
        ids = event["output_ids"]
        return {**event, "output_ids": ids if len(ids) == count else ids[:count], "meta_info": meta}

    def _appended(self, event: Mapping[str, Any]) -> dict[str, Any]:
        """What is new. The lists grow in place: a copy with each event would cost their length each time."""
        if self.answer is None:
            return {**event}
        known = self.answer
        meta = {**known["meta_info"], **event["meta_info"]}
        for name in OUTPUT_LISTS:
            new = event["meta_info"].get(name)
            if new is not None:
                meta[name] = known["meta_info"].get(name) or []
                meta[name] += new
        ids = known["output_ids"]
        ids += event["output_ids"]
        return {**event, "text": known["text"] + event["text"], "output_ids": ids, "meta_info": meta}

    def _repeated(self, event: Mapping[str, Any]) -> dict[str, Any]:
        """The end of a generation that was aborted in the queue of a retracted one: it tells again what has come."""
        assert self.answer is not None
        meta = {**event["meta_info"]}
        for name in OUTPUT_LISTS:
            meta.pop(name, None)
        return {**event, **self.answer, "meta_info": {**self.answer["meta_info"], **meta}}

    def _note_version(self, meta: Mapping[str, Any], count: int) -> None:
        version, spans = meta.get(VERSION), self.spans
        if spans and spans[-1]["version"] == version:
            spans[-1]["end"] = count
        elif count:
            spans.append({"version": version, "start": spans[-1]["end"] if spans else 0, "end": count})

"""An accumulator that assembles a `/generate` answer from the events of a stream. No I/O.

By default each SGLang event repeats all tokens so far (cumulative). With `--incremental-streaming-output` it contains
only the new ones. `completion_tokens` always counts all tokens and so distinguishes the two. Events without it must be
cumulative.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miles_router.engines.answers import (
    LOGPROBS,
    MALFORMED,
    OUTPUT_LISTS,
    VERSION,
    VERSIONS,
    UnreadableAnswer,
    check_logprobs,
    in_words,
    is_abort,
    version_runs,
)


class GrowingAnswer:
    """The answer of one generation, assembled from events.

    Attributes:
        answer: everything so far, in the form of a complete answer; None before the first event.
        incremental: whether events contain only new tokens; None while it is unknown.
        spans: the weight versions of the events, as `{"version", "start", "end"}` over the tokens so far.
    """

    def __init__(self) -> None:
        self.answer: dict[str, Any] | None = None
        self.incremental: bool | None = None
        self.spans: list[dict[str, Any]] = []
        self._skimmed: Mapping[str, Any] | None = None

    @property
    def ended(self) -> bool:
        """Whether the last event has arrived."""
        return self.answer is not None and self.answer["meta_info"].get("finish_reason") is not None

    def add(self, event: Mapping[str, Any]) -> dict[str, Any]:
        """Add one event and return the answer so far. The next event may modify the returned object.

        Raises:
            UnreadableAnswer: a field is missing, the counts fit neither kind of stream, or ids, logprobs and versions
                do not fit the earlier ids or each other. The event is not added then.
        """
        try:
            grown = self._merge(event)
            self._note_version(event["meta_info"], len(grown["output_ids"]))
        except MALFORMED as error:
            raise UnreadableAnswer("incomplete", in_words(error)) from error
        self.answer = grown
        return grown

    def add_lazily(self, event: Mapping[str, Any]) -> None:
        """Add one event for a caller that reads `answer` only once it has `ended`. Cumulative events that the next one
        repeats are not parsed.

        Raises:
            UnreadableAnswer: as `add`.
        """
        meta: Any = event.get("meta_info")
        unfinished = isinstance(meta, dict) and meta.get("finish_reason") is None
        if unfinished and self.incremental is False and meta.get(VERSION) == self.spans[-1]["version"]:
            self._skimmed = event
            return
        skimmed, self._skimmed = self._skimmed, None
        if skimmed is not None:
            self.add(skimmed)  # it marks the last token of the previous weight version
        self.add(event)

    def _merge(self, event: Mapping[str, Any]) -> dict[str, Any]:
        text, ids, meta = event["text"], event["output_ids"], event["meta_info"]
        count = meta.get("completion_tokens", len(ids))
        lists = (meta.get(name) for name in OUTPUT_LISTS)
        if not (isinstance(text, str) and isinstance(ids, list) and isinstance(count, int)) or not all(
            each is None or isinstance(each, list) for each in lists
        ):
            raise UnreadableAnswer("incomplete", "text, output_ids, completion_tokens or a list has the wrong type")
        known = self.answer["output_ids"] if self.answer is not None else []
        before = len(known)
        if "completion_tokens" not in meta and ids[:before] != known:
            raise UnreadableAnswer(
                "incomplete", "completion_tokens is missing, and the event does not repeat earlier ids"
            )
        if meta.get(VERSIONS):
            version_runs(meta, count)
        aborted = is_abort(meta.get("finish_reason"))
        if len(ids) >= count >= before:
            if ids[:before] != known:
                raise UnreadableAnswer("tokens_taken_back", f"an event changes some of the first {before} ids")
            grown = self._merge_cumulative(event, count)
            if before and not aborted:  # an abort may repeat all tokens in either kind of stream
                self.incremental = False
        elif before + len(ids) == count:
            if self.incremental is False:
                raise UnreadableAnswer("token_counts_disagree", f"a cumulative event has {len(ids)} of {count} ids")
            grown = self._merge_incremental(event)
            self.incremental = True
        elif self.answer is not None and aborted and count == before:
            grown = self._merge_abort_in_queue(event)
        else:
            raise UnreadableAnswer("token_counts_disagree", f"{before} ids and {len(ids)} new ones are not {count}")
        return grown

    def with_versions(self) -> dict[str, Any]:
        """Return the answer so far with its weight versions; `answer` must not be None. They are the engine's own
        `weight_versions`, or else `spans`: an abort in the queue does not list them."""
        assert self.answer is not None
        meta = self.answer["meta_info"]
        if meta.get(VERSIONS) or all(span["version"] is None for span in self.spans):
            return self.answer
        return {**self.answer, "meta_info": {**meta, VERSIONS: self.spans}}

    def _merge_cumulative(self, event: Mapping[str, Any], count: int) -> dict[str, Any]:
        """Replace the answer by a cumulative event. SGLang writes an event's ids a moment after its counts (0.5.23,
        `tokenizer_manager.py`), so there may be more ids than counted. The next event repeats them."""
        known, before = ({}, 0) if self.answer is None else (self.answer["meta_info"], len(self.answer["output_ids"]))
        meta = {**known, **event["meta_info"]}
        for name in OUTPUT_LISTS:
            if meta.get(name) is not None and len(meta[name]) > count:
                meta[name] = meta[name][:count]
        ids = event["output_ids"] if len(event["output_ids"]) == count else event["output_ids"][:count]
        if meta.get(LOGPROBS) is not None:
            # Earlier logprobs were checked with their events, and are checked again at the end.
            seen = known.get(LOGPROBS) is not None and meta.get("finish_reason") is None
            check_logprobs(ids, meta[LOGPROBS], before if seen else 0)
        return {**event, "output_ids": ids, "meta_info": meta}

    def _merge_incremental(self, event: Mapping[str, Any]) -> dict[str, Any]:
        """Append an incremental event. The lists grow in place: copying them with each event would be quadratic."""
        new_ids, new = event["output_ids"], event["meta_info"]
        known = self.answer["meta_info"] if self.answer is not None else {}
        if new.get(LOGPROBS) is not None or (known.get(LOGPROBS) is not None and new_ids):
            check_logprobs(new_ids, new.get(LOGPROBS) or [])
        if self.answer is None:
            return {**event}
        if new.get(LOGPROBS) and known.get(LOGPROBS) is None and self.answer["output_ids"]:
            raise UnreadableAnswer("token_counts_disagree", "the earlier tokens have no logprobs")
        meta = {**known, **new}
        for name in OUTPUT_LISTS:
            if new.get(name) is not None:
                meta[name] = known.get(name) or []
                meta[name] += new[name]
        ids = self.answer["output_ids"]
        ids += new_ids
        return {**event, "text": self.answer["text"] + event["text"], "output_ids": ids, "meta_info": meta}

    def _merge_abort_in_queue(self, event: Mapping[str, Any]) -> dict[str, Any]:
        """Handle the last event of a generation that was aborted while it waited in the queue after a retraction: it
        repeats all tokens."""
        assert self.answer is not None
        if (entries := self.answer["meta_info"].get(LOGPROBS)) is not None:
            check_logprobs(self.answer["output_ids"], entries)
        meta = {name: value for name, value in event["meta_info"].items() if name not in OUTPUT_LISTS}
        return {**event, **self.answer, "meta_info": {**self.answer["meta_info"], **meta}}

    def _note_version(self, meta: Mapping[str, Any], count: int) -> None:
        version, spans = meta.get(VERSION), self.spans
        if spans and spans[-1]["version"] == version:
            spans[-1]["end"] = count
        elif count:
            spans.append({"version": version, "start": spans[-1]["end"] if spans else 0, "end": count})

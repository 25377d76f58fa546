"""Chat streams: choices and messages put together from chunks, and the conversion of a whole answer to chunks. Pure.

Source: SGLang 0.5.23, `serving_chat.py`. Each chunk contains logprobs; the last chunk contains the ids, in `sglext`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import NoneType
from typing import Any

from miles_router.engines.answers import (
    LOGPROBS,
    MALFORMED,
    VERSIONS,
    Unreadable,
    UnreadableAnswer,
    in_words,
    token_count,
    version_runs,
)
from miles_router.engines.openai.choices import Choice, GrowingChoice, GrowingChoices, StreamShortfall
from miles_router.engines.rows import ROW_FIELDS

#: Token counts that are part of another count: the larger count, the object that contains the part (None: the usage
#: itself), and the name of the part.
PARTS = (
    ("prompt_tokens", "prompt_tokens_details", "cached_tokens"),
    ("completion_tokens", "completion_tokens_details", "reasoning_tokens"),
    ("completion_tokens", None, "reasoning_tokens"),
)
HOLDERS = frozenset(holder for _, holder, _ in PARTS if holder is not None)


def valid_usage(usage: Any) -> Any:
    """Return a usage without impossible values; None if `usage` is not an object.

    Counts that are not whole numbers of at least 0 are dropped, as are parts that exceed their larger count and details
    that are not objects. `total_tokens` becomes the sum.
    """
    if not isinstance(usage, Mapping):
        return None
    sound = {
        name: value for name, value in usage.items() if name not in HOLDERS or isinstance(value, Mapping | NoneType)
    }
    wholes: dict[str, int] = {}
    for name in ("prompt_tokens", "completion_tokens"):
        count = token_count(usage, name)
        if count is not None and count >= 0:
            wholes[name] = count
        elif name in sound:
            del sound[name]
    if "total_tokens" in sound:
        sound["total_tokens"] = sum(wholes.values())
    for whole, holder, part in PARTS:
        held = sound if holder is None else sound.get(holder)
        if not isinstance(held, Mapping) or part not in held:
            continue
        count = token_count(held, part)
        if count is None or not 0 <= count <= wholes.get(whole, 0):
            kept = {name: value for name, value in held.items() if name != part}
            sound = kept if holder is None else {**sound, holder: kept}
    return sound


ANSWER_FIELDS = ("id", "created", "model")
CHUNK_FIELDS = (*ANSWER_FIELDS, "object")
NOT_IN_ENVELOPE = ("choices", "usage", "sglext")
ROW_NAMES = frozenset(fields.rows.name for fields in ROW_FIELDS.values())


def with_named_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the message. Raises one of `MALFORMED` if a tool call names no function.

    The next turn of a session could not continue such a message.
    """
    for call in message.get("tool_calls") or ():
        if not isinstance(call["function"]["name"], str):
            raise TypeError("a tool call names no function")
    return {**message}


class CallIndices:
    """A corrector for the indices of one choice's tool calls.

    After a call of an unknown function, SGLang 0.5.23 restarts at index 0, and clients would join two calls to one.
    """

    def __init__(self) -> None:
        self._places: dict[object, int] = {}  # by the engine's index
        self._named = 0

    def renumber(self, delta: Mapping[str, Any]) -> None:
        """Change the delta, in place, so that each new call has an index of its own."""
        for piece in delta.get("tool_calls") or ():
            index = piece.get("index") or 0
            if (piece.get("function") or {}).get("name"):
                self._places[index] = max(self._named, index)
                self._named = self._places[index] + 1
            if index in self._places:
                piece["index"] = self._places[index]


class GrowingMessage:
    """An assistant message put together from a stream's deltas."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> GrowingMessage:
        """Return a `GrowingMessage` with this message as its state."""
        growing = cls()
        calls = [{**call, "index": place} for place, call in enumerate(message.get("tool_calls") or ())]
        growing.add({**message, "tool_calls": calls})
        return growing

    def add(self, delta: Mapping[str, Any]) -> None:
        if delta.get("content"):
            self._content.append(delta["content"])
        if delta.get("reasoning_content"):
            self._reasoning.append(delta["reasoning_content"])
        for piece in delta.get("tool_calls") or ():
            self._add_call(piece)

    def _add_call(self, piece: Mapping[str, Any]) -> None:
        call = self._calls.setdefault(piece.get("index") or 0, {"id": None, "name": None, "parts": []})
        function = piece.get("function") or {}
        call["id"] = piece.get("id") or call["id"]
        call["name"] = function.get("name") or call["name"]
        if function.get("arguments"):
            call["parts"].append(function["arguments"])

    def message(self) -> dict[str, Any]:
        """Return the message in the form of a whole answer. Raises one of `MALFORMED` if the deltas are malformed."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._content)}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": "".join(call["parts"])},
                }
                for _, call in sorted(self._calls.items())
            ]
        return with_named_calls(message)


class GrowingChatChoice(GrowingChoice):
    """One choice of a chat stream, put together from chunks.

    Args:
        keeps_entries: whether to keep chat's logprob entries; a choice that may be continued needs them.
    """

    def __init__(self, rid: str | None, *, keeps_entries: bool) -> None:
        super().__init__(rid)
        self.message = GrowingMessage()
        #: Chat's entries for the logprobs of all tokens.
        self.entries: list[dict[str, Any]] = []
        self._keeps_entries = keeps_entries

    def _add(self, choice: Mapping[str, Any]) -> int:
        self.message.add(choice.get("delta") or {})
        entries = self.logprob_list(choice, "content")
        for entry in entries:
            self.logprobs.append(entry.get("logprob") if isinstance(entry, Mapping) else None)
        if self._keeps_entries:
            self.entries += entries
        return len(entries)

    def add_shown(self, choice: Mapping[str, Any]) -> None:
        """Record only the message and finish reason of a continuation's chunk. `replace_tokens` sets the tokens."""
        self.message.add(choice.get("delta") or {})
        if choice.get("finish_reason") is not None:
            self.finish, self.matched = choice["finish_reason"], choice.get("matched_stop")


class GrowingChat(GrowingChoices[GrowingChatChoice]):
    """A streamed chat answer, put together from chunks.

    Args:
        may_be_cut: whether to keep all data that a continuation of its choices needs.
    """

    def __init__(self, *, may_be_cut: bool = False) -> None:
        super().__init__()
        #: The ids of the prompt, if the request asked for them.
        self.prompt: list[int] | None = None
        #: The fields of `sglext` (ids and rows), and the usage of all choices.
        self.extension: dict[str, Any] = {}
        self.usage: dict[str, Any] | None = None
        self._ids: list[list[int]] | None = None
        self._cached_tokens: int | None = None
        self._may_be_cut = self._keeps_chunks = may_be_cut

    def _begin(self, rid: str | None) -> GrowingChatChoice:
        return GrowingChatChoice(rid, keeps_entries=self._may_be_cut)

    def _add(self, chunk: Mapping[str, Any]) -> None:
        extra = chunk.get("sglext")
        if self._may_be_cut:
            self._keep(chunk, extra or {})
        if not extra:
            return
        if extra.get("output_ids"):
            if not isinstance(extra["output_ids"], list) or not all(
                isinstance(ids, list) for ids in extra["output_ids"]
            ):
                raise UnreadableAnswer("invalid_tokens", "the ids of a stream are not lists")
            self._ids = extra["output_ids"]
        if extra.get("input_ids"):
            if not isinstance(extra["input_ids"], list):
                raise UnreadableAnswer("invalid_tokens", "the ids of a prompt are not a list")
            self.prompt = extra["input_ids"]
        if (cached := cached_tokens(extra)) is not None:
            self._cached_tokens = cached

    def _keep(self, chunk: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
        if chunk["choices"]:
            self.envelope = {name: value for name, value in chunk.items() if name not in NOT_IN_ENVELOPE}
        self.extension |= {name: value for name, value in extra.items() if value is not None}
        usage = chunk.get("usage")
        if isinstance(usage, Mapping) and type(usage.get("prompt_tokens") or 0) is int:
            self.usage = {**usage}

    def _choices(self) -> list[Choice]:
        growing = sorted(self.growing.items())
        if any(choice.finish is None for _, choice in growing):
            raise UnreadableAnswer("incomplete", "a stream ended without a finish reason")
        if self._ids is None:
            raise StreamShortfall("a stream ended without the sampled ids")
        indices = [index for index, _ in growing]
        if indices != list(range(len(self._ids))):
            detail = f"the choices are {indices}, but there are ids for {len(self._ids)}"
            raise UnreadableAnswer("token_counts_disagree", detail)
        return [self._choice(index, choice, ids) for (index, choice), ids in zip(growing, self._ids, strict=True)]

    def _choice(self, index: int, choice: GrowingChatChoice, ids: list[int]) -> Choice:
        message = choice.message.message()  # first, since a malformed message is not a shortfall
        if choice.tokens < len(ids):
            reason: Unreadable = "token_counts_disagree" if choice.tokens else "incomplete"
            first = f"position {choice.tokens}, token {ids[choice.tokens]} has none"
            counts = f"{len(ids)} ids, {choice.tokens} logprobs; {first}"
            raise StreamShortfall(f"a stream left out logprobs: {counts}", reason)
        return Choice(
            index=index,
            message=message,
            finish=str(choice.finish),
            matched=choice.matched,
            ids=ids,
            logprobs=choice.logprobs,
            versions=choice.versions.runs,
            prompt=self.prompt,
            facts={"rid": choice.rid, "cached_tokens": self._cached_tokens},
        )

    # For a stream that was cut

    def set_ids(self, ids: Mapping[int, list[int]]) -> None:
        """Set the sampled ids of every choice, by its index, if the stream ended before it contained them."""
        self._ids = self.extension["output_ids"] = [ids.get(index, []) for index in range(max(ids) + 1)]

    def as_generate(self, index: int, given: int, finish: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the streamed part of a choice in the form of `/generate`, with an empty text.

        Args:
            given: the number of prompt tokens.
            finish: the finish reason; None if the choice was cut.

        Raises:
            UnreadableAnswer: the stream did not contain the ids and logprobs.
        """
        choice, all_ids = self.growing[index], self._ids or []
        ids = all_ids[index] if index < len(all_ids) else None
        if ids is None or len(ids) != len(choice.entries) or not all(type(each) is int for each in ids):
            raise UnreadableAnswer("incomplete", "the stream lacks the ids and logprobs of the sampled tokens")
        try:
            triples = [[entry["logprob"], token, entry] for token, entry in zip(ids, choice.entries, strict=True)]
        except MALFORMED as error:
            raise UnreadableAnswer("incomplete", in_words(error)) from error
        meta = {
            "id": self.envelope.get("id"),
            "finish_reason": finish,
            "prompt_tokens": given,
            "completion_tokens": len(ids),
            LOGPROBS: triples,
        }
        if choice.versions.runs:
            meta[VERSIONS] = [
                {"version": run.version, "start": run.start, "end": run.end} for run in choice.versions.runs
            ]
        meta |= {name: value for name, value in self.extension.items() if name in ROW_NAMES}
        return {"text": "", "output_ids": list(ids), "meta_info": meta}

    def replace_tokens(self, index: int, answer: Mapping[str, Any]) -> None:
        """Replace the tokens of a continued choice by the tokens of the joined answer, which has the form of
        `/generate`."""
        choice, meta = self.growing[index], answer["meta_info"]
        choice.logprobs = [triple[0] for triple in meta[LOGPROBS]]
        choice.tokens = len(choice.logprobs)
        choice.versions.runs = version_runs(meta, choice.tokens)
        if self._ids is not None:
            self._ids = [*self._ids[:index], list(answer["output_ids"]), *self._ids[index + 1 :]]


def cached_tokens(extra: object) -> int | None:
    """Return the number of prompt tokens from a prefix cache in `sglext`; None if it has no such counts."""
    details = extra.get("cached_tokens_details") if isinstance(extra, Mapping) else None
    if not isinstance(details, Mapping) or not details:
        return None
    return sum(count for count in details.values() if type(count) is int and count > 0)


def chunks_of(answer: Mapping[str, Any], fields: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a whole answer as the chunks of a stream, with the text of each choice in a single chunk."""
    head = {name: answer.get(name) for name in ANSWER_FIELDS} | {"object": "chat.completion.chunk"}
    for choice in answer["choices"]:
        for part in _parts(choice):
            yield {**head, "choices": [part]}
    if wants_usage(fields):
        extra = {"sglext": answer["sglext"]} if answer.get("sglext") else {}
        yield {**head, "choices": [], "usage": answer.get("usage"), **extra}


def wants_usage(fields: Mapping[str, Any]) -> bool:
    """Return True if a request asks for a final chunk with the usage."""
    options = fields.get("stream_options")
    return isinstance(options, Mapping) and bool(options.get("include_usage"))


def with_usage(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return `stream_options` that ask for a final chunk with the usage. Invalid options stay as they are."""
    options = fields.get("stream_options")
    if options is not None and not isinstance(options, Mapping):
        return {"stream_options": options}
    return {"stream_options": {**(options or {}), "include_usage": True}}


def without_usage(chunk: dict[str, Any], fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """Remove the final usage from a chunk if the client did not ask for it. Return None if nothing is left."""
    if wants_usage(fields) or chunk.get("usage") is None or chunk["choices"]:
        return chunk
    kept = {name: value for name, value in chunk.items() if name != "usage"}
    return kept if kept.get("sglext") else None


def _parts(choice: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield three chunks of a choice: the role, the whole message, and the finish reason."""
    index, message = choice["index"], choice["message"]
    yield {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None, "logprobs": None}
    delta = {name: message[name] for name in ("reasoning_content", "content") if message.get(name)}
    if message.get("tool_calls"):
        delta["tool_calls"] = [{**call, "index": place} for place, call in enumerate(message["tool_calls"])]
    yield {"index": index, "delta": delta, "finish_reason": None, "logprobs": choice.get("logprobs")}
    yield {
        "index": index,
        "delta": {},
        "finish_reason": choice["finish_reason"],
        "matched_stop": choice.get("matched_stop"),
        "logprobs": None,
    }

"""Chat streams: a message and choices that grow with their chunks, and a whole answer given as chunks (SGLang 0.5.23,
`serving_chat.py`). Pure.

The logprobs come with each chunk, the ids with the last one, in `sglext`.
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

#: Fields of a usage that are parts of another, by the object that they stand in, if any.
PARTS = (
    ("prompt_tokens", "prompt_tokens_details", "cached_tokens"),
    ("completion_tokens", "completion_tokens_details", "reasoning_tokens"),
    ("completion_tokens", None, "reasoning_tokens"),
)
HOLDERS = frozenset(holder for _, holder, _ in PARTS if holder is not None)


def sound_usage(usage: Any) -> Any:
    """Return a usage without the counts that cannot be: what is no whole number from 0 is left out, and so is a part
    that is larger than its whole. The total is the sum. What should be an object and is none is left out."""
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


OF_THE_ANSWER = ("id", "created", "model")
OF_A_CHUNK = (*OF_THE_ANSWER, "object")
BESIDE_THE_ENVELOPE = ("choices", "usage", "sglext")
ROW_NAMES = frozenset(fields.rows.name for fields in ROW_FIELDS.values())


def named_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose calls say what they call: only such a one can be continued. Raises one of `MALFORMED` for any
    other."""
    for call in message.get("tool_calls") or ():
        if not isinstance(call["function"]["name"], str):
            raise TypeError("a tool call that names no function")
    return {**message}


class CallPlaces:
    """The places of the tool calls of one choice. Behind a call of an unknown function, SGLang 0.5.23 begins again with
    index 0, and clients would join two calls into one."""

    def __init__(self) -> None:
        self._places: dict[object, int] = {}  # by the engine's index
        self._named = 0

    def number(self, delta: Mapping[str, Any]) -> None:
        """Give each new call of a delta a place of its own."""
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
    def of(cls, message: Mapping[str, Any]) -> GrowingMessage:
        """One that has grown to this message."""
        growing = cls()
        calls = [{**call, "index": place} for place, call in enumerate(message.get("tool_calls") or ())]
        growing.add({**message, "tool_calls": calls})
        return growing

    def add(self, delta: Mapping[str, Any]) -> None:
        """One delta more."""
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
        """As the whole answer would have it. Raises one of `MALFORMED` where the deltas make none."""
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
        return named_calls(message)


class GrowingChatChoice(GrowingChoice):
    """One choice of a chat stream as it grows.

    Args:
        keeps_entries: whether the entries of its logprobs are kept; a choice that is carried on needs them.
    """

    def __init__(self, rid: str | None, *, keeps_entries: bool) -> None:
        super().__init__(rid)
        #: The message that the deltas so far make.
        self.message = GrowingMessage()
        #: Chat's entries for the logprobs of all tokens.
        self.entries: list[dict[str, Any]] = []
        self._keeps_entries = keeps_entries

    def _add(self, choice: Mapping[str, Any]) -> int:
        self.message.add(choice.get("delta") or {})
        entries = self.told_logprobs(choice, "content")
        for entry in entries:
            self.logprobs.append(entry.get("logprob") if isinstance(entry, Mapping) else None)
        if self._keeps_entries:
            self.entries += entries
        return len(entries)

    def see(self, choice: Mapping[str, Any]) -> None:
        """Take what is shown of it while it is carried on; what was sampled is put in its place at the end."""
        self.message.add(choice.get("delta") or {})
        if choice.get("finish_reason") is not None:
            self.finish, self.matched = choice["finish_reason"], choice.get("matched_stop")


class GrowingChat(GrowingChoices[GrowingChatChoice]):
    """A chat answer as its chunks come. The ids come with the last chunk, the logprobs with each.

    Args:
        may_be_cut: whether its choices may be carried on: then all is kept that this needs.
    """

    def __init__(self, *, may_be_cut: bool = False) -> None:
        super().__init__()
        #: The ids of the prompt, where the engine was asked to tell them.
        self.prompt: list[int] | None = None
        #: What the last chunks say beside the choices: ids and rows; and the usage of all.
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
                raise UnreadableAnswer("invalid_tokens", "the ids of a stream are no lists")
            self._ids = extra["output_ids"]
        if extra.get("input_ids"):
            if not isinstance(extra["input_ids"], list):
                raise UnreadableAnswer("invalid_tokens", "the ids of a prompt are no list")
            self.prompt = extra["input_ids"]
        if (cached := cached_tokens(extra)) is not None:
            self._cached_tokens = cached

    def _keep(self, chunk: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
        if chunk["choices"]:
            self.envelope = {name: value for name, value in chunk.items() if name not in BESIDE_THE_ENVELOPE}
        self.extension |= {name: value for name, value in extra.items() if value is not None}
        usage = chunk.get("usage")
        if isinstance(usage, Mapping) and type(usage.get("prompt_tokens") or 0) is int:
            self.usage = {**usage}

    def _choices(self) -> list[Choice]:
        growing = sorted(self.growing.items())
        if any(choice.finish is None for _, choice in growing):
            raise UnreadableAnswer("incomplete", "a stream ended without a finish reason")
        if self._ids is None:
            raise StreamShortfall("a stream ended without the ids that it sampled")
        indices = [index for index, _ in growing]
        if indices != list(range(len(self._ids))):
            raise UnreadableAnswer("token_counts_disagree", f"choices {indices}, and ids of {len(self._ids)}")
        return [self._choice(index, choice, ids) for (index, choice), ids in zip(growing, self._ids, strict=True)]

    def _choice(self, index: int, choice: GrowingChatChoice, ids: list[int]) -> Choice:
        message = choice.message.message()  # first: a chunk that is none says nothing of other streams
        if choice.tokens < len(ids):
            told: Unreadable = "token_counts_disagree" if choice.tokens else "incomplete"
            first = f"position {choice.tokens}, token {ids[choice.tokens]} has none"
            counts = f"{len(ids)} ids, {choice.tokens} logprobs; {first}"
            raise StreamShortfall(f"a stream left out logprobs: {counts}", told)
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

    # A stream that is cut

    def name_ids(self, ids: Mapping[int, list[int]]) -> None:
        """Take the ids of every choice, by its index, of a stream that ended before it told them."""
        self._ids = self.extension["output_ids"] = [ids.get(index, []) for index in range(max(ids) + 1)]

    def part(self, index: int, given: int, finish: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return a choice in the form of `/generate`, as far as the stream told it; its text is not known.

        Args:
            given: the number of ids that it was given.
            finish: why it ended; None where it did not.

        Raises:
            UnreadableAnswer: the stream did not tell its ids and logprobs.
        """
        choice, told = self.growing[index], self._ids or []
        ids = told[index] if index < len(told) else None
        if ids is None or len(ids) != len(choice.entries) or not all(type(each) is int for each in ids):
            raise UnreadableAnswer("incomplete", "the stream did not tell the ids and logprobs of what was sampled")
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

    def put_whole(self, index: int, answer: Mapping[str, Any]) -> None:
        """Put all that was sampled of a choice that was carried on, in the form of `/generate`, in the place of what
        its first part was."""
        choice, meta = self.growing[index], answer["meta_info"]
        choice.logprobs = [triple[0] for triple in meta[LOGPROBS]]
        choice.tokens = len(choice.logprobs)
        choice.versions.runs = version_runs(meta, choice.tokens)
        if self._ids is not None:
            self._ids = [*self._ids[:index], list(answer["output_ids"]), *self._ids[index + 1 :]]


def cached_tokens(extra: object) -> int | None:
    """How many tokens of the prompt came from a prefix cache, as the extension `sglext` says it; None where it does
    not."""
    details = extra.get("cached_tokens_details") if isinstance(extra, Mapping) else None
    if not isinstance(details, Mapping) or not details:
        return None
    return sum(count for count in details.values() if type(count) is int and count > 0)


def chunks_of(answer: Mapping[str, Any], fields: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A whole answer as the chunks of a stream that a request with these fields asks for: each choice in one piece."""
    head = {name: answer.get(name) for name in OF_THE_ANSWER} | {"object": "chat.completion.chunk"}
    for choice in answer["choices"]:
        for part in _parts(choice):
            yield {**head, "choices": [part]}
    if wants_usage(fields):
        extra = {"sglext": answer["sglext"]} if answer.get("sglext") else {}
        yield {**head, "choices": [], "usage": answer.get("usage"), **extra}


def wants_usage(fields: Mapping[str, Any]) -> bool:
    """Whether a request asks for a stream that ends with a chunk of usage."""
    options = fields.get("stream_options")
    return isinstance(options, Mapping) and bool(options.get("include_usage"))


def with_usage(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `stream_options` of a request whose stream ends with a chunk of usage; what is none stays as it is."""
    options = fields.get("stream_options")
    if options is not None and not isinstance(options, Mapping):
        return {"stream_options": options}
    return {"stream_options": {**(options or {}), "include_usage": True}}


def without_usage(chunk: dict[str, Any], fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a chunk without the usage that its client did not ask for; None if it says nothing else."""
    if wants_usage(fields) or chunk.get("usage") is None or chunk["choices"]:
        return chunk
    kept = {name: value for name, value in chunk.items() if name != "usage"}
    return kept if kept.get("sglext") else None


def _parts(choice: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A role, all that was said, and why it ended."""
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

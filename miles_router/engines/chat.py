"""The chat endpoint: what it is asked so that a turn can be recorded exactly, and what it answers (SGLang 0.5.23,
`serving_chat.py`). Pure.

A whole answer tells ids, logprobs and weight versions in each choice's `meta_info`. A stream tells the logprobs with
each chunk and the ids at its end in `sglext`; it does not tell weight versions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from miles_router.engines import paths
from miles_router.engines.answers import UnreadableAnswer, version_runs, without_logprobs
from miles_router.engines.choices import MALFORMED, Choice, Chunks, GrowingChoice, GrowingChoices, StreamShortfall
from miles_router.engines.facts import Facts
from miles_router.trajectory.pieces import Tokens

#: What a whole answer is asked for, and what a stream; a client gets those that it asked for itself.
OF_WHOLE = ("logprobs", "return_meta_info")
OF_STREAM = ("logprobs", "return_output_ids_in_sglext", "return_cached_tokens_details")
PROMPT_OF_WHOLE, PROMPT_OF_STREAM = "return_prompt_token_ids", "return_input_ids_in_sglext"
#: Of `sglext`, what is asked for to record, and the request's field for each.
SGLEXT = {
    "input_ids": PROMPT_OF_STREAM,
    "output_ids": "return_output_ids_in_sglext",
    "cached_tokens_details": "return_cached_tokens_details",
}
SCHEMA = "ChatCompletionRequest"
#: Where a request has the header `X-SGLExt-Ids-Framed`, the ids come in an event of this name.
FRAMED = b"sglext_ids"
EMPTY: tuple[object, ...] = (None, "", [])
OF_THE_ANSWER = ("id", "created", "model")


class ChatEndpoint:
    """`/v1/chat/completions`."""

    path = paths.CHAT
    experts_of_each = True
    chunk_events = frozenset({b"", FRAMED})

    def request(self, fields: Mapping[str, Any], *, stream: bool, ids: Tokens | None = None) -> bytes:
        """The request for the engine; without `ids`, it is asked which its template made of the messages."""
        sent = {**fields, **dict.fromkeys(OF_STREAM if stream else OF_WHOLE, True)}
        if not stream:
            sent.pop("stream", None)
            sent.pop("stream_options", None)
        if ids is None:
            sent[PROMPT_OF_STREAM if stream else PROMPT_OF_WHOLE] = True
        else:
            sent["input_ids"] = ids
        return orjson.dumps(sent, option=orjson.OPT_SERIALIZE_NUMPY)

    def choices(self, answer: Mapping[str, Any]) -> list[Choice]:
        """What a whole answer says was sampled.

        Raises:
            UnreadableAnswer: it lacks something, or contradicts itself.
        """
        try:
            return [_choice(each) for each in answer["choices"]]
        except MALFORMED as error:
            raise UnreadableAnswer("incomplete", repr(error)) from error

    def growing(self) -> GrowingChat:
        """For a stream's chunks."""
        return GrowingChat()

    def as_asked(self, answer: dict[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
        """A whole answer with what its client asked for itself."""
        return {**answer, "choices": [_choice_as_asked(choice, fields) for choice in answer["choices"]]}

    def chunk_as_asked(self, chunk: dict[str, Any], fields: Mapping[str, Any]) -> dict[str, Any] | None:
        """A chunk, changed to what its client asked for itself; None if it says nothing else."""
        if chunk.get("sglext") is not None:
            unwanted = {name for name, field in SGLEXT.items() if not fields.get(field)}
            kept = {
                name: value for name, value in chunk["sglext"].items() if value is not None and name not in unwanted
            }
            chunk["sglext"] = kept
            if not kept:
                del chunk["sglext"]
                if not chunk["choices"] and chunk.get("usage") is None:
                    return None
        if fields.get("logprobs"):
            return chunk
        stripped = False
        for choice in chunk["choices"]:
            stripped = stripped or choice.get("logprobs") is not None
            choice["logprobs"] = None
        return None if stripped and all(map(_says_nothing, chunk["choices"])) else chunk

    def shortfall(self, facts: Facts) -> str | None:
        """By the engine's schema and parsers: without any parser, SGLang's chat streams leave out the logprobs of
        tokens that show no text, a stop token's above all."""
        field = SGLEXT["output_ids"]
        if facts.takes_field(SCHEMA, field) is False:
            return f"the engine has no field {field}"
        if facts.tool_call_parser == facts.reasoning_parser == "":
            return "the engine has neither tool_call_parser nor reasoning_parser: its streams leave out logprobs"
        return None

    @property
    def chunks(self) -> Chunks:
        """Gives a whole answer as the chunks of a stream: each choice in one piece."""
        return _chunks


def _choice(choice: Mapping[str, Any]) -> Choice:
    """One choice of a whole answer that was asked for with `OF_WHOLE`."""
    meta, finish = choice["meta_info"], choice["finish_reason"]
    if not isinstance(finish, str):
        raise UnreadableAnswer("incomplete", "a choice has no finish reason")
    triples = meta["output_token_logprobs"]
    if len(triples) != meta["completion_tokens"]:
        counts = f"{meta['completion_tokens']} tokens, {len(triples)} logprobs"
        raise UnreadableAnswer("token_counts_disagree", counts)
    reason = meta.get("finish_reason") or {}
    return Choice(
        index=choice["index"],
        message=_checked(choice["message"]),
        finish=finish,
        matched=reason.get("matched", choice.get("matched_stop")),
        ids=[triple[1] for triple in triples],
        logprobs=[triple[0] for triple in triples],
        versions=version_runs(meta, len(triples)),
        prompt=choice.get("prompt_token_ids"),
        facts={
            "rid": meta.get("id"),
            "cached_tokens": meta.get("cached_tokens"),
            "retractions": meta.get("num_retractions"),
            "versions": "engine",
        },
    )


def _checked(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose calls say what they call: only such a one can be continued."""
    for call in message.get("tool_calls") or ():
        if not isinstance(call["function"]["name"], str):
            raise TypeError("a tool call that names no function")
    return {**message}


def _choice_as_asked(choice: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    kept = dict(choice)
    if not (fields.get("return_prompt_token_ids") or fields.get("return_token_ids")):
        kept.pop("prompt_token_ids", None)
    if not fields.get("logprobs"):
        kept["logprobs"] = None
    if not fields.get("return_meta_info"):
        kept.pop("meta_info", None)
    elif not fields.get("logprobs"):
        kept = without_logprobs(kept)
    return kept


def _says_nothing(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return choice.get("finish_reason") is None and all(value in EMPTY for value in delta.values())


def _chunks(answer: Mapping[str, Any], fields: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    head = {name: answer.get(name) for name in OF_THE_ANSWER} | {"object": "chat.completion.chunk"}
    for choice in answer["choices"]:
        for part in _parts(choice):
            yield {**head, "choices": [part]}
    if wants_usage(fields):
        yield {**head, "choices": [], "usage": answer.get("usage")}


def wants_usage(fields: Mapping[str, Any]) -> bool:
    """Whether a request asks for a stream that ends with a chunk of usage."""
    options = fields.get("stream_options")
    return isinstance(options, Mapping) and bool(options.get("include_usage"))


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


class GrowingMessage:
    """An assistant message put together from a stream's deltas."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}

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
        return _checked(message)


class _GrowingChatChoice(GrowingChoice):
    def __init__(self, rid: str | None) -> None:
        super().__init__(rid)
        self.message = GrowingMessage()

    @property
    def tokens(self) -> int:
        return len(self.logprobs)

    def _add(self, choice: Mapping[str, Any]) -> None:
        self.message.add(choice.get("delta") or {})
        entries = (choice.get("logprobs") or {}).get("content") or ()
        self.logprobs += [entry["logprob"] for entry in entries]


class GrowingChat(GrowingChoices[_GrowingChatChoice]):
    """A chat answer as its chunks come. The ids come with the last chunk, the logprobs with each."""

    def __init__(self) -> None:
        super().__init__()
        self._prompt: list[int] | None = None
        self._ids: list[list[int]] | None = None
        self._cached_tokens: int | None = None

    def _begin(self, rid: str | None) -> _GrowingChatChoice:
        return _GrowingChatChoice(rid)

    def _add(self, chunk: Mapping[str, Any]) -> None:
        extra = chunk.get("sglext") or {}
        if extra.get("output_ids"):
            self._ids = [list(ids) for ids in extra["output_ids"]]
        self._prompt = extra.get("input_ids") or self._prompt
        details = extra.get("cached_tokens_details")
        if details:
            self._cached_tokens = sum(count for count in details.values() if isinstance(count, int))

    def _choices(self) -> list[Choice]:
        growing = sorted(self._growing.items())
        if any(choice.finish is None for _, choice in growing):
            raise UnreadableAnswer("incomplete", "a stream ended without a finish reason")
        if self._ids is None:
            raise StreamShortfall("a stream ended without the ids that it sampled")
        indices = [index for index, _ in growing]
        if indices != list(range(len(self._ids))):
            raise UnreadableAnswer("token_counts_disagree", f"choices {indices}, and ids of {len(self._ids)}")
        return [self._choice(index, choice, ids) for (index, choice), ids in zip(growing, self._ids, strict=True)]

    def _choice(self, index: int, choice: _GrowingChatChoice, ids: list[int]) -> Choice:
        message = choice.message.message()  # first: a chunk that is none says nothing of other streams
        if choice.tokens < len(ids):
            raise StreamShortfall(f"a stream left out logprobs: {len(ids)} ids, {choice.tokens} logprobs")
        return Choice(
            index=index,
            message=message,
            finish=str(choice.finish),
            matched=choice.matched,
            ids=ids,
            logprobs=choice.logprobs,
            versions=choice.versions.runs,
            prompt=self._prompt,
            facts={"rid": choice.rid, "cached_tokens": self._cached_tokens},
        )

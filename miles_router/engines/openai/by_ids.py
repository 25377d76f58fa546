"""Chat by `input_ids`, translated to `/generate` for engines whose own chat takes no ids or returns none. Pure.

A session sends such requests when it renders the prompt and parses the answer itself. Answers have the form of SGLang's
chat (0.5.23, `serving_chat.py`) with the unparsed text as content.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import orjson

from miles_router.engines import paths
from miles_router.engines.answers import ASKS_FOR_MASK, LOGPROBS, MALFORMED, UNFINISHED, UnreadableAnswer, in_words
from miles_router.engines.engine import CannotServe, Parse, Translation
from miles_router.engines.events import LAST_EVENT, Event, write_event
from miles_router.engines.generate import IDS, PARAMS, stop_strings
from miles_router.engines.growing import GrowingAnswer
from miles_router.engines.models import ADAPTER, MODEL
from miles_router.engines.openai.chat import PROMPT_OF_STREAM, PROMPT_OF_WHOLE, SGLEXT
from miles_router.engines.openai.chat_stream import wants_usage
from miles_router.engines.openai.held_deltas import LONGEST_BEGINNING, TOKEN_ID
from miles_router.engines.rows import ROW_FIELDS

#: Sampling parameters: the name in chat, and in `/generate`.
SAMPLING: Mapping[str, str] = {
    **{
        name: name
        for name in (
            *("temperature", "top_p", "top_k", "min_p", "n", "stop", "stop_token_ids", "stop_regex", "logit_bias"),
            *("frequency_penalty", "presence_penalty", "repetition_penalty", "regex", "ebnf", "custom_params"),
            *("ignore_eos", "no_stop_trim", "skip_special_tokens"),
        )
    },
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
}
#: Other fields that `/generate` has too. All further fields concern rendering, parsing or the form of the answer, or
#: are unknown; SGLang's chat ignores unknown fields.
OTHER_FIELDS = frozenset(
    (
        *("stream", "rid", "lora_path", "priority", "extra_key", "cache_salt", "custom_logit_processor"),
        *("session_params", "return_hidden_states", "max_thinking_tokens", ASKS_FOR_MASK),
        *(name for fields in ROW_FIELDS.values() for name in (fields.wanted, fields.start) if name is not None),
    )
)
JSON_OBJECT = '{"type": "object"}'


def has_input_ids(body: bytes, parse: Parse) -> bool:
    """Return True if a chat request has `input_ids`. Raises what `parse` raises."""
    fields = parse(body) if b'"%b"' % IDS.encode() in body else None
    return isinstance(fields, Mapping) and fields.get(IDS) is not None


def chat_by_ids(body: bytes, parse: Parse, generate: Callable[[bytes], Translation | None]) -> ChatByIds:
    """Translate a chat request to `/generate`.

    Args:
        generate: translates the `/generate` request to the engine's own; returns None if the engine takes it as it is.

    Raises:
        CannotServe: the request has no `input_ids`, or wants the engine to parse reasoning or tool calls.
        What `parse` and `generate` raise.
    """
    fields = parse(body)
    if not isinstance(fields, Mapping) or not isinstance(fields.get(IDS), list):
        raise CannotServe("its chat needs input_ids")
    if fields.get("separate_reasoning", True):
        raise CannotServe("its chat by input_ids parses no reasoning: set separate_reasoning to false")
    if fields.get("tools") and fields.get("tool_choice") != "none":
        raise CannotServe("its chat by input_ids parses no tool calls: set tool_choice to none")
    if ":" in str(fields.get(MODEL)) and not fields.get(ADAPTER):
        raise CannotServe(f"its chat by input_ids takes no adapter from the model's name: send it in {ADAPTER}")
    sent = orjson.dumps(as_generate(fields))
    return ChatByIds(fields, sent, generate(sent))


def as_generate(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `/generate` request with the same prompt and sampling parameters.

    Raises:
        CannotServe: the type of `response_format` is unknown.
    """
    params = {own: fields[name] for name, own in SAMPLING.items() if fields.get(name) is not None}
    params["max_new_tokens"] = fields.get("max_completion_tokens") or fields.get("max_tokens")
    params |= _json_schema(fields.get("response_format"))
    kept = {name: fields[name] for name in OTHER_FIELDS if fields.get(name) is not None}
    kept |= {"return_logprob": True, "return_text_in_logprobs": True}
    return {**kept, "top_logprobs_num": fields.get("top_logprobs") or 0, IDS: fields["input_ids"], PARAMS: params}


def _json_schema(wanted: Any) -> dict[str, Any]:
    match wanted:
        case None | {"type": "text"}:
            return {}
        case {"type": "json_object"}:
            return {"json_schema": JSON_OBJECT}
        case {"type": "json_schema", "json_schema": {"schema": Mapping() as schema}}:
            return {"json_schema": orjson.dumps(schema).decode()}
    raise CannotServe(f"it does not support response_format {str(wanted)[:64]!r}")


class ChatByIds:
    """The translation of one chat request by ids.

    Args:
        sent: the `/generate` request.
        inner: translates that to the engine's own request; None if the engine takes it as it is.
    """

    def __init__(self, fields: Mapping[str, Any], sent: bytes, inner: Translation | None) -> None:
        self.target: bytes | None = (inner.target if inner is not None else None) or paths.GENERATE.encode()
        self.body = sent if inner is None else inner.body
        self.rids: Mapping[str, str] = {} if inner is None else inner.rids
        self.heeds_cache_key = inner is None or inner.heeds_cache_key
        self._fields = fields
        self._inner = inner
        self._created = int(time.time())
        self._stops = stop_strings(fields.get("stop"))
        self._streamed: dict[int, StreamedChoice] = {}
        n = fields.get("n")
        self._choices = n if type(n) is int and n > 0 else 1

    def whole(self, answer: bytes, version: str | None) -> bytes:
        try:
            parsed = orjson.loads(answer if self._inner is None else self._inner.whole(answer, version))
            return orjson.dumps(self._whole(parsed if isinstance(parsed, list) else [parsed]))
        except (*MALFORMED, orjson.JSONDecodeError) as error:
            raise UnreadableAnswer("incomplete", in_words(error)) from error

    def _whole(self, answers: list[Any]) -> dict[str, Any]:
        metas = [answer["meta_info"] for answer in answers]
        choices = [self._choice(place, answer) for place, answer in enumerate(answers)]
        head = {**self._head(metas[0]["id"]), "object": "chat.completion"}
        return {**head, "choices": choices, "usage": self._usage(metas)}

    def _choice(self, index: int, answer: Mapping[str, Any]) -> dict[str, Any]:
        meta, finish = answer["meta_info"], answer["meta_info"]["finish_reason"]
        if not isinstance(answer["text"], str):
            raise TypeError("the text is not a string")
        prompt = {"prompt_token_ids": self._fields["input_ids"]} if self._fields.get(PROMPT_OF_WHOLE) else {}
        return {
            "index": index,
            "message": {"role": "assistant", "content": answer["text"], "reasoning_content": None, "tool_calls": None},
            "logprobs": {"content": [*_entries(meta)]},
            "finish_reason": finish["type"],
            "matched_stop": finish.get("matched"),
            "meta_info": meta,
            **prompt,
        }

    def event(self, event: Event, version: str | None) -> bytes:
        if event.is_last:
            try:
                return b"".join([*map(write_event, self._end()), LAST_EVENT])
            except MALFORMED as error:
                raise UnreadableAnswer("incomplete", in_words(error)) from error
        raw = event.raw if self._inner is None else self._inner.event(event, version)
        parsed = Event.read(raw).parse()
        if not isinstance(parsed, Mapping) or "error" in parsed or not event.data:
            return raw
        try:
            index = parsed.get("index", 0)
            if type(index) is not int or not 0 <= index < self._choices:
                raise TypeError("the index of an event is invalid")
            choice = self._streamed.setdefault(index, StreamedChoice(self._stops))
            parts = [*choice.parts(parsed)]
            head = {**self._head(parsed["meta_info"]["id"]), "object": "chat.completion.chunk"}
        except MALFORMED as error:
            raise UnreadableAnswer("incomplete", in_words(error)) from error
        return b"".join(write_event({**head, "choices": [{"index": index, **part}]}) for part in parts)

    def _end(self) -> Iterator[dict[str, Any]]:
        """Yield the last chunks of the stream: ids and rows of all choices, and the usage."""
        ended = [answer for _, each in sorted(self._streamed.items()) if (answer := each.answer) is not None]
        if len(ended) != self._choices:
            return
        metas = [answer["meta_info"] for answer in ended]
        head = {**self._head(metas[0].get("id")), "object": "chat.completion.chunk", "choices": []}
        extension: dict[str, Any] = {}
        if self._fields.get(SGLEXT["output_ids"]):
            extension["output_ids"] = [answer["output_ids"] for answer in ended]
        if self._fields.get(PROMPT_OF_STREAM):
            extension["input_ids"] = self._fields["input_ids"]
        rows = [fields.rows.name for fields in ROW_FIELDS.values()]
        extension |= {name: metas[0][name] for name in rows if metas[0].get(name)}
        if extension:
            yield {**head, "usage": None, "sglext": extension}
        if wants_usage(self._fields):
            yield {**head, "usage": self._usage(metas)}

    def _usage(self, metas: list[Any]) -> dict[str, Any]:
        """Return the usage. The length of `input_ids` counts where the engine does not return `prompt_tokens`."""
        prompt = next((meta["prompt_tokens"] for meta in metas if "prompt_tokens" in meta), len(self._fields[IDS]))
        completion = sum(meta["completion_tokens"] for meta in metas)
        if type(prompt) is not int or type(completion) is not int:
            raise TypeError("the token counts are not integers")
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _head(self, name: object) -> dict[str, Any]:
        return {"id": name, "created": self._created, "model": self._fields.get("model")}


class StreamedChoice:
    """One choice of a stream. Text that may be the start of a stop string, or ends inside a character, is held back."""

    def __init__(self, stops: list[str]) -> None:
        self._stops = stops
        self._growing = GrowingAnswer()
        self._text = ""
        self._tokens = 0

    @property
    def answer(self) -> dict[str, Any] | None:
        """The answer so far, in the form of `/generate`; None before the first event."""
        return self._growing.answer

    def parts(self, parsed: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the fields of the choice in each chunk that one event becomes.

        Raises:
            UnreadableAnswer: the event contradicts an earlier one.
            What `GrowingAnswer.add` raises.
        """
        if self._growing.ended:
            raise UnreadableAnswer("incomplete", "an event follows the finish reason")
        answer = self._growing.add(parsed)
        meta, finish = answer["meta_info"], answer["meta_info"].get("finish_reason")
        if finish is not None and not isinstance(finish["type"], str):
            raise TypeError("the type of the finish reason is not a string")
        text = answer["text"] if finish is not None else self._safe_text(answer["text"])
        if not text.startswith(self._text) and not self._text.startswith(text):
            raise UnreadableAnswer("tokens_taken_back", "the text of an event differs from the text before")
        new, entries = text[len(self._text) :], [*_entries(meta, self._tokens)]
        self._text, self._tokens = max(text, self._text, key=len), len(answer["output_ids"])
        open_ = {"finish_reason": None, "matched_stop": None}
        if new or entries:
            delta = {"role": None, "content": new, "reasoning_content": None}
            yield {"delta": delta, "logprobs": {"content": entries} if entries else None, **open_}
        if finish is not None:
            end = {"finish_reason": finish["type"], "matched_stop": finish.get("matched")}
            yield {"delta": {"role": None, "content": None}, "logprobs": None, **end}

    def _safe_text(self, text: str) -> str:
        kept = len(text.rstrip(UNFINISHED))
        for stop in self._stops:
            longest = min(len(stop) - 1, kept, LONGEST_BEGINNING)
            kept -= next((size for size in range(longest, 0, -1) if text.endswith(stop[:size], 0, kept)), 0)
        return text[:kept]


def _entries(meta: Mapping[str, Any], start: int = 0) -> Iterator[dict[str, Any]]:
    """Yield chat's logprobs entry for each token from `start` on. Raises one of `MALFORMED`."""
    tops = meta.get("output_top_logprobs") or ()
    for place, triple in enumerate(meta[LOGPROBS][start:], start):
        top = tops[place] if place < len(tops) and tops[place] else ()
        yield {**_entry(triple), "top_logprobs": [_entry(each) for each in top]}


def _entry(triple: Any) -> dict[str, Any]:
    """Return chat's logprob entry for a token. `bytes` is None for a token that is only part of a character."""
    text = triple[2] or ""
    spelled = None if UNFINISHED in text else list(text.encode("utf-8", "surrogatepass"))
    return {"token": text, "bytes": spelled, "logprob": triple[0], TOKEN_ID: triple[1]}

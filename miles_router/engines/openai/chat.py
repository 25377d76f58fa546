"""The chat endpoint: requests that make exact recording of a turn possible, and the reading of answers. Pure.

Source: SGLang 0.5.23, `serving_chat.py`. A whole answer contains ids, logprobs and weight versions in the `meta_info`
of each choice. A stream contains logprobs in each chunk, and the ids at its end in `sglext`, but no weight versions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from miles_router.engines import json_bytes, paths
from miles_router.engines.answers import (
    ASKS_FOR_MASK,
    MALFORMED,
    UnreadableAnswer,
    in_words,
    sampling_mask_of,
    tokens_of,
    version_runs,
    without_logprobs,
)
from miles_router.engines.facts import Facts
from miles_router.engines.generate import RID
from miles_router.engines.openai.chat_stream import (
    GrowingChat,
    chunks_of,
    valid_usage,
    with_named_calls,
    with_usage,
    without_usage,
)
from miles_router.engines.openai.choices import Choice, Chunks
from miles_router.engines.parsers.reading import Tools

#: Fields that the router adds to a request, for a whole answer and for a stream. The client sees only the results of
#: fields that the client itself sent.
WHOLE_FIELDS = ("logprobs", "return_meta_info")
STREAM_FIELDS = ("logprobs", "return_output_ids_in_sglext", "return_cached_tokens_details")
PROMPT_OF_WHOLE, PROMPT_OF_STREAM = "return_prompt_token_ids", "return_input_ids_in_sglext"
#: Fields of `sglext` that a record needs, and the request field that asks for each.
SGLEXT = {
    "input_ids": PROMPT_OF_STREAM,
    "output_ids": "return_output_ids_in_sglext",
    "cached_tokens_details": "return_cached_tokens_details",
}
#: SGLang's own settings of sampling and rendering, which a request of any API may have.
CONTROLS = frozenset(
    (
        *("min_p", "min_tokens", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "seed"),
        *("stop_token_ids", "stop_regex", "no_stop_trim", "ignore_eos", "skip_special_tokens", "regex", "ebnf"),
        *("chat_template_kwargs", "lora_path", "custom_logit_processor", "custom_params", "priority", "rid"),
        ASKS_FOR_MASK,
    )
)
#: The field of a request whose last message is the start of the answer.
CONTINUES_FINAL = "continue_final_message"
SCHEMA = "ChatCompletionRequest"
#: Where a request has the header `X-SGLExt-Ids-Framed`, the ids come in an event of this name.
FRAMED = b"sglext_ids"
EMPTY: tuple[object, ...] = (None, "", [])


def _with_readable_calls(message: Any) -> Any:
    """Return a message with U+FFFD for lone surrogates in call arguments, which models write and the engine refuses."""
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [*map(_readable, calls)]}


def _readable(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(arguments, str) or "\\u" not in arguments:
        return call
    return {
        **call,
        "function": {**function, "arguments": json_bytes.replace_invalid_unicode(arguments.encode()).decode()},
    }


class ChatEndpoint:
    """The `OpenAIEndpoint` for `/v1/chat/completions`."""

    path = paths.CHAT
    takes_ids = True
    rows_missing: str | None = None
    length_fields: tuple[str, ...] = ("max_completion_tokens", "max_tokens")
    tokens_by_default: int | None = None
    chunk_events = frozenset({b"", FRAMED})
    whole_only = frozenset({ASKS_FOR_MASK})

    def request(self, fields: Mapping[str, Any], *, stream: bool, ids: Sequence[bytes] | None = None) -> bytes:
        """Return the request for the engine. Without `ids`, it also asks for the prompt ids that the template made."""
        sent = {**fields, **dict.fromkeys(STREAM_FIELDS if stream else WHOLE_FIELDS, True)}
        if stream:
            sent |= with_usage(fields)
        else:
            sent.pop("stream", None)
            sent.pop("stream_options", None)
        if ids is None:
            sent["messages"] = [*map(_with_readable_calls, fields["messages"])]
            sent[PROMPT_OF_STREAM if stream else PROMPT_OF_WHOLE] = True
            return orjson.dumps(sent)
        sent.pop("input_ids", None)
        # The rid comes last, where it is found without a search of the body.
        end = b"," + orjson.dumps({RID: sent.pop(RID)})[1:] if RID in sent else b"}"
        return b"".join((memoryview(orjson.dumps(sent))[:-1], b',"input_ids":', *ids, end))

    def choices(self, answer: Mapping[str, Any]) -> list[Choice]:
        try:
            return [_choice(each) for each in answer["choices"]]
        except MALFORMED as error:
            raise UnreadableAnswer("incomplete", in_words(error)) from error

    def growing(self, *, may_be_cut: bool = False) -> GrowingChat:
        return GrowingChat(may_be_cut=may_be_cut)

    def for_client(self, answer: dict[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return a whole answer with only the fields that the client asked for.

        Values in `metadata` become strings: the API allows only strings, and some clients refuse other types.
        """
        seen = {**answer, "choices": [_choice_for_client(choice, fields) for choice in answer["choices"]]}
        if "usage" in seen:
            seen["usage"] = valid_usage(seen["usage"])
        if isinstance(answer.get("metadata"), dict):
            seen["metadata"] = {name: _text(value) for name, value in answer["metadata"].items()}
        return seen

    def chunk_for_client(self, chunk: dict[str, Any], fields: Mapping[str, Any]) -> dict[str, Any] | None:
        """Reduce a chunk, in place, to the fields that the client asked for. Return None if nothing is left."""
        if chunk.get("usage") is not None:
            chunk["usage"] = valid_usage(chunk["usage"])
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
        if not fields.get("logprobs"):
            emptied = False
            for choice in chunk["choices"]:
                if choice.get("logprobs") is not None:
                    emptied = True
                choice["logprobs"] = None
            if emptied and all(map(_is_empty, chunk["choices"])):
                return None
        return chunk if chunk.get("usage") is None else without_usage(chunk, fields)

    def shortfall(self, facts: Facts) -> str | None:
        """Return the shortfall according to the engine's schema and parsers.

        Without any parser, SGLang's chat streams leave out the logprobs of tokens without text, such as stop tokens.
        """
        field = SGLEXT["output_ids"]
        if facts.takes_field(SCHEMA, field) is False:
            return f"the engine has no field {field}"
        if facts.tool_call_parser == facts.reasoning_parser == "":
            return "the engine has neither tool_call_parser nor reasoning_parser: its streams leave out logprobs"
        return None

    @property
    def chunks(self) -> Chunks:
        return chunks_of


def ids_obstacle(fields: Mapping[str, Any]) -> str | None:
    """Return the reason, in one word, why ids cannot replace the messages of a request; None if they can."""
    if fields.get("input_ids") is not None:
        return "own_input_ids"
    if not isinstance(fields.get("chat_template_kwargs") or {}, Mapping):
        return "invalid_chat_template_kwargs"  # the engine reports this error
    return CONTINUES_FINAL if fields.get(CONTINUES_FINAL) else None


def _choice(choice: Mapping[str, Any]) -> Choice:
    """Read one choice of a whole answer to a request with the fields `WHOLE_FIELDS`."""
    meta, finish = choice["meta_info"], choice["finish_reason"]
    if not isinstance(finish, str):
        raise UnreadableAnswer("incomplete", "a choice has no finish reason")
    triples = meta["output_token_logprobs"]
    if not isinstance(triples, list):
        raise UnreadableAnswer("invalid_tokens", "the logprobs are not a list")
    ids = tokens_of(triples)
    if len(triples) != meta["completion_tokens"]:
        counts = f"{meta['completion_tokens']} tokens, {len(triples)} logprobs: position {len(triples)} has none"
        raise UnreadableAnswer("token_counts_disagree", counts)
    reason = meta.get("finish_reason") or {}
    return Choice(
        index=choice["index"],
        message=with_named_calls(choice["message"]),
        finish=finish,
        matched=reason.get("matched", choice.get("matched_stop")),
        ids=ids,
        logprobs=[triple[0] for triple in triples],
        versions=version_runs(meta, len(triples)),
        prompt=choice.get("prompt_token_ids"),
        sampling_mask=sampling_mask_of(meta, ids),
        facts={
            "rid": meta.get("id"),
            "cached_tokens": meta.get("cached_tokens"),
            "retractions": meta.get("num_retractions"),
            "versions": "engine",
        },
    )


def _text(value: object) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def _choice_for_client(choice: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
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


def _is_empty(choice: Mapping[str, Any]) -> bool:
    values = (choice.get("delta") or {}).values()
    return choice.get("finish_reason") is None and not any(values) and all(value in EMPTY for value in values)


def tools_of(fields: Mapping[str, Any]) -> list[Any]:
    """Return the tools whose calls the engine looks for in the answer."""
    tools = fields.get("tools")
    return tools if isinstance(tools, list) and fields.get("tool_choice") != "none" else []


def tools_by_name(tools: Sequence[Any]) -> Tools:
    """Return the parameters' schema of each tool, by the tool's name."""
    functions = [tool.get("function") for tool in tools if isinstance(tool, Mapping)]
    return {
        each["name"]: each.get("parameters")
        for each in functions
        if isinstance(each, Mapping) and isinstance(each.get("name"), str)
    }

"""The schema checks that SGLang applies to chat messages, tools and non-null fields before rendering (`protocol.py`,
SGLang 0.5.23: `ChatCompletionMessageGenericParam`, `ChatCompletionMessageUserParam`, `Tool`, `ChatCompletionRequest`,
`CompletionRequest`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Problem = dict[str, Any]
Place = tuple[str | int, ...]
Check = Callable[[Any, Place], Iterator[Problem]]

ROLES = ("system", "assistant", "tool", "function", "developer", "latest_reminder", "root")
#: Required fields of each type of content part.
PARTS: Mapping[str, Mapping[str, type]] = {
    "text": {"text": str},
    "image_url": {"image_url": dict},
    "video_url": {"video_url": dict},
    "audio_url": {"audio_url": dict},
    "input_audio": {"input_audio": dict},
    "tool_reference": {"name": str},
}
THOUGHTS = ("thinking", "reasoning")
BOOLEANS = ("true", "false", "t", "f", "yes", "no", "y", "n", "on", "off", "1", "0")
#: Fields of both APIs that may be absent but not null.
NOT_NULL = (
    *("model", "frequency_penalty", "presence_penalty", "n", "stream", "min_tokens", "no_stop_trim", "ignore_eos"),
    *("skip_special_tokens", "return_hidden_states", "return_routed_experts", "routed_experts_start_len"),
    *("return_cached_tokens_details", "return_spec_tokens_details", "return_token_ids"),
)
NOT_NULL_OF_CHAT = (
    *(*NOT_NULL, "logprobs", "parallel_tool_calls", "return_prompt_token_ids", "return_meta_info"),
    *("return_input_ids_in_sglext", "return_output_ids_in_sglext", "return_sampling_mask", "continue_final_message"),
    *("return_flat_raw_output_top_logprobs", "return_flat_raw_top_logprobs_b64", "separate_reasoning"),
    *("stream_reasoning", "use_audio_in_video"),
)
NOT_NULL_OF_COMPLETIONS = (
    *(*NOT_NULL, "echo", "max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
)


def nulls_in(body: Mapping[str, Any], fields: Sequence[str]) -> list[Problem]:
    """Return FastAPI's errors for the given fields that are null."""
    return [_problem("null", (name,), "Input should not be null") for name in fields if body.get(name, ...) is None]


def problems_of(body: Mapping[str, Any]) -> list[Problem]:
    """Return FastAPI's errors for the null fields, messages and tools of a chat request."""
    messages, tools = body.get("messages"), body.get("tools")
    found = nulls_in(body, NOT_NULL_OF_CHAT)
    if not isinstance(messages, list):
        found.append(_problem("list_type", ("messages",), "Input should be a valid list"))
    else:
        found += [each for n, message in enumerate(messages) for each in _message(message, ("messages", n))]
    if tools is not None:
        found += _list(tools, ("tools",), _tool)
    return found


def _problem(kind: str, place: Place, words: str) -> Problem:
    return {"type": kind, "loc": ("body", *place), "msg": words}


def _text(value: Any, place: Place) -> Iterator[Problem]:
    if not isinstance(value, str):
        yield _problem("string_type", place, "Input should be a valid string")
    elif not _is_unicode(value):
        yield _problem("string_unicode", place, "Input should be a valid string, unable to parse raw data as unicode")


def _is_unicode(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _integer(value: Any, place: Place) -> Iterator[Problem]:
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if not whole and not (isinstance(value, str) and value.strip().lstrip("+-").isdigit()):
        yield _problem("int_parsing", place, "Input should be a valid integer")


def _boolean(value: Any, place: Place) -> Iterator[Problem]:
    known = value in (0, 1) if isinstance(value, (int, float)) else str(value).lower() in BOOLEANS
    if not known or not isinstance(value, (int, float, str)):
        yield _problem("bool_parsing", place, "Input should be a valid boolean")


def _list(value: Any, place: Place, check: Check) -> Iterator[Problem]:
    if not isinstance(value, list):
        yield _problem("list_type", place, "Input should be a valid list")
        return
    for n, each in enumerate(value):
        yield from check(each, (*place, n))


def _object(value: Any, place: Place, optional: Mapping[str, Check]) -> Iterator[Problem]:
    """Yield errors of an object's optional fields, which may be absent or null."""
    if not isinstance(value, Mapping):
        yield _problem("model_attributes_type", place, "Input should be a valid dictionary or object")
        return
    for name, check in optional.items():
        if value.get(name) is not None:
            yield from check(value[name], (*place, name))


def _message(message: Any, place: Place) -> Iterator[Problem]:
    if not isinstance(message, Mapping):
        yield _problem("model_attributes_type", place, "Input should be a valid dictionary or object")
        return
    role = message.get("role")
    if role == "user":
        yield from _content(message.get("content"), (*place, "content"), thinks=False)
        return
    if not isinstance(role, str) or role.lower() not in ROLES:
        yield _problem("value_error", (*place, "role"), f"Value error, 'role' must be one of {ROLES}")
        return
    yield from _object(message, place, OF_MESSAGES)
    if message.get("content") is not None:
        yield from _content(message["content"], (*place, "content"), thinks=role.lower() == "assistant")


def _content(content: Any, place: Place, *, thinks: bool) -> Iterator[Problem]:
    if isinstance(content, list):
        for n, part in enumerate(content):
            yield from _part(part, (*place, n), thinks=thinks)
    else:
        yield from _text(content, place)


def _part(part: Any, place: Place, *, thinks: bool) -> Iterator[Problem]:
    kind = str(part.get("type")) if isinstance(part, Mapping) else ""
    if kind in THOUGHTS and thinks:
        texts = [part.get(name) for name in ("thinking", "text")]
        if (texts[0] is None) == (texts[1] is None) or not all(isinstance(each, str | None) for each in texts):
            yield _problem("value_error", place, "thinking parts require exactly one of 'thinking' or 'text'")
    elif kind not in PARTS or not all(isinstance(part.get(name), want) for name, want in PARTS[kind].items()):
        yield _problem("union", place, "Input should be a valid content part")
    elif kind == "text":
        yield from _text(part["text"], (*place, "text"))


def _call(call: Any, place: Place) -> Iterator[Problem]:
    yield from _object(call, place, {"id": _text, "index": _integer})
    if not isinstance(call, Mapping):
        return
    if call.get("type", "function") != "function":
        yield _problem("literal_error", (*place, "type"), "Input should be 'function'")
    yield from _object(call.get("function"), (*place, "function"), {"name": _text, "arguments": _arguments})


def _arguments(arguments: Any, place: Place) -> Iterator[Problem]:
    if not isinstance(arguments, Mapping):
        yield from _text(arguments, place)


def _tool(tool: Any, place: Place) -> Iterator[Problem]:
    yield from _object(tool, place, {"defer_loading": _boolean})
    if not isinstance(tool, Mapping):
        return
    yield from _text(tool.get("type", "function"), (*place, "type"))
    function = tool.get("function")
    optional: Mapping[str, Check] = {"description": _text, "strict": _boolean, "defer_loading": _boolean}
    yield from _object(function, (*place, "function"), optional)
    if isinstance(function, Mapping):
        yield from _text(function.get("name"), (*place, "function", "name"))


def _tools(tools: Any, place: Place) -> Iterator[Problem]:
    return _list(tools, place, _tool)


def _calls(calls: Any, place: Place) -> Iterator[Problem]:
    return _list(calls, place, _call)


OF_MESSAGES: Mapping[str, Check] = {
    **dict.fromkeys(("tool_call_id", "name", "reasoning_content"), _text),
    "tool_calls": _calls,
    "tools": _tools,
    "prefix": _boolean,
}

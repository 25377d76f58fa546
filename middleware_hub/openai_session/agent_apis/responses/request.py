"""Translates a Responses request to a chat request.

Each field is translated, ignored because it cannot affect the model, or refused by name. So no request means something
else than its sampled tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson

from middleware_hub.openai_session.agent_apis.agent_api import UNKNOWN_HINT, RequestPolicy, UnknownFields
from middleware_hub.openai_session.agent_apis.responses.conversation import ResponsesConversation
from middleware_hub.openai_session.agent_apis.responses.envelope import Envelope, Responses, Settings
from middleware_hub.openai_session.agent_apis.responses.errors import InvalidParameter, missing, unavailable, wrong_type
from middleware_hub.openai_session.agent_apis.responses.tools import choice_of
from middleware_hub.openai_session.sessions.messages import Message, message_bytes
from middleware_hub.openai_session.sessions.turn import Context, contexts_of
from miles_router.engines.openai.chat import CONTROLS
from miles_router.errors import BadRequest

#: Fields that are translated.
READ = frozenset(
    (
        *("model", "input", "instructions", "previous_response_id", "store", "stream", "stream_options", "metadata"),
        *("tools", "tool_choice", "parallel_tool_calls", "max_output_tokens", "temperature", "top_p"),
        *("reasoning", "text", "include", "truncation"),
    )
)
#: Fields that are ignored: accounts, caches and OpenAI's own tools.
HARMLESS = frozenset(
    (
        *("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
        *("service_tier", "max_tool_calls", "client_metadata", "context_management", "access_programs"),
    )
)
#: Fields for features that run on OpenAI's servers, which do not exist here.
REFUSED = frozenset(
    (
        *("background", "background_options", "conversation", "prompt", "moderation", "image"),
        *("modalities", "audio", "top_logprobs"),
    )
)
#: Fields of the engine itself, passed on as in a chat request.
ENGINE = CONTROLS | {"top_k"}
ENCRYPTED = "reasoning.encrypted_content"
#: Accepted values of `include`. All but `ENCRYPTED` are results of OpenAI's tools, which never occur here.
INCLUDABLE = frozenset(
    (
        *("web_search_call.action.sources", "web_search_call.results", "code_interpreter_call.outputs"),
        *("computer_call_output.output.image_url", "file_search_call.results", "message.input_image.image_url"),
        ENCRYPTED,
    )
)
#: The most bytes of memory that the metadata of a response may take.
MAX_METADATA = 1 << 20
STRICT = RequestPolicy()


class ResponsesRequest(NamedTuple):
    """A parsed request.

    Attributes:
        fields: the chat request; its messages are the ones that the session stores.
        settings: the settings that the response repeats.
        own: fields of the response that it does not share with others.
        seals: whether reasoning is also wanted as `encrypted_content`.
        stored: whether the response may be read and continued by its id.
        facts: facts for the turn's record.
    """

    fields: dict[str, Any]
    settings: Settings
    own: Mapping[str, Any]
    seals: bool
    stored: bool
    facts: Mapping[str, Any]

    def contexts(self, fields: Mapping[str, Any]) -> tuple[Context, ...]:
        """Return the tools and settings that the parent turn may have been rendered with, the current ones first.
        Earlier turns may have been rendered with tools that this request's `tool_choice` does not allow."""
        contexts, every = contexts_of(fields), self.settings.tools.shown
        if fields.get("tools") not in (None, every):
            contexts += contexts_of({**fields, "tools": every, "tool_choice": "auto"})
        return contexts


def read(
    request: object,
    responses: Responses,
    *,
    system_anywhere: bool,
    system_first: bool = True,
    policy: RequestPolicy = STRICT,
) -> ResponsesRequest:
    """Parse a request.

    Raises:
        BadRequest: the request is invalid, or asks for what cannot be traced.
    """
    if not isinstance(request, Mapping):
        raise BadRequest("the request body must be a JSON object")
    unknown = UnknownFields(refuses=policy.unknown)
    _refuse(request, unknown)
    settings = responses.settings(_repeated_fields(request))
    conversation, messages = _messages(
        request, responses, system_first=system_first, system_anywhere=system_anywhere, policy=policy
    )
    fields: dict[str, Any] = {
        **{name: request[name] for name in ENGINE if request.get(name) is not None},
        "model": request["model"],
        "messages": messages,
        "return_cached_tokens_details": True,
        **_sampling(request),
        **_response_format(settings.fields["text"]),
        **choice_of(request.get("tool_choice"), settings.tools),
    }
    if request.get("parallel_tool_calls") is False and settings.tools.shown:
        fields["parallel_tool_calls"] = False
    if _flag(request, "stream", default=False):
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    own = {"metadata": _metadata(request), "previous_response_id": request.get("previous_response_id")}
    seals = ENCRYPTED in _included(request, unknown)
    facts = {**conversation.media.facts, **unknown.facts}
    return ResponsesRequest(fields, settings, own, seals, _flag(request, "store", default=True), facts)


def _refuse(request: Mapping[str, Any], unknown: UnknownFields) -> None:
    for name in sorted(request.keys() & REFUSED):
        if request[name]:
            raise unavailable(name, f"The parameter '{name}'")
    if (other := unknown.refused(request, READ | HARMLESS | REFUSED | ENGINE)) is not None:
        raise InvalidParameter(other, f"Unknown parameter: '{other}'; {UNKNOWN_HINT}.", "unknown_parameter")
    for name in ("model", "input"):
        if request.get(name) is None:
            raise missing(name)
    if not isinstance(request["model"], str):
        raise wrong_type("model", "a string")


def _repeated_fields(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that a response repeats and that other requests of the same agent share. `truncation` is always
    `disabled`: the router drops nothing, and refuses an input that is too long."""
    instructions = request.get("instructions")
    if instructions is not None and not isinstance(instructions, str):
        raise wrong_type("instructions", "a string")
    if request.get("truncation") not in (None, "auto", "disabled"):
        raise InvalidParameter("truncation", "Invalid value. Supported values are: 'auto' and 'disabled'.")
    reasoning, text = _object(request, "reasoning"), _object(request, "text")
    return {
        "model": request["model"],
        "instructions": instructions,
        "max_output_tokens": request.get("max_output_tokens"),
        "max_tool_calls": request.get("max_tool_calls"),
        "parallel_tool_calls": request.get("parallel_tool_calls") is not False,
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "store": request.get("store") is not False,
        "temperature": request.get("temperature"),
        "top_p": request.get("top_p"),
        "text": {"format": {"type": "text"}, **_without_nulls(text)},
        "tool_choice": request.get("tool_choice") or "auto",
        "tools": [] if request.get("tools") is None else request["tools"],
        "truncation": "disabled",
        "service_tier": "default",
        "user": request.get("user"),
    }


def _without_nulls(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _messages(
    request: Mapping[str, Any],
    responses: Responses,
    *,
    system_first: bool,
    system_anywhere: bool,
    policy: RequestPolicy,
) -> tuple[ResponsesConversation, list[Message]]:
    """Return the messages of a request, and the conversation that collected its media."""
    before_id = request.get("previous_response_id") or None
    before: Envelope | None = None
    if before_id is not None:
        before = responses.find(before_id)
        if before is None:
            raise InvalidParameter(
                "previous_response_id",
                f"Previous response with id '{str(before_id)[:64]}' not found.",
                "previous_response_not_found",
            )
    conversation = ResponsesConversation(responses, system_first=system_first, system_anywhere=system_anywhere)
    conversation.media.refuses = policy.media
    history = before.history() if before is not None else ()
    return conversation, conversation.read(request.get("instructions"), history, request["input"])


def _sampling(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat fields for sampling. Fields that are not given are left to the engine, as in a chat request."""
    fields = {name: request[name] for name in ("temperature", "top_p") if request.get(name) is not None}
    most = request.get("max_output_tokens")
    if most is not None:
        if not isinstance(most, int) or isinstance(most, bool) or most < 1:
            raise InvalidParameter("max_output_tokens", "Invalid 'max_output_tokens': expected an integer above 0.")
        fields["max_tokens"] = most
    effort = _object(request, "reasoning").get("effort")
    if effort is not None:
        fields["reasoning_effort"] = effort
    return fields


def _response_format(text: Mapping[str, Any]) -> dict[str, Any]:
    form = text["format"]
    kind = form.get("type") if isinstance(form, Mapping) else None
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"response_format": {"type": "json_object"}}
    if kind != "json_schema":
        values = "'text', 'json_object', and 'json_schema'"
        raise InvalidParameter("text.format.type", f"Invalid value. Supported values are: {values}.")
    if not isinstance(form.get("schema"), Mapping):
        raise missing("text.format.schema")
    schema = {name: value for name, value in form.items() if name != "type" and value is not None}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", **schema}}}


def _included(request: Mapping[str, Any], unknown: UnknownFields) -> list[str]:
    included = request.get("include") or []
    if not isinstance(included, list):
        raise wrong_type("include", "an array")
    for place, each in enumerate(included):
        if not isinstance(each, str):
            raise wrong_type(f"include[{place}]", "a string")
    if (other := unknown.refused(dict.fromkeys(included, True), INCLUDABLE, "include.")) is not None:
        name = other.removeprefix("include.")
        raise InvalidParameter(
            "include", f"'{name}' is not available in a traced session; {UNKNOWN_HINT}.", "unsupported_value"
        )
    return included


def _metadata(request: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the metadata with values that are texts. As in SGLang, a request may have values of any type and
    length."""
    given = _without_nulls(_object(request, "metadata"))
    metadata = {key: value if isinstance(value, str) else orjson.dumps(value).decode() for key, value in given.items()}
    if message_bytes(metadata) + message_bytes([*metadata]) > MAX_METADATA:
        raise InvalidParameter("metadata", f"Invalid 'metadata': it takes more than {MAX_METADATA} bytes of memory.")
    return metadata


def _object(request: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = request.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise wrong_type(name, "an object")
    return value or {}


def _flag(request: Mapping[str, Any], name: str, *, default: bool) -> bool:
    value = request.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise wrong_type(name, "a boolean")
    return value

"""Translates a Messages request to a chat request.

Each field is translated, ignored because it cannot affect the model, or refused by name. So no request means something
else than its sampled tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from middleware_hub.openai_session.agent_apis.agent_api import RequestPolicy, UnknownFields
from middleware_hub.openai_session.agent_apis.messages.conversation import MessagesConversation
from middleware_hub.openai_session.agent_apis.messages.echo import Echo
from middleware_hub.openai_session.agent_apis.messages.errors import invalid, unknown_field
from middleware_hub.openai_session.agent_apis.messages.tools import MessagesTools, choice_of
from middleware_hub.openai_session.sessions.messages import Message
from middleware_hub.openai_session.sessions.turn import Context, contexts_of
from miles_router.engines.openai.chat import CONTROLS
from miles_router.errors import BadRequest

#: Fields that are translated.
READ = frozenset(
    (
        *("model", "messages", "system", "max_tokens", "stream", "temperature", "top_p", "top_k", "stop_sequences"),
        *("tools", "tool_choice", "thinking", "output_config", "output_format"),
    )
)
#: Fields that are ignored: accounts, caches and servers, and `context_management`, which trims long histories.
HARMLESS = frozenset(
    (
        *("metadata", "cache_control", "service_tier", "inference_geo", "speed", "diagnostics", "betas"),
        *("user_profile_id", "workspace_id", "billing_policy", "fallbacks", "fallback_credit_token"),
        "context_management",
    )
)
#: Fields for features that run on Anthropic's servers, which do not exist here.
REFUSED = frozenset({"mcp_servers", "container", "thread", "compaction"})
#: Fields that are passed on without validation; the engine refuses bad values.
PASSED_ON = {"model": "model", "temperature": "temperature", "top_p": "top_p", "top_k": "top_k"}
#: The most bytes of tools and settings in all contexts of one request. Above it, a tool loaded later starts a segment.
MAX_CONTEXTS = 1 << 24
STRICT = RequestPolicy()


class MessagesRequest(NamedTuple):
    """A parsed request.

    Attributes:
        fields: the chat request; its messages are the ones that the session stores.
        tools: the request's tools.
        facts: facts for the turn's record.
    """

    fields: dict[str, Any]
    tools: MessagesTools
    facts: Mapping[str, Any]

    def contexts(self, fields: Mapping[str, Any]) -> tuple[Context, ...]:
        """Return the tools and settings that the parent turn may have been rendered with, the current ones first.
        Earlier turns were rendered without the tools that were loaded later, so each step of loading is a context."""
        contexts = list(contexts_of(fields))
        shown, loaded = self.tools.shown, self.tools.loaded
        if len(contexts[0].key) * len(loaded) > MAX_CONTEXTS:
            del loaded[1:]
        for count in range(len(loaded)):
            contexts += contexts_of({**fields, "tools": [*shown, *loaded[:count]] or None})
        return tuple(contexts)


def read(
    request: object,
    echo: Echo,
    *,
    system_anywhere: bool,
    system_first: bool = True,
    counts: bool = False,
    policy: RequestPolicy = STRICT,
) -> MessagesRequest:
    """Parse a request. `counts`: the request only counts tokens, so it needs no length.

    Raises:
        BadRequest: the request is invalid, or asks for what cannot be traced.
    """
    if not isinstance(request, Mapping):
        raise BadRequest("the request body must be a JSON object")
    unknown = UnknownFields(refuses=policy.unknown)
    _refuse(request, unknown)
    conversation, messages = _messages(
        request, echo, unknown, system_first=system_first, system_anywhere=system_anywhere, policy=policy
    )
    tools = conversation.tools
    settings = _thinking(request.get("thinking"))
    fields: dict[str, Any] = {
        **{name: request[name] for name in CONTROLS if request.get(name) is not None},
        **{chat: request[name] for name, chat in PASSED_ON.items() if request.get(name) is not None},
        "messages": messages,
        **_output(request, unknown),
        **choice_of(request.get("tool_choice"), tools),
        "return_cached_tokens_details": True,
    }
    if not isinstance(request.get("model"), str):
        raise invalid("model", "Field required")
    if not counts:
        fields |= _length(request)
    if tools.callable:
        fields["tools"] = tools.callable
    if settings:
        own = fields.get("chat_template_kwargs")
        fields["chat_template_kwargs"] = {**settings, **(own if isinstance(own, Mapping) else {})}
    if messages[-1]["role"] == "assistant":  # a prefill: the answer continues this message
        fields["continue_final_message"] = True
    return MessagesRequest(fields, tools, {**conversation.media.facts, **unknown.facts, **tools.facts})


def _messages(
    request: Mapping[str, Any],
    echo: Echo,
    unknown: UnknownFields,
    *,
    system_first: bool,
    system_anywhere: bool,
    policy: RequestPolicy,
) -> tuple[MessagesConversation, list[Message]]:
    """Return the messages of a request, and the conversation that collected its tools and media."""
    tools = MessagesTools(request.get("tools"), echo.functions, unknown)
    conversation = MessagesConversation(echo, tools, system_first=system_first, system_anywhere=system_anywhere)
    conversation.media.refuses = policy.media
    return conversation, conversation.read(request.get("system"), request.get("messages"))


def omits_thinking(request: object) -> bool:
    """Return True if the agent wants signatures of reasoning without its text."""
    thinking = request.get("thinking") if isinstance(request, Mapping) else None
    return isinstance(thinking, Mapping) and thinking.get("display") == "omitted"


def _refuse(request: Mapping[str, Any], unknown: UnknownFields) -> None:
    for name in request.keys() & REFUSED:
        if request[name]:
            raise invalid(name, "is not available in a traced session")
    if (other := unknown.refused(request, READ | HARMLESS | REFUSED | CONTROLS)) is not None:
        raise unknown_field(other)


def _length(request: Mapping[str, Any]) -> dict[str, Any]:
    most, stops, stream = request.get("max_tokens"), request.get("stop_sequences"), request.get("stream")
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        raise invalid("max_tokens", "Input should be an integer of at least 1")
    fields: dict[str, Any] = {"max_tokens": most}
    if stops is not None:
        if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
            raise invalid("stop_sequences", "Input should be a list of strings")
        fields["stop"] = stops
    if stream is not None and not isinstance(stream, bool):
        raise invalid("stream", "Input should be a valid boolean")
    if stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    return fields


def _thinking(given: object) -> dict[str, bool]:
    """Return the template settings for `thinking`: whether the model reasons. `adaptive` leaves that to the template
    and the run's settings. The budget is ignored: no engine enforces one."""
    if given is None:
        return {}
    kind = given.get("type") if isinstance(given, Mapping) else None
    if not isinstance(given, Mapping) or kind not in ("enabled", "disabled", "adaptive", "between_tools"):
        raise invalid("thinking.type", "Input should be 'enabled', 'disabled' or 'adaptive'")
    if kind == "adaptive":
        return {}
    reasons = kind != "disabled"
    return {"thinking": reasons, "enable_thinking": reasons}


def _output(request: Mapping[str, Any], unknown: UnknownFields) -> dict[str, Any]:
    config = request.get("output_config")
    if config is None:
        config = {}
    if not isinstance(config, Mapping):
        raise invalid("output_config", "Input should be an object")
    if (name := unknown.refused(config, {"effort", "format", "task_budget"}, "output_config.")) is not None:
        raise unknown_field(name)
    fields: dict[str, Any] = {}
    if config.get("effort") is not None:
        fields["reasoning_effort"] = config["effort"]
    form = config.get("format") or request.get("output_format")
    if form is not None:
        schema = form.get("schema") if isinstance(form, Mapping) and form.get("type") == "json_schema" else None
        if not isinstance(schema, Mapping):
            raise invalid("output_config.format", "Input should be a json_schema with its schema")
        json_schema = {"name": "answer", "schema": schema, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": json_schema}
    return fields

"""A Messages request to a chat request. Every field is known: it is translated, says nothing to a model, or is refused
by name, so that no request means something else than its sampled tokens say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from middleware_hub.openai_session.faces.messages.conversation import MessagesConversation
from middleware_hub.openai_session.faces.messages.echo import Echo
from middleware_hub.openai_session.faces.messages.errors import invalid, unknown_field
from middleware_hub.openai_session.faces.messages.tools import MessagesTools, choice_of
from middleware_hub.openai_session.faces.policy import RequestPolicy, UnknownFields
from middleware_hub.openai_session.sessions.messages import Message
from middleware_hub.openai_session.sessions.prompting import Context, contexts_of
from miles_router.engines.openai.chat import CONTROLS
from miles_router.errors import BadRequest

#: What is translated.
READ = frozenset(
    (
        *("model", "messages", "system", "max_tokens", "stream", "temperature", "top_p", "top_k", "stop_sequences"),
        *("tools", "tool_choice", "thinking", "output_config", "output_format"),
    )
)
#: What is about accounts, caches and servers, or asks that less be shown to the model once there is too much.
HARMLESS = frozenset(
    (
        *("metadata", "cache_control", "service_tier", "inference_geo", "speed", "diagnostics", "betas"),
        *("user_profile_id", "workspace_id", "billing_policy", "fallbacks", "fallback_credit_token"),
        "context_management",
    )
)
#: What this API runs by itself, and nobody here does.
REFUSED = frozenset({"mcp_servers", "container", "thread", "compaction"})
#: Those that go on as they are, whatever they are: the engine refuses what it cannot take.
AS_THEY_ARE = {"model": "model", "temperature": "temperature", "top_p": "top_p", "top_k": "top_k"}
#: Bytes of tools and settings in all contexts of a request; with more, tools that are loaded later begin a segment.
MAX_CONTEXTS = 1 << 24
STRICT = RequestPolicy()


class MessagesRequest(NamedTuple):
    """A request, read.

    Attributes:
        fields: the chat request; its messages are what the session holds.
        tools: those of the request.
        facts: what the turn's record says of it.
    """

    fields: dict[str, Any]
    tools: MessagesTools
    facts: Mapping[str, Any]

    def contexts(self, fields: Mapping[str, Any]) -> tuple[Context, ...]:
        """What the request may be rendered with. A tool that was loaded on the way is not in the context of what stood
        before."""
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
    """Read a request; `counts`: one that asks how many tokens it has, and generates nothing.

    Raises:
        BadRequest: it is none, or asks for what cannot be traced.
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
        **{chat: request[name] for name, chat in AS_THEY_ARE.items() if request.get(name) is not None},
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
    if messages[-1]["role"] == "assistant":  # the answer goes on from words that are put into the assistant's mouth
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
    """Return the messages of a request, and what was read beside them."""
    tools = MessagesTools(request.get("tools"), echo.functions, unknown)
    conversation = MessagesConversation(echo, tools, system_first=system_first, system_anywhere=system_anywhere)
    conversation.media.refuses = policy.media
    return conversation, conversation.read(request.get("system"), request.get("messages"))


def omits_thinking(request: object) -> bool:
    """Whether an agent is shown no reasoning, but only what stands for it."""
    thinking = request.get("thinking") if isinstance(request, Mapping) else None
    return isinstance(thinking, Mapping) and thinking.get("display") == "omitted"


def _refuse(request: Mapping[str, Any], unknown: UnknownFields) -> None:
    for name in request.keys() & REFUSED:
        if request[name]:
            raise invalid(name, "is not available in a traced session")
    if (other := unknown.refused(request, READ | HARMLESS | REFUSED | CONTROLS)) is not None:
        raise unknown_field(other)


def _length(request: Mapping[str, Any]) -> dict[str, Any]:
    """How long the answer may be, where it ends, and how it is given."""
    most, stops, stream = request.get("max_tokens"), request.get("stop_sequences"), request.get("stream")
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        raise invalid("max_tokens", "Input should be an integer of at least 1")
    fields: dict[str, Any] = {"max_tokens": most}
    if stops is not None:
        if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
            raise invalid("stop_sequences", "Input should be a list of strings")
        fields["stop"] = stops
    if stream not in (None, True, False):
        raise invalid("stream", "Input should be a valid boolean")
    if stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    return fields


def _thinking(given: object) -> dict[str, bool]:
    """What `thinking` means for a template: whether the model is to reason. `adaptive` leaves that to the template, and
    to the run's own settings. No engine keeps a budget."""
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
    """How much effort, and in which form."""
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

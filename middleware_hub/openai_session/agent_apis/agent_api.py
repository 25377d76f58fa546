"""Base classes of the agent APIs. An agent API (`AgentApi`) is a protocol that agents speak over one engine endpoint.

    agent's request  ──  turn()    ──►  the engine's request, its position in the tree of turns, its prompt ids
    agent's answer   ◄──  writer() ──   the engine's answer, once it is recorded
    agent's error    ◄──  error_body()  an error of the router's own

The policies for media and unknown fields in its requests are here too; everything else that is the same for every API
is in `turns/`. To add an API, add a file to this folder and a line to the table in `agent_apis/__init__.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, ClassVar

import orjson

from middleware_hub.openai_session.continuing.continuation import Continuation
from middleware_hub.openai_session.episodes.contract import REFUSE, base_model
from middleware_hub.openai_session.errors import ContextOverflow
from middleware_hub.openai_session.sessions.contents import POLICIES, REFUSE_FIRST
from middleware_hub.openai_session.sessions.equality import Equality
from middleware_hub.openai_session.sessions.session import AgentRequest, Session
from miles_router.engines.openai.choices import OpenAIEndpoint
from miles_router.errors import BadRequest, ConfigError, RouterError
from miles_router.middlewares import ASGIApp, Event, Message, Receive, Scope, Send, write_event
from miles_router.middlewares.generation import HeartbeatForm
from miles_router.trajectory.pieces import Tokens

RECORD = "record"
#: The policies for unknown fields.
UNKNOWN_POLICIES = (REFUSE, RECORD)
UNKNOWN_HINT = "set the option unknown_fields of the sessions to 'record' to have such fields ignored and recorded"
#: The most unknown fields that a turn's record names, and the most characters of each name.
MOST_NAMES, LONGEST_NAME = 32, 64


@dataclass(frozen=True)
class RequestPolicy:
    """Flags for one request: whether media, and whether unknown fields are refused."""

    media: bool = True
    unknown: bool = True


@dataclass(frozen=True)
class RunPolicy:
    """The run's policies for all requests, by their option names."""

    media: str = REFUSE_FIRST
    unknown: str = REFUSE

    @classmethod
    def checked(cls, media: str, unknown_fields: str) -> RunPolicy:
        """Return the policies of these options.

        Raises:
            ConfigError: an option is not the name of a policy.
        """
        for option, value, known in (
            ("media", media, POLICIES),
            ("unknown_fields", unknown_fields, UNKNOWN_POLICIES),
        ):
            if value not in known:
                problem = f"must be one of {', '.join(known)}, not {value!r}"
                raise ConfigError(f"openai_session_middleware.{option}: {problem}")
        return cls(media, unknown_fields)

    def of(self, session: Session) -> RequestPolicy:
        """Return the policy for the session's next request. The session's contract takes precedence over the run."""
        media = session.episode.contract.media or self.media
        refuses = media == REFUSE or (media == REFUSE_FIRST and not session.turns)
        return RequestPolicy(refuses, self.unknown == REFUSE)


class UnknownFields:
    """The fields of one request that its API does not have.

    Attributes:
        names: in the order in which they were found, at most `MOST_NAMES`.
    """

    def __init__(self, *, refuses: bool) -> None:
        self._refuses = refuses
        self.names: list[str] = []

    def refused(self, holder: Mapping[str, Any], known: Set[str], before: str = "") -> str | None:
        """Return the first unknown field if the policy refuses such fields, else record all and return None. Fields
        that are null or false count as not given.

        Args:
            holder: an object of the request.
            before: the path of that object, which is put in front of the names.
        """
        found = sorted(each for each in holder.keys() - known if holder[each] is not None and holder[each] is not False)
        if found and self._refuses:
            return before + found[0][:LONGEST_NAME]
        self.names += [before + each[:LONGEST_NAME] for each in found[: MOST_NAMES - len(self.names)]]
        return None

    @property
    def facts(self) -> dict[str, Any]:
        """The unknown fields, for the turn's record."""
        return {"unknown_fields": self.names} if self.names else {}


class StreamForm(HeartbeatForm):
    """The heartbeats of one API's streams, and the error event for a stream that fails before its answer begins."""

    #: True once a heartbeat has sent the answer's first event; a full context is then reported by `failed`.
    began = False

    def set_turn(self, turn: AgentRequest) -> None:
        """Record the turn that the stream belongs to, as soon as its request is parsed."""


class ReplyWriter:
    """A translator of one engine reply to an agent API. The engine's reply comes in without the fields that the router
    added for recording. By default the agent gets that."""

    def write_answer(self, answer: dict[str, Any]) -> object:
        """Return the API's object for an answer that is not streamed."""
        return answer

    def write_chunk(self, chunk: dict[str, Any], name: bytes) -> bytes:
        """Return the API's events for one chunk of a stream; `name` is the SSE event name that the engine used."""
        return write_event(chunk, name)

    def write_other(self, event: Event) -> bytes:
        """Return the bytes for an event that is not a chunk: the end of the stream (`[DONE]`), an error, a comment."""
        return event.raw

    def write_refusal(self, body: bytes, status: int) -> bytes:
        """Return the body for an engine's error response. `body` may not be JSON."""
        return body


@dataclass(frozen=True)
class RunSettings:
    """Settings that the training run adds to every turn, whatever its agent asks.

    Attributes:
        lora_path: the engine's name of the LoRA adapter that answers; empty for the base model.
        chat_template_kwargs: settings of the chat template; the agent's own values take precedence.
        policy: decides which requests are refused.
    """

    lora_path: str = ""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    policy: RunPolicy = field(default_factory=RunPolicy)

    def with_adapter(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a request of any API with the run's adapter. The base model stays named in `model`."""
        return {**request, **base_model(request), "lora_path": self.lora_path} if self.lora_path else request

    def with_chat_settings(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a chat request with the run's adapter and template settings. Template settings that are not an object
        stay as they are; the engine refuses them."""
        request, own = self.with_adapter(request), request.get("chat_template_kwargs") or {}
        if not self.chat_template_kwargs or not isinstance(own, Mapping):
            return request
        return {**request, "chat_template_kwargs": {**self.chat_template_kwargs, **own}}


def without_nulls(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of a request that are not null. SGLang refuses null in many fields that it knows."""
    if None not in request.values():
        return request
    return {name: value for name, value in request.items() if value is not None}


class AgentApi(ABC):
    """An agent API. Each router has one instance of each subclass."""

    #: The path, relative to the session, that agents post turns to.
    path: ClassVar[str]
    #: The engine endpoint that answers.
    endpoint: ClassVar[OpenAIEndpoint]
    #: Whether an answer that ends inside a tool call shows the part that was sampled, or leaves the call out.
    shows_open_calls: ClassVar[bool] = True

    def __init__(self, continuation: Continuation, equal: Equality, settings: RunSettings | None = None) -> None:
        self._continuation = continuation
        self._equal = equal
        self._settings = settings or RunSettings()

    def untraced_reason(self, request: object) -> str | None:
        """Return why a request cannot be recorded, or None if it can. Such a request is forwarded unchanged."""
        return None

    @abstractmethod
    async def turn(self, session: Session, request: object, *, now: float) -> AgentRequest:
        """Translate a parsed request and find its parent turn in the session.

        Raises:
            BadRequest: the request is invalid, or a text in it is too long.
        """

    def is_side_call(self, scope: Scope) -> bool:
        """Return True if the harness marks the request as a side call, outside the main line."""
        return False

    async def prompt_tokens(self, turn: AgentRequest) -> int | None:
        """Return the tokens in the longest prompt of a turn; None where only the engine can count them."""
        return turn.prompt.length if turn.prompt is not None else None

    async def render_ids(self, fields: Mapping[str, Any]) -> Tokens:
        """Return the ids that the model's template and tokenizer make of the request of a root turn.

        Raises:
            BadRequest: the template refuses the messages, or a text in them is too long.
        """
        raise BadRequest(f"{self.path}: the router cannot render prompts of this API")

    def writer(self, turn: AgentRequest) -> ReplyWriter:
        return ReplyWriter()

    def stream_form(self, session: Session, request: object) -> StreamForm:
        """Return the heartbeats for a stream. `request` is parsed JSON that is not validated yet."""
        return StreamForm()

    def error_body(self, error: RouterError, request_id: str) -> dict[str, Any]:
        """Return the body of a router error in this API's format."""
        return error.body(request_id)

    def overflow_stream(self, session: Session, request: object, error: ContextOverflow) -> bytes | None:
        """Return a full-context error as stream events, or None to answer with an HTTP error. APIs override this where
        harnesses look for the error in the stream that they asked for."""
        return None

    def owns_path(self, scope: Scope, path: str) -> bool:
        """Return True if errors of requests for this path within a session use this API's format."""
        return path == self.path

    async def answer_other(self, session: Session, scope: Scope, receive: Receive, send: Send, app: ASGIApp) -> bool:
        """Answer a request within a session that is not a turn, such as counting tokens. `app` forwards to a worker.
        Return False for a request that does not belong to this API."""
        return False


async def send_json(send: Send, content: object) -> None:
    """Send a complete JSON answer to a request that is not a turn."""
    await send_complete(send, orjson.dumps(content), [(b"content-type", b"application/json")])


def start_message(body: bytes, headers: Iterable[tuple[bytes, bytes]]) -> Message:
    """Return the ASGI start message of a complete answer: these headers, and the content-length of `body`."""
    kept = [pair for pair in headers if pair[0] != b"content-length"]
    length = (b"content-length", b"%d" % len(body))
    return {"type": "http.response.start", "status": 200, "headers": [*kept, length]}


async def send_complete(send: Send, body: bytes, headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Send a complete answer with status 200 and its content-length."""
    await send(start_message(body, headers))
    await send({"type": "http.response.body", "body": body, "more_body": False})

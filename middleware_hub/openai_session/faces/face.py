"""A face: an API that agents speak, over one of the engine's endpoints.

    agent's request  ──  turn()    ──►  the engine's request, its place in the tree, the ids it is given
    agent's answer   ◄──  writer() ──   the engine's answer, once it is recorded
    agent's error    ◄──  error_body()  an error of the router's own

Everything else is the same for every API and stands in `turns/`. Another API is a file in this folder and a line in
the table of `faces/__init__.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import orjson

from middleware_hub.openai_session.continuing.continuation import Continuation
from middleware_hub.openai_session.episodes.contract import base_model
from middleware_hub.openai_session.errors import ContextOverflow
from middleware_hub.openai_session.faces.policy import RunPolicy
from middleware_hub.openai_session.sessions.agent_request import AgentRequest
from middleware_hub.openai_session.sessions.equality import Equality
from middleware_hub.openai_session.sessions.session import Session
from miles_router.engines.openai.choices import OpenAIEndpoint
from miles_router.errors import BadRequest, RouterError
from miles_router.middlewares import ASGIApp, Event, Message, Receive, Scope, Send, write_event
from miles_router.middlewares.generation import HeartbeatForm
from miles_router.trajectory.pieces import Tokens


class StreamForm(HeartbeatForm):
    """How an API's streams say that they wait, or that they have failed before the answer began."""

    #: Whether a heartbeat has begun the answer in the API's own form.
    began = False

    def is_of(self, turn: AgentRequest) -> None:
        """Take note of the turn, once the request is read."""


class ReplyWriter:
    """Writes one reply in a face's own API. What it is given is the engine's, less what was asked for only to record.
    By default an agent is given just that."""

    def whole(self, answer: dict[str, Any]) -> object:
        """The API's object for a whole answer."""
        return answer

    def chunk(self, chunk: dict[str, Any], name: bytes) -> bytes:
        """The API's events for one chunk of a stream; `name` is that of the engine's event."""
        return write_event(chunk, name)

    def other(self, event: Event) -> bytes:
        """What the agent gets for an event that is no chunk: the stream's end (`[DONE]`), an error, a comment."""
        return event.raw

    def refusal(self, body: bytes, status: int) -> bytes:
        """What the agent gets for an error that the engine answers with. It may be no JSON."""
        return body


@dataclass(frozen=True)
class RunSettings:
    """What the training run puts into every turn, whatever its agent asks.

    Attributes:
        lora_path: the adapter that answers, by the engine's name for it; the base model where it is empty.
        chat_template_kwargs: settings of the chat template; an agent's own count more.
        policy: what is refused of requests.
    """

    lora_path: str = ""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    policy: RunPolicy = field(default_factory=RunPolicy)

    def of_any(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """A request with what belongs into one of any API."""
        return {**request, **base_model(request), "lora_path": self.lora_path} if self.lora_path else request

    def of_chat(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """A chat request with all of it. Template settings that are none are left for the engine to refuse."""
        request, own = self.of_any(request), request.get("chat_template_kwargs") or {}
        if not self.chat_template_kwargs or not isinstance(own, Mapping):
            return request
        return {**request, "chat_template_kwargs": {**self.chat_template_kwargs, **own}}


def given(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of a request that are not null: SGLang refuses null for many of those that it has."""
    if None not in request.values():
        return request
    return {name: value for name, value in request.items() if value is not None}


class Face(ABC):
    """One API. There is one object of it for each router."""

    #: Where agents ask, within a session.
    path: ClassVar[str]
    #: Where the engine is asked.
    endpoint: ClassVar[OpenAIEndpoint]
    #: Whether a whole answer shows a call that it ends within, as far as that goes; else it leaves the call out.
    shows_open_calls: ClassVar[bool] = True

    def __init__(self, continuation: Continuation, equal: Equality, settings: RunSettings | None = None) -> None:
        self._continuation = continuation
        self._equal = equal
        self._settings = settings or RunSettings()

    def untraceable(self, request: object) -> str | None:
        """Why a request cannot be recorded and passes as it is; None if it can."""
        return None

    @abstractmethod
    async def turn(self, session: Session, request: object, *, now: float) -> AgentRequest:
        """Read a parsed request and place it in its session.

        Raises:
            BadRequest: it is none, or a text in it is too long.
        """

    def is_side_call(self, scope: Scope) -> bool:
        """Whether a harness says of a request that it is none of its main line."""
        return False

    async def prompt_tokens(self, turn: AgentRequest) -> int | None:
        """How many tokens the longest prompt of a turn has; None where only the engine can tell."""
        return turn.prompt.length if turn.prompt is not None else None

    async def rendered(self, fields: Mapping[str, Any]) -> Tokens:
        """Return the ids that the model's template and tokenizer make of the engine's request for a root.

        Raises:
            BadRequest: the template refuses it, or a text in it is too long.
        """
        raise BadRequest(f"{self.path}: its prompts are not rendered here")

    def writer(self, turn: AgentRequest) -> ReplyWriter:
        """What the reply is written with."""
        return ReplyWriter()

    def stream_form(self, session: Session, request: object) -> StreamForm:
        """Return what tells the client of a stream that it waits; `request` is parsed, and not checked."""
        return StreamForm()

    def error_body(self, error: RouterError, request_id: str) -> dict[str, Any]:
        """An error of the router's own as this API has it."""
        return error.body(request_id)

    def as_stream(self, session: Session, request: object, error: ContextOverflow) -> bytes | None:
        """A full context as the stream that a request asked for, where harnesses of this API look for it there; None:
        it is told as other errors are."""
        return None

    def speaks(self, scope: Scope, path: str) -> bool:
        """Whether a request for this path within a session is made in this API's words, and its errors are."""
        return path == self.path

    async def beside(self, session: Session, scope: Scope, receive: Receive, send: Send, app: ASGIApp) -> bool:
        """Answer a request within a session that is no turn, such as one that counts tokens; `app` asks a worker. False
        for one that is none of this API's."""
        return False


async def give_json(send: Send, content: object) -> None:
    """Answer what is asked beside turns."""
    await give_whole(send, orjson.dumps(content), [(b"content-type", b"application/json")])


def head(body: bytes, headers: Iterable[tuple[bytes, bytes]]) -> Message:
    """Return the head of a whole answer with this body, and its length among these headers."""
    kept = [pair for pair in headers if pair[0] != b"content-length"]
    length = (b"content-length", b"%d" % len(body))
    return {"type": "http.response.start", "status": 200, "headers": [*kept, length]}


async def give_whole(send: Send, body: bytes, headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Send a whole answer, with its length."""
    await send(head(body, headers))
    await send({"type": "http.response.body", "body": body, "more_body": False})

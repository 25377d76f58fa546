"""`/v1/responses`, and the routes of the responses that a session stores."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import parse_qs

from middleware_hub.openai_session.agent_apis.agent_api import ReplyWriter, StreamForm, send_json
from middleware_hub.openai_session.agent_apis.chat import ChatApi
from middleware_hub.openai_session.agent_apis.responses import errors
from middleware_hub.openai_session.agent_apis.responses.envelope import Envelope, Responses, new_id
from middleware_hub.openai_session.agent_apis.responses.errors import InvalidParameter
from middleware_hub.openai_session.agent_apis.responses.heartbeat import ResponsesForm
from middleware_hub.openai_session.agent_apis.responses.request import ResponsesRequest, read
from middleware_hub.openai_session.agent_apis.responses.stream import ResponsesWriter
from middleware_hub.openai_session.errors import ContextOverflow
from middleware_hub.openai_session.sessions.session import AgentRequest, Session
from middleware_hub.openai_session.sessions.turn import Turn
from miles_router.engines import paths
from miles_router.errors import BadRequest, NotFound, RouterError
from miles_router.middlewares import ASGIApp, Receive, Scope, Send, first_header

#: The header in which Codex names a side call, and its value for a compaction, which belongs to the main line.
SUB_AGENT, COMPACTION = b"x-openai-subagent", b"compact"
#: The last part of the path at which OpenAI's server compacts a history.
COMPACT = "compact"
#: Fields that a response repeats and that a contract may fix.
FIXED = ("model", "temperature", "top_p")
#: Input items on one page: the default, and the API's limit.
PAGE, MAX_PAGE = 20, 100


class ResponsesApi(ChatApi):
    """OpenAI's Responses API."""

    path = paths.RESPONSES
    shows_open_calls = False

    async def turn(self, session: Session, request: object, *, now: float) -> AgentRequest:
        responses, asked = Responses.of(session), self._read(session, request)
        fields = self._settings.with_chat_settings(asked.fields)
        turn = await self.build_turn(session, fields, asked.contexts(fields), now=now)
        envelope = Envelope(new_id(), int(now), asked.settings, {**asked.own, **_fixed(session, asked)}, asked.seals)

        def remember(turn: Turn) -> int:
            return responses.keep(envelope, turn, stored=asked.stored)

        left_out = asked.settings.tools.left_out
        facts = {"response_id": envelope.id, **({"tools_left_out": left_out} if left_out else {})}
        facts = {**turn.facts, **asked.facts, **facts}
        return replace(turn, asked=envelope, remember=remember, facts=facts)

    def is_side_call(self, scope: Scope) -> bool:
        """Return True if Codex's header names a sub-agent, a review or the like."""
        return first_header(scope["headers"], SUB_AGENT) not in (None, COMPACTION)

    def writer(self, turn: AgentRequest) -> ReplyWriter:
        assert isinstance(turn.asked, Envelope)
        return ResponsesWriter(turn.asked, streams=turn.stream)

    def overflow_stream(self, session: Session, request: object, error: ContextOverflow) -> bytes | None:
        """Return the events of a failed response: in a stream, Codex looks for the error nowhere else."""
        if not isinstance(request, Mapping) or request.get("stream") is not True:
            return None
        envelope = self._without_turn(session, request)
        return (
            None if envelope is None else ResponsesWriter(envelope, streams=True).failed(errors.overflow_error(error))
        )

    def stream_form(self, session: Session, request: object) -> StreamForm:
        """Return heartbeats that are response events, because Codex's timeout ignores SSE comments."""
        return ResponsesForm(partial(self._without_turn, session, request))

    def _without_turn(self, session: Session, request: object) -> Envelope | None:
        """Return the response for a request that did not become a turn; None if the request is invalid."""
        try:
            asked = self._read(session, request)
        except BadRequest:
            return None
        return Envelope(new_id(), int(time.time()), asked.settings, {**asked.own, **_fixed(session, asked)})

    def _read(self, session: Session, request: object) -> ResponsesRequest:
        first, anywhere = self._continuation.roles.system_first, "system" not in self._continuation.proof.refused
        policy = self._settings.policy.of(session)
        return read(request, Responses.of(session), system_first=first, system_anywhere=anywhere, policy=policy)

    def error_body(self, error: RouterError, request_id: str) -> dict[str, Any]:
        return errors.router_error(error, request_id)

    def owns_path(self, scope: Scope, path: str) -> bool:
        return path == self.path or path.startswith(f"{self.path}/")

    async def answer_other(self, session: Session, scope: Scope, receive: Receive, send: Send, app: ASGIApp) -> bool:
        """Answer requests to read or delete a stored response, or to list the items of its input.

        Raises:
            NotFound: the session stores no response with this id.
            InvalidParameter: the page is invalid, or the request is for compaction at the server.
        """
        method, path = scope["method"], scope["path"]
        if not path.startswith(f"{self.path}/"):
            return False
        response_id, _, rest = path[len(self.path) + 1 :].partition("/")
        if (method, response_id, rest) == ("POST", COMPACT, ""):
            raise errors.no_compaction("input", f"Compaction at the server ({path})")
        if (method, rest) not in (("GET", ""), ("DELETE", ""), ("GET", "input_items")):
            return False
        responses = Responses.of(session)
        envelope = responses.find(response_id)
        if envelope is None:
            raise NotFound(f"Response with id '{response_id[:64]}' not found.")
        query = {name: values[-1] for name, values in parse_qs(scope["query_string"].decode("latin-1")).items()}
        if method == "DELETE":
            responses.forget(response_id)
            await send_json(send, {"id": response_id, "object": "response", "deleted": True})
        elif rest:
            await send_json(send, page(envelope.input(), query))
        elif query.get("stream") == "true":
            raise errors.unavailable("stream", "A stream of a response that has ended")
        else:
            await send_json(send, envelope.finished())
        return True


def _fixed(session: Session, asked: ResponsesRequest) -> dict[str, Any]:
    """Return the fields of a response that the session's contract replaces."""
    fixed, _ = session.episode.contract.apply_fixed(asked.fields)
    requested = asked.settings.fields
    return {name: fixed[name] for name in FIXED if name in fixed and fixed[name] != requested[name]}


def page(items: Iterable[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """Return one page of a list, for the query's `order`, `limit` and `after`.

    Raises:
        InvalidParameter: a value is invalid.
    """
    order, limit = query.get("order", "desc"), query.get("limit", str(PAGE))
    if order not in ("asc", "desc"):
        raise InvalidParameter("order", f"Invalid value: '{order[:64]}'. Supported values are: 'asc' and 'desc'.")
    if not limit.isascii() or not limit.isdigit() or len(limit) > len(str(MAX_PAGE)) or not 1 <= int(limit) <= MAX_PAGE:
        raise InvalidParameter("limit", f"Invalid 'limit': expected a number from 1 to {MAX_PAGE}.")
    every = list(items) if order == "asc" else list(items)[::-1]
    after = query.get("after")
    if after is not None:
        ids = [item["id"] for item in every]
        if after not in ids:
            raise InvalidParameter("after", f"Item with id '{after[:64]}' not found.", None)
        every = every[ids.index(after) + 1 :]
    shown = every[: int(limit)]
    ends = {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": None, "last_id": None}
    return {"object": "list", "data": shown, **ends, "has_more": len(every) > len(shown)}

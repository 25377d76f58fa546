"""`/v1/messages`, `/v1/messages/count_tokens`, and the list of models for Anthropic clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import orjson

from middleware_hub.openai_session.agent_apis.agent_api import ReplyWriter, RunSettings, StreamForm, send_json
from middleware_hub.openai_session.agent_apis.chat import ChatApi
from middleware_hub.openai_session.agent_apis.messages import errors
from middleware_hub.openai_session.agent_apis.messages.answer import AnswerEnd
from middleware_hub.openai_session.agent_apis.messages.echo import Echo
from middleware_hub.openai_session.agent_apis.messages.models import in_anthropic_format
from middleware_hub.openai_session.agent_apis.messages.request import omits_thinking, read
from middleware_hub.openai_session.agent_apis.messages.stream import MessagesForm, MessagesWriter
from middleware_hub.openai_session.continuing.continuation import Continuation
from middleware_hub.openai_session.continuing.templates import CannotRender
from middleware_hub.openai_session.sessions.equality import Equality, equality_on
from middleware_hub.openai_session.sessions.session import AgentRequest, Session
from miles_router.engines import paths
from miles_router.errors import BadRequest, RouterError
from miles_router.middlewares import ASGIApp, Collected, Exchange, Receive, Scope, Send, Watch, first_header

#: The header that every client of this API sends.
VERSION = b"anthropic-version"
#: The header in which Claude Code names a sub-agent.
SUB_AGENT = b"x-claude-code-agent-id"
#: Stream options for a prompt whose length only the engine knows: `message_start` must contain it.
USAGE_FROM_THE_START = {"include_usage": True, "continuous_usage_stats": True}


class MessagesApi(ChatApi):
    """Anthropic's Messages API."""

    path = paths.MESSAGES
    shows_open_calls = False

    def __init__(self, continuation: Continuation, equal: Equality, settings: RunSettings | None = None) -> None:
        super().__init__(continuation, equality_on(self.path, equal), settings)
        self._system_anywhere = "system" not in continuation.proof.refused

    async def turn(self, session: Session, request: object, *, now: float) -> AgentRequest:
        return await self._turn(session, request, now, counts=False)

    def is_side_call(self, scope: Scope) -> bool:
        """Return True if Claude Code's header names a sub-agent."""
        return first_header(scope["headers"], SUB_AGENT) is not None

    def writer(self, turn: AgentRequest) -> ReplyWriter:
        asked = turn.asked
        assert isinstance(asked, Mapping)
        prompt_tokens = turn.prompt.length if turn.prompt is not None else None
        # The agent's own limits, before the session's contract replaces them.
        ending = AnswerEnd(asked.get("stop_sequences") or (), asked["max_tokens"], prompt_tokens)
        return MessagesWriter(ending, omits_thinking=omits_thinking(asked))

    def stream_form(self, session: Session, request: object) -> StreamForm:
        return MessagesForm()

    def error_body(self, error: RouterError, request_id: str) -> dict[str, Any]:
        return errors.router_error(error, request_id)

    def owns_path(self, scope: Scope, path: str) -> bool:
        """Return True for this API's paths, and for the list of models if an Anthropic client asks."""
        return path == paths.MESSAGES or path.startswith(f"{paths.MESSAGES}/") or _lists_models(scope, path)

    async def answer_other(self, session: Session, scope: Scope, receive: Receive, send: Send, app: ASGIApp) -> bool:
        """Answer `/v1/messages/count_tokens` and the list of models; return False for anything else."""
        method, path = scope["method"], scope["path"]
        if method == "POST" and path == paths.COUNT_TOKENS:
            await self._count(session, scope, receive, send)
        elif method == "GET" and _lists_models(scope, path):
            await _models(scope, receive, send, app)
        else:
            return False
        return True

    async def _turn(self, session: Session, request: object, now: float, *, counts: bool) -> AgentRequest:
        policy = self._settings.policy.of(session)
        asked = read(
            request,
            Echo.of(session),
            system_first=self._continuation.roles.system_first,
            system_anywhere=self._system_anywhere,
            counts=counts,
            policy=policy,
        )
        fields = self._settings.with_chat_settings(asked.fields)
        turn = await self.build_turn(session, fields, asked.contexts(fields), now=now)
        if turn.stream and turn.prompt is None:
            fields = {**turn.fields, "stream_options": USAGE_FROM_THE_START}
        else:
            fields = turn.fields
        return replace(turn, fields=fields, asked=request, facts={**turn.facts, **asked.facts})

    async def _count(self, session: Session, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the number of prompt tokens, without asking an engine.

        Raises:
            BadRequest: the request is invalid, or the template refuses it.
        """
        exchange = Exchange.of(scope)
        request = exchange.loads(await exchange.read(receive))
        with Watch(receive):
            turn = await self._turn(session, request, 0.0, counts=True)
            length = turn.prompt.length if turn.prompt is not None else await self._counted(turn.fields)
        await send_json(send, {"input_tokens": length})

    async def _counted(self, fields: Mapping[str, Any]) -> int:
        try:
            return await self.count_rendered_tokens(fields)
        except CannotRender as reason:
            raise BadRequest(f"messages: {reason}") from None


def _lists_models(scope: Scope, path: str) -> bool:
    named = path == paths.MODELS or path.startswith(f"{paths.MODELS}/")
    return named and first_header(scope["headers"], VERSION) is not None


async def _models(scope: Scope, receive: Receive, send: Send, app: ASGIApp) -> None:
    collected = Collected()
    await collected.call(app, scope, receive)
    if collected.is_json:
        await collected.give_to(send, orjson.dumps(in_anthropic_format(collected.parse())))
    elif collected.status != 200:
        await collected.give_to(send, errors.refusal_body(collected.body, collected.status))
    else:
        await collected.give_to(send)

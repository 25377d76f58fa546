"""`/v1/chat/completions`: messages, tools and settings, as the engine's own endpoint takes them.

An API that is translated to chat extends `ChatApi` with its own request and writer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from middleware_hub.openai_session.agent_apis.agent_api import AgentApi, without_nulls
from middleware_hub.openai_session.continuing.continuation import HeldEnd, NotAppendOnly
from middleware_hub.openai_session.continuing.templates import CannotRender
from middleware_hub.openai_session.sessions.contents import Media, readable_contents, readable_fields
from middleware_hub.openai_session.sessions.history import ParentMatch
from middleware_hub.openai_session.sessions.messages import Message, Unread, checked_messages, named_calls, only_text
from middleware_hub.openai_session.sessions.session import AgentRequest, PromptIds, Session
from middleware_hub.openai_session.sessions.turn import Context, Turn, contexts_of
from miles_router.engines.openai.chat import CONTINUES_FINAL, ChatEndpoint, ids_obstacle
from miles_router.errors import BadRequest
from miles_router.trajectory import Piece
from miles_router.trajectory.pieces import Tokens, frozen

#: Fields that OpenAI's API had before `tools`, and the values of `function_call` that force no call.
FUNCTIONS, ANY_FUNCTION = ("functions", "function_call"), ("auto", "none")


class ChatApi(AgentApi):
    """OpenAI's chat API."""

    path = ChatEndpoint.path
    endpoint = ChatEndpoint()

    def fields(self, request: object) -> Mapping[str, Any]:
        """Return the chat request for an agent's request. The session stores its messages.

        Raises:
            BadRequest: the request is invalid.
        """
        checked_messages(request)
        assert isinstance(request, Mapping)
        return without_nulls(request)

    async def turn(self, session: Session, request: object, *, now: float) -> AgentRequest:
        """Find the deepest recorded turn whose messages a request begins with.

        Raises:
            BadRequest: the request is invalid.
            BadRequest: the request has an image or other media, and the policy refuses them.
        """
        fields = self._settings.with_chat_settings(self.fields(request))
        media = Media(refuses=self._settings.policy.of(session).media)
        unread = Unread(first=not session.turns)
        _check_legacy_functions(fields, unread)
        readable = readable_fields(fields["messages"], media, unread)
        readable = named_calls(readable, unread, writes_ids=self._continuation.writes_ids)
        messages, places = self._continuation.roles.with_known_roles(readable_contents(readable, media))
        if messages is not fields["messages"]:
            fields = {**fields, "messages": messages}
        turn = await self.build_turn(session, fields, contexts_of(fields), now=now, places=places)
        facts = {**media.facts, **unread.facts}
        return replace(turn, facts={**turn.facts, **facts}) if facts else turn

    async def build_turn(
        self,
        session: Session,
        fields: Mapping[str, Any],
        contexts: Sequence[Context],
        *,
        now: float,
        places: Sequence[int] | None = None,
    ) -> AgentRequest:
        """Return a chat request with its parent turn, and its prompt ids where it extends one.

        Args:
            contexts: tools and template settings that the parent may have been rendered with; a root turn uses the
                first.
            places: the index of each message in the agent's request, where it is another; for error messages.

        Raises:
            BadRequest: a text is too long, or the template drops a message.
        """
        messages: Sequence[Message] = fields["messages"]
        keys = [context.key for context in contexts]
        place = session.history.find_parent(messages, keys, self._equal, self._continuation.same_id)
        if place.parent is None:
            self._check_written(fields, contexts[0], places)
            return self._root(session, fields, place, now)
        try:
            context = next(each for each in contexts if each.key == place.context)
            prompt = await self._prompt(fields, context, place, place.parent)
        except NotAppendOnly as reason:
            self._check_written(fields, contexts[0], places)
            root = ParentMatch(None, tuple(messages), contexts[0].key)
            return self._root(session, fields, root, now, segment=str(reason))
        return AgentRequest(session, self.path, fields, (place,), now, prompt)

    def _root(
        self, session: Session, fields: Mapping[str, Any], place: ParentMatch, now: float, *, segment: str | None = None
    ) -> AgentRequest:
        """Return a turn that starts a segment. The engine renders its messages, so arguments of calls are converted to
        a form that it accepts."""
        messages, wrapped = self._continuation.readable(fields["messages"])
        if messages is not fields["messages"]:
            fields = {**fields, "messages": messages}
        facts = {"wrapped_arguments": wrapped} if wrapped else {}
        return AgentRequest(session, self.path, fields, (place,), now, segment=segment, facts=facts)

    def _check_written(self, fields: Mapping[str, Any], context: Context, places: Sequence[int] | None) -> None:
        """Check that the template writes every message that the engine is going to render.

        Raises:
            BadRequest: the template drops a message.
        """
        if isinstance(fields.get("input_ids"), list):
            return
        messages = fields["messages"][:-1] if fields.get(CONTINUES_FINAL) else fields["messages"]
        place = self._continuation.roles.first_dropped(messages, context.tools, context.template_kwargs)
        if place is not None:
            role, sent = messages[place]["role"][:64], place if places is None else places[place]
            raise BadRequest(
                f"messages[{sent}]: the chat template would drop this message with the role {role!r}; "
                "move it, or use another role"
            )

    async def prompt_tokens(self, turn: AgentRequest) -> int | None:
        """Return the tokens in the prompt. A root turn is rendered here with the model's template and tokenizer."""
        known, fields = await super().prompt_tokens(turn), turn.fields
        own = fields.get("input_ids")
        if known is not None or isinstance(own, list):
            return known or len(own or ())
        if not only_text(fields["messages"]) or ids_obstacle(fields) not in (None, CONTINUES_FINAL):
            return None
        try:
            return await self.count_rendered_tokens(fields)
        except CannotRender:
            return None

    async def count_rendered_tokens(self, fields: Mapping[str, Any]) -> int:
        """Return the number of ids in the prompt of a root turn.

        Raises:
            CannotRender: the template refuses the messages.
            TextTooLong: the rendered text is too long.
        """
        return len(await self._render(fields))

    async def render_ids(self, fields: Mapping[str, Any]) -> Tokens:
        if isinstance(own := fields.get("input_ids"), list):
            return Piece.given(own).tokens
        try:
            return await self._render(fields)
        except CannotRender as error:
            raise BadRequest(f"the chat template refuses these messages: {error}") from None

    async def _render(self, fields: Mapping[str, Any]) -> Tokens:
        """Return the ids that the engine makes of a root turn's request.

        Raises:
            CannotRender: the template refuses the messages.
            TextTooLong: the rendered text is too long.
        """
        context, *_ = contexts_of(fields)
        continues_final = bool(fields.get(CONTINUES_FINAL))
        return await self._continuation.beginning(
            fields["messages"], context.tools, context.template_kwargs, continues_final=continues_final
        )

    async def _prompt(self, fields: Mapping[str, Any], context: Context, place: ParentMatch, parent: Turn) -> PromptIds:
        """Return the ids that extend a recorded turn.

        Raises:
            NotAppendOnly: no exact ids can be given.
        """
        obstacle = ids_obstacle(fields) or ("not_text" if not only_text(place.appended) else None)
        if obstacle is not None:
            raise NotAppendOnly(obstacle)
        extension = await self._continuation.after(HeldEnd.of(parent), place.appended, context)
        return PromptIds(parent, Piece(frozen(extension.ids)), extension.drop)


def _check_legacy_functions(fields: Mapping[str, Any], unread: Unread) -> None:
    """Record the legacy `functions` and `function_call` fields as unread; no engine reads them.

    Raises:
        BadRequest: it is the session's first turn.
    """
    for name in FUNCTIONS:
        if fields.get(name) and fields[name] not in ANY_FUNCTION:
            if unread.first:
                raise BadRequest(f"{name}: the engine does not read it; send tools and tool_choice in its place")
            unread.note([name])

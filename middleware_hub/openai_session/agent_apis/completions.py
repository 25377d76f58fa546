"""`/v1/completions` within a session: text or ids in, text out.

A prompt of ids that begins with all tokens of a recorded turn extends that turn. Any other prompt starts a root turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from hashlib import blake2b
from typing import Any

import numpy as np
import orjson

from middleware_hub.openai_session.agent_apis.agent_api import AgentApi, without_nulls
from middleware_hub.openai_session.sessions.history import ParentMatch
from middleware_hub.openai_session.sessions.messages import Message
from middleware_hub.openai_session.sessions.session import AgentRequest, PromptIds, Session
from middleware_hub.openai_session.sessions.turn import Turn
from miles_router.engines.openai.completions import CompletionsEndpoint
from miles_router.errors import BadRequest
from miles_router.trajectory import InvalidTrajectory, Piece
from miles_router.trajectory.pieces import Tokens

CONTEXT = b"completions"


class CompletionsApi(AgentApi):
    """OpenAI's legacy completions API."""

    path = CompletionsEndpoint.path
    endpoint = CompletionsEndpoint()

    def untraced_reason(self, request: object) -> str | None:
        """Return a reason for requests with `echo`, where the answer's ids include the prompt's, which were not
        sampled."""
        if isinstance(request, Mapping) and request.get("echo"):
            return "with echo, the answer also contains the prompt's text and logprobs, which were not sampled"
        return None

    async def turn(self, session: Session, request: object, *, now: float) -> AgentRequest:
        """Find the parent turn of each prompt of a request.

        Raises:
            BadRequest: the request or a prompt is invalid.
        """
        if not isinstance(request, Mapping):
            raise BadRequest("the request body must be a JSON object")
        request = self._settings.with_adapter(without_nulls(request))
        prompt = request.get("prompt")
        if not isinstance(prompt, (str, list)):
            raise BadRequest("prompt must be a string, token ids, or a list of either")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
            prompt = prompt[0]
        if isinstance(prompt, list) and (set(map(type, prompt)) & {str, list}):
            _check_prompts(prompt)
            parents = [_root(each) for each in prompt]
            return AgentRequest(session, self.path, request, parents, now, segment="batch")
        turn = AgentRequest(session, self.path, request, (_root(prompt),), now)
        if isinstance(prompt, list):
            return _extend_deepest(turn, prompt, _checked_ids(prompt))
        return replace(turn, segment="text_prompt") if _continues_text(prompt, session) else turn

    async def prompt_tokens(self, turn: AgentRequest) -> int | None:
        """Return the tokens in the longest prompt. Texts are counted with the tokenizer."""
        prompts = turn.fields["prompt"]
        several = isinstance(prompts, list) and set(map(type, prompts)) & {str, list}
        counts = [await self._tokens(each) for each in (prompts if several else [prompts])]
        return max(counts)

    async def _tokens(self, prompt: str | list[int]) -> int:
        return len(prompt) if isinstance(prompt, list) else await self._continuation.text_tokens(prompt)


def _check_prompts(prompts: list[Any]) -> None:
    """Check that each prompt of a batch is a text or a list of ids.

    Raises:
        BadRequest: a prompt is neither.
    """
    for each in prompts:
        if isinstance(each, list):
            _checked_ids(each)
        elif not isinstance(each, str):
            raise BadRequest("prompt must be a string, token ids, or a list of either")


def _checked_ids(prompt: list[Any]) -> Tokens:
    """Return a prompt's ids.

    Raises:
        BadRequest: the list holds something else than valid ids. Some invalid ids crash an engine.
    """
    if not set(map(type, prompt)) <= {int}:
        raise BadRequest("prompt must be a string, token ids, or a list of either")
    try:
        return Piece.given(prompt).tokens
    except InvalidTrajectory as error:
        raise BadRequest(f"prompt: {error}") from None


def _root(prompt: object) -> ParentMatch:
    return ParentMatch(None, (_message(prompt),), CONTEXT)


def _message(prompt: object) -> Message:
    """Return a message that stands for a prompt. Ids are stored once, as tokens; their message holds only count and
    digest."""
    if isinstance(prompt, list):
        digest = blake2b(orjson.dumps(prompt), digest_size=16).hexdigest()
        return {"role": "prompt", "content": f"{len(prompt)} token ids, blake2b {digest}"}
    return {"role": "prompt", "content": prompt}


def _extend_deepest(turn: AgentRequest, prompt: list[int], ids: Tokens) -> AgentRequest:
    """Return the turn as an extension of the deepest recorded turn whose tokens the prompt begins with; unchanged if
    there is none."""
    parent = _find_deepest(ids, turn.session)
    if parent is None:
        return turn
    place = ParentMatch(parent, (_message(prompt[parent.tokens :]),), parent.context)
    return replace(turn, parents=(place,), prompt=PromptIds(parent, Piece.given(ids[parent.tokens :])))


def _continues_text(prompt: str, session: Session) -> bool:
    """Return True if a text begins with a recorded root's prompt and answer. It is a root turn all the same: its ids
    need not begin with the recorded ones."""
    return any(
        prompt.startswith(turn.appended[0]["content"] + turn.answer["content"])
        for turn in session.roots
        if turn.context == CONTEXT
    )


def _find_deepest(ids: Tokens, session: Session) -> Turn | None:
    """Return the longest recorded turn that is a prefix of the ids, the latest one of equals; None if there is none."""
    best: Turn | None = None
    candidates = [root for root in session.roots if root.context == CONTEXT]
    while candidates:
        turn = candidates.pop()
        if _contains_turn(ids, turn):
            candidates.extend(session.history.children(turn))
            if best is None or (turn.tokens, turn.number) > (best.tokens, best.number):
                best = turn
    return best


def _contains_turn(ids: Tokens, turn: Turn) -> bool:
    """Return True if the ids contain this turn's own tokens. They are known to begin with its parent's."""
    begin = turn.prompt_tokens - len(turn.given)
    for piece in (turn.given, *turn.sampled):
        if not np.array_equal(ids[begin : begin + len(piece)], piece.tokens):
            return False
        begin += len(piece)
    return True

"""A turn on its way in: where it hangs in the session's tree, and the request that the engine is sent for it.

A root goes as `messages`, and the engine tells the ids its template made of them. A turn that extends a held one goes
as `input_ids`: what is held, and the continuation of what the agent appended. Fields are asked for that recording
needs; what the agent asked for itself is remembered, so that it gets that and no more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from middleware_hub.openai_session.continuing.continuation import Continuation, HeldEnd, NotAppendOnly
from middleware_hub.openai_session.sessions.messages import Equality, checked, only_text
from middleware_hub.openai_session.sessions.prompting import Context, contexts_of
from middleware_hub.openai_session.sessions.tree import Place, Session, Turn
from miles_router.middlewares.rows import Handover, RowPrefix
from miles_router.trajectory import Piece

CHAT = "/v1/chat/completions"
#: What a whole answer is asked for, and what a stream; the agent gets those that it asked for itself.
OF_WHOLE = ("logprobs", "return_meta_info")
OF_STREAM = ("logprobs", "return_output_ids_in_sglext", "return_cached_tokens_details")
PROMPT_OF_WHOLE, PROMPT_OF_STREAM = "return_prompt_token_ids", "return_input_ids_in_sglext"


@dataclass
class Asked:
    """A turn that is being asked for. `given` is None for a root: the engine will tell."""

    session: Session
    path: str
    parsed: Mapping[str, Any]
    place: Place
    asked_at: float
    given: Piece | None = None
    dropped: int = 0
    held: npt.NDArray[np.int32] | None = None  # the parent's tokens that stay
    segment: str | None = None  # why a history that is held in words is not continued in tokens
    turn_id: str | None = None
    batch: Sequence[Place] = ()  # for a batch of prompts, where the turns of each will hang
    experts: Handover | None = None  # where routed experts are captured

    @property
    def stream(self) -> bool:
        """Whether the agent reads it as a stream."""
        return bool(self.parsed.get("stream"))

    def wants(self, field: str) -> bool:
        """Whether the agent asked for a field itself."""
        return bool(self.parsed.get(field))

    @property
    def several(self) -> bool:
        """Whether the agent asked for more than one choice."""
        return self.parsed.get("n") not in (None, 1)

    @property
    def held_experts(self) -> RowPrefix | None:
        """The routed experts held of the tokens that stay."""
        if self.held is None or self.place.parent is None:
            return None
        return self.place.parent.held_experts(len(self.held))

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        options = self.parsed.get("stream_options")
        return isinstance(options, Mapping) and bool(options.get("include_usage"))

    def body(self, *, stream: bool) -> bytes:
        """The request for the engine."""
        fields = {**self.parsed, **dict.fromkeys(OF_STREAM if stream else OF_WHOLE, True)}
        if not stream:
            fields.pop("stream", None)
            fields.pop("stream_options", None)
        if self.given is None:
            fields[PROMPT_OF_STREAM if stream else PROMPT_OF_WHOLE] = True
        else:
            assert self.held is not None
            fields["input_ids"] = np.concatenate([self.held, self.given.tokens])
        return orjson.dumps(fields, option=orjson.OPT_SERIALIZE_NUMPY)


def ask(
    session: Session, parsed: object, *, path: str, continuation: Continuation, equal: Equality, now: float
) -> Asked:
    """Place a chat request in its session.

    Raises:
        BadRequest: it is none.
    """
    messages = checked(parsed)
    assert isinstance(parsed, Mapping)
    contexts = contexts_of(parsed)
    place = session.place(messages, [each.key for each in contexts], equal)
    asked = Asked(session, path, parsed, place, now)
    if place.parent is None:
        return asked
    obstacle = _obstacle(parsed) or ("not_text" if not only_text(messages) else None)
    try:
        if obstacle is not None:
            raise NotAppendOnly(obstacle)
        _continue(asked, place.parent, next(each for each in contexts if each.key == place.context), continuation)
    except NotAppendOnly as reason:
        asked.segment = str(reason)
        asked.place = Place(None, messages, contexts[0].key)
    return asked


def _obstacle(parsed: Mapping[str, Any]) -> str | None:
    if parsed.get("input_ids") is not None:
        return "own_input_ids"
    if not isinstance(parsed.get("chat_template_kwargs") or {}, Mapping):
        return "invalid_chat_template_kwargs"  # the engine refuses them in its own words
    return "continue_final_message" if parsed.get("continue_final_message") else None


def _continue(asked: Asked, parent: Turn, context: Context, continuation: Continuation) -> None:
    calls = parent.answer.get("tool_calls") or ()
    end = HeldEnd(
        last_id=parent.last_id,
        ended=parent.ended_itself,
        tool_calls=tuple((call.get("id"), call["function"]["name"]) for call in calls),
        reasoning=bool(parent.answer.get("reasoning_content")),
    )
    extension = continuation.after(end, asked.place.appended, context.tools, context.template_kwargs)
    asked.dropped = extension.drop
    asked.given = Piece.given(extension.ids)
    held = parent.trajectory().tokens
    asked.held = held[: len(held) - extension.drop]

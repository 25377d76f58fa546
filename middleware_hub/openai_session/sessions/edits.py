"""Description of an agent's change to the recorded history: the first message that differs, its field, both texts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from middleware_hub.openai_session.sessions.equality import MEANING, STRICT, Difference
from middleware_hub.openai_session.sessions.messages import Message, common_prefix

#: How many characters of each text are shown, and how many of them precede the first difference.
SHOWN, BEFORE = 160, 40


def message_edit(place: int, held: Message | None, sent: Message | None) -> Mapping[str, Any]:
    """Describe a changed, removed or added message.

    Args:
        place: the index of the message in the history.
        held: the recorded message; None if the agent added one.
        sent: the message of the request; None if the agent removed one.
    """
    if held is None or sent is None:
        return _edit(place, Difference("message", held, sent))
    found = MEANING.difference(held, sent) or STRICT.difference(held, sent)
    # A `message_equality` that the operator wrote may see a difference where ours sees none.
    return _edit(place, found or Difference("message", held, sent))


def context_edit(held: bytes, sent: bytes) -> Mapping[str, Any]:
    """Describe changed tools or chat template settings, from the recorded context and the one sent."""
    (tools, settings), (new_tools, new_settings) = (
        orjson.loads(context) if context.startswith(b"[") else (None, context.decode()) for context in (held, sent)
    )
    if tools != new_tools:
        return _edit(None, Difference("tools", tools, new_tools))
    return _edit(None, Difference("chat_template_kwargs", settings, new_settings))


def _edit(place: int | None, difference: Difference) -> Mapping[str, Any]:
    held, sent = _text(difference.held), _text(difference.sent)
    same = common_prefix(held or "", sent or "")
    shown = {"held": _excerpt(held, same), "sent": _excerpt(sent, same)}
    return {"message": place, "field": difference.field, **shown}


def _text(value: object) -> str | None:
    return value if value is None or isinstance(value, str) else orjson.dumps(value, default=dict).decode()


def _excerpt(text: str | None, position: int) -> str | None:
    if text is None:
        return None
    begin = max(0, position - BEFORE)
    end = begin + SHOWN
    return f"{'…' if begin else ''}{text[begin:end]}{'…' if end < len(text) else ''}"

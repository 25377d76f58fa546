"""Tool calls that an answer ends within, by its length or by an abort. Pure.

The engine leaves them out of whole answers, with all that they say; here an agent sees them as far as they go, as it
does in a stream, behind a finish reason that says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from miles_router.engines.facts import Facts
from miles_router.engines.openai.chat_parts import call_id, looks_for_calls, separates_reasoning, tools_of
from miles_router.engines.parsers import UNREAD, Parsers
from miles_router.engines.parsers.local import tools_by_name
from miles_router.engines.parsers.reading import tool_calls


def with_unfinished(
    message: Mapping[str, Any], text: str, fields: Mapping[str, Any], parsers: Parsers, facts: Facts
) -> dict[str, Any]:
    """The message that was made of a text, with the call that the text ends within; as it is where there is none, or
    where no parser here knows the family.

    Args:
        text: all of the answer, special tokens included.
        fields: of the request.
        facts: of the engine.
    """
    calls, thinking, call = parsers.calls(facts), parsers.thinking(facts), None
    if calls is not None and looks_for_calls(fields, facts):
        try:
            if thinking is not None and separates_reasoning(fields, facts):
                split = thinking.whole(text, thinking=bool(message.get("reasoning_content")))
                text = (split.rest or "") + split.begun
            call = calls.unfinished(text, tools_by_name(tools_of(fields)))
        except UNREAD:
            pass
    if call is None:
        return dict(message)
    before = message.get("tool_calls") or []
    named = tool_calls([call], partial(call_id, fields=fields, facts=facts), begin=len(before))
    return {**message, "tool_calls": [*before, *named]}

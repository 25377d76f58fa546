"""Adds a tool call that was cut, by the length limit or an abort, to the message of a whole answer. Pure.

The engine leaves incomplete calls out of whole answers, with all their text. With this addition an agent sees the part
that was sampled, as in a stream. The finish reason shows that the call is incomplete.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from miles_router.engines.facts import Facts
from miles_router.engines.openai.chat import tools_by_name, tools_of
from miles_router.engines.openai.chat_parts import call_id, looks_for_calls, separates_reasoning
from miles_router.engines.parsers import PARSE_ERRORS, Parsers
from miles_router.engines.parsers.reading import tool_calls


def with_unfinished(
    message: Mapping[str, Any], text: str, fields: Mapping[str, Any], parsers: Parsers, facts: Facts
) -> dict[str, Any]:
    """Return a copy of the message, with the incomplete call at the end of the text if a local parser finds one.

    Args:
        message: the message that was parsed from the text.
        text: the whole answer, with special tokens.
        fields: the fields of the request.
        facts: the facts of the engine.
    """
    calls, thinking, call = parsers.call_format(facts), parsers.reasoning_format(facts), None
    if calls is not None and looks_for_calls(fields, facts):
        try:
            if thinking is not None and separates_reasoning(fields, facts):
                split = thinking.split(text, thinking=bool(message.get("reasoning_content")))
                text = (split.rest or "") + split.open_call
            call = calls.unfinished(text, tools_by_name(tools_of(fields)))
        except PARSE_ERRORS:
            pass
    if call is None:
        return dict(message)
    before = message.get("tool_calls") or []
    named = tool_calls([call], partial(call_id, fields=fields, facts=facts), begin=len(before))
    return {**message, "tool_calls": [*before, *named]}

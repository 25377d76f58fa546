"""Finds tool calls that an ended stream did not show. Pure.

Source: SGLang 0.5.23, `base_format_detector.py`. The engine's streaming parser waits for the arguments of a call. If a
model writes a call without arguments, the stream shows neither `{}` nor any later call. The parser for whole texts
finds all calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from miles_router.engines.answers import UnreadableAnswer
from miles_router.engines.facts import Facts
from miles_router.engines.openai.chat import tools_by_name, tools_of
from miles_router.engines.openai.chat_parts import call_id, looks_for_calls, separates_reasoning
from miles_router.engines.openai.rest import missing_call_deltas
from miles_router.engines.parsers import PARSE_ERRORS, Parsers
from miles_router.engines.parsers.reading import tool_calls

#: The reason of a message with a call that a local parser does not find in the text.
NOT_IN_TEXT = "a call was shown that the whole text does not have"
#: The JSON for a call without arguments.
NO_ARGUMENTS = "{}"


def unshown_calls(
    shown: Mapping[str, Any], text: str, fields: Mapping[str, Any], parsers: Parsers, facts: Facts, *, cut: bool
) -> list[dict[str, Any]]:
    """Return the deltas for the complete tool calls in a text that `shown` lacks.

    Args:
        shown: the message that the stream has shown.
        text: the whole answer, with special tokens, without the token that ended it.
        fields: the fields of the request.
        facts: the facts of the engine.
        cut: whether the answer was cut, so that the last shown call may be incomplete.

    Raises:
        UnreadableAnswer: the stream showed calls that the text does not contain, or a call without arguments that no
            local parser can read.
    """
    if not looks_for_calls(fields, facts) or fields.get("tool_choice") not in (None, "auto"):
        return []  # a grammar constrains the answer to another form
    begun = shown.get("tool_calls") or []
    read = _calls_in(text, shown, fields, parsers, facts)
    if read is None:
        if any(not call["function"]["arguments"] for call in begun):
            raise UnreadableAnswer("incomplete", "a call was shown without arguments, and no local parser can read it")
        return []
    if cut and len(begun) == len(read) + 1:
        begun = begun[:-1]
    if len(begun) > len(read):
        raise UnreadableAnswer("tokens_taken_back", NOT_IN_TEXT)
    return list(missing_call_deltas(begun, read))


def _calls_in(
    text: str, shown: Mapping[str, Any], fields: Mapping[str, Any], parsers: Parsers, facts: Facts
) -> list[dict[str, Any]] | None:
    """Return the calls in a text; None if no local parser can read it."""
    calls, thinking = parsers.call_format(facts), parsers.reasoning_format(facts)
    if calls is None:
        return None
    try:
        if separates_reasoning(fields, facts):
            if thinking is None:
                return None
            text = thinking.split(text, thinking=bool(shown.get("reasoning_content"))).rest or ""
        found = calls.read(text, tools_by_name(tools_of(fields))).calls
    except PARSE_ERRORS:
        return None
    given = [each._replace(arguments=NO_ARGUMENTS) if each.arguments == "null" else each for each in found]
    return tool_calls(given, partial(call_id, fields=fields, facts=facts))

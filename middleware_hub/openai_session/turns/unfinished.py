"""Tool calls that a whole answer ends within, by its length or by an abort. The engine leaves them out, with all that
they say; here an agent sees them as far as they go, as it does in a stream, behind a finish reason that says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from miles_router.engines.facts import Facts
from miles_router.engines.openai.held_deltas import OWN_ENDS
from miles_router.engines.openai.legs import call_id, tools_of
from miles_router.engines.parsers import UNREAD, Parsers
from miles_router.engines.parsers.local import tools_by_name
from miles_router.engines.parsers.reading import CallFormat, Tools, tool_calls


def ends_early(answer: Mapping[str, Any], fields: Mapping[str, Any]) -> bool:
    """Whether some choice may end within a call."""
    return bool(tools_of(fields)) and any(choice.get("finish_reason") not in OWN_ENDS for choice in answer["choices"])


def with_unfinished(
    answer: dict[str, Any],
    fields: Mapping[str, Any],
    parsers: Parsers,
    facts: Facts,
    decode: Callable[..., str],
) -> dict[str, Any]:
    """The answer with the calls that its choices end within; of a family that is not known here it stays as it is."""
    calls, tools = parsers.calls(facts), tools_by_name(tools_of(fields))
    if calls is None or not facts.tool_call_parser:
        return answer
    named = partial(call_id, fields=fields, facts=facts)
    return {**answer, "choices": [_finished(choice, calls, tools, named, decode) for choice in answer["choices"]]}


def _finished(
    choice: Any, calls: CallFormat, tools: Tools, named: Callable[[str, int], str], decode: Callable[..., str]
) -> Any:
    if choice["finish_reason"] in OWN_ENDS:
        return choice
    ids = [triple[1] for triple in choice["meta_info"]["output_token_logprobs"]]
    try:
        call = calls.unfinished(decode(ids, skip_special_tokens=False), tools)
    except UNREAD:
        return choice
    if call is None:
        return choice
    before = choice["message"].get("tool_calls") or []
    unfinished = tool_calls([call], named, begin=len(before))
    message = {**choice["message"], "tool_calls": [*before, *unfinished]}
    return {**choice, "message": message}

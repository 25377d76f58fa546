"""Accounts for the sampled text of a turn in the message that the agent was shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from middleware_hub.openai_session.statistics import SessionStatistics
from middleware_hub.openai_session.turns.plan import TurnPlan
from middleware_hub.openai_session.turns.stream import SHOWN_OTHERWISE
from miles_router.engines import paths
from miles_router.engines.openai.chat_parts import tools_of
from miles_router.engines.openai.choices import Choice
from miles_router.engines.openai.held_deltas import OWN_ENDS
from miles_router.engines.openai.unshown import NOT_IN_TEXT
from miles_router.engines.parsers.accounting import INVALID_JSON, WHOLE, account
from miles_router.engines.parsers.local import tools_by_name

#: The most characters that are accounted for, since that runs on the event loop: up to 0.1 s if a parser dropped all.
MAX_TEXT = 1 << 16
#: The fact of a turn with `WHOLE`, or with the list of reasons why the message is not all of the sampled text.
PARSED = "parsed"


def parsed_facts(
    plan: TurnPlan, choice: Choice, text_of: Callable[[Choice], str], statistics: SessionStatistics
) -> Mapping[str, Any]:
    """Return the fact `PARSED` of a choice, and count it.

    Completions, which are not parsed, have none, and neither have ids that the tokenizer does not know, and texts of
    more than `MAX_TEXT` characters.
    """
    if plan.request.path == paths.COMPLETIONS:
        return {}
    try:
        text = text_of(choice)
    except (OverflowError, LookupError, TypeError, ValueError):
        return {}
    if len(text) > MAX_TEXT:
        return {}
    tools = tools_by_name(tools_of(plan.grant.fields))
    reasons = account(text, choice.message, tools, cut=choice.finish not in OWN_ENDS, stop=choice.matched)
    if not reasons and NOT_IN_TEXT in choice.facts.get(SHOWN_OTHERWISE, ""):
        reasons = [INVALID_JSON]  # the engine closed what the model left open
    statistics.parsed.update(reasons or (WHOLE,))
    return {PARSED: reasons or WHOLE}

"""Incomplete tool calls at the end of a whole answer: the agent gets the part that was sampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from miles_router.engines.facts import Facts
from miles_router.engines.openai.chat import tools_of
from miles_router.engines.openai.held_deltas import OWN_ENDS
from miles_router.engines.openai.unfinished import with_unfinished
from miles_router.engines.parsers import Parsers


def ends_early(answer: Mapping[str, Any], fields: Mapping[str, Any]) -> bool:
    """Return True if a choice may end inside a tool call."""
    return bool(tools_of(fields)) and any(choice.get("finish_reason") not in OWN_ENDS for choice in answer["choices"])


def with_unfinished_calls(
    answer: dict[str, Any],
    fields: Mapping[str, Any],
    parsers: Parsers,
    facts: Facts,
    decode: Callable[..., str],
) -> dict[str, Any]:
    """Return the answer with the incomplete tool calls at the end of its choices.

    Raises:
        One of `MALFORMED`: the answer lacks a field.
    """

    def whole(choice: Any) -> Any:
        if choice["finish_reason"] in OWN_ENDS:
            return choice
        ids = [triple[1] for triple in choice["meta_info"]["output_token_logprobs"]]
        text = decode(ids, skip_special_tokens=False)
        return {**choice, "message": with_unfinished(choice["message"], text, fields, parsers, facts)}

    return {**answer, "choices": [whole(choice) for choice in answer["choices"]]}

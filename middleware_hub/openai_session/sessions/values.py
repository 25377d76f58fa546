"""Limits on the number of JSON values in a turn, because the event loop handles each value one by one. Pure."""

from __future__ import annotations

from typing import Any

from miles_router.engines.client_json import may_have_many_values, refuse_many_values
from miles_router.errors import BadRequest

#: The most values in a turn, without the ids of a prompt. A chat template takes some 50 microseconds for a message,
#: which has at least three values.
MAX_VALUES = 1 << 16
#: The most ids in a prompt.
MAX_IDS = 1 << 20
PROMPT = "prompt"


def refuse_long_turn(body: bytes, parsed: Any) -> None:
    """Refuse a turn that would block the event loop for seconds.

    Raises:
        BadRequest: the turn, or the arguments of one call, have more than `MAX_VALUES` values, or the prompt more than
            `MAX_IDS` ids.
    """
    if not isinstance(parsed, dict) or not may_have_many_values(body, MAX_VALUES):
        return
    prompt = parsed.get(PROMPT)
    if isinstance(prompt, list) and sum(len(each) if isinstance(each, list) else 1 for each in prompt) > MAX_IDS:
        raise BadRequest(f"the prompt has more than {MAX_IDS} ids")
    fields = {name: value for name, value in parsed.items() if name != PROMPT or not isinstance(value, list)}
    refuse_many_values(body, [fields], MAX_VALUES)  # in a list, because at the top level it would exempt fields of ids
    if any(_values_in(text) > MAX_VALUES for text in _arguments([*parsed.values()])):
        raise BadRequest(f"the arguments of a call have more than {MAX_VALUES} values")


def _values_in(text: str) -> int:
    return text.count(",") + text.count("[") + text.count("{")


def _arguments(waiting: list[Any]) -> list[str]:
    """Return all call arguments that are JSON in a string; `waiting` is consumed."""
    found: list[str] = []
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            texts = (value.get("arguments"), value.get("input") if value.get("type") == "tool_use" else None)
            found += [text for text in texts if isinstance(text, str)]
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return found

"""The engine's models in the format of Anthropic's API."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any


def in_anthropic_format(answer: object) -> object:
    """Return an engine's list of models, or one model, in Anthropic's format; any other answer unchanged."""
    if not isinstance(answer, Mapping):
        return answer
    if not isinstance(answer.get("data"), list):
        return _model(answer) if answer.get("object") == "model" else answer
    models = [_model(each) for each in answer["data"] if isinstance(each, Mapping)]
    ids = [model["id"] for model in models] or [None]
    return {"data": models, "has_more": False, "first_id": ids[0], "last_id": ids[-1]}


def _model(card: Mapping[str, Any]) -> dict[str, Any]:
    created = card.get("created")
    moment = datetime.fromtimestamp(created if isinstance(created, int) else 0, timezone.utc)
    return {
        "type": "model",
        "id": card.get("id"),
        "display_name": card.get("id"),
        "created_at": moment.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": card.get("max_model_len"),
    }

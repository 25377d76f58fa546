"""The setting `trained_models`: further models with middlewares of their own, each as `MODEL_ID=CHECKPOINT`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

#: A `model_id` here is a segment of paths.
ENTRY = re.compile(r"([A-Za-z0-9_-][A-Za-z0-9._-]{0,127})=(\S.*)")
MOST = 16
#: The paths below it begin with a `model_id`.
MOUNT = "/models/"


def models_problem(entries: Iterable[str]) -> str | None:
    """Return why these cannot be further trained models, or None."""
    entries = [*entries]
    if any(not ENTRY.fullmatch(each) for each in entries):
        return "write each as MODEL_ID=CHECKPOINT, with a MODEL_ID of letters, digits and . _ - (no . at its beginning)"
    if len(entries) > MOST:
        return f"at most {MOST} models are possible"
    return "a model is there twice" if len(checkpoints(entries)) < len(entries) else None


def checkpoints(entries: Iterable[str]) -> Mapping[str, str]:
    """Return the checkpoint of each model by `model_id`."""
    found = (ENTRY.fullmatch(each) for each in entries)
    return {each[1]: each[2] for each in found if each is not None}


def default_problem(entries: Iterable[str], model_id: str | None) -> str | None:
    """Return why a router with these models cannot have this default model, or None."""
    if not (models := checkpoints(entries)):
        return None
    if model_id is None:
        return "the default model needs a name too: set --model-id"
    return f"{model_id!r} is the default model already (--model-id)" if model_id in models else None


def mount_of(model_id: str) -> str:
    """Return the beginning of the paths of a model's requests."""
    return f"{MOUNT}{model_id}"

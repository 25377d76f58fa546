"""Decide which `/generate` requests are recorded, and which logprobs their clients asked for. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from miles_router.engines.generate import BEYOND_TEXT, IDS, IDS_ALIAS, TEXT, GenerateRequest, is_absent
from miles_router.errors import BadRequest

LOGPROBS = "return_logprob"

RequestReason = Literal["beyond_text", "text_and_ids", "return_logprob"]


class NotRecordable(ValueError):
    """A request that the layer forwards unchanged and does not record. `reason` labels metrics."""

    def __init__(self, reason: RequestReason) -> None:
        super().__init__(reason)
        self.reason: RequestReason = reason


def read_request(body: object) -> GenerateRequest:
    """Read a parsed request whose prompts are texts or ids only. Ignore media fields without content.

    Raises:
        NotRecordable, UnknownShape: the request is of another kind, which the engine may still understand.
        BadRequest: a prompt is empty; a worker's process ends when it gets one.
    """
    if isinstance(body, Mapping):
        if absent := [name for name in BEYOND_TEXT if name in body and is_absent(body[name])]:
            body = {name: value for name, value in body.items() if name not in absent}
        if any(name in body for name in BEYOND_TEXT):
            raise NotRecordable("beyond_text")
        if body.get(TEXT) is not None and any(body.get(name) is not None for name in (IDS, IDS_ALIAS)):
            raise NotRecordable("text_and_ids")
    request = GenerateRequest.read(body)
    if not all(prompt.text or prompt.ids for prompt in request.prompts):
        raise BadRequest("a prompt must not be empty: engines crash on empty prompts")
    wanted = request.body.get(LOGPROBS)
    if request.batch and isinstance(wanted, list) and len(wanted) != len(request.prompts):
        raise NotRecordable("return_logprob")
    return request


def wants_logprobs(request: GenerateRequest, generation: int) -> bool:
    """Return whether the client itself asked for the logprobs of this generation."""
    return bool(request.field(LOGPROBS, request.prompt_of(generation)))

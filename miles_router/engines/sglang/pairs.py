"""Requests to both halves of a prefill/decode pair of SGLang. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from miles_router.engines import paths
from miles_router.engines.engine import CannotServe, Parse
from miles_router.engines.generate import IDS, IDS_ALIAS, PARAMS, PER_PROMPT, RID, TEXT, GenerateRequest, UnknownShape
from miles_router.engines.json_bytes import Field
from miles_router.engines.pairs.request import PairedRequest, has_value
from miles_router.engines.rows import ROW_FIELDS
from miles_router.engines.sglang.paths import INVOCATIONS
from miles_router.engines.writing import extended

#: Paths whose requests accept a room (bootstrap id). The others have no field for it.
PATHS = frozenset({paths.GENERATE, paths.CHAT, paths.COMPLETIONS, paths.MESSAGES, paths.RESPONSES, INVOCATIONS})
N, ECHO, LOGPROBS = Field("n"), Field("echo"), Field("logprobs")
LOGPROB_START, LOGPROB_IDS = Field("logprob_start_len"), Field("token_ids_logprob")
META_INFO, STREAM = Field("return_meta_info"), Field("stream")


def paired(path: str, body: bytes, parse: Parse) -> PairedRequest:
    """Return the request for both halves, without parsing it if possible.

    Raises:
        CannotServe: a pair would answer differently or not at all.
        BadRequest: the request must be rewritten, and its body cannot be parsed.
    """
    if path not in PATHS:
        raise CannotServe(
            f"{path} cannot be served by a prefill/decode pair: its requests have no field for the bootstrap room"
        )
    if has_value(body, N, lambda n: type(n) is int and n > 1):
        body = _repeat_prompts(path, body, parse)
    rows = tuple(fields for fields in ROW_FIELDS.values() if has_value(body, Field(fields.wanted), bool))
    if rows and path != paths.GENERATE and (has_value(body, STREAM, bool) or not has_value(body, META_INFO, bool)):
        raise CannotServe(
            f"a prefill/decode pair returns rows at {path} only without stream and with return_meta_info: otherwise "
            "the router cannot see whether the decode half lost some"
        )
    if path == paths.COMPLETIONS and has_value(body, ECHO, bool) and has_value(body, LOGPROBS, bool):
        raise CannotServe(
            "a prefill/decode pair cannot return the logprobs of an echoed prompt: only the prefill half has them"
        )
    prompt_logprobs = path == paths.GENERATE and (
        has_value(body, LOGPROB_START, lambda start: start not in (None, -1)) or has_value(body, LOGPROB_IDS, bool)
    )
    return PairedRequest(body, rows, prompt_logprobs)


def with_room(body: bytes, host: str, port: int, room: int) -> bytes:
    """Return the request with the bootstrap host, port and room appended."""
    return extended(body, {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": room})


# Several samples of one prompt


def _repeat_prompts(path: str, body: bytes, parse: Parse) -> bytes:
    """Return a `/generate` request as a batch that repeats each prompt `n` times. Samples of one prompt would share a
    room, and wait in it forever."""
    parsed = parse(body)
    if path != paths.GENERATE:
        if isinstance(parsed, Mapping) and type(parsed.get("n")) is int and parsed["n"] > 1:
            raise CannotServe(
                f"a prefill/decode pair cannot serve n > 1 at {path}: the samples would wait for each other forever"
            )
        return body
    try:
        request = GenerateRequest.read(parsed)
    except UnknownShape as error:
        raise CannotServe(f"n > 1 in a request that the router cannot read: {error.reason}") from None
    return body if request.samples == 1 else orjson.dumps(_as_batch(request))


def _as_batch(request: GenerateRequest) -> dict[str, Any]:
    """Return the request as a batch. The client's `rid` is dropped: for n > 1 the engine makes the ids itself."""
    places = [request.prompt_of(generation) for generation in range(request.generations)]
    prompts = [request.prompts[place] for place in places]
    kept = {name: value for name, value in request.body.items() if name not in (TEXT, IDS, IDS_ALIAS, RID)}
    listed = {
        name: [request.field(name, place) for place in places]
        for name in PER_PROMPT
        if isinstance(kept.get(name), list) and not (request.batch and request.field(name, 0) is kept[name])
    }
    source: dict[str, Any] = (
        {TEXT: [each.text for each in prompts]} if prompts[0].ids is None else {IDS: [each.ids for each in prompts]}
    )
    return {**kept, **source, **listed, PARAMS: [dict(each.params) for each in prompts]}

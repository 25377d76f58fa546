"""Requests that recompute the logprobs of sampled ids, and rules which recorded logprobs are comparable. No I/O.

Source: SGLang 0.5.23. `layers/sampler.py`: the reported logprob of a sampled token comes from the logits after logit
bias, penalties and the grammar's mask, divided by the temperature; greedy requests are not divided. `top_p`, `top_k`
and `min_p` are applied later and do not change it. A `top_k` of 1 is the exception: it is greedy, and is divided only
if the batch contains requests that are not greedy. `layers/logprob_processor.py`: the logprob of a prompt's token comes
from the bare logits. The first requested token has none, since nothing is computed in front of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import orjson

from miles_router.engines.answers import MALFORMED, VERSION, VERSIONS, UnreadableAnswer, is_abort
from miles_router.engines.facts import Facts
from miles_router.engines.generate import IDS, PARAMS, GenerateRequest
from miles_router.engines.long_arrays import take_array
from miles_router.engines.models import ADAPTER, MODEL, adapter_of
from miles_router.trajectory import InvalidTrajectory
from miles_router.trajectory.pieces import Logprobs, Tokens, logprob_array, token_array
from miles_router.trajectory.teacher import NO_ID, NO_LOGPROB

TEMPERATURE = "temperature"
#: Other settings that change the reported logprobs, with the value that has no effect.
NEUTRAL: Mapping[str, float] = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "min_new_tokens": 0,
}
#: Settings that change the reported logprobs with any value.
PROCESSOR = "custom_logit_processor"
CONSTRAINTS = ("logit_bias", "regex", "ebnf", "json_schema", "structural_tag", PROCESSOR)
TOP_K, ONE = "top_k", 1
#: Fields of an answer: the logprobs of the prompt's tokens, and the likeliest tokens.
ENTRIES, TOPS = "input_token_logprobs", "input_top_logprobs"
#: Settings that chat takes from the model's `generation_config.json` if the request has none, with the default if that
#: file has none either.
OF_THE_MODEL: Mapping[str, float] = {TEMPERATURE: 1.0, "repetition_penalty": 1.0, TOP_K: -1}
FROM_THE_MODEL, FROM_THE_API = "model", "openai"  # `Facts.sampling_defaults`
#: Temperatures below this are greedy.
GREEDY = 1e-6


class AskedSampling(NamedTuple):
    """The parts of a generation request that determine its logprobs.

    Attributes:
        requested: the request's own values of settings that otherwise have defaults.
        reshaped_by: the setting that changed the distribution of its logprobs, or None.
        adapter: the adapter that sampled, "" for the base weights; None if it is unknown.
    """

    requested: Mapping[str, Any]
    reshaped_by: str | None
    adapter: str | None

    @classmethod
    def of_chat(cls, fields: Mapping[str, Any], names: Iterable[str]) -> AskedSampling:
        """Read a chat or completions request. `names` are the names of the base model."""
        return cls(_settings(fields), reshaped_by(fields), adapter_in(fields, names))

    @classmethod
    def of_generate(cls, request: GenerateRequest, prompt: int, adapter: str | None) -> AskedSampling:
        """Read a `/generate` request, for one of its prompts. `adapter` is used if the request names none."""
        fields = {**request.prompts[prompt].params, PROCESSOR: request.field(PROCESSOR, prompt)}
        own = request.field(ADAPTER, prompt) or ("" if request.body.get(ADAPTER) is not None else adapter or "")
        return cls(_settings(fields), reshaped_by(fields), own if isinstance(own, str) else None)


def _settings(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: fields[name] for name in OF_THE_MODEL if fields.get(name) is not None}


class Likeliest(NamedTuple):
    """The likeliest tokens at some positions, the likeliest first: ids (int32) and logprobs (float32), both
    [positions, k]. Where the engine returned fewer, `NO_ID` and `NO_LOGPROB`."""

    ids: Tokens
    logprobs: Logprobs


class Recomputed(NamedTuple):
    """The logprobs (float32) that an engine computes for given ids, its weight version (None: not reported), and the
    likeliest tokens at their positions (None: not requested)."""

    logprobs: Logprobs
    version: str | None
    likeliest: Likeliest | None = None


class RecomputationCut(Exception):
    """An error: the engine aborted the request, or changed its weights during it."""


def possible_defaults(facts: Facts, of_model: Mapping[str, Any], *, chat: bool) -> list[Mapping[str, Any]]:
    """Return the possible defaults for settings that a request does not contain. If several mappings disagree, the
    value is unknown. `of_model`: the model's `generation_config.json`."""
    own = {name: of_model.get(name) for name in OF_THE_MODEL} if chat else {}
    preferred = facts.preferred_sampling_params or {}
    if facts.sampling_defaults == FROM_THE_API:
        return [preferred]
    neutral = {name: OF_THE_MODEL[name] for name, value in own.items() if value is not None}
    return [preferred, own] if facts.sampling_defaults == FROM_THE_MODEL else [preferred, own, neutral]


def temperature(fields: Mapping[str, Any], *defaults: Mapping[str, Any]) -> float | None:
    """Return the divisor of the logits, which is 1 for greedy requests; None if it is unknown. `defaults` apply to
    settings that the request does not contain."""
    values = [1.0 if _is_greedy(value) else value for value in _values_of(TEMPERATURE, fields, defaults)] or [1.0]
    known = isinstance(values[0], (int, float)) and all(value == values[0] for value in values)
    if not known or (values[0] != 1 and ONE in _values_of(TOP_K, fields, defaults)):
        return None
    return float(values[0])


def reshaped_by(fields: Mapping[str, Any], *defaults: Mapping[str, Any]) -> str | None:
    """Return the setting, besides the temperature, that makes the logprobs differ from the model's own distribution;
    None without one. `defaults` apply to settings that the request does not contain."""
    for name, neutral in NEUTRAL.items():
        if any(value != neutral for value in _values_of(name, fields, defaults)):
            return name
    for name in CONSTRAINTS:
        if fields.get(name):
            return name
    form = fields.get("response_format")
    if isinstance(form, Mapping) and form.get("type") not in (None, "text"):
        return "response_format"
    choice = fields.get("tool_choice")
    if isinstance(choice, Mapping) or choice == "required":
        return "tool_choice"
    return "tools" if _has_strict_tool(fields.get("tools")) else None


def _values_of(name: str, fields: Mapping[str, Any], defaults: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Return the request's value of a setting, or else the values of all defaults, since it is unknown which one
    applies."""
    if fields.get(name) is not None:
        return [fields[name]]
    return [each[name] for each in defaults if each.get(name) is not None]


def _is_greedy(value: object) -> bool:
    return isinstance(value, (int, float)) and 0 <= value < GREEDY


def _has_strict_tool(tools: object) -> bool:
    if not isinstance(tools, list):
        return False
    functions = (tool.get("function") for tool in tools if isinstance(tool, Mapping))
    return any(isinstance(function, Mapping) and function.get("strict") is True for function in functions)


def adapter_in(fields: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """Return the adapter that a chat or completions request selects, "" for the base weights; None if it is not a
    single name. `names` are the names of the base model."""
    model, own = fields.get(MODEL), fields.get(ADAPTER)
    if isinstance(model, str) and ":" in model:
        known = adapter_of(model, names)
        return known[1] if known is not None else model.partition(":")[2].strip() or None
    return own or "" if own is None or isinstance(own, str) else None


def request(ids: Tokens, start: int, adapter: str, top_k: int = 0) -> bytes:
    """Return a `/generate` request for the logprobs of the ids behind position `start`, and for as many of the
    likeliest tokens there."""
    tops = {"top_logprobs_num": top_k} if top_k else {}
    return _serialize(ids, {"max_new_tokens": 0, TEMPERATURE: 0}, adapter, logprob_start_len=start, **tops)


def request_next(ids: Tokens, token: int, divided_by: float, adapter: str) -> bytes:
    """Return a `/generate` request for the logprob of one token behind these ids, at a temperature."""
    return _serialize(ids, {"max_new_tokens": 1, TEMPERATURE: divided_by}, adapter, token_ids_logprob=[token])


def _serialize(ids: Tokens, params: Mapping[str, Any], adapter: str, **fields: Any) -> bytes:
    body: dict[str, Any] = {IDS: ids, PARAMS: params, "return_logprob": True, **fields}
    if adapter:
        body[ADAPTER] = adapter
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def read(body: bytes, ids: Sequence[int], top_k: int = 0) -> Recomputed:
    """Parse the answer to a request for the logprobs of all of these ids except the first, with as many of the
    likeliest tokens. A thread that does it leaves the interpreter to others.

    Raises:
        RecomputationCut: the request was aborted, or several weight versions computed it.
        UnreadableAnswer: the answer has no logprobs, or logprobs of other ids.
    """
    with _readable():
        body, entries = take_array(body, ENTRIES)
        body, rows = take_array(body, TOPS)
        meta = _meta(body)
        logprobs = _logprobs(_parsed(entries, ENTRIES), ids, 1)
        likeliest = _likeliest(_parsed(rows, TOPS), len(ids), top_k) if top_k else None
        return Recomputed(logprobs, _version(meta), likeliest)


def read_next(body: bytes, token: int) -> Recomputed:
    """Parse the answer to a request for the logprob of one token behind given ids. Raises as `read`."""
    with _readable():
        meta = _meta(body)
        return Recomputed(_logprobs([meta["output_token_ids_logprobs"][0]], [token], 0), _version(meta))


@contextmanager
def _readable() -> Iterator[None]:
    """Raise UnreadableAnswer instead of the errors of an answer that is not as documented."""
    try:
        yield
    except (*MALFORMED, orjson.JSONDecodeError, InvalidTrajectory) as error:
        raise UnreadableAnswer("incomplete", repr(error)) from None


def _parsed(pieces: Sequence[bytes] | None, name: str) -> Iterator[list[Any]]:
    """Yield the elements of each piece of an array. Raises KeyError if there is no array."""
    if pieces is None:
        raise KeyError(name)
    yield from map(orjson.loads, pieces)


def _meta(body: bytes) -> Mapping[str, Any]:
    """Return the `meta_info` of an answer. Raises RecomputationCut if the request was aborted."""
    meta: Mapping[str, Any] = orjson.loads(body)["meta_info"]
    if is_abort(meta.get("finish_reason")):
        raise RecomputationCut
    return meta


def _version(meta: Mapping[str, Any]) -> str | None:
    """Return the weight version that computed an answer. Raises RecomputationCut if there are several."""
    versions = {span["version"] for span in meta.get(VERSIONS) or ()} | {meta.get(VERSION)}
    if len(versions - {None}) > 1:
        raise RecomputationCut
    return next((str(each) for each in versions if each is not None), None)


def _logprobs(pieces: Iterable[Sequence[Any]], ids: Sequence[int], first: int) -> Logprobs:
    """Return the logprobs from index `first` on. Raises UnreadableAnswer if they belong to other ids."""
    logprobs: list[Any] = []
    found: list[Any] = []
    for entries in pieces:
        logprobs += [entry[0] for entry in entries]
        found += [entry[1] for entry in entries]
    if found != list(ids):
        raise UnreadableAnswer("logprobs_of_other_tokens", f"{len(found)} logprobs, {len(ids)} ids")
    return logprob_array(logprobs[first:], len(ids) - first)


def _likeliest(pieces: Iterable[Sequence[Any]], count: int, top_k: int) -> Likeliest:
    """Return the likeliest tokens at all positions except the first, which has none.

    Raises:
        UnreadableAnswer: the number of positions is not `count`.
        InvalidTrajectory, TypeError, ValueError: an id or a logprob is not one.
    """
    parts = [_likeliest_of(rows, top_k) for rows in pieces]
    positions = sum(len(part.ids) for part in parts)
    if positions != count:
        raise UnreadableAnswer("logprobs_of_other_tokens", f"likeliest tokens of {positions} positions, {count} ids")
    ids, logprobs = (np.concatenate(arrays)[1:] for arrays in zip(*parts, strict=True))
    return Likeliest(ids, logprobs)


def _likeliest_of(rows: Sequence[Sequence[Any] | None], top_k: int) -> Likeliest:
    """Return the likeliest tokens at these positions. Raises as `_likeliest`."""
    # JSON writes minus infinity as null.
    known = [[entry for entry in row or () if entry[0] is not None][:top_k] for row in rows]
    entries = [entry for row in known for entry in row]
    filled = np.arange(top_k) < np.array([len(row) for row in known], dtype=np.int32).reshape(-1, 1)
    ids = np.full(filled.shape, NO_ID, dtype=np.int32)
    logprobs = np.full(filled.shape, NO_LOGPROB, dtype=np.float32)
    ids[filled] = token_array([entry[1] for entry in entries])
    logprobs[filled] = logprob_array([entry[0] for entry in entries], len(entries))
    return Likeliest(ids, logprobs)

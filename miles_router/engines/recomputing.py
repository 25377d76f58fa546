"""The logprobs of ids that were sampled before, asked of an engine anew; and which recorded ones can be held against
them. Pure.

Source: SGLang 0.5.23. `layers/sampler.py`: the logprob that is told of a sampled token is that of the logits behind a
bias, penalties and a grammar's mask, divided by the temperature; greedy ones are not divided. `top_p`, `top_k` and
`min_p` come later, so that they change nothing of it, but for a `top_k` of 1: that is greedy too, and is divided only
where the batch has requests that are not. `layers/logprob_processor.py`: the logprob of a prompt's token is that of the
bare logits. The first one asked for has none, since nothing is computed in front of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from miles_router.engines.answers import MALFORMED, VERSION, VERSIONS, UnreadableAnswer, is_abort
from miles_router.engines.facts import Facts
from miles_router.engines.generate import IDS, PARAMS, GenerateRequest
from miles_router.engines.models import ADAPTER, MODEL, adapter_of
from miles_router.trajectory import InvalidTrajectory
from miles_router.trajectory.pieces import Logprobs, Tokens, logprob_array

TEMPERATURE = "temperature"
#: Settings beside it that change the logprobs that are told of a request, with the value that does not.
NEUTRAL: Mapping[str, float] = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "min_new_tokens": 0,
}
#: And those that do whatever they say.
PROCESSOR = "custom_logit_processor"
CONSTRAINTS = ("logit_bias", "regex", "ebnf", "json_schema", "structural_tag", PROCESSOR)
TOP_K, ONE = "top_k", 1
#: What an engine takes from the model's `generation_config.json` where a chat request says nothing, and what it takes
#: where that says nothing either.
OF_THE_MODEL: Mapping[str, float] = {TEMPERATURE: 1.0, "repetition_penalty": 1.0, TOP_K: -1}
FROM_THE_MODEL, FROM_THE_API = "model", "openai"  # `Facts.sampling_defaults`
#: Below it an engine is greedy.
GREEDY = 1e-6


class AskedSampling(NamedTuple):
    """How a generation was asked for, as far as its logprobs depend on it.

    Attributes:
        said: what its request said of settings that an engine assumes else.
        reshaped_by: the setting that made its logprobs those of another distribution, where there is one.
        adapter: that was to sample it, "" for the base weights; None: nobody can tell.
    """

    said: Mapping[str, Any]
    reshaped_by: str | None
    adapter: str | None

    @classmethod
    def of_chat(cls, fields: Mapping[str, Any], names: Iterable[str]) -> AskedSampling:
        """As a chat or completions request asks. `names` are those of the base model."""
        return cls(_settings(fields), reshaped_by(fields), adapter_in(fields, names))

    @classmethod
    def of_generate(cls, request: GenerateRequest, prompt: int, adapter: str | None) -> AskedSampling:
        """As a request of `/generate` asks for one of its prompts. `adapter`: what it is given where it names none."""
        fields = {**request.prompts[prompt].params, PROCESSOR: request.field(PROCESSOR, prompt)}
        own = request.field(ADAPTER, prompt) or ("" if request.body.get(ADAPTER) is not None else adapter or "")
        return cls(_settings(fields), reshaped_by(fields), own if isinstance(own, str) else None)


def _settings(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: fields[name] for name in OF_THE_MODEL if fields.get(name) is not None}


class Recomputed(NamedTuple):
    """What an engine says of given ids: float32 logprobs, and the weight version that computed them (None: it does not
    say)."""

    logprobs: Logprobs
    version: str | None


class RecomputationCut(Exception):
    """The engine was told to end it."""


def assumed(facts: Facts, of_model: Mapping[str, Any], *, chat: bool) -> list[Mapping[str, Any]]:
    """What an engine may assume of settings that a request does not name; where several say something else, nobody
    knows which of them counts. `of_model`: the model's `generation_config.json`."""
    own = {name: of_model.get(name) for name in OF_THE_MODEL} if chat else {}
    preferred = facts.preferred_sampling_params or {}
    if facts.sampling_defaults == FROM_THE_API:
        return [preferred]
    neutral = {name: OF_THE_MODEL[name] for name, value in own.items() if value is not None}
    return [preferred, own] if facts.sampling_defaults == FROM_THE_MODEL else [preferred, own, neutral]


def temperature(fields: Mapping[str, Any], *defaults: Mapping[str, Any]) -> float | None:
    """By which temperature the logits of a request are divided, 1 where it is greedy; None where nobody can tell.
    `defaults` hold where the request says nothing."""
    values = [1.0 if _is_greedy(value) else value for value in _said(TEMPERATURE, fields, defaults)] or [1.0]
    known = isinstance(values[0], (int, float)) and all(value == values[0] for value in values)
    if not known or (values[0] != 1 and ONE in _said(TOP_K, fields, defaults)):
        return None
    return float(values[0])


def reshaped_by(fields: Mapping[str, Any], *defaults: Mapping[str, Any]) -> str | None:
    """The setting of a request, beside its temperature, that makes its logprobs those of another distribution than the
    weights'; None where there is none. `defaults` hold where the request says nothing."""
    for name, neutral in NEUTRAL.items():
        if any(value != neutral for value in _said(name, fields, defaults)):
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


def _said(name: str, fields: Mapping[str, Any], defaults: Iterable[Mapping[str, Any]]) -> list[Any]:
    """What a request says of a setting; else what all defaults say, since nobody knows which of them counts."""
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
    """The adapter that answers a chat or completions request, "" for the base weights; None where that is not one name.
    `names` are those of the base model."""
    model, own = fields.get(MODEL), fields.get(ADAPTER)
    if isinstance(model, str) and ":" in model:
        known = adapter_of(model, names)
        return known[1] if known is not None else model.partition(":")[2].strip() or None
    return own or "" if own is None or isinstance(own, str) else None


def request(ids: Tokens, start: int, adapter: str) -> bytes:
    """A request of `/generate` for the logprobs of the ids behind `start`."""
    return _written(ids, {"max_new_tokens": 0, TEMPERATURE: 0}, adapter, logprob_start_len=start)


def request_next(ids: Tokens, token: int, divided_by: float, adapter: str) -> bytes:
    """A request of `/generate` for the logprob of one token behind these ids, at a temperature."""
    return _written(ids, {"max_new_tokens": 1, TEMPERATURE: divided_by}, adapter, token_ids_logprob=[token])


def _written(ids: Tokens, params: Mapping[str, Any], adapter: str, **fields: Any) -> bytes:
    body: dict[str, Any] = {IDS: ids, PARAMS: params, "return_logprob": True, **fields}
    if adapter:
        body[ADAPTER] = adapter
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def read(body: bytes, ids: Sequence[int]) -> Recomputed:
    """Read the answer to a request for the logprobs of all of these ids but the first.

    Raises:
        RecomputationCut: it was ended by an abort.
        UnreadableAnswer: it has no logprobs, or those of other ids.
    """
    return _read(body, lambda meta: meta["input_token_logprobs"], ids, 1)


def read_next(body: bytes, token: int) -> Recomputed:
    """Read the answer to a request for the logprob of one token behind given ids. Raises as `read`."""
    return _read(body, lambda meta: meta["output_token_ids_logprobs"][0], [token], 0)


def _read(
    body: bytes, entries_of: Callable[[Mapping[str, Any]], Sequence[Any]], ids: Sequence[int], first: int
) -> Recomputed:
    """The logprobs from the id at place `first` on."""
    try:
        meta = orjson.loads(body)["meta_info"]
        if is_abort(meta.get("finish_reason")):
            raise RecomputationCut
        entries = entries_of(meta)
        if [entry[1] for entry in entries] != list(ids):
            raise UnreadableAnswer("logprobs_of_other_tokens", f"{len(entries)} logprobs, {len(ids)} ids")
        versions = {span["version"] for span in meta.get(VERSIONS) or ()} | {meta.get(VERSION)}
        logprobs = logprob_array([entry[0] for entry in entries[first:]], len(entries) - first)
    except (*MALFORMED, orjson.JSONDecodeError, InvalidTrajectory) as error:
        raise UnreadableAnswer("incomplete", repr(error)) from None
    if len(versions - {None}) > 1:
        raise RecomputationCut
    return Recomputed(logprobs, next((str(each) for each in versions if each is not None), None))

"""Translation of OpenAI and Anthropic API requests for vLLM, which refuses fields that vLLM silently ignores. Pure.

Source: vLLM 0.32.0, `entrypoints/openai/`. vLLM names an adapter in `model`, and has other names for some of SGLang's
fields.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import orjson

from miles_router.engines import paths
from miles_router.engines.answers import MALFORMED, VERSION, UnreadableAnswer
from miles_router.engines.engine import CannotServe, Parse
from miles_router.engines.events import Event
from miles_router.engines.generate import RID, is_absent
from miles_router.engines.models import ADAPTER, MODEL
from miles_router.engines.vllm.facts import Flags
from miles_router.engines.vllm.generate import SALT, changes_distribution, salt_of

PATHS = frozenset({paths.CHAT, paths.COMPLETIONS, paths.MESSAGES, paths.RESPONSES})
#: SGLang's fields that vLLM does not know. Ignoring one would change the answer.
IGNORED = (
    *("input_ids", "return_meta_info", "return_prompt_token_ids", "return_output_ids_in_sglext"),
    *("return_input_ids_in_sglext", "return_routed_experts", "return_indexer_topk", "return_hidden_states"),
    *("session_params", "custom_logit_processor", "custom_params", "regex", "ebnf", "json_schema", "stop_regex"),
    *("no_stop_trim", "max_thinking_tokens", "routed_dp_rank", "data_parallel_rank", "return_sampling_mask"),
    *("sampling_logprobs_mode", "return_flat_raw_output_top_logprobs", "return_flat_raw_top_logprobs_b64"),
)
CACHE_KEY = "extra_key"
#: The element of `include` that asks for logprobs in the responses API.
OUTPUT_LOGPROBS = "message.output_text.logprobs"
#: SGLang's field names, and vLLM's names for the same fields. The answer's id contains the request's id.
NAMES: Mapping[str, str] = {RID: "request_id", ADAPTER: MODEL, CACHE_KEY: SALT}


def translate(path: str, body: bytes, parse: Parse, flags: Flags) -> VLLMRequest | None:
    """Return the translation of a request; None if the request goes to the engine unchanged.

    Raises:
        CannotServe: vLLM would silently ignore a field, or return logprobs of another distribution.
        What `parse` raises.
    """
    fields = parse(body)
    if not isinstance(fields, Mapping):
        return None  # the engine reports the error
    if unknown := [name for name in IGNORED if not is_absent(fields.get(name))]:
        raise CannotServe(f"it does not support {unknown[0]} at {path}")
    if (
        flags.raw_logprobs
        and _wants_logprobs(path, fields)
        and (changes_distribution(fields) or not _has_neutral_values(fields))
    ):
        raise CannotServe(
            "its logprobs are computed at temperature 1 without penalties: start it with --logprobs-mode "
            "processed_logprobs, or send temperature 0 or 1 and repetition_penalty 1, since models have other defaults"
        )
    versions = path == paths.COMPLETIONS and bool(fields.get("return_token_ids"))
    renamed = any(not is_absent(fields.get(name)) for name in NAMES)
    return VLLMRequest(fields, versions=versions) if renamed or versions else None


def _wants_logprobs(path: str, fields: Mapping[str, Any]) -> bool:
    """Return True if the request asks for logprobs. In completions, 0 asks for the logprobs of sampled tokens only."""
    if path == paths.RESPONSES:
        included = fields.get("include")
        return isinstance(included, list) and OUTPUT_LOGPROBS in included
    wanted = fields.get("logprobs")
    return wanted is not None and wanted is not False


def _has_neutral_values(fields: Mapping[str, Any]) -> bool:
    return fields.get("temperature") in (0, 1) and fields.get("repetition_penalty") == 1


class VLLMRequest:
    """The translation of a request to vLLM's field names. In answers only the request's id is translated back.

    Args:
        versions: whether to add the weight version to a whole answer, as SGLang's completions with ids do.
    """

    heeds_cache_key = True
    target: bytes | None = None

    def __init__(self, fields: Mapping[str, Any], *, versions: bool) -> None:
        self._versions = versions
        given, name = fields.get(RID), uuid.uuid4().hex
        if isinstance(given, list):
            raise CannotServe("its rid must be one string, not a list")
        kept = {each: value for each, value in fields.items() if each not in NAMES}
        own = {own: fields[each] for each, own in NAMES.items() if not is_absent(fields.get(each))}
        if CACHE_KEY in fields and SALT in own:
            own[SALT] = salt_of(str(own[SALT]), str(fields.get(SALT)))
        self.rids: Mapping[str, str] = {given: name} if isinstance(given, str) else {}
        self._client_names = {name.encode(): orjson.dumps(each)[1:-1] for each, name in self.rids.items()}
        self.body = orjson.dumps({**kept, **own, **({NAMES[RID]: name} if self.rids else {})})

    def whole(self, answer: bytes, version: str | None) -> bytes:
        """Return a whole answer with the client's request id.

        Raises:
            UnreadableAnswer: the weight version cannot be added, since the answer is not a JSON object.
        """
        if not self._versions or version is None:
            return self._named(answer)
        try:
            return orjson.dumps({**orjson.loads(self._named(answer)), "metadata": {VERSION: version}})
        except (orjson.JSONDecodeError, *MALFORMED) as error:
            raise UnreadableAnswer("incomplete", "the answer is not a JSON object") from error

    def event(self, event: Event, version: str | None) -> bytes:
        """Return an event of a stream with the client's request id."""
        return self._named(event.raw)

    def _named(self, data: bytes) -> bytes:
        for name, given in self._client_names.items():
            data = data.replace(name, given)
        return data

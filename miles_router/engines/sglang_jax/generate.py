"""Translation of requests and answers for SGLang-Jax (sgl-project/sglang-jax at cddbf6f, observed running). Pure.

Every `/generate` request asks for top logprobs, even if the client wants none. With `return_logprob` alone, a stream
repeats logprobs, and a batch that contains other requests too ends the server
(`tokenizer_manager._create_tokenized_object`, `scheduler_output_processor_mixin.stream_output_generation`). With top
logprobs, ids and logprobs are right. `output_ids` stay wrong: they lack the stop token and special tokens, and may
repeat a token. So the ids come from the logprobs. A reused `rid` gets text that the earlier request left in the
detokenizer, so the router names each generation itself.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import orjson

from miles_router.engines import paths
from miles_router.engines.answers import (
    ASKS_FOR_MASK,
    LOGPROB_FIELDS,
    LOGPROBS,
    OUTPUT_LISTS,
    VERSION,
    VERSIONS,
    UnreadableAnswer,
    is_abort,
    readable,
)
from miles_router.engines.engine import CannotServe, Parse, Translation
from miles_router.engines.events import Event, write_event
from miles_router.engines.generate import IDS, IDS_ALIAS, RID, GenerateRequest
from miles_router.engines.models import own_adapters
from miles_router.engines.openai.by_ids import chat_by_ids, has_input_ids
from miles_router.engines.rows import EXPERT_FIELDS, cut_rows
from miles_router.engines.sglang.paths import INVOCATIONS

WANTED, TOP, START_LEN, WITH_TEXT = "return_logprob", "top_logprobs_num", "logprob_start_len", "return_text_in_logprobs"
TOP_LISTS = ("input_top_logprobs", "output_top_logprobs")

#: Fields and sampling parameters of `/generate` that the engine silently ignores.
IGNORED = (
    "session_params",
    "custom_logit_processor",
    "cache_salt",
    "max_thinking_tokens",
    "require_reasoning",
    "positional_embed_overrides",
    "return_hidden_states",
    "return_indexer_topk",
    ASKS_FOR_MASK,
)
IGNORED_PARAMS = ("logit_bias",)
#: Fields of chat and completions that the engine silently ignores; without them a turn cannot be recorded.
IGNORED_IN_CHAT = (
    "return_meta_info",
    "return_token_ids",
    "return_prompt_token_ids",
    "return_output_ids_in_sglext",
    "return_input_ids_in_sglext",
    "return_routed_experts",
    "return_indexer_topk",
    "cache_salt",
    ASKS_FOR_MASK,
)
CHATS = {paths.CHAT: "top_logprobs", INVOCATIONS: "top_logprobs", paths.COMPLETIONS: "logprobs"}


def translate(path: str, body: bytes, parse: Parse) -> Translation | None:
    """Return the translation of a request; None if the request goes to the engine unchanged.

    Raises:
        CannotServe: the engine would ignore a field of the request.
        UnknownShape: the body is not a `/generate` request that the router can read.
        What `parse` raises.
    """
    if path == paths.GENERATE:
        return GenerateTranslation(GenerateRequest.read(parse(body)))
    if path == paths.CHAT and has_input_ids(body, parse):
        return chat_by_ids(body, parse, lambda sent: translate(paths.GENERATE, sent, parse))
    if path in CHATS:
        _check_chat(parse(body), top=CHATS[path], completes=path == paths.COMPLETIONS)
    return None


def translate_without_adapters(path: str, body: bytes, parse: Parse) -> Translation | None:
    """Translate as `translate` does, but refuse adapters: a server without `--enable-lora` silently ignores them.

    Raises:
        CannotServe: the request names an adapter, or `translate` refuses it.
    """
    if own_adapters(body, parse):
        raise CannotServe("it was started without --enable-lora")
    return translate(path, body, parse)


def _check_chat(body: Any, *, top: str, completes: bool) -> None:
    """Check that the engine supports every field of a chat or completions request.

    Raises:
        CannotServe: the engine would ignore a field, or return wrong logprobs.
    """
    if not isinstance(body, Mapping):
        return  # the engine reports the error
    if unknown := [name for name in IGNORED_IN_CHAT if body.get(name)]:
        raise CannotServe(f"it does not support {unknown[0]} in chat and completions, which sessions need")
    if not completes and body.get("lora_path"):
        raise CannotServe("it does not support lora_path in chat")
    if body.get("logprobs") not in (None, False) and not body.get(top):
        raise CannotServe(f"its logprobs are wrong without {top} of at least 1")


class GenerateTranslation:
    """The translation of one `/generate` request."""

    def __init__(self, request: GenerateRequest) -> None:
        _check_generate(request)
        self.target: bytes | None = None
        self._request = request
        self._prompts = range(len(request.prompts))
        # With several generations the engine loses the key (`GenerateReqInput.__getitem__`).
        self.heeds_cache_key = not request.indexed
        given = [] if request.samples != 1 else request.rids
        names: list[str] = [uuid.uuid4().hex for _ in given]
        self.rids: Mapping[str, str] = {own: name for own, name in zip(given, names, strict=True) if own is not None}
        self._client_rids = {name: own for own, name in zip(given, names, strict=True) if own is not None}
        self.body = orjson.dumps({**self._unchanged_fields(), **self._logprob_fields(), **self._rid_field(names)})
        #: The last answer of each generation in a stream, by its index.
        self._last: dict[int, Mapping[str, Any]] = {}

    def _unchanged_fields(self) -> dict[str, Any]:
        """Return the fields that are sent unchanged."""
        body = self._request.body
        dropped = {RID, EXPERT_FIELDS.start, IDS_ALIAS}
        if not any(map(self._wants_logprobs, self._prompts)):
            dropped |= {START_LEN, "token_ids_logprob"}
        kept = {name: value for name, value in body.items() if name not in dropped}
        if body.get(IDS) is None and body.get(IDS_ALIAS) is not None:
            kept[IDS] = body[IDS_ALIAS]
        return kept

    def _logprob_fields(self) -> dict[str, Any]:
        top = self._request.body.get(TOP)
        tops = [each or 1 for each in top] if isinstance(top, list) else top or 1
        return {WANTED: True, TOP: tops, WITH_TEXT: bool(self._request.body.get(WITH_TEXT))}

    def _rid_field(self, names: list[str]) -> dict[str, Any]:
        """Return the `rid` field if the client named generations. With several samples the engine makes the names."""
        return {RID: names if self._request.batch else names[0]} if self.rids else {}

    def _wants_logprobs(self, prompt: int) -> bool:
        return bool(self._request.field(WANTED, prompt))

    def whole(self, answer: bytes, version: str | None) -> bytes:
        try:
            parsed = orjson.loads(answer)
        except orjson.JSONDecodeError as error:
            raise UnreadableAnswer("incomplete", str(error)) from error
        answers = parsed if isinstance(parsed, list) else [parsed]
        if len(answers) != self._request.generations or isinstance(parsed, list) != self._request.indexed:
            raise UnreadableAnswer("incomplete", f"{len(answers)} answers to {self._request.generations} generations")
        with readable():
            read = [self._translated(index, each, version) for index, each in enumerate(answers)]
            return orjson.dumps(read if self._request.indexed else read[0])

    def event(self, event: Event, version: str | None) -> bytes:
        if event.is_last or event.is_error:
            return event.raw
        answer = event.parse()
        index = answer.get("index", 0) if isinstance(answer, dict) else None
        if type(index) is not int or not 0 <= index < self._request.generations:
            raise UnreadableAnswer("incomplete", "the index of an event is invalid")
        with readable():
            return write_event(self._translated(index, answer, version), event.name)

    def _translated(self, index: int, answer: Any, version: str | None) -> dict[str, Any]:
        return self._for_client(index, self._with_sampled_ids(index, answer), version)

    def _with_sampled_ids(self, index: int, answer: Any) -> dict[str, Any]:
        """Return an answer whose `output_ids` are the sampled ids.

        Raises:
            UnreadableAnswer: the number of logprobs is not `completion_tokens`.
        """
        meta = dict(answer["meta_info"])
        count, entries = meta["completion_tokens"], meta.setdefault(LOGPROBS, [])
        before = self._last.get(index)
        if is_abort(meta["finish_reason"]) and before is not None and count < before["meta_info"]["completion_tokens"]:
            # A retracted generation that is aborted in the queue loses its sampled tokens: use the tokens of the last
            # event.
            return {**before, "meta_info": {**before["meta_info"], "finish_reason": meta["finish_reason"]}}
        if len(entries) != count:
            raise UnreadableAnswer("token_counts_disagree", f"{count} tokens, {len(entries)} logprobs")
        if not count:
            meta.pop("prompt_tokens")  # the engine reports 0 for a generation that was aborted in the queue
        exact = {**answer, "output_ids": [entry[1] for entry in entries], "meta_info": meta}
        if self._request.stream:
            self._last[index] = exact
        return exact

    def _for_client(self, index: int, answer: dict[str, Any], version: str | None) -> dict[str, Any]:
        """Return an answer with only the fields that the client asked for, and the client's `rid`."""
        prompt = self._request.prompt_of(index)
        if self._request.prompts[prompt].params.get("max_new_tokens") == 0:
            answer = _without_sampled(answer)
        ids, meta = answer["output_ids"], dict(answer["meta_info"])
        rows = meta.pop(EXPERT_FIELDS.rows.name, None)
        if rows is not None and self._request.body.get(EXPERT_FIELDS.wanted):
            begin, end = EXPERT_FIELDS.start_of(self._request.body), meta["prompt_tokens"] + len(ids) - 1
            total_rows = meta["prompt_tokens"] + meta["completion_tokens"] - 1  # the engine always returns all rows
            meta[EXPERT_FIELDS.rows.name] = cut_rows(rows, total_rows, begin, end)
        meta["completion_tokens"] = len(ids)
        if not self._wants_logprobs(prompt):
            meta = {name: value for name, value in meta.items() if name not in LOGPROB_FIELDS}
        elif not self._request.field(TOP, prompt):
            meta = {name: value for name, value in meta.items() if name not in TOP_LISTS}
        meta["id"] = self._client_rids.get(meta["id"], meta["id"])
        if version is not None:
            meta[VERSION] = version
            if meta["finish_reason"] is not None and not self._request.stream:
                meta[VERSIONS] = [{"version": version, "start": 0, "end": len(ids)}]
        return {**answer, "meta_info": meta}


def _check_generate(request: GenerateRequest) -> None:
    """Check that the engine supports every field of a `/generate` request.

    Raises:
        CannotServe: the engine would silently ignore a field.
    """
    unknown = [name for name in IGNORED if request.body.get(name)]
    unknown += [name for name in IGNORED_PARAMS if any(each.params.get(name) for each in request.prompts)]
    if request.indexed and request.body.get("extra_key"):
        unknown.append("extra_key for several generations")
    if unknown:
        raise CannotServe(f"it does not support {unknown[0]}")


def _without_sampled(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer without its tokens, for `max_new_tokens` 0: this engine samples one token anyway."""
    meta = dict(answer["meta_info"])
    for name in OUTPUT_LISTS:
        if meta.get(name) is not None:
            meta[name] = []
    return {**answer, "text": "", "output_ids": [], "meta_info": meta}

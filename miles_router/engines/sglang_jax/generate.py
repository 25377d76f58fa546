"""SGLang-Jax, the engine for TPUs (sgl-project/sglang-jax at cddbf6f, seen running). Pure.

Its `/generate` is asked for top logprobs, whatever a client wants: with `return_logprob` alone a stream repeats
logprobs, and a batch that has other requests too ends the server (`tokenizer_manager._create_tokenized_object`,
`scheduler_output_processor_mixin.stream_output_generation`). With them ids and logprobs are right; `output_ids` are
not: they lack the token that stopped, and special ones, and may have one twice. So the ids are taken from the logprobs.
A name that is used twice gets what the first one left in the detokenizer: each generation has a name of the router's.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import orjson

from miles_router.engines import paths
from miles_router.engines.answers import (
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
from miles_router.engines.openai.by_ids import chat_by_ids, gives_ids
from miles_router.engines.rows import EXPERT_FIELDS, cut_rows
from miles_router.engines.sglang.paths import INVOCATIONS

WANTED, TOP, START_LEN, WITH_TEXT = "return_logprob", "top_logprobs_num", "logprob_start_len", "return_text_in_logprobs"
TOP_LISTS = ("input_top_logprobs", "output_top_logprobs")

#: Fields of `/generate` that it does not know and answers without, and of its sampling parameters.
IGNORED = (
    "session_params",
    "custom_logit_processor",
    "cache_salt",
    "max_thinking_tokens",
    "require_reasoning",
    "positional_embed_overrides",
    "return_hidden_states",
    "return_indexer_topk",
)
IGNORED_PARAMS = ("logit_bias",)
#: The same of chat and completions: without these nobody could tell what was generated.
IGNORED_IN_CHAT = (
    "return_meta_info",
    "return_token_ids",
    "return_prompt_token_ids",
    "return_output_ids_in_sglext",
    "return_input_ids_in_sglext",
    "return_routed_experts",
    "return_indexer_topk",
    "cache_salt",
)
CHATS = {paths.CHAT: "top_logprobs", INVOCATIONS: "top_logprobs", paths.COMPLETIONS: "logprobs"}


def translate(path: str, body: bytes, parse: Parse) -> Translation | None:
    """How a request is asked. Raises as `Translate`."""
    if path == paths.GENERATE:
        return GenerateTranslation(GenerateRequest.read(parse(body)))
    if path == paths.CHAT and gives_ids(body, parse):
        return chat_by_ids(body, parse, lambda sent: translate(paths.GENERATE, sent, parse))
    if path in CHATS:
        _check_chat(parse(body), top=CHATS[path], completes=path == paths.COMPLETIONS)
    return None


def translate_without_adapters(path: str, body: bytes, parse: Parse) -> Translation | None:
    """The same of one that was started without adapters: it leaves the name of one out without a word."""
    if own_adapters(body, parse):
        raise CannotServe("it was started without adapters")
    return translate(path, body, parse)


def _check_chat(body: Any, *, top: str, completes: bool) -> None:
    """See that chat or completions answer all that they are asked.

    Raises:
        CannotServe: they would not.
    """
    if not isinstance(body, Mapping):
        return  # the engine says what is wrong with it
    if unknown := [name for name in IGNORED_IN_CHAT if body.get(name)]:
        raise CannotServe(f"it takes no {unknown[0]} in chat and completions, which sessions need")
    if not completes and body.get("lora_path"):
        raise CannotServe("it applies no adapter in chat")
    if body.get("logprobs") not in (None, False) and not body.get(top):
        raise CannotServe(f"its logprobs are wrong without {top} of at least 1")


class GenerateTranslation:
    """One request of `/generate`."""

    def __init__(self, request: GenerateRequest) -> None:
        _check_generate(request)
        self.target: bytes | None = None
        self._request = request
        self._prompts = range(len(request.prompts))
        self.heeds_cache_key = not request.indexed  # it loses that of several (`GenerateReqInput.__getitem__`)
        given = [] if request.samples != 1 else request.rids
        names: list[str] = [uuid.uuid4().hex for _ in given]
        self.rids: Mapping[str, str] = {own: name for own, name in zip(given, names, strict=True) if own is not None}
        self._clients = {name: own for own, name in zip(given, names, strict=True) if own is not None}
        self.body = orjson.dumps({**self._kept(), **self._asked(), **self._named(names)})
        #: Of a stream: the last that came of each generation.
        self._last: dict[int, Mapping[str, Any]] = {}

    def _kept(self) -> dict[str, Any]:
        """What passes as it came."""
        body = self._request.body
        dropped = {RID, EXPERT_FIELDS.start, IDS_ALIAS}
        if not any(map(self._wants_logprobs, self._prompts)):
            dropped |= {START_LEN, "token_ids_logprob"}
        kept = {name: value for name, value in body.items() if name not in dropped}
        if body.get(IDS) is None and body.get(IDS_ALIAS) is not None:
            kept[IDS] = body[IDS_ALIAS]
        return kept

    def _asked(self) -> dict[str, Any]:
        top = self._request.body.get(TOP)
        tops = [each or 1 for each in top] if isinstance(top, list) else top or 1
        return {WANTED: True, TOP: tops, WITH_TEXT: bool(self._request.body.get(WITH_TEXT))}

    def _named(self, names: list[str]) -> dict[str, Any]:
        """Names where the client gave some; of several samples the engine makes them itself."""
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
            read = [self._translated(place, each, version) for place, each in enumerate(answers)]
            return orjson.dumps(read if self._request.indexed else read[0])

    def event(self, event: Event, version: str | None) -> bytes:
        if event.is_last or event.is_error:
            return event.raw
        answer = event.parse()
        place = answer.get("index", 0) if isinstance(answer, dict) else None
        if type(place) is not int or not 0 <= place < self._request.generations:
            raise UnreadableAnswer("incomplete", "an event of no generation")
        with readable():
            return write_event(self._translated(place, answer, version), event.name)

    def _translated(self, place: int, answer: Any, version: str | None) -> dict[str, Any]:
        return self._as_asked(place, self._exact(place, answer), version)

    def _exact(self, place: int, answer: Any) -> dict[str, Any]:
        """An answer with the ids that were sampled, and with as many of everything."""
        meta = dict(answer["meta_info"])
        count, entries = meta["completion_tokens"], meta.setdefault(LOGPROBS, [])
        before = self._last.get(place)
        if is_abort(meta["finish_reason"]) and before is not None and count < before["meta_info"]["completion_tokens"]:
            # Retracted, and aborted in the queue: it forgets all that it has sampled.
            return {**before, "meta_info": {**before["meta_info"], "finish_reason": meta["finish_reason"]}}
        if len(entries) != count:
            raise UnreadableAnswer("token_counts_disagree", f"{count} tokens, {len(entries)} logprobs")
        if not count:
            meta.pop("prompt_tokens")  # one that was aborted in the queue says 0
        exact = {**answer, "output_ids": [entry[1] for entry in entries], "meta_info": meta}
        if self._request.stream:
            self._last[place] = exact
        return exact

    def _as_asked(self, place: int, answer: dict[str, Any], version: str | None) -> dict[str, Any]:
        """An answer with what its client asked for."""
        prompt = self._request.prompt_of(place)
        if self._request.prompts[prompt].params.get("max_new_tokens") == 0:
            answer = _without_sampled(answer)
        ids, meta = answer["output_ids"], dict(answer["meta_info"])
        rows = meta.pop(EXPERT_FIELDS.rows.name, None)
        if rows is not None and self._request.body.get(EXPERT_FIELDS.wanted):
            begin, end = EXPERT_FIELDS.start_of(self._request.body), meta["prompt_tokens"] + len(ids) - 1
            told = meta["prompt_tokens"] + meta["completion_tokens"] - 1  # all, whatever it was asked for
            meta[EXPERT_FIELDS.rows.name] = cut_rows(rows, told, begin, end)
        meta["completion_tokens"] = len(ids)
        if not self._wants_logprobs(prompt):
            meta = {name: value for name, value in meta.items() if name not in LOGPROB_FIELDS}
        elif not self._request.field(TOP, prompt):
            meta = {name: value for name, value in meta.items() if name not in TOP_LISTS}
        meta["id"] = self._clients.get(meta["id"], meta["id"])
        if version is not None:
            meta[VERSION] = version
            if meta["finish_reason"] is not None and not self._request.stream:
                meta[VERSIONS] = [{"version": version, "start": 0, "end": len(ids)}]
        return {**answer, "meta_info": meta}


def _check_generate(request: GenerateRequest) -> None:
    """See that nothing is asked for that the engine would leave out without a word.

    Raises:
        CannotServe: something is.
    """
    unknown = [name for name in IGNORED if request.body.get(name)]
    unknown += [name for name in IGNORED_PARAMS if any(each.params.get(name) for each in request.prompts)]
    if request.indexed and request.body.get("extra_key"):
        unknown.append("extra_key for several generations")
    if unknown:
        raise CannotServe(f"it takes no {unknown[0]}")


def _without_sampled(answer: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to a request for no tokens at all: this engine samples one."""
    meta = dict(answer["meta_info"])
    for name in OUTPUT_LISTS:
        if meta.get(name) is not None:
            meta[name] = []
    return {**answer, "text": "", "output_ids": [], "meta_info": meta}

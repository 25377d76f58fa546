"""Translation of `/generate` to vLLM's `/inference/v1/generate`, and of the answers back to the form of `/generate`.
Pure.

Source: vLLM 0.32.0, `entrypoints/scale_out/token_in_token_out/`. vLLM silently ignores unknown fields, so the router
refuses every field that is not listed here. `output_mode` asks for text: logprobs then contain the token texts, and
`token_ids` beside them has one id for each. Top logprobs contain ids only with `--return-tokens-as-token-ids`, and then
no texts.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import orjson

from miles_router.engines.answers import (
    LOGPROBS,
    VERSION,
    VERSIONS,
    UnreadableAnswer,
    readable,
    version_runs,
)
from miles_router.engines.engine import CannotServe, Parts, Translation
from miles_router.engines.events import Event, write_event
from miles_router.engines.generate import (
    DEFAULT_MAX_NEW_TOKENS,
    IDS,
    IDS_ALIAS,
    PARAMS,
    RID,
    TEXT,
    GenerateRequest,
    is_absent,
    stop_strings,
)
from miles_router.engines.long_arrays import take_array
from miles_router.engines.models import ADAPTER, MODEL
from miles_router.engines.rows import EXPERT_FIELDS
from miles_router.engines.vllm.facts import IDS_AS_TOKENS, Flags
from miles_router.engines.vllm.paths import SAMPLE
from miles_router.engines.vllm.rows import converted_rows
from miles_router.errors import BadRequest

TARGET = SAMPLE.encode()
WANTED, START_LEN, WITH_TEXT = "return_logprob", "logprob_start_len", "return_text_in_logprobs"
TOP, TOP_ENTRIES, PROMPT_TOPS = "top_logprobs_num", "output_top_logprobs", "input_top_logprobs"
#: vLLM's field with the logprobs of a prompt.
PROMPT = "prompt_logprobs"
PLACEHOLDER = "token_id:"
SALT = "cache_salt"
CACHE_KEYS = ("extra_key", SALT)
NEW_TOKENS = "max_new_tokens"
#: Sampling parameters: the name in `/generate`, and vLLM's name.
SAMPLING: Mapping[str, str] = {
    **{
        name: name
        for name in (
            *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"),
            *("stop_token_ids", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "logit_bias"),
        )
    },
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
}
#: Parameters that constrain the form of the answer. They apply from the first token only if the request contains
#: `reasoning_ended`, whichever reasoning parser the engine has.
CONSTRAINTS: Mapping[str, str] = {
    "regex": "regex",
    "json_schema": "json",
    "ebnf": "grammar",
    "structural_tag": "structural_tag",
}
#: Penalties and their neutral values. With any other value, raw logprobs do not describe the sampling distribution.
NEUTRAL_PENALTIES: Mapping[str, float] = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
#: Other accepted fields: the translation reads them, or they do not affect the sampled tokens.
FIELDS = frozenset(
    (
        *(TEXT, IDS, IDS_ALIAS, PARAMS, RID, MODEL, ADAPTER, "stream", *CACHE_KEYS),
        *(WANTED, START_LEN, WITH_TEXT, TOP, EXPERT_FIELDS.wanted, EXPERT_FIELDS.start, "log_metrics", "return_bytes"),
    )
)
#: The logprob that vLLM reports for a token whose logprob it does not know.
NO_LOGPROB = -9999.0


def translate(request: GenerateRequest, flags: Flags) -> Translation | Parts:
    """Return the translation of a request. A list of prompts becomes one request for each prompt.

    Raises:
        CannotServe: vLLM does not support the request.
        BadRequest: a field has an invalid value.
    """
    parts = [PromptSampling(request, place, flags) for place in range(len(request.prompts))]
    return Parts(parts) if request.batch else parts[0]


class PromptSampling:
    """The translation of one prompt of a request, with all its samples.

    Args:
        place: the index of the prompt in the request.
        incremental: whether a translated event contains only new tokens, as vLLM's own, or everything so far.
    """

    heeds_cache_key = True

    def __init__(self, request: GenerateRequest, place: int, flags: Flags, *, incremental: bool = False) -> None:
        self._request, self._incremental = request, incremental
        self._prompt = request.prompts[place]
        self._first = place * request.samples
        self._wants_logprobs = bool(request.field(WANTED, place))
        self._with_text = bool(request.body.get(WITH_TEXT))
        self._tops = (_count(TOP, request.field(TOP, place)) or 0) if self._wants_logprobs else 0
        start = request.field(START_LEN, place) if self._wants_logprobs else None
        self._prompt_from = None if start == -1 else _count(START_LEN, start)
        self._check(place, flags)
        self._wants_no_tokens = self._prompt.params.get(NEW_TOKENS, DEFAULT_MAX_NEW_TOKENS) == 0
        self._name = uuid.uuid4().hex
        given = request.rid(self._first) if request.samples == 1 else request.body.get(RID)
        self._rid = given if isinstance(given, str) else self._name
        #: The `id` in the answer of each sample. The engine has one name for all samples.
        self._ids = [self._rid] if request.samples == 1 else [f"{self._rid}_{n}" for n in range(request.samples)]
        self.rids: Mapping[str, str] = dict.fromkeys(sorted({self._rid, *self._ids} - {self._name}), self._name)
        self.target: bytes | None = TARGET
        self.body = orjson.dumps(self._request_body(place))
        self._choices = [
            VLLMSample(self._entry if self._wants_logprobs else None, self._tops) for _ in range(request.samples)
        ]

    def _check(self, place: int, flags: Flags) -> None:
        """Check that vLLM, started with these flags, supports the request.

        Raises:
            CannotServe: vLLM lacks a field, or the server lacks a flag.
            BadRequest: `stop` or a count has an invalid value.
        """
        if not flags.scale_out:
            raise CannotServe("it was started without --enable-scale-out")
        body, params = self._request.body, self._prompt.params
        unknown = [name for name in body if name not in FIELDS and not _is_default(self._request.field(name, place))]
        known = SAMPLING.keys() | CONSTRAINTS.keys() | {NEW_TOKENS, "stop"}
        unknown += [name for name, value in params.items() if name not in known and not is_absent(value)]
        if unknown:
            raise CannotServe(f"it does not support {unknown[0]}")
        if self._prompt.ids is None:
            raise CannotServe("it generates from input_ids only, and the text prompt was not tokenized")
        if not self._prompt.ids:
            raise CannotServe("the prompt must have at least one token")
        if body.get(EXPERT_FIELDS.wanted):
            _count(f"{EXPERT_FIELDS.start}", EXPERT_FIELDS.start_of(body))
            if not flags.experts:
                raise CannotServe(f"it returns no routed experts: {EXPERT_FIELDS.remedy}")
        stop = params.get("stop") or []
        if not isinstance(stop, (str, list)) or not all(isinstance(each, str) for each in stop):
            raise BadRequest("stop must be a string or a list of strings")
        if self._tops and not flags.token_ids_in_logprobs:
            raise CannotServe(
                "its top logprobs contain no token ids: start it with --return-tokens-as-token-ids and "
                f"--additional-config '{{\"{IDS_AS_TOKENS}\": true}}'"
            )
        if self._prompt_from is not None and self._request.stream:
            raise CannotServe(f"it returns no prompt logprobs in a stream: send {START_LEN} only without stream")
        if self._wants_logprobs and flags.raw_logprobs and changes_distribution(params):
            raise CannotServe(
                "its logprobs are computed at temperature 1 without penalties: start it with --logprobs-mode "
                "processed_logprobs"
            )

    def _request_body(self, place: int) -> dict[str, Any]:
        body = self._request.body
        adapter = self._request.field(ADAPTER, place)
        keys = [str(key) for name in CACHE_KEYS if not is_absent(key := self._request.field(name, place))]
        asked = {
            "token_ids": self._prompt.ids,
            "sampling_params": self._sampling(),
            "output_mode": "text",
            "request_id": self._name,
            **({"reasoning_ended": True} if CONSTRAINTS.keys() & self._prompt.params.keys() else {}),
            **({MODEL: adapter} if adapter else {}),
            **({SALT: salt_of(*keys)} if keys else {}),
        }
        if body.get(EXPERT_FIELDS.wanted):
            start = min(EXPERT_FIELDS.start_of(body), len(self._prompt.ids or ()))
            asked["sampling_params"]["routed_experts_prompt_start"] = start
        if self._request.stream:
            asked |= {"stream": True, "stream_options": {"include_usage": True}}
        return asked

    def _sampling(self) -> dict[str, Any]:
        params = self._prompt.params
        asked = {
            own: params[name]
            for name, own in SAMPLING.items()
            if params.get(name) is not None and params[name] not in ([], {})
        }
        limit = params.get(NEW_TOKENS, DEFAULT_MAX_NEW_TOKENS)
        if limit is not None:
            asked["max_tokens"] = 1 if self._wants_no_tokens else limit  # vLLM samples at least one token
        if stops := stop_strings(params.get("stop")):
            asked["stop"] = stops
        bound = {own: params[name] for name, own in CONSTRAINTS.items() if params.get(name) is not None}
        if bound:
            asked["structured_outputs"] = bound
        if self._request.samples > 1:
            asked["n"] = self._request.samples
        if self._wants_logprobs:
            asked["logprobs"] = self._tops + 1 if self._tops else 0  # vLLM counts the sampled token as one of them
            if self._prompt_from is not None:
                asked[PROMPT] = self._tops
        return asked

    def whole(self, answer: bytes, version: str | None) -> bytes:
        with readable():
            answer, of_prompt = take_array(answer, PROMPT) if self._prompt_from is not None else (answer, None)
            parsed = orjson.loads(answer)
            choices, usage = parsed["choices"], parsed["usage"]
            if sorted(choice["index"] for choice in choices) != [*range(self._request.samples)]:
                raise UnreadableAnswer("incomplete", f"{len(choices)} answers to {self._request.samples} generations")
            for new_choice in choices:
                self._choices[new_choice["index"]].add(new_choice)
            self._check_usage(usage)
            meta = {"cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens")}
            meta = {name: value for name, value in meta.items() if value is not None} | self._prompt_logprobs(of_prompt)
            answers = [self._answer(place, version, meta) for place in range(len(self._choices))]
            return orjson.dumps(answers if self._request.indexed else answers[0])

    def event(self, event: Event, version: str | None) -> bytes:
        if event.is_last or event.is_error:
            return event.raw
        with readable():
            parsed = event.parse()
            if not parsed["choices"]:
                self._check_usage(parsed["usage"])
                return b""
            (new_choice,) = parsed["choices"]
            index = new_choice["index"]
            if type(index) is not int or not 0 <= index < len(self._choices):
                raise UnreadableAnswer("incomplete", "the index of an event is invalid")
            begin, chars = len(self._choices[index].ids), len(self._choices[index].text)
            self._choices[index].add(new_choice)
            answer = self._answer(index, version, {}, *((begin, chars) if self._incremental else (0, 0)))
            place = {"index": self._first + index} if self._request.indexed else {}
            return write_event({**answer, **place})

    def _check_usage(self, usage: Mapping[str, Any]) -> None:
        sampled, prompt = sum(len(choice.ids) for choice in self._choices), len(self._prompt.ids or ())
        if (usage["prompt_tokens"], usage["completion_tokens"]) != (prompt, sampled):
            detail = f"the usage is {usage}, but {prompt} tokens were sent and {sampled} received"
            raise UnreadableAnswer("token_counts_disagree", detail)
        if not all(choice.finish for choice in self._choices):
            raise UnreadableAnswer("incomplete", "the usage arrived before every generation ended")

    def _answer(
        self, index: int, version: str | None, meta: Mapping[str, Any], begin: int = 0, begin_char: int = 0
    ) -> dict[str, Any]:
        """Return the answer of one sample so far, without its first `begin` tokens and `begin_char` characters."""
        choice = self._choices[index]
        ids, prompt = ([] if self._wants_no_tokens else choice.ids), len(self._prompt.ids or ())
        count = len(ids)
        meta_info: dict[str, Any] = {
            "id": self._ids[index],
            "finish_reason": choice.finish_reason(no_tokens=self._wants_no_tokens),
        }
        meta_info |= {"prompt_tokens": prompt, "completion_tokens": count, **meta}
        if self._wants_logprobs:
            meta_info |= {LOGPROBS: choice.entries[begin:count], "output_token_logprobs_length": count}
            meta_info |= {TOP_ENTRIES: choice.tops[begin:count]} if self._tops else {}
            meta_info.setdefault("input_token_logprobs", [])
        spans = choice.versions
        if spans and not self._wants_no_tokens:
            meta_info |= {VERSIONS: spans, VERSION: spans[-1]["version"]}
            version_runs(meta_info, count)
        elif version is not None:
            meta_info[VERSION] = version
        # A generation that is aborted before its first token was not computed and has no rows.
        if choice.finish and choice.ids and self._request.body.get(EXPERT_FIELDS.wanted):
            start = min(EXPERT_FIELDS.start_of(self._request.body), prompt)
            rows = prompt + len(choice.ids) - 1 - start
            meta_info[EXPERT_FIELDS.rows.name] = converted_rows(
                choice.experts, rows, rows - 1 if self._wants_no_tokens else rows
            )
        return {
            "text": "" if self._wants_no_tokens else choice.text[begin_char:],
            "output_ids": ids[begin:],
            "meta_info": meta_info,
        }

    @property
    def _sampled_nothing(self) -> bool:
        """True if no sample has a token: the prompt may not have been computed."""
        return not any(choice.ids for choice in self._choices)

    def _prompt_logprobs(self, pieces: Sequence[bytes] | None) -> dict[str, Any]:
        """Return the `meta_info` fields with the logprobs of the prompt, from the first requested token on.

        The first entry's logprob is None. Without requested prompt logprobs there are no fields.

        Raises:
            KeyError: vLLM's answer has no prompt logprobs.
            UnreadableAnswer: vLLM returned more or fewer logprobs than the prompt has tokens.
        """
        begin, ids = self._prompt_from, self._prompt.ids or ()
        if begin is None or self._sampled_nothing:
            return {}
        if pieces is None:
            raise KeyError(PROMPT)
        entries: list[list[Any]] = []
        tops: list[orjson.Fragment | None] = []
        place = 0
        for place, by_id in enumerate(chain.from_iterable(map(orjson.loads, pieces)), 1):
            if not begin < place <= len(ids):
                continue
            token = ids[place - 1]
            own = by_id[str(token)] if entries else {"logprob": None, "decoded_token": None}
            ranked = sorted((by_id or {}).items(), key=lambda item: item[1]["rank"])[: self._tops]
            row = orjson.dumps([self._prompt_entry(int(id_), one) for id_, one in ranked])
            tops.append(orjson.Fragment(row) if entries else None)
            entries.append(self._prompt_entry(token, own))
        if place != len(ids):
            raise UnreadableAnswer("token_counts_disagree", f"{place} logprobs for {len(ids)} prompt tokens")
        return {"input_token_logprobs": entries, **({PROMPT_TOPS: tops} if self._tops else {})}

    def _prompt_entry(self, token: int, entry: Mapping[str, Any]) -> list[Any]:
        return [entry["logprob"], token, entry["decoded_token"] if self._with_text else None]

    def _entry(self, entry: Mapping[str, Any], token: int | None = None) -> list[Any]:
        """Return a logprob entry of `/generate`. Without `token`, the entry itself must contain the id.

        Raises:
            UnreadableAnswer: vLLM does not know the logprob.
        """
        named = entry["token"].startswith(PLACEHOLDER)
        if token is None:
            token = int(entry["token"].removeprefix(PLACEHOLDER))
        if entry["logprob"] <= NO_LOGPROB:
            raise UnreadableAnswer("incomplete", f"the logprob of token {token} is missing")
        return [entry["logprob"], token, entry["token"] if self._with_text and not named else None]


class VLLMSample:
    """One sample, put together from events that contain new tokens only. A whole answer counts as one event.

    Args:
        entry: converts vLLM's logprob entry; None if the client wants no logprobs.
        tops: how many top logprobs the client wants for each token.
    """

    def __init__(self, entry: Callable[..., list[Any]] | None, tops: int) -> None:
        self.ids: list[int] = []
        self.text = ""
        self.entries: list[list[Any]] = []
        self.tops: list[list[list[Any]]] = []
        self.finish = ""
        self.versions: list[Any] = []
        self.experts: object = None
        self._matched: object = None
        self._entry, self._tops = entry, tops

    def add(self, choice: Mapping[str, Any]) -> None:
        """Append the tokens of an event.

        Raises:
            UnreadableAnswer: the event contradicts itself, or follows the finish reason.
            One of `MALFORMED`.
        """
        if self.finish:
            raise UnreadableAnswer("incomplete", "an event follows the finish reason")
        ids, text = choice["token_ids"], choice["text"]
        if not isinstance(text, str) or not isinstance(ids, list) or not {*map(type, ids)} <= {int}:
            raise TypeError("token_ids is not a list of integers, or text is not a string")
        if self._entry is not None:
            content = (choice["logprobs"] or {"content": []})["content"]
            if len(content) != len(ids):
                raise UnreadableAnswer("token_counts_disagree", f"{len(ids)} tokens, {len(content)} logprobs")
            self.entries += map(self._entry, content, ids)
            if self._tops:  # vLLM adds the sampled token to the list, whatever its rank
                ranked = (sorted(each["top_logprobs"], key=lambda one: -one["logprob"]) for each in content)
                self.tops += [[*map(self._entry, each[: self._tops])] for each in ranked]
        self.ids += ids
        self.text += text
        finish = choice["finish_reason"]
        if finish is not None:
            if finish not in ("stop", "length", "abort"):
                raise UnreadableAnswer("incomplete", f"unknown finish reason {str(finish)[:64]!r}")
            self.finish, self._matched = finish, choice["stop_reason"]
            self.versions, self.experts = choice["weight_versions"] or [], choice["routed_experts"]

    def finish_reason(self, *, no_tokens: bool) -> dict[str, Any] | None:
        """Return the finish reason in the form of `/generate`; None before the end.

        vLLM reports no stop token if the model's own end token stopped the sample: that is the last token.
        """
        match self.finish:
            case "":
                return None
            case "stop" if not no_tokens:
                return {"type": "stop", "matched": self.ids[-1] if self._matched is None else self._matched}
            case "abort":
                return {"type": "abort", "message": "Aborted"}
            case _:
                return {"type": "length", "length": 0 if no_tokens else len(self.ids)}


def salt_of(*keys: str) -> str:
    """Return a cache salt for these keys. vLLM accepts at most 128 characters, and not every character."""
    return hashlib.sha256("/".join(keys).encode("utf-8", "surrogatepass")).hexdigest()


def _is_default(value: object) -> bool:
    """Return True if a field is absent, 0 or -1, the defaults of counts and positions."""
    return is_absent(value) or (type(value) is int and value in (0, -1))


def _count(name: str, value: object) -> int | None:
    """Return the value of a count; None if it is absent.

    Raises:
        BadRequest: the value is not a whole number of at least 0.
    """
    if is_absent(value):
        return None
    if type(value) is not int or value < 0:
        raise BadRequest(f"{name} must be a whole number of at least 0")
    return value


def changes_distribution(params: Mapping[str, Any]) -> bool:
    """Return True if the sampling distribution differs from temperature 1 without penalties. False for greedy."""
    changed = any(params.get(name) not in (None, neutral) for name, neutral in NEUTRAL_PENALTIES.items())
    return changed or params.get("temperature") not in (None, 0, 1) or bool(params.get("logit_bias"))

"""A parser of `/generate` requests, shared by all layers (SGLang's `GenerateReqInput`). No I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from miles_router.engines.answers import ASKS_FOR_MASK

TEXT, IDS, IDS_ALIAS = "text", "input_ids", "input_tokens"
PARAMS, RID = "sampling_params", "rid"
MEDIA = ("image_data", "video_data", "audio_data")
#: Fields that add to the model's input what neither text nor ids show.
BEYOND_TEXT = ("input_embeds", *MEDIA, "session_params")
MAX_GENERATIONS = 4096  # per request
DEFAULT_MAX_NEW_TOKENS = 128  # SGLang's `SamplingParams`
#: Fields that may be a list with one value per prompt.
PER_PROMPT = (
    PARAMS,
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "token_ids_logprob",
    "lora_path",
    *MEDIA,
    "custom_logit_processor",
    "return_hidden_states",
    ASKS_FOR_MASK,
    "sampling_logprobs_mode",
    "extra_key",
    "cache_salt",
    RID,
)

Reason = Literal["no_object", "no_prompt", "text", "input_ids", "sampling_params", "rid", "too_many"]


def stop_strings(stop: object) -> list[str]:
    """Return the non-empty stop strings of a request's `stop`, which is a string or a list."""
    each = [stop] if isinstance(stop, str) else stop if isinstance(stop, list) else ()
    return [one for one in each if isinstance(one, str) and one]


def is_absent(value: object) -> bool:
    """Return True where a field holds nothing: null, false, a blank string, or a list or object of nothing else.
    Clients without images send `"image_data": []`, `[null]`, `[[]]` or `{"url": ""}`."""
    if isinstance(value, list):
        return all(map(is_absent, value))
    if isinstance(value, Mapping):
        return all(map(is_absent, value.values()))
    return value is None or value is False or (isinstance(value, str) and not value.strip())


class UnknownShape(ValueError):
    """An error about a request body that the router cannot read; the engine may still accept it. `reason` has few
    values, since it labels a metric."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason: Reason = reason


@dataclass(frozen=True)
class Prompt:
    """One prompt: its text or its ids, and its sampling parameters without `n`."""

    text: str | None
    ids: Sequence[int] | None
    params: Mapping[str, Any]


@dataclass(frozen=True)
class GenerateRequest:
    """A `/generate` request.

    Attributes:
        body: the parsed JSON.
        prompts: in order. If a client sends text and ids, the engine uses the ids.
        samples: generations per prompt (`n`).
        batch: whether the prompts came as a list.
        stream: whether the answer is a stream of events.
    """

    body: Mapping[str, Any]
    prompts: tuple[Prompt, ...]
    samples: int
    batch: bool
    stream: bool

    @classmethod
    def read(cls, body: object) -> GenerateRequest:
        """Parse a body that is already decoded from JSON.

        Raises:
            UnknownShape: the body has none of the engine's shapes, or asks for more than `MAX_GENERATIONS`.
        """
        if not isinstance(body, Mapping):
            raise UnknownShape("no_object")
        sources, batch, of_text = _sources(body)
        params = _params(body.get(PARAMS), len(sources))
        samples = params[0].get("n", 1)
        if type(samples) is not int or samples < 1 or any(each.get("n", 1) != samples for each in params):
            raise UnknownShape("sampling_params")  # the engine requires one `n` for all prompts
        if len(sources) * samples > MAX_GENERATIONS:
            raise UnknownShape("too_many")
        _check_rid(body.get(RID), len(sources))
        prompts = tuple(
            Prompt(
                text=source if of_text else None,
                ids=None if of_text else source,
                params={name: value for name, value in own.items() if name != "n"},
            )
            for source, own in zip(sources, params, strict=True)
        )
        return cls(body, prompts, samples, batch, bool(body.get("stream")))

    @property
    def generations(self) -> int:
        """The number of generations: `samples` for the first prompt, then for the second, and so on."""
        return len(self.prompts) * self.samples

    @property
    def indexed(self) -> bool:
        """Whether the answers come as a list, or as events with an `index`."""
        return self.batch or self.samples != 1

    def prompt_of(self, generation: int) -> int:
        """Return the index of the prompt that a generation continues."""
        return generation // self.samples

    @property
    def rids(self) -> list[str | None]:
        """The client's `rid` of each generation; None where the engine makes one."""
        return list(map(self.rid, range(self.generations)))

    def rid(self, generation: int) -> str | None:
        """Return the client's `rid` of one generation; None if the engine makes one."""
        rid = self.body.get(RID)
        if self.samples != 1 or rid is None:  # for n > 1 the engine makes the ids itself
            return None
        if isinstance(rid, list):
            return str(rid[generation])
        return f"{rid}_{generation}" if self.batch else rid

    def field(self, name: str, prompt: int) -> Any:
        """Return the value of a `PER_PROMPT` field for one prompt."""
        value = self.body.get(name)
        if not self.batch or not isinstance(value, list) or len(value) != len(self.prompts):
            return value
        if name == "token_ids_logprob" and not isinstance(value[0], list):
            return value  # one list of ids for all prompts
        return value[prompt]

    def single(self, generation: int) -> dict[str, Any]:
        """Return the request body for one generation alone."""
        place = self.prompt_of(generation)
        prompt = self.prompts[place]
        own = {name: self.field(name, place) for name in PER_PROMPT if name in self.body}
        kept = {name: value for name, value in self.body.items() if name not in (TEXT, IDS, IDS_ALIAS, RID)}
        source = {IDS: prompt.ids} if prompt.ids is not None else {TEXT: prompt.text}
        own.pop(RID, None)
        rid = self.rid(generation)
        return {**kept, **source, **own, PARAMS: dict(prompt.params), **({} if rid is None else {RID: rid})}

    def with_params(self, change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> dict[str, Any]:
        """Return the body with each prompt's sampling parameters, `n` included, replaced by the result of `change`. A
        single object for all prompts stays a single object."""
        params = self.body.get(PARAMS)
        return {**self.body, PARAMS: [*map(change, params)] if isinstance(params, list) else change(params or {})}

    def with_ids(self, ids: Sequence[object], **fields: object) -> dict[str, Any]:
        """Return the body with `ids` as its prompts, and with further fields.

        Args:
            ids: one sequence per prompt, in any form that is serialized as a list of numbers, such as a numpy array.
        """
        kept = {name: value for name, value in self.body.items() if name not in (TEXT, IDS_ALIAS)}
        return {**kept, IDS: list(ids) if self.batch else ids[0], **fields}


def _sources(body: Mapping[str, Any]) -> tuple[list[Any], bool, bool]:
    """Return the prompts, whether they came as a list, and whether they are texts."""
    text, ids = body.get(TEXT), body.get(IDS)
    if ids is None and text is None:
        ids = body.get(IDS_ALIAS)
    if ids is not None:
        if _are_ids(ids):
            return [ids], False, False
        if not isinstance(ids, list) or not all(map(_are_ids, ids)):
            raise UnknownShape("input_ids")
        return ids, True, False
    if text is None:
        raise UnknownShape("no_prompt")
    texts = [text] if isinstance(text, str) else text
    if not isinstance(texts, list) or not texts or not all(isinstance(each, str) for each in texts):
        raise UnknownShape("text")
    return texts, texts is text, True


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and set(map(type, value)) <= {int}


def _params(params: object, prompts: int) -> list[Mapping[str, Any]]:
    each: list[Any] = params if isinstance(params, list) else [{} if params is None else params] * prompts
    if len(each) != prompts or not all(isinstance(one, Mapping) for one in each):
        raise UnknownShape("sampling_params")
    return each


def _check_rid(rid: object, prompts: int) -> None:
    listed = isinstance(rid, list) and len(rid) == prompts and all(isinstance(each, str) for each in rid)
    if not (rid is None or isinstance(rid, str) or listed):
        raise UnknownShape("rid")

"""The request shapes of SGLang's `/generate` (`GenerateReqInput`), reduced to prompts in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miles_router.errors import BadRequest

#: Fields that put something into the model's input which text and ids do not show.
BEYOND_TEXT = ("input_embeds", "image_data", "video_data", "audio_data", "session_params")
TEXT, IDS, IDS_ALIAS = "text", "input_ids", "input_tokens"


class NotUnderstood(Exception):
    """A request that is passed through untouched; the message is its reason, one of the few that metrics label."""


@dataclass(frozen=True)
class Prompt:
    """One prompt of a request: its text, or its ids where the client sent those."""

    text: str | None
    ids: list[int] | None
    skip_special: bool
    no_stop_trim: bool
    logprobs_wanted: bool


@dataclass(frozen=True)
class Shape:
    """A whole request: its prompts, how many samples each gets, and whether the answer is a list."""

    prompts: tuple[Prompt, ...]
    samples: int
    batch: bool
    stream: bool

    @property
    def answers(self) -> int:
        """How many there will be."""
        return len(self.prompts) * self.samples

    def prompt_of(self, answer: int) -> int:
        """The prompt that the answer at this place of the list belongs to: answers are prompt-major."""
        return answer // self.samples


def understand(body: Mapping[str, Any]) -> Shape:
    """What a request asks for.

    Raises:
        NotUnderstood: it is not one of the shapes; SGLang itself may still know what to do with it.
        BadRequest: an empty prompt, which would end the worker.
    """
    if any(body.get(name) is not None for name in BEYOND_TEXT):
        raise NotUnderstood("beyond_text")
    sources, batch, of_text = _sources(body)
    params = body.get("sampling_params")
    each = list(params) if isinstance(params, list) else [params or {}] * len(sources)
    if len(each) != len(sources) or not all(isinstance(one, Mapping) for one in each):
        raise NotUnderstood("sampling_params")
    counts = {one.get("n", 1) for one in each}
    samples = counts.pop() if len(counts) == 1 else None
    if not isinstance(samples, int) or samples < 1:
        raise NotUnderstood("sampling_params")
    wanted = _logprobs_wanted(body.get("return_logprob"), len(sources))
    prompts = tuple(
        Prompt(
            text=source if of_text else None,
            ids=None if of_text else source,
            skip_special=bool(one.get("skip_special_tokens", True)),
            no_stop_trim=bool(one.get("no_stop_trim", False)),
            logprobs_wanted=want,
        )
        for source, one, want in zip(sources, each, wanted, strict=True)
    )
    return Shape(prompts, samples, batch, bool(body.get("stream")))


def _sources(body: Mapping[str, Any]) -> tuple[list[Any], bool, bool]:
    """The prompts, whether they came as a list, and whether they are texts."""
    text, ids = body.get(TEXT), body.get(IDS, body.get(IDS_ALIAS))
    if (text is None) == (ids is None):
        raise NotUnderstood("no_prompt" if text is None else "text_and_ids")
    if text is not None:
        texts = [text] if isinstance(text, str) else text
        if not isinstance(texts, list) or not all(isinstance(one, str) for one in texts) or not texts:
            raise NotUnderstood("text")
        _refuse_empty(texts)
        return texts, not isinstance(text, str), True
    rows = [ids] if _is_ids(ids) else ids
    if not isinstance(rows, list) or not rows or not all(_is_ids(row) for row in rows):
        raise NotUnderstood("input_ids")
    _refuse_empty(rows)
    return rows, rows is ids, False


def _refuse_empty(prompts: Sequence[Sequence[object]]) -> None:
    if not all(prompts):
        raise BadRequest("a prompt must not be empty: SGLang 0.5.23 ends over one")


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and (not value or type(value[0]) is int) and all(type(one) is int for one in value)


def _logprobs_wanted(value: Any, count: int) -> list[bool]:
    if isinstance(value, list):
        if len(value) != count:
            raise NotUnderstood("return_logprob")
        return [bool(one) for one in value]
    return [bool(value)] * count


def rewritten(body: Mapping[str, Any], shape: Shape, ids: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The request for the engine: ids in place of text, logprobs always, everything else as it came."""
    changed = {name: value for name, value in body.items() if name not in (TEXT, IDS_ALIAS)}
    changed[IDS] = list(ids) if shape.batch else ids[0]
    changed["return_logprob"] = True
    return changed

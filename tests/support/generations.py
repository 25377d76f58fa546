"""What an engine was given and what it sampled, read from what passed between it and the router.

It knows the engine's protocol, and nothing of the router but the headers that name a request and a session.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from tests.support.events import EventReader

GENERATE, CHAT = "/generate", "/v1/chat/completions"


@dataclass
class Generation:
    """One sample of `/generate`, or one choice of a chat. `given` is None where the engine was sent no ids, and did not
    tell any."""

    given: list[int] | None
    body: dict[str, Any]  # the request it belongs to
    params: dict[str, Any]
    arrived: float  # when the request came in
    choice: int = 0
    session: str = ""  # the router's `X-Session-Id`
    request_id: str = ""  # its `X-Request-Id`
    proxy: int = 0
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    logprob_ids: list[int] = field(default_factory=list)
    versions: list[set[str]] = field(default_factory=list)  # of each token; two where a chat's stream leaves it open
    told: list[str] = field(default_factory=list)  # the version that each token's event named
    text: str = ""
    finish: dict[str, Any] | None = None  # its type, and what matched
    rid: str = ""
    cached: int = 0
    experts: str = ""  # the rows of routed experts it came with, in base64
    answered: float = float("inf")  # when its end came out of the engine
    legs: int = 1  # requests that it took

    @property
    def prompt(self) -> list[int]:
        """What it was given, which must be known."""
        assert self.given is not None
        return self.given

    @property
    def end(self) -> dict[str, Any]:
        """How it ended, which it must have."""
        assert self.finish is not None
        return self.finish

    @property
    def skip_special(self) -> bool:
        return bool(self.params.get("skip_special_tokens", True))

    @property
    def streamed(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def rendered(self) -> bool:
        """Whether the engine made its prompt of messages."""
        return "input_ids" not in self.body

    def position_versions(self) -> list[str]:
        """The weight version of each sampled token, where there is no doubt."""
        assert len(self.versions) == len(self.sampled), (self.versions, len(self.sampled))
        return [version for (version,) in self.versions]


def spread(spans: Iterable[Mapping[str, Any]]) -> list[set[str]]:
    return [{span["version"]} for span in spans for _ in range(span["start"], span["end"])]


class Generating:
    """The generations of one `/generate`, as far as they have got. `incremental`: how the engine streams."""

    def __init__(self, body: bytes, *, incremental: bool, request_id: str) -> None:
        self.all = list(_asked(body))
        for each in self.all:
            each.request_id = request_id
        self._incremental = incremental
        self._events = EventReader()

    def feed(self, data: bytes) -> None:
        for event in self._events.feed(data):
            if "output_ids" in event:
                _take(self.all[event.get("index", 0)], event, more=self._incremental)

    def end(self, body: bytes) -> None:
        answers = orjson.loads(body)
        answers = answers if isinstance(answers, list) else [answers]
        assert len(answers) == len(self.all), "one answer for each sample"
        for generation, answer in zip(self.all, answers, strict=True):
            _take(generation, answer, more=False)


def _asked(body: bytes) -> Iterator[Generation]:
    """The samples that a request asks for, prompt by prompt."""
    try:
        asked = orjson.loads(body)
    except ValueError:
        return
    if not isinstance(asked, dict):
        return
    ids, texts = asked.get("input_ids"), asked.get("text")
    rows: list[Any] = [ids] if ids and isinstance(ids[0], int) else ids or []
    count = len(rows) or (1 if isinstance(texts, str) else len(texts or []))
    params = asked.get("sampling_params") or {}
    each = params if isinstance(params, list) else [params] * count
    for index in range(count):
        for _ in range(each[index].get("n", 1)):
            yield Generation(rows[index] if rows else None, asked, each[index], time.monotonic())


def _take(generation: Generation, answer: dict[str, Any], *, more: bool) -> None:
    """Write an answer down; `more` adds it to what came before."""
    meta = answer["meta_info"]
    logprobs = meta.get("output_token_logprobs", [])
    if not more:
        generation.sampled, generation.logprobs, generation.logprob_ids, generation.text = [], [], [], ""
    generation.sampled = generation.sampled + answer["output_ids"]
    generation.logprobs = generation.logprobs + [entry[0] for entry in logprobs]
    generation.logprob_ids = generation.logprob_ids + [entry[1] for entry in logprobs]
    generation.text += answer["text"]
    generation.rid = meta["id"]
    generation.finish = meta["finish_reason"]
    generation.experts = meta.get("routed_experts") or ""
    if "weight_version" in meta:  # else the engine tells none
        generation.told += [meta["weight_version"]] * (len(generation.sampled) - len(generation.told))
    if generation.finish is not None:
        generation.versions = spread(meta.get("weight_versions") or ())
        generation.answered = time.monotonic()


# Chat


def whole_generations(legs: Iterable[Generation]) -> list[Generation]:
    """Each generation once, of which some were cut and carried on as another request with what was there."""
    whole: list[Generation] = []
    for leg in legs:
        begun = next((each for each in whole if each.request_id == leg.request_id and _goes_on(each, leg)), None)
        if begun is None:
            whole.append(leg)
        else:
            begun.sampled = begun.sampled + leg.sampled
            begun.logprobs = begun.logprobs + leg.logprobs
            begun.versions = begun.versions + leg.versions
            begun.finish = leg.finish
            begun.proxy = leg.proxy  # who ended it has all of it
            begun.legs += 1
    return whole


def _goes_on(begun: Generation, leg: Generation) -> bool:
    return begun.end["type"] == "abort" and leg.given == [*begun.prompt, *begun.sampled]


@dataclass
class NewVersion:
    """The engine is given a version at one time and goes on at another; in between it samples nothing, and what still
    comes was sampled before."""

    version: str
    given: float
    used: float


def whole_chat(body: dict[str, Any], reply: bytes) -> Iterator[Generation]:
    for choice in orjson.loads(reply)["choices"]:
        meta = choice["meta_info"]
        triples = meta["output_token_logprobs"]
        yield Generation(
            given=body.get("input_ids") or choice["prompt_token_ids"],
            body=body,
            params=body,
            arrived=0.0,
            choice=choice["index"],
            sampled=[token for _, token, _ in triples],
            logprobs=[logprob for logprob, _, _ in triples],
            versions=spread(meta["weight_versions"]),
            finish={"type": choice["finish_reason"], "matched": choice["matched_stop"]},
            rid=meta["id"],
            cached=meta["cached_tokens"],
            experts=meta.get("routed_experts") or "",
        )


def streamed_chat(
    body: dict[str, Any], parts: Iterable[tuple[float, bytes]], versions: Sequence[NewVersion]
) -> Iterator[Generation]:
    """The choices of a stream, of which `parts` came at some time each. It does not tell versions: a token's is the one
    that the engine used when it came. Routers may take the new one for it from the moment when the engine is given
    that."""
    events, choices = EventReader(), dict[int, Generation]()
    extra: Mapping[str, Any] = {}
    experts: dict[str, str] = {}
    for at, chunk in ((at, chunk) for at, data in parts for chunk in events.feed(data)):
        possible = {[each.version for each in versions if each.used <= at][-1]}
        possible |= {each.version for each in versions if each.given <= at < each.used}
        for choice in chunk["choices"]:
            grown = choices.setdefault(
                choice["index"], Generation(None, body, body, 0.0, choice=choice["index"], rid=chunk["id"])
            )
            tokens = (choice.get("logprobs") or {}).get("content") or []
            grown.logprobs += [token["logprob"] for token in tokens]
            grown.versions += [possible] * len(tokens)
            if choice["finish_reason"] is not None:
                grown.finish = {"type": choice["finish_reason"], "matched": choice.get("matched_stop")}
        own = chunk.get("sglext") or {}
        extra = own or extra
        if "routed_experts" in own:
            assert chunk["id"] not in experts
            experts[chunk["id"]] = own["routed_experts"]
    for index, grown in choices.items():
        grown.given = body.get("input_ids") or extra["input_ids"]
        grown.sampled = extra["output_ids"][index]
        grown.cached = sum((extra.get("cached_tokens_details") or {}).values())
        grown.experts = experts.get(grown.rid, "")
        yield grown

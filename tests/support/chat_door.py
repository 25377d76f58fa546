"""Chat turns as they went through the workers' doors: what each was given, and what was sampled, whole and streamed.

Read from the doors' exchanges afterwards. Knows the worker's protocol and nothing of sessions but the header that names
one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.support.door import Door, Exchange

CHAT = "/v1/chat/completions"
NEW_VERSION, CONTINUE = "/update_weight_version", "/continue_generation"


@dataclass
class ChatGeneration:
    """One choice of one answer. `given` are the ids that were sent, or those that the engine told for messages."""

    session: str
    request_id: str
    choice: int
    door: int
    rid: str
    body: dict[str, Any]  # the request it belongs to
    given: list[int]
    sampled: list[int]
    logprobs: list[float]
    versions: list[set[str]]  # of each sampled token; two where a stream leaves it open
    finish: str
    matched: int | str | None
    cached: int
    streamed: bool

    @property
    def first(self) -> bool:
        """Whether the engine rendered it from messages."""
        return "input_ids" not in self.body


@dataclass
class Passed:
    """Everything that went through the doors."""

    generations: list[ChatGeneration] = field(default_factory=list)
    broken_off: int = 0  # requests whose client left

    def of(self, session: str) -> list[ChatGeneration]:
        return [each for each in self.generations if each.session == session]


def passed(doors: Sequence[Door], *, version: str) -> Passed:
    """All chat turns; `version` is that of the workers at the beginning."""
    found = Passed()
    for number, door in enumerate(doors):
        changes = [_Change(version, -1.0, -1.0), *_changes(door)]
        for exchange in door.exchanges:
            if exchange.path != CHAT:
                continue
            if not exchange.ended:
                found.broken_off += 1
                continue
            assert exchange.status == 200, exchange.reply
            read = _streamed if _is_stream(exchange) else _whole
            found.generations += read(exchange, number, changes)
    return found


@dataclass
class _Change:
    """The worker is given a version at one time and goes on at another; in between it samples nothing, and what still
    comes was sampled before."""

    version: str
    given: float
    used: float


def _changes(door: Door) -> Iterator[_Change]:
    for number, exchange in enumerate(door.exchanges):
        if exchange.path == NEW_VERSION:
            used = next(each.arrived for each in door.exchanges[number:] if each.path == CONTINUE)
            yield _Change(json.loads(exchange.body)["new_version"], exchange.arrived, used)


def _is_stream(exchange: Exchange) -> bool:
    return bool(json.loads(exchange.body).get("stream"))


def _header(exchange: Exchange, name: str) -> str:
    return next((value for key, value in exchange.headers.items() if key.lower() == name), "")


def _whole(exchange: Exchange, door: int, _: object) -> Iterator[ChatGeneration]:
    body, answer = json.loads(exchange.body), json.loads(exchange.reply)
    for choice in answer["choices"]:
        meta = choice["meta_info"]
        triples = meta["output_token_logprobs"]
        spans = meta["weight_versions"]
        yield ChatGeneration(
            session=_header(exchange, "x-session-id"),
            request_id=_header(exchange, "x-request-id"),
            choice=choice["index"],
            door=door,
            rid=meta["id"],
            body=body,
            given=body.get("input_ids") or choice["prompt_token_ids"],
            sampled=[token for _, token, _ in triples],
            logprobs=[logprob for logprob, _, _ in triples],
            versions=[{span["version"]} for span in spans for _ in range(span["start"], span["end"])],
            finish=choice["finish_reason"],
            matched=choice["matched_stop"],
            cached=meta["cached_tokens"],
            streamed=False,
        )


@dataclass
class _Choice:
    rid: str
    logprobs: list[float] = field(default_factory=list)
    versions: list[set[str]] = field(default_factory=list)
    finish: str = ""
    matched: int | str | None = None


def _streamed(exchange: Exchange, door: int, changes: Sequence[_Change]) -> Iterator[ChatGeneration]:
    """A stream does not tell versions: a token's is the one that the worker used when it came. Routers may take the new
    one for it from the moment when the worker is given that."""
    body = json.loads(exchange.body)
    choices: dict[int, _Choice] = {}
    extra: Mapping[str, Any] = {}
    for at, chunk in _chunks(exchange):
        version = {[change.version for change in changes if change.used <= at][-1]}
        version |= {change.version for change in changes if change.given <= at < change.used}
        for choice in chunk["choices"]:
            grown = choices.setdefault(choice["index"], _Choice(chunk["id"]))
            tokens = (choice.get("logprobs") or {}).get("content") or []
            grown.logprobs += [token["logprob"] for token in tokens]
            grown.versions += [version] * len(tokens)
            if choice["finish_reason"] is not None:
                grown.finish, grown.matched = choice["finish_reason"], choice.get("matched_stop")
        extra = chunk.get("sglext") or extra
    for index, grown in choices.items():
        yield ChatGeneration(
            session=_header(exchange, "x-session-id"),
            request_id=_header(exchange, "x-request-id"),
            choice=index,
            door=door,
            rid=grown.rid,
            body=body,
            given=body.get("input_ids") or extra["input_ids"],
            sampled=extra["output_ids"][index],
            logprobs=grown.logprobs,
            versions=grown.versions,
            finish=grown.finish,
            matched=grown.matched,
            cached=sum((extra.get("cached_tokens_details") or {}).values()),
            streamed=True,
        )


def _chunks(exchange: Exchange) -> Iterator[tuple[float, dict[str, Any]]]:
    """The events of a stream, each with the time at which it was complete."""
    rest = b""
    for at, data in exchange.parts:
        *events, rest = (rest + data).split(b"\n\n")
        for event in events:
            if event.startswith(b"data: {"):
                yield at, json.loads(event.removeprefix(b"data: "))

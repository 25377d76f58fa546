"""A turn whose answer is streamed: every chunk goes on as it comes, less what the agent did not ask for.

The ids come with the last chunk, the logprobs with each. What ends the answer for the agent (its finish reasons) waits
for that last chunk, so that a turn is recorded before the agent can ask for the next.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from middleware_hub.openai_session.errors import UnusableAnswer
from middleware_hub.openai_session.faces.answers import MALFORMED, Generated, GrowingMessage
from middleware_hub.openai_session.turns.asking import Asked
from miles_router.engines.events import DATA, DONE, END

EMPTY: tuple[object, ...] = (None, "", [])
#: Where a request has the header `X-SGLExt-Ids-Framed`, the ids come in an event of this name.
FRAMED = b"event: sglext_ids\n"
#: Of the engine's own fields, those that are asked for to record, and the request's field for each.
OF_RECORDING = {
    "input_ids": "return_input_ids_in_sglext",
    "output_ids": "return_output_ids_in_sglext",
    "cached_tokens_details": "return_cached_tokens_details",
}


class Versions:
    """Which weight versions sampled the tokens of one choice, as the router sees it while they come."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, int, int]] = []  # none if it did not know for the first tokens
        self._reached = 0

    def reach(self, end: int, version: str | None) -> None:
        """The choice has `end` tokens now; None where the router knows no version, of a worker just removed."""
        begin, self._reached = self._reached, end
        if end == begin or (begin and not self.spans):
            return
        last = self.spans[-1] if self.spans else None
        if last is not None and version in (None, last[0]):
            self.spans[-1] = (last[0], last[1], end)
        elif version is not None:
            self.spans.append((version, begin, end))


class Stream(ABC):
    """Reads a stream's events, gives back what the agent is shown, and knows at the end what was sampled.

    `version` tells the weight version of the worker that answers, as the router knows it now: a stream's chunks do not
    say it. Where an update falls into a stream, the boundary is the one that the router saw.
    """

    def __init__(self, asked: Asked, version: Callable[[], str | None]) -> None:
        self.began = False  # something was generated
        self.done = False  # `[DONE]`
        self.first_token_at: float | None = None
        self._asked = asked
        self._version = version
        self._failure: str | None = None  # why it cannot be recorded, if a chunk says so
        self._held_back: list[bytes] = []

    def feed(self, event: bytes) -> bytes:
        """What the agent is shown of one event of the engine's; what ends its answer is kept for `release`."""
        name = FRAMED if event.startswith(FRAMED) else b""
        if not event.startswith(DATA, len(name)):
            return self._in_order(event)
        data = event[len(name) + len(DATA) :]
        if data.startswith(DONE):
            self.done = True
            self._held_back.append(event)
            return b""
        try:
            return self._chunk(name, orjson.loads(data))
        except UnusableAnswer as error:
            self._failure = self._failure or str(error)
        except MALFORMED as error:
            self._failure = self._failure or f"the worker's stream has a chunk that is none: {error!r}"
        return self._in_order(event)

    def release(self) -> bytes:
        """What was kept back."""
        held, self._held_back = self._held_back, []
        return b"".join(held)

    def generated(self) -> list[Generated]:
        """What was sampled, choice by choice.

        Raises:
            UnusableAnswer: the stream did not tell it all.
        """
        if self._failure is None:
            try:
                return self._generated()
            except MALFORMED as error:
                self._failure = f"the worker's stream lacks what recording needs: {error!r}"
        raise UnusableAnswer(self._failure)

    def _in_order(self, event: bytes) -> bytes:
        """An event that is no chunk, behind what is held back."""
        if not self._held_back:
            return event
        self._held_back.append(event)
        return b""

    def _chunk(self, name: bytes, chunk: Any) -> bytes:
        if "error" in chunk:
            raise UnusableAnswer("the worker's stream ended with an error")
        choices = chunk["choices"]
        self.began = self.began or bool(choices)
        ends = any(choice.get("finish_reason") is not None for choice in choices)
        if self._take(chunk, self._version()) and self.first_token_at is None:
            self.first_token_at = time.time()
        shown = self._shown(chunk)
        if shown is None:
            return b""
        data = name + DATA + orjson.dumps(shown) + END
        if ends or (self._held_back and not choices):
            self._held_back.append(data)
            return b""
        return data

    @abstractmethod
    def _take(self, chunk: Mapping[str, Any], version: str | None) -> bool:
        """Keep what a chunk says; whether it has tokens."""

    @abstractmethod
    def _shown(self, chunk: dict[str, Any]) -> Mapping[str, Any] | None:
        """A chunk with what the agent asked for; None if nothing is left that it would miss."""

    @abstractmethod
    def _generated(self) -> list[Generated]: ...


class _Choice:
    """One choice as it grows."""

    def __init__(self, rid: str | None) -> None:
        self.rid = rid
        self.message = GrowingMessage()
        self.logprobs: list[float] = []
        self.finish_reason: str | None = None
        self.matched: int | str | None = None
        self.versions = Versions()

    def take(self, choice: Mapping[str, Any], version: str | None) -> bool:
        self.message.take(choice.get("delta") or {})
        tokens = (choice.get("logprobs") or {}).get("content") or ()
        self.logprobs += [token["logprob"] for token in tokens]
        self.versions.reach(len(self.logprobs), version)
        if choice.get("finish_reason") is not None:
            self.finish_reason = choice["finish_reason"]
            self.matched = choice.get("matched_stop")
        return bool(tokens)


class StreamedAnswer(Stream):
    """A chat answer."""

    def __init__(self, asked: Asked, version: Callable[[], str | None]) -> None:
        super().__init__(asked, version)
        self._choices: dict[int, _Choice] = {}
        self._prompt: list[int] | None = None
        self._ids: list[list[int]] | None = None
        self._cached_tokens: int | None = None

    @property
    def shortfall(self) -> str | None:
        """What an engine that ended the stream in order did not tell; it would not for another stream either."""
        if self._failure is not None:
            return None
        choices = [choice for _, choice in sorted(self._choices.items())]
        if any(choice.finish_reason is None for choice in choices):
            return None
        if self._ids is None:
            return "a stream ended without the ids that it sampled"
        if any(len(choice.logprobs) < len(ids) for choice, ids in zip(choices, self._ids, strict=False)):
            return "a stream left out logprobs"
        return None

    def _take(self, chunk: Mapping[str, Any], version: str | None) -> bool:
        tokens = False
        for choice in chunk["choices"]:
            # The last chunks of several choices all have the id of one of them.
            known = self._choices.setdefault(choice["index"], _Choice(chunk.get("id")))
            tokens = known.take(choice, version) or tokens
        extra = chunk.get("sglext") or {}
        self._ids = extra.get("output_ids") or self._ids
        self._prompt = extra.get("input_ids") or self._prompt
        details = extra.get("cached_tokens_details")
        if details:
            self._cached_tokens = sum(count for count in details.values() if isinstance(count, int))
        return tokens

    def _shown(self, chunk: dict[str, Any]) -> Mapping[str, Any] | None:
        if chunk.get("sglext") is not None:
            chunk["sglext"] = self._wanted(chunk["sglext"])
            if not chunk["sglext"]:
                del chunk["sglext"]
                if not chunk["choices"] and chunk.get("usage") is None:
                    return None
        if self._asked.wants("logprobs"):
            return chunk
        stripped = False
        for choice in chunk["choices"]:
            stripped = stripped or choice.get("logprobs") is not None
            choice["logprobs"] = None
        return None if stripped and all(map(_says_nothing, chunk["choices"])) else chunk

    def _wanted(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        unwanted = {name for name, field in OF_RECORDING.items() if not self._asked.wants(field)}
        return {name: value for name, value in extra.items() if value is not None and name not in unwanted}

    def _generated(self) -> list[Generated]:
        if self._ids is None:
            raise UnusableAnswer("the worker's stream ended without the ids it sampled")
        if sorted(self._choices) != list(range(len(self._ids))):
            raise UnusableAnswer(f"the worker's stream has choices {sorted(self._choices)} and ids of {len(self._ids)}")
        return [self._generated_choice(index, self._choices[index], ids) for index, ids in enumerate(self._ids)]

    def _generated_choice(self, index: int, choice: _Choice, ids: list[int]) -> Generated:
        if choice.finish_reason is None:
            raise UnusableAnswer("the worker's stream ended without a finish reason")
        return Generated(
            index=index,
            message=choice.message.message(),
            finish_reason=choice.finish_reason,
            matched=choice.matched,
            prompt=self._prompt,
            ids=ids,
            logprobs=choice.logprobs,
            versions=choice.versions.spans,
            facts={
                "rid": choice.rid,
                "cached_tokens": self._cached_tokens,
                "first_token_at": self.first_token_at,
                "versions": "router",
            },
        )


def _says_nothing(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return choice.get("finish_reason") is None and all(value in EMPTY for value in delta.values())

"""What the engine sampled, read out of an answer of the chat endpoint: ids, logprobs, weight versions, the message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from middleware_hub.openai_session.errors import UnusableAnswer
from miles_router.trajectory import InvalidTrajectory, Piece

#: `(version, start, end)` over the sampled tokens.
Spans = Sequence[tuple[str, int, int]]
#: What reading an answer of another form raises.
MALFORMED = (KeyError, TypeError, IndexError, AttributeError, ValueError)


@dataclass
class Generated:
    """One choice of an answer."""

    index: int
    message: Mapping[str, Any]
    finish_reason: str
    matched: int | str | None
    ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Spans
    prompt: Sequence[int] | None = None  # the ids it was given, where the engine was asked to tell them
    facts: dict[str, Any] = field(default_factory=dict)

    def pieces(self) -> tuple[Piece, ...]:
        """The sampled tokens, one piece for each weight version.

        Raises:
            UnusableAnswer: the parts do not fit each other.
        """
        try:
            whole = Piece.sampled(self.ids, self.logprobs, None)
        except InvalidTrajectory as error:
            raise UnusableAnswer(f"the worker's answer cannot be recorded: {error}") from None
        if not self.versions:
            return (whole,) if len(whole) else ()
        bounds = [0, *(end for *_, end in self.versions)]
        if [start for _, start, _ in self.versions] != bounds[:-1] or bounds != sorted(bounds):
            raise UnusableAnswer("the worker's weight versions leave gaps or overlap")
        if bounds[-1] != len(whole):
            raise UnusableAnswer("the worker's weight versions do not cover what it sampled")
        return tuple(
            Piece(part.tokens, part.logprobs, version)
            for version, start, end in self.versions
            if len(part := whole.cut(start, end))
        )


def chat_choice(choice: Mapping[str, Any]) -> Generated:
    """One choice of a whole answer that has `meta_info`.

    Raises:
        UnusableAnswer: it has not what recording needs.
    """
    try:
        meta, finish_reason = choice["meta_info"], choice["finish_reason"]
        if not isinstance(finish_reason, str):
            raise UnusableAnswer("the worker's answer has no finish reason")
        triples = meta["output_token_logprobs"]
        if len(triples) != meta["completion_tokens"]:
            raise UnusableAnswer(f"{meta['completion_tokens']} tokens have {len(triples)} logprobs")
        finish = meta.get("finish_reason") or {}
        return Generated(
            index=choice["index"],
            message=_checked(choice["message"]),
            finish_reason=finish_reason,
            matched=finish.get("matched", choice.get("matched_stop")),
            ids=[triple[1] for triple in triples],
            logprobs=[triple[0] for triple in triples],
            versions=spans_of(meta, len(triples)),
            prompt=choice.get("prompt_token_ids"),
            facts={
                "rid": meta.get("id"),
                "cached_tokens": meta.get("cached_tokens"),
                "retractions": meta.get("num_retractions"),
                "versions": "engine",
            },
        )
    except MALFORMED as error:
        raise UnusableAnswer(f"the worker's answer lacks what recording needs: {error!r}") from None


def _checked(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose calls say what they call: only such a one can be continued."""
    for call in message.get("tool_calls") or ():
        if not isinstance(call["function"]["name"], str):
            raise TypeError("a tool call that names no function")
    return dict(message)


def spans_of(meta: Mapping[str, Any], length: int) -> Spans:
    """The weight versions of `length` sampled tokens, as the engine tells them; none if it tells none."""
    spans = meta.get("weight_versions")
    if spans:
        return [(str(span["version"]), span["start"], span["end"]) for span in spans]
    version = meta.get("weight_version")
    return [(str(version), 0, length)] if version is not None else []


class GrowingMessage:
    """An assistant message put together from a stream's deltas."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}

    def take(self, delta: Mapping[str, Any]) -> None:
        """One delta more."""
        if delta.get("content"):
            self._content.append(delta["content"])
        if delta.get("reasoning_content"):
            self._reasoning.append(delta["reasoning_content"])
        for piece in delta.get("tool_calls") or ():
            self._take_call(piece)

    def _take_call(self, piece: Mapping[str, Any]) -> None:
        call = self._calls.setdefault(
            piece.get("index") or 0, {"id": None, "type": "function", "name": None, "parts": []}
        )
        function = piece.get("function") or {}
        call["id"] = piece.get("id") or call["id"]
        call["name"] = function.get("name") or call["name"]
        if function.get("arguments"):
            call["parts"].append(function["arguments"])

    def message(self) -> dict[str, Any]:
        """As the whole answer would have it. Raises one of `MALFORMED` where the deltas make none."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._content)}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {"name": call["name"], "arguments": "".join(call["parts"])},
                }
                for _, call in sorted(self._calls.items())
            ]
        return _checked(message)

"""Turns on engines whose chat takes or tells no ids: their prompts are rendered here and their answers are read here.

The engine is asked for raw chat by ids, which its folder makes a request of `/generate`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from middleware_hub.openai_session.sessions.agent_request import AgentRequest
from middleware_hub.openai_session.sessions.messages import only_text
from miles_router.engines.answers import UnreadableAnswer
from miles_router.engines.facts import Facts
from miles_router.engines.openai.chat_stream import GrowingMessage
from miles_router.engines.openai.held_deltas import OWN_ENDS
from miles_router.engines.openai.legs import RAW, keeps_special, tools_of
from miles_router.engines.openai.text_reader import LiveText, TextReader
from miles_router.engines.openai.unfinished import with_unfinished
from miles_router.engines.parsers import Parsers, reasoning_marks
from miles_router.trajectory.pieces import Tokens

logger = logging.getLogger(__name__)

#: Ids at the end of a prompt that may spell the beginning of reasoning.
TAIL = 16
NO_DELTA: Mapping[str, Any] = {"reasoning_content": None}


def obstacle(request: AgentRequest, fields: Mapping[str, Any], reader: TextReader) -> str | None:
    """Return what of a request cannot be rendered or read here; None where all can."""
    if request.prompt is None and not only_text(fields["messages"]):
        return "a message that is no text"
    if (parser := reader.missing) is not None:
        return f"no parser of the router's reads what {parser} reads"
    tools = tools_of(fields)
    if tools and fields.get("tool_choice") not in (None, "auto"):
        return "tool_choice other than auto and none needs the engine's own grammar"
    if any((tool.get("function") or {}).get("strict") for tool in tools if isinstance(tool, Mapping)):
        return "a strict tool needs the engine's own grammar"
    return None


def written_ids(ids: Tokens) -> tuple[bytes, bytes]:
    """Return ids as a list in JSON, in pieces of which the last ends it."""
    return orjson.dumps(ids, option=orjson.OPT_SERIALIZE_NUMPY)[:-1], b"]"


@dataclass(frozen=True)
class RawTurn:
    """How the answer to one request is asked raw, and read.

    Attributes:
        fields: the request as its agent made it.
        facts: of the engines that may answer.
        opened: whether the prompt begins the reasoning of the answer.
    """

    fields: Mapping[str, Any]
    parsers: Parsers
    facts: Facts
    opened: bool

    @property
    def reader(self) -> TextReader:
        """Return what reads its texts."""
        return TextReader(self.fields, self.parsers, self.facts)

    @property
    def asked(self) -> Mapping[str, Any]:
        """Return the request for the raw text."""
        return {**self.fields, **RAW, "skip_special_tokens": not keeps_special(self.fields, self.facts)}

    def whole(self, answer: dict[str, Any], *, shows_open_calls: bool) -> tuple[dict[str, Any], dict[int, str]]:
        """Return a raw answer as an engine would have given it that reads its own, and why calls stand in the content
        of some choices still, by their indices. Raises one of `MALFORMED`."""
        choices: list[dict[str, Any]] = []
        unread: dict[int, str] = {}
        for choice in answer["choices"]:
            began, finish = choice["message"], choice["finish_reason"]
            message, _, reason = self.read(began["content"] or "", began, None if not shows_open_calls else finish)
            unread |= {} if reason is None else {choice["index"]: reason}
            choices.append({**choice, "message": message, **_end(choice, message)})
        return {**answer, "choices": choices}, unread

    def read(self, text: str, began: Mapping[str, Any], finish: str | None) -> tuple[dict[str, Any], str, str | None]:
        """Read a whole text.

        Args:
            finish: why it ended, where a call that it ends within is to be shown.

        Returns:
            The message, the text that its content and calls stand in, and why calls stand in its content still, where
            they could not be read: as of an engine whose parser fails.
        """
        reader = self.reader
        try:
            message, rest = reader.read(text, began, opened=self.opened)
        except UnreadableAnswer as error:
            logger.warning("calls_not_read", extra={"fields": {"reason": str(error)}})
            return reader.message(began, "", text, ()), text, str(error)
        if finish is not None and finish not in OWN_ENDS:
            message = with_unfinished(message, text, self.fields, self.parsers, self.facts)
        return message, rest, None


def _end(choice: Mapping[str, Any], message: Mapping[str, Any]) -> dict[str, Any]:
    """Return how a choice ended whose message is this."""
    if choice["finish_reason"] != "stop" or not message.get("tool_calls"):
        return {}
    meta = choice["meta_info"]
    meta = {**meta, "finish_reason": {**meta["finish_reason"], "matched": None}}
    return {"finish_reason": "tool_calls", "matched_stop": None, "meta_info": meta}


def begins_reasoning(spelled: str, facts: Facts) -> bool:
    """Return whether a prompt that ends with this text has begun the reasoning of its answer."""
    begin, _ = reasoning_marks(facts.reasoning_parser or "")
    return bool(begin) and spelled.rstrip().endswith(begin)


class RawStream:
    """The raw chunks of a stream as an engine would have given them that reads its own."""

    def __init__(self, turn: RawTurn) -> None:
        self._turn = turn
        self._choices: dict[int, _RawChoice] = {}
        #: Why calls stand in the content of a choice, by its index.
        self.unread: dict[int, str] = {}

    def chunks(self, chunk: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the chunks that a raw one makes. Raises one of `MALFORMED`."""
        if not chunk["choices"]:
            yield chunk
        for choice in chunk["choices"]:
            for part in self._parts(choice):
                yield {**chunk, "choices": [{**choice, "finish_reason": None, "matched_stop": None, **part}]}

    def _parts(self, choice: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        growing = self._choices.get(choice["index"])
        if growing is None:
            growing = self._choices[choice["index"]] = _RawChoice(self._turn)
            yield {"delta": {"role": "assistant", "content": ""}, "logprobs": None}
        finish, logprobs = choice.get("finish_reason"), choice.get("logprobs")
        deltas: Sequence[Mapping[str, Any]]
        growing.text += (choice.get("delta") or {}).get("content") or ""
        if finish is None:
            deltas = growing.live.certain(growing.text)
        else:
            deltas, unread = growing.end(finish)
            self.unread |= {} if unread is None else {choice["index"]: unread}
        for delta in deltas or ([NO_DELTA] if logprobs else []):
            yield {"delta": delta, "logprobs": logprobs}
            logprobs = None
        if finish is not None:
            called = finish == "stop" and bool(growing.live.shown.message().get("tool_calls"))
            end = {"finish_reason": "tool_calls", "matched_stop": None} if called else {"finish_reason": finish}
            yield {"delta": NO_DELTA, "logprobs": None, "matched_stop": choice.get("matched_stop"), **end}


class _RawChoice:
    def __init__(self, turn: RawTurn) -> None:
        self._turn = turn
        self.text = ""
        self.live = LiveText(turn.reader.growing(opened=turn.opened), GrowingMessage())

    def end(self, finish: str) -> tuple[Sequence[Mapping[str, Any]], str | None]:
        """Return the deltas that were not shown, and why calls could not be read."""
        message, rest, unread = self._turn.read(self.text, {}, finish)
        try:
            return self.live.behind(message, rest), unread
        except UnreadableAnswer as error:
            return [], unread or str(error)

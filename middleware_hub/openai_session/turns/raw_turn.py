"""Turns on engines whose chat endpoint takes or returns no ids: the router renders the prompt and parses the answer.

The router sends a chat request with `input_ids`; the engine's folder in `engines/` translates it to `/generate`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from middleware_hub.openai_session.sessions.messages import only_text
from middleware_hub.openai_session.sessions.session import AgentRequest
from miles_router.engines.answers import UnreadableAnswer
from miles_router.engines.facts import Facts
from miles_router.engines.openai.chat import CONTINUES_FINAL, tools_of
from miles_router.engines.openai.chat_parts import RAW, keeps_special
from miles_router.engines.openai.chat_stream import GrowingMessage
from miles_router.engines.openai.held_deltas import OWN_ENDS
from miles_router.engines.openai.text_reader import LiveText, TextReader
from miles_router.engines.openai.unfinished import with_unfinished
from miles_router.engines.openai.unshown import NOT_IN_TEXT
from miles_router.engines.parsers import Parsers, reasoning_marks
from miles_router.errors import BadRequest
from miles_router.trajectory.pieces import Tokens

logger = logging.getLogger(__name__)

MAX_ID = 1 << 31
#: The number of tokens at the end of a prompt in which the start of reasoning is searched.
TAIL = 16
NO_DELTA: Mapping[str, Any] = {"reasoning_content": None}


def check_fields(fields: Mapping[str, Any]) -> None:
    """Check the fields that an engine would check if it rendered the prompt and parsed the answer.

    Raises:
        BadRequest: a field is invalid.
    """
    tools = fields.get("tools")
    functions = [each.get("function") if isinstance(each, Mapping) else None for each in tools or ()]
    if not isinstance(tools, list | None) or not all(isinstance(each, Mapping) for each in functions):
        raise BadRequest("tools must be a list of objects with a function")
    for name in ("chat_template_kwargs", "response_format"):
        if not isinstance(fields.get(name), Mapping | None):
            raise BadRequest(f"{name} must be an object")
    ids = fields.get("input_ids")
    if ids is not None and not (
        isinstance(ids, list) and all(type(each) is int and 0 <= each < MAX_ID for each in ids)
    ):
        raise BadRequest("input_ids must be a list of token ids")


def obstacle(request: AgentRequest, fields: Mapping[str, Any], reader: TextReader) -> str | None:
    """Return why the router cannot render the request or parse its answer; None if it can."""
    if request.prompt is None and not only_text(fields["messages"]):
        return "the router renders text only, and a message has a part that is not text"
    if (parser := reader.missing) is not None:
        return f"the router has no parser for {parser}"
    tools = tools_of(fields)
    if tools and fields.get("tool_choice") not in (None, "auto"):
        return "tool_choice other than auto and none needs the engine's own grammar"
    if any((tool.get("function") or {}).get("strict") for tool in tools if isinstance(tool, Mapping)):
        return "a strict tool needs the engine's own grammar"
    return None


def written_ids(ids: Tokens) -> tuple[bytes, bytes]:
    """Return ids as a JSON list in two pieces, the second being the closing bracket."""
    return orjson.dumps(ids, option=orjson.OPT_SERIALIZE_NUMPY)[:-1], b"]"


@dataclass(frozen=True)
class RawTurn:
    """One turn whose answer the router parses.

    Attributes:
        fields: the agent's request.
        facts: the facts of an engine that may answer; they name the parsers to use.
        opened: whether the prompt ends with the start of reasoning.
        prompt: the prompt ids of a root; None for a turn that extends a parent.
    """

    fields: Mapping[str, Any]
    parsers: Parsers
    facts: Facts
    opened: bool
    prompt: Sequence[int] | None = None

    @classmethod
    def from_prompt(
        cls,
        given: Tokens,
        fields: Mapping[str, Any],
        parsers: Parsers,
        facts: Facts,
        decode: Callable[..., str],
        *,
        root: bool,
    ) -> RawTurn:
        """Return the turn whose prompt ends with these ids; for a root they must be the whole prompt."""
        opened = begins_reasoning(given, fields, facts, decode)
        return cls(fields, parsers, facts, opened, given.tolist() if root else None)

    @property
    def reader(self) -> TextReader:
        """The parser of this turn's texts."""
        return TextReader(self.fields, self.parsers, self.facts)

    @property
    def engine_fields(self) -> Mapping[str, Any]:
        """The request to the engine, with the engine's parsers turned off."""
        rendered = {name: value for name, value in self.fields.items() if name != CONTINUES_FINAL}
        return {**rendered, **RAW, "skip_special_tokens": not keeps_special(self.fields, self.facts)}

    def parse_answer(self, answer: dict[str, Any], *, shows_open_calls: bool) -> tuple[dict[str, Any], dict[int, str]]:
        """Parse the text of every choice.

        Args:
            shows_open_calls: whether an unfinished tool call stays in the message.

        Returns:
            The answer with parsed messages, and by choice index the reason why its tool calls could not be parsed.

        Raises:
            One of `MALFORMED`.
        """
        choices: list[dict[str, Any]] = []
        unread: dict[int, str] = {}
        for choice in answer["choices"]:
            began, finish = choice["message"], choice["finish_reason"]
            message, _, reason = self.parse(began["content"] or "", began, None if not shows_open_calls else finish)
            unread |= {} if reason is None else {choice["index"]: reason}
            choices.append({**choice, "message": message, **_end(choice, message)})
        return {**answer, "choices": choices}, unread

    def parse(self, text: str, began: Mapping[str, Any], finish: str | None) -> tuple[dict[str, Any], str, str | None]:
        """Parse a whole text.

        Args:
            began: fields of the message that are kept.
            finish: the finish reason; None to leave out an unfinished tool call.

        Returns:
            The message, the text behind the reasoning, and the reason why the text could not be parsed (None if it
            could). Unparsed text is the message's content.
        """
        reader = self.reader
        try:
            message, rest = reader.read(text, began, opened=self.opened)
        except UnreadableAnswer as error:
            logger.warning("tool_calls_not_parsed", extra={"fields": {"reason": str(error)}})
            return reader.message(began, "", text, ()), text, str(error)
        if finish is not None and finish not in OWN_ENDS:
            message = with_unfinished(message, text, self.fields, self.parsers, self.facts)
        return message, rest, None


def _end(choice: Mapping[str, Any], message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a choice that a parsed tool call changes."""
    if choice["finish_reason"] != "stop" or not message.get("tool_calls"):
        return {}
    meta = choice["meta_info"]
    meta = {**meta, "finish_reason": {**meta["finish_reason"], "matched": None}}
    return {"finish_reason": "tool_calls", "matched_stop": None, "meta_info": meta}


def begins_reasoning(ids: Tokens, fields: Mapping[str, Any], facts: Facts, decode: Callable[..., str]) -> bool:
    """Return True if reasoning is open at the end of a prompt with these last ids.

    If the request continues its last assistant message, that message decides instead.
    """
    begin, end = reasoning_marks(facts.reasoning_parser or "")
    if not begin:
        return False
    if fields.get(CONTINUES_FINAL):
        begun = str(fields["messages"][-1].get("content") or "")
        return begun.rfind(begin) > begun.rfind(end)
    return decode(ids[-TAIL:].tolist(), skip_special_tokens=False).rstrip().endswith(begin)


class RawStream:
    """A parser of the chunks of one stream."""

    def __init__(self, turn: RawTurn) -> None:
        self.prompt = turn.prompt
        self._turn = turn
        self._choices: dict[int, _RawChoice] = {}
        #: Why the text of a choice could not be parsed, by its index.
        self.unread: dict[int, str] = {}

    def text(self, index: int) -> str:
        """Return the text of a choice so far."""
        choice = self._choices.get(index)
        return "" if choice is None else choice.text

    def chunks(self, chunk: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the parsed chunks for one chunk. Raises one of `MALFORMED`."""
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
            deltas = growing.live.new_deltas(growing.text)
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
        """Return the remaining deltas, and why the text could not be parsed; None if it could."""
        deltas = self.live.new_deltas(self.text, at_once=True)  # even if the whole text parses otherwise
        message, rest, unread = self._turn.parse(self.text, {}, finish)
        if len(self.live.shown.message().get("tool_calls") or ()) > len(message.get("tool_calls") or ()):
            return deltas, unread or NOT_IN_TEXT
        try:
            return [*deltas, *self.live.remaining_deltas(message, rest)], unread
        except UnreadableAnswer as error:
            return deltas, unread or str(error)

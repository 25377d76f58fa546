"""The response object around an answer, and the responses that a session stores.

A stored response is its turn in the session's tree, and the settings of its request. No text is stored twice; responses
with equal settings share them.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from middleware_hub.openai_session.agent_apis.responses.items import RESPONSE, ItemWriter, input_items, text_of
from middleware_hub.openai_session.agent_apis.responses.tools import ResponsesTools
from middleware_hub.openai_session.sessions.messages import Message, message_bytes
from middleware_hub.openai_session.sessions.session import Session
from middleware_hub.openai_session.sessions.turn import Turn

#: The key of the session's `notes`.
NOTE = "responses"
#: Approximate memory of a response without its settings, and of each call in it.
ENVELOPE_BYTES, CALL_BYTES = 1024, 256
#: How many recent settings a new request is compared with: the settings of the agent and of its side calls.
MAX_ALIKE = 8
#: The separator between instructions and other system texts.
JOINT = "\n\n"
#: By the engine's finish reason: the response's status, and the reason of `incomplete_details`.
STATUS: Mapping[str, tuple[str, str | None]] = {
    "stop": ("completed", None),
    "tool_calls": ("completed", None),
    "length": ("incomplete", "max_output_tokens"),
    "content_filter": ("incomplete", "content_filter"),
}
CUT = {"code": "server_error", "message": "The engine cut the answer off."}


@dataclass(frozen=True)
class Settings:
    """The settings of a request, as its response repeats them, and its tools."""

    fields: Mapping[str, Any]
    tools: ResponsesTools

    @property
    def nbytes(self) -> int:
        return message_bytes(self.fields) + message_bytes(self.tools.shown)


def new_id() -> str:
    return RESPONSE + secrets.token_hex(16)


@dataclass
class Envelope:
    """One response without its output.

    Attributes:
        own: fields that are not shared with other responses: metadata, and the id of the previous response.
        seals: whether reasoning items also have `encrypted_content`.
        usage: in this API's format; None until the engine reports it.
        cut_call: whether the last call was not sampled to its end.
        turn: None until the turn is recorded.
    """

    id: str
    created_at: float
    settings: Settings
    own: Mapping[str, Any]
    seals: bool = False
    usage: Mapping[str, Any] | None = None
    cut_call: bool = False
    turn: Turn | None = field(default=None, repr=False)

    def writer(self) -> ItemWriter:
        return ItemWriter(self.id, self.settings.tools, seals=self.seals)

    def body(self, output: Sequence[Mapping[str, Any]], finish: str | None = None) -> dict[str, Any]:
        """Return the response with this output. Without `finish`, the engine's finish reason, it is in progress."""
        status, reason = ("in_progress", None) if finish is None else STATUS.get(finish, ("failed", None))
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created_at,
            "status": status,
            "background": False,
            "error": CUT if status == "failed" else None,
            "incomplete_details": None if reason is None else {"reason": reason},
            **self.settings.fields,
            **self.own,
            "tools": self.settings.tools.given,
            "output": output,
            "usage": self.usage,
        }

    def finished_with(self, message: Message, finish: str) -> dict[str, Any]:
        """Return the finished response with the items of a chat message."""
        item_status = "completed" if STATUS.get(finish, ("", None))[0] == "completed" else "incomplete"
        return self.body(self.writer().answer(message, item_status, cut_call=self.cut_call), finish)

    def finished(self) -> dict[str, Any]:
        """Return the finished response, from its recorded turn."""
        return self.finished_with(self._turn.answer, self._turn.finish_reason)

    def history(self) -> list[Message]:
        """Return all messages up to the answer, without the instructions: a next response does not inherit them."""
        return [*self._given_messages(), self._turn.answer]

    def input(self) -> Iterator[dict[str, Any]]:
        """Yield the items of the response's input."""
        return input_items(self.id[len(RESPONSE) :], self._given_messages(), self.settings.tools)

    @property
    def _turn(self) -> Turn:
        assert self.turn is not None
        return self.turn

    def _given_messages(self) -> list[Message]:
        messages = [message for turn in self._turn.line() for message in (*turn.appended, turn.answer)][:-1]
        instructions = self.settings.fields["instructions"]
        if not instructions or not messages:
            return messages
        first, *rest = messages
        text = text_of(first)
        others = text[len(instructions) :].removeprefix(JOINT) if text.startswith(instructions) else ""
        return [{**first, "content": others}, *rest] if others else rest


class Responses:
    """The responses of one session."""

    def __init__(self) -> None:
        self._stored: dict[str, Envelope] = {}
        self._settings: list[Settings] = []  # the most recent different ones
        self._answers: dict[str, Message] = {}  # by response id, stored or not
        self._calls: dict[str, list[tuple[str, Message]]] = {}  # by call id: response id and call
        self._thinkers: dict[bytes, list[str]] = {}  # response ids, by the digest of their reasoning

    @classmethod
    def of(cls, session: Session) -> Responses:
        responses: Responses = session.notes.setdefault(NOTE, cls())
        return responses

    def settings(self, fields: Mapping[str, Any]) -> Settings:
        """Return the settings with these fields. A recent request's object is shared if its fields are equal.

        Raises:
            InvalidParameter: a tool is invalid.
        """
        for each in reversed(self._settings):
            if each.fields == fields:
                return each
        return Settings(fields, ResponsesTools(fields["tools"], began=bool(self._answers)))

    def keep(self, envelope: Envelope, turn: Turn, *, stored: bool) -> int:
        """Add the response of a recorded turn; return the bytes of memory that it takes.

        Args:
            stored: whether clients may read it and continue it by its id.
        """
        calls = turn.answer.get("tool_calls") or ()
        nbytes = ENVELOPE_BYTES + CALL_BYTES * len(calls) + message_bytes(envelope.own)
        envelope.turn = turn
        self.index_answer(envelope.id, turn)
        if stored:
            self._stored[envelope.id] = envelope
        if not any(each is envelope.settings for each in self._settings):
            self._settings = [*self._settings[1 - MAX_ALIKE :], envelope.settings]
            nbytes += envelope.settings.nbytes
        return nbytes

    def index_answer(self, response_id: str, turn: Turn) -> None:
        """Index the answer of a response, so that returned items are matched with it."""
        self._answers[response_id] = turn.answer
        for call in turn.answer.get("tool_calls") or ():
            self._calls.setdefault(str(call.get("id")), []).append((response_id, call))
        if thought := _stripped(turn.answer.get("reasoning_content")):
            self._thinkers.setdefault(_digest(thought), []).append(response_id)

    @property
    def stored(self) -> Set[str]:
        """The ids of the stored responses."""
        return self._stored.keys()

    def find(self, response_id: object) -> Envelope | None:
        """Return the stored response with this id, or None."""
        return self._stored.get(response_id) if isinstance(response_id, str) else None

    def forget(self, response_id: str) -> None:
        """Delete a stored response. Its turn stays."""
        self._stored.pop(response_id, None)

    def answer(self, response_id: str | None) -> Message | None:
        """Return the answer of a response, stored or not; None for an unknown id."""
        return self._answers.get(response_id) if response_id is not None else None

    def calls(self, call_id: str) -> Sequence[tuple[str, Message]]:
        """Return the recorded calls with this id, each with the id of its response."""
        return self._calls.get(call_id, ())

    def find_by_reasoning(self, text: str) -> Sequence[str]:
        """Return the ids of the responses whose reasoning is this text, apart from white space around it."""
        return self._thinkers.get(_digest(text.strip()), ()) if self._thinkers else ()


def _stripped(text: object) -> str:
    return text.strip() if isinstance(text, str) else ""


def _digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()

"""What stands around an answer: the response as an object, and those that a session keeps.

A response that is kept is its turn in the session's tree and what its request asked for beside messages. No text of it
is held twice; requests that ask for the same share that.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from middleware_hub.openai_session.faces.responses.items import RESPONSE, ItemWriter, input_items, text_of
from middleware_hub.openai_session.faces.responses.tools import ResponsesTools
from middleware_hub.openai_session.sessions.messages import Message, message_bytes
from middleware_hub.openai_session.sessions.session import Session
from middleware_hub.openai_session.sessions.turn import Turn

#: Under which a session remembers its responses.
NOTE = "responses"
#: What a response takes beside its settings, and each call in it, about.
ENVELOPE_BYTES, CALL_BYTES = 1024, 256
#: How many settings a new request is compared with: those of an agent and of its side calls.
MAX_ALIKE = 8
#: Between instructions and what else a system says.
JOINT = "\n\n"
#: Why an answer ended: the response's status, and the reason why it is not complete.
STATUS: Mapping[str, tuple[str, str | None]] = {
    "stop": ("completed", None),
    "tool_calls": ("completed", None),
    "length": ("incomplete", "max_output_tokens"),
    "content_filter": ("incomplete", "content_filter"),
}
CUT = {"code": "server_error", "message": "The engine cut the answer off."}


@dataclass(frozen=True)
class Settings:
    """What a request asks for beside its messages, as its response says it again, and its tools."""

    fields: Mapping[str, Any]
    tools: ResponsesTools

    @property
    def nbytes(self) -> int:
        """The memory that they take."""
        return message_bytes(self.fields) + message_bytes(self.tools.shown)


def new_id() -> str:
    """An id for a response."""
    return RESPONSE + secrets.token_hex(16)


@dataclass
class Envelope:
    """One response, but for its output.

    Attributes:
        own: what of it is no other's: metadata, and the response before.
        seals: whether reasoning is given encrypted, too.
        usage: as the API tells it, once the engine has said it.
        cut_call: whether its last call was not sampled to its end.
        turn: None until it is recorded.
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
        """What its items are written with."""
        return ItemWriter(self.id, self.settings.tools, seals=self.seals)

    def body(self, output: Sequence[Mapping[str, Any]], finish: str | None = None) -> dict[str, Any]:
        """The response as it is with this output, and once it has ended, for this reason."""
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

    def whole(self, said: Message, finish: str) -> dict[str, Any]:
        """The response with all that was said."""
        item_status = "completed" if STATUS.get(finish, ("", None))[0] == "completed" else "incomplete"
        return self.body(self.writer().answer(said, item_status, cut_call=self.cut_call), finish)

    def written(self) -> dict[str, Any]:
        """The response, from its turn."""
        return self.whole(self._turn.answer, self._turn.finish_reason)

    def history(self) -> list[Message]:
        """What its model was given and has said, but for instructions: they are not carried over."""
        return [*self._given(), self._turn.answer]

    def input(self) -> Iterator[dict[str, Any]]:
        """The items of its input."""
        return input_items(self.id[len(RESPONSE) :], self._given(), self.settings.tools)

    @property
    def _turn(self) -> Turn:
        assert self.turn is not None
        return self.turn

    def _given(self) -> list[Message]:
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
        self._settings: list[Settings] = []  # the last ones that differ
        self._answers: dict[str, Message] = {}  # of every response, stored or not
        self._calls: dict[str, list[tuple[str, Message]]] = {}  # by their ids, with the response that each is of
        self._thinkers: dict[bytes, list[str]] = {}  # responses, by the digest of their reasoning

    @classmethod
    def of(cls, session: Session) -> Responses:
        """Those of a session."""
        responses: Responses = session.notes.setdefault(NOTE, cls())
        return responses

    def settings(self, fields: Mapping[str, Any]) -> Settings:
        """Settings with these fields: those of an earlier response that asked for the same.

        Raises:
            InvalidParameter: a tool is none.
        """
        for each in reversed(self._settings):
            if each.fields == fields:
                return each
        return Settings(fields, ResponsesTools(fields["tools"], began=bool(self._answers)))

    def keep(self, envelope: Envelope, turn: Turn, *, stored: bool) -> int:
        """Remember a response that was recorded; gives the bytes that this takes."""
        calls = turn.answer.get("tool_calls") or ()
        nbytes = ENVELOPE_BYTES + CALL_BYTES * len(calls) + message_bytes(envelope.own)
        envelope.turn = turn
        self.know(envelope.id, turn)
        if stored:
            self._stored[envelope.id] = envelope
        if not any(each is envelope.settings for each in self._settings):
            self._settings = [*self._settings[1 - MAX_ALIKE :], envelope.settings]
            nbytes += envelope.settings.nbytes
        return nbytes

    def know(self, response_id: str, turn: Turn) -> None:
        """What the model said in a response, stored or not."""
        self._answers[response_id] = turn.answer
        for call in turn.answer.get("tool_calls") or ():
            self._calls.setdefault(str(call.get("id")), []).append((response_id, call))
        if thought := _stripped(turn.answer.get("reasoning_content")):
            self._thinkers.setdefault(_digest(thought), []).append(response_id)

    @property
    def stored(self) -> Set[str]:
        """The ids of those that are stored."""
        return self._stored.keys()

    def find(self, response_id: object) -> Envelope | None:
        """The stored response with this id."""
        return self._stored.get(response_id) if isinstance(response_id, str) else None

    def forget(self, response_id: str) -> None:
        """Delete a response. Its turn stays."""
        self._stored.pop(response_id, None)

    def answer(self, response_id: str | None) -> Message | None:
        """What the model said in a response, stored or not."""
        return self._answers.get(response_id) if response_id is not None else None

    def calls(self, call_id: str) -> Sequence[tuple[str, Message]]:
        """The held calls with this id, and the response that each is of."""
        return self._calls.get(call_id, ())

    def thinkers(self, text: str) -> Sequence[str]:
        """Return the responses whose reasoning this is, but for white space around it."""
        return self._thinkers.get(_digest(text.strip()), ())


def _stripped(text: object) -> str:
    return text.strip() if isinstance(text, str) else ""


def _digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()

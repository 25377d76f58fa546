"""What the recorded answers of a session say: which of them a history holds, and to which conversation it belongs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

import orjson

from middleware_hub.openai_session.sessions.equality import words_of
from middleware_hub.openai_session.sessions.messages import Message, function_of

if TYPE_CHECKING:
    from middleware_hub.openai_session.sessions.history import SessionHistory
    from middleware_hub.openai_session.sessions.turn import Turn


class RecordedAnswers:
    """The answers of turns, by digest. They are read when a history with answers begins a segment, which is rare.
    Questions come in the order of turns: `before` is the number of the first turn that does not count.
    """

    def __init__(self) -> None:
        self._conversations: dict[bytes, tuple[Turn, ...]] = {}
        self._read = 0  # turns

    def have(self, answers: Sequence[Message], history: SessionHistory, before: int) -> bool:
        """Return whether each of these is what an answer that was recorded says."""
        known = self._known(history, before)
        return all(said in known for said in map(_says, answers))

    def conversation(self, answers: Sequence[Message], history: SessionHistory, before: int) -> Turn | None:
        """Return the conversation that recorded most of these answers, the latest of several; None without any."""
        if not answers:
            return None
        known = self._known(history, before)
        counts = Counter(each for said in map(_says, answers) for each in known.get(said, ()))
        return max(counts, key=lambda each: (counts[each], each.number), default=None)

    def clear(self) -> None:
        """Forget all of them."""
        self._conversations.clear()

    def _known(self, history: SessionHistory, before: int) -> dict[bytes, tuple[Turn, ...]]:
        for turn in history.turns[self._read : before]:
            conversation = history.classify(turn).conversation
            said = _says(turn.answer)
            known = self._conversations.get(said, ())
            if conversation not in known:
                self._conversations[said] = (*known, conversation)
        self._read = max(self._read, before)
        return self._conversations


def _says(answer: Message) -> bytes:
    """A digest of what an answer says: its text, and the names of the functions it calls. Unlike an equality it needs
    no other message, and it does not see what agents' libraries write anew."""
    calls = answer.get("tool_calls")
    names = [function_of(call).get("name") for call in calls] if isinstance(calls, list) else []
    return blake2b(orjson.dumps([words_of(answer), names]), digest_size=16).digest()

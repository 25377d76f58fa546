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
    from middleware_hub.openai_session.sessions.tree import Turn


class RecordedAnswers:
    """The answers of turns, by digest. They are read when a history with answers begins a segment, which is rare."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._turns = turns
        self._conversations: dict[bytes, set[Turn]] = {}
        self._read = 0  # turns

    def have(self, answers: Sequence[Message]) -> bool:
        """Return whether each of these is what an answer that was recorded says."""
        return not answers or all(said in self._known() for said in map(_says, answers))

    def conversation(self, answers: Sequence[Message]) -> Turn | None:
        """Return the conversation that recorded most of these answers, the latest of several; None without any."""
        if not answers:
            return None
        known = self._known()
        counts = Counter(each for said in map(_says, answers) for each in known.get(said, ()))
        return max(counts, key=lambda each: (counts[each], each.number), default=None)

    def clear(self) -> None:
        """Forget all of them."""
        self._conversations.clear()

    def _known(self) -> dict[bytes, set[Turn]]:
        for turn in self._turns[self._read :]:
            self._conversations.setdefault(_says(turn.answer), set()).add(turn.conversation)
        self._read = len(self._turns)
        return self._conversations


def _says(answer: Message) -> bytes:
    """A digest of what an answer says: its text, and the names of the functions it calls. Unlike an equality it needs
    no other message, and it does not see what agents' libraries write anew."""
    calls = answer.get("tool_calls")
    names = [function_of(call).get("name") for call in calls] if isinstance(calls, list) else []
    return blake2b(orjson.dumps([words_of(answer), names]), digest_size=16).digest()

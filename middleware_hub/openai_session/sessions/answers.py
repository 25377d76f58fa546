"""An index over the recorded answers of one session: which answers of a request are recorded, and where."""

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
    """The answers of a session's turns, by digest.

    The index grows only when a root brings answers in its messages, which is rare. Callers must ask in the order of
    turns: only turns with a number below `before` count.
    """

    def __init__(self) -> None:
        self._conversations: dict[bytes, tuple[Turn, ...]] = {}
        self._read = 0  # turns in the index

    def have(self, answers: Sequence[Message], history: SessionHistory, before: int) -> bool:
        """Return True if every one of these messages has the same text and calls as a recorded answer."""
        known = self._known(history, before)
        return all(said in known for said in map(_says, answers))

    def conversation(self, answers: Sequence[Message], history: SessionHistory, before: int) -> Turn | None:
        """Return the root of the conversation with most of these answers; None if no conversation has any.

        Of several with equally many answers, the latest wins.
        """
        if not answers:
            return None
        known = self._known(history, before)
        counts = Counter(each for said in map(_says, answers) for each in known.get(said, ()))
        return max(counts, key=lambda each: (counts[each], each.number), default=None)

    def clear(self) -> None:
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
    """Return a digest of an answer's text and of the names of the functions it calls.

    The digest is the same for every spelling that agent libraries use, and needs no second message to compare with.
    """
    calls = answer.get("tool_calls")
    names = [function_of(call).get("name") for call in calls] if isinstance(calls, list) else []
    return blake2b(orjson.dumps([words_of(answer), names]), digest_size=16).digest()

"""An index over the recorded answers of one session: which answers of a request are recorded, and where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING

import orjson

from middleware_hub.openai_session.sessions.equality import compact_text
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
        self._indexed = 0  # turns in the index

    def contains_all(self, answers: Sequence[Message], history: SessionHistory, before: int) -> bool:
        """Return True if every one of these messages has the same text and calls as a recorded answer."""
        index = self._index(history, before)
        return all(digest in index for digest in map(_digest, answers))

    def find_conversation(self, answers: Sequence[Message], history: SessionHistory, before: int) -> Turn | None:
        """Return the root of the conversation with most of these answers; None if no conversation has any.

        Of several with equally many answers, the latest wins.
        """
        if not answers:
            return None
        index = self._index(history, before)
        counts = Counter(each for digest in map(_digest, answers) for each in index.get(digest, ()))
        return max(counts, key=lambda each: (counts[each], each.number), default=None)

    def clear(self) -> None:
        self._conversations.clear()

    def _index(self, history: SessionHistory, before: int) -> dict[bytes, tuple[Turn, ...]]:
        for turn in history.turns[self._indexed : before]:
            conversation = history.classify(turn).conversation
            digest = _digest(turn.answer)
            roots = self._conversations.get(digest, ())
            if conversation not in roots:
                self._conversations[digest] = (*roots, conversation)
        self._indexed = max(self._indexed, before)
        return self._conversations


def _digest(answer: Message) -> bytes:
    """Return a digest of an answer's text and of the names of the functions it calls.

    The digest is the same for every spelling that agent libraries use, and needs no second message to compare with.
    """
    calls = answer.get("tool_calls")
    names = [function_of(call).get("name") for call in calls] if isinstance(calls, list) else []
    return blake2b(orjson.dumps([compact_text(answer), names]), digest_size=16).digest()

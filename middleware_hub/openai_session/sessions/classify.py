"""The reasons why a turn branches off its session's tree, and what its agent changed.

This is a pure function of the turns recorded before, computed when the classification is first read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from middleware_hub.openai_session.sessions.edits import context_edit, message_edit
from middleware_hub.openai_session.sessions.equality import Equality
from middleware_hub.openai_session.sessions.messages import Message
from middleware_hub.openai_session.sessions.turn import Classification, Turn, shows_tools

if TYPE_CHECKING:
    from middleware_hub.openai_session.sessions.history import HistoryMatch, SessionHistory


def classify(history: SessionHistory, turn: Turn, equal: Equality, conversation: Turn | None) -> Classification:
    """Classify a turn that is neither the first root of its session nor the first child of its parent.

    Args:
        conversation: the conversation of its parent; None for a root.
    """
    branch = _Branch(history, turn, equal)
    conversation = branch.conversation() if conversation is None else conversation
    reason = branch.reason(conversation)
    return Classification(conversation, reason, branch.edit(reason), branch.first_repeated())


class _Branch:
    """A turn that is neither its parent's first child nor the session's first root."""

    def __init__(self, history: SessionHistory, turn: Turn, equal: Equality) -> None:
        self._history, self._turn, self._equal = history, turn, equal
        self._match = history.match_after(turn.parent, turn.appended, equal, before=turn.number)
        self._siblings = _earlier(turn, history.siblings(turn))
        self._roots = _earlier(turn, history.roots)
        same_request = self._match.turns_asked()
        self._repeated = [each for each in same_request if each.parent is turn.parent and each.context == turn.context]

    def first_repeated(self) -> Turn | None:
        """Return the first turn with the same request; None if this turn is the first."""
        if not self._repeated:
            return None
        return self._history.classify(self._repeated[0]).first or self._repeated[0]

    def conversation(self) -> Turn:
        """Return the root of the conversation that this root belongs to: an earlier root, or this turn."""
        kin = (root for root in self._roots if _same_conversation(root, self._turn, self._equal))
        found = next(kin, None)
        return self._history.classify(found).conversation if found is not None else self._find_rewritten() or self._turn

    def _find_rewritten(self) -> Turn | None:
        """Return the conversation whose first user message the agent rewrote; None if there is none.

        Agents append remarks to that message. The answers behind it are still the recorded ones and identify the
        conversation. A turn with a system message is not tried here: the system message identifies its conversation.
        """
        turn = self._turn
        if turn.side_call or not turn.appended or turn.appended[0].get("role") != "user":
            return None
        found = self._history.answers.find_conversation(turn.sent_answers, self._history, turn.number)
        if found is None or found.side_call or found.appended[0].get("role") != "user":
            return None
        return found if shows_tools(found.context) == shows_tools(turn.context) else None

    def reason(self, conversation: Turn) -> str:
        """Return the reason of the branch, one of `session.REASONS` or the `segment` of the turn."""
        turn = self._turn
        if turn.request != turn.number:
            return "choice"  # a further choice of the same answer (`n` above 1)
        if any(not _overlaps(turn, other) for other in self._repeated):
            return "retry"
        if turn.parent is None:
            return self._reason_of_root(conversation)
        return "parallel" if any(_overlaps(turn, other) for other in self._siblings) else "edited_history"

    def _reason_of_root(self, conversation: Turn) -> str:
        turn, messages = self._turn, self._turn.appended
        if turn.segment is not None:
            return turn.segment
        if any(other.context != turn.context for other in _compared_turns(self._match)):
            return "changed_tools"
        kin = [root for root in self._roots if self._history.classify(root).conversation is conversation]
        if not any(self._equal(root.appended[0], messages[0]) for root in kin) and not self._find_rewritten():
            return "sub_agent"
        if any(_overlaps(turn, other) for other in kin):
            return "parallel"
        held = (other for root in kin for other in self._history.descendants(root) if other.number < turn.number)
        longest = max(held, key=lambda other: other.messages)
        return "compaction" if longest.parent is not None and len(messages) < longest.messages else "edited_history"

    def edit(self, reason: str) -> Mapping[str, Any] | None:
        """Return the change that the agent made to the recorded history; None if the reason is not a change."""
        turn = self._turn
        if reason == "changed_tools":
            other = next(each for each in _compared_turns(self._match) if each.context != turn.context)
            return context_edit(other.context, turn.context)
        if reason in ("edited_history", "compaction"):
            count, held, sent = self._match.divergence()
            return message_edit(turn.messages - len(turn.appended) - 1 + count, held, sent)
        if reason == "sub_agent" and len(turn.appended) > 1:
            question = turn.appended[1:2]
            alike = [root for root in self._roots if _equal_messages(root.appended[1:2], question, self._equal)]
            return message_edit(0, alike[-1].appended[0], turn.appended[0]) if alike else None
        return None


def _earlier(turn: Turn, others: Sequence[Turn]) -> list[Turn]:
    return [other for other in others if other.number < turn.number]


def _compared_turns(match: HistoryMatch) -> Iterator[Turn]:
    """Yield the turns whose whole history begins this request, then the roots with exactly these messages."""
    yield from match.turns()
    yield from (turn for turn in match.turns_asked() if turn.parent is None)


def _equal_messages(held: Sequence[Message], sent: Sequence[Message], equal: Equality) -> bool:
    return len(held) == len(sent) and all(equal(one, other) for one, other in zip(held, sent, strict=True))


def _same_conversation(root: Turn, turn: Turn, equal: Equality) -> bool:
    """Return True if two roots begin the same conversation.

    They do if their first messages are equal. They also do if only the first messages differ, while the second messages
    and the tools are the same: a system message changes when it contains the date. All completions prompts count as one
    conversation, because a prompt does not identify its conversation.
    """
    one, other = root.appended, turn.appended
    if one[0].get("role") == other[0].get("role") == "prompt" or equal(one[0], other[0]):
        return True
    alike = root.context == turn.context and shows_tools(turn.context) and len(other) > 1
    return alike and _equal_messages(one[1:2], other[1:2], equal)


def _overlaps(turn: Turn, other: Turn) -> bool:
    """Return True if the request of `turn` came before `other` was answered."""
    return bool(turn.facts.get("asked_at", 0) < other.facts.get("answered_at", 0))

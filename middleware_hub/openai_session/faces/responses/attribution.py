"""Finds the recorded answers that the items of a request belong to, where their ids do not say so.

Call ids may repeat across turns (Kimi counts `bash:0`), so an item may belong to several responses. Each further item
of an answer narrows them down. A response that an earlier answer of the request was matched with is not a candidate
again: recorded answers are matched in the order of recording.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from middleware_hub.openai_session.faces.responses.envelope import Responses
from middleware_hub.openai_session.faces.responses.forms import CallForm, held_call
from middleware_hub.openai_session.faces.responses.items import text_of
from middleware_hub.openai_session.sessions.messages import Message

#: The kinds of items, in the order in which an answer contains them. A result belongs to the calls before it.
REASONING, TEXT, CALL, RESULT = range(4)
#: The most responses that an item without an id is compared with.
MAX_CANDIDATES = 64


@dataclass
class Answer:
    """One assistant message, built from consecutive items of the request.

    Attributes:
        message: the chat message, filled in after all items are read.
        of: ids of the responses that it may be; empty if nothing is known.
        reached: the kind of its last item.
    """

    message: dict[str, Any]
    of: Sequence[str] = ()
    reached: int = REASONING
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[Message] = field(default_factory=list)
    guessed: bool = False  # a text item was taken for its reasoning

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def goes_on(self, step: int, found: Sequence[str]) -> bool:
        """Return True if an item continues this answer: by the candidates of both if both have some, else by the item
        order.

        Args:
            step: the kind of the item.
            found: ids of the responses that the item may belong to.
        """
        if self.of and found:
            return not set(found).isdisjoint(self.of)
        if self.reached == RESULT:
            return False
        return bool(self.calls) or self.reached < step or self.reached == step != TEXT

    def narrow(self, found: Sequence[str]) -> None:
        """Keep only the candidates that the next item may belong to as well."""
        self.of = [each for each in self.of if each in found] if self.of and found else self.of or found

    def count(self, call_id: str) -> int:
        return sum(call.get("id") == call_id for call in self.calls)


class Attribution:
    """A matcher of the answers of one request with the responses of its session."""

    def __init__(self, responses: Responses) -> None:
        self._responses = responses
        self._settled: set[str] = set()

    def goes_on(self, answer: Answer | None, call_id: str) -> bool:
        """Return True if a call continues the answer before it. A call behind a result continues the answer only if a
        candidate has one more such call. Even then a new answer starts if the answer is complete without this call and
        another response begins with it."""
        if answer is None or answer.reached != RESULT:
            return True
        if not any(self._lacks(answer, of, call_id) for of in answer.of):
            return False
        own = self.of(answer)
        others = (of for of, _ in self._responses.calls(call_id) if of != own and of not in self._settled)
        begins = any(str(self._calls(of)[0].get("id")) == call_id for of in others)
        return not (begins and any(self._is_whole(answer, of) for of in answer.of))

    def callers(
        self, call_id: str, item: Mapping[str, Any], form: CallForm, answer: Answer | None, named: str | None
    ) -> Sequence[tuple[str, Message]]:
        """Return the responses that a call may belong to, each with its recorded call. If some recorded calls have the
        same content as the item, only those are returned.

        Args:
            named: the response that the item's id names, if any.
        """
        known = self._responses.calls(call_id)
        if named is not None:
            return [each for each in known if each[0] == named]
        own = () if answer is None else answer.of
        found = [each for each in known if answer is not None and self._lacks(answer, each[0], call_id)]
        if not found:
            others = (each for each in known if each[0] not in self._settled and each[0] not in own)
            found = [*islice(others, MAX_CANDIDATES)]
        return [each for each in found if held_call(each[1], item, form)] or found

    def _lacks(self, answer: Answer, of: str, call_id: str) -> bool:
        """Return True if response `of` is a candidate and has more calls with this id than the answer so far."""
        if of not in answer.of:
            return False
        return answer.count(call_id) < sum(str(call.get("id")) == call_id for call in self._calls(of))

    def _is_whole(self, answer: Answer, of: str) -> bool:
        return len(self._calls(of)) == len(answer.calls)

    def _calls(self, of: str) -> Sequence[Message]:
        return (self._responses.answer(of) or {}).get("tool_calls") or ()

    def thinkers(self, text: str, answer: Answer | None) -> Sequence[str]:
        """Return the responses whose reasoning equals a text; none if the answer already has its reasoning."""
        if answer is not None and answer.thoughts and answer.reached == REASONING:
            return ()
        thinkers = (each for each in self._responses.thinkers(text) if each not in self._settled)
        return [*islice(thinkers, MAX_CANDIDATES)]

    def of(self, answer: Answer) -> str | None:
        """Return the best candidate: the same number of calls, then the same text, then the earliest; None without
        candidates."""

        def unlike(of: str) -> tuple[bool, bool]:
            held = self._responses.answer(of) or {}
            return not self._is_whole(answer, of), not same_words(text_of(held), answer.text)

        return min(answer.of, key=unlike, default=None)

    def settle(self, answer: Answer) -> None:
        """Match a complete answer with one response, which is then no candidate for later answers."""
        of = self.of(answer)
        if of is not None:
            answer.of = (of,)
            self._settled.add(of)


def same_words(one: str, other: str) -> bool:
    """Return True if two texts differ in white space at most."""
    return one == other or "".join(one.split()) == "".join(other.split())

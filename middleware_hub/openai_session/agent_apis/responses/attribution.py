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

from middleware_hub.openai_session.agent_apis.responses.envelope import Responses
from middleware_hub.openai_session.agent_apis.responses.forms import CallForm, held_call
from middleware_hub.openai_session.agent_apis.responses.items import text_of
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
        candidates: ids of the responses that it may be; empty if nothing is known.
        reached: the kind of its last item.
    """

    message: dict[str, Any]
    candidates: Sequence[str] = ()
    reached: int = REASONING
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[Message] = field(default_factory=list)
    guessed: bool = False  # a text item was taken for its reasoning

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def continues(self, step: int, found: Sequence[str]) -> bool:
        """Return True if an item continues this answer: by the candidates of both if both have some, else by the item
        order.

        Args:
            step: the kind of the item.
            found: ids of the responses that the item may belong to.
        """
        if self.candidates and found:
            return not set(found).isdisjoint(self.candidates)
        if self.reached == RESULT:
            return False
        return bool(self.calls) or self.reached < step or self.reached == step != TEXT

    def narrow(self, found: Sequence[str]) -> None:
        """Keep only the candidates that the next item may belong to as well."""
        self.candidates = (
            [each for each in self.candidates if each in found]
            if self.candidates and found
            else self.candidates or found
        )

    def count(self, call_id: str) -> int:
        return sum(call.get("id") == call_id for call in self.calls)


class Attribution:
    """A matcher of the answers of one request with the responses of its session."""

    def __init__(self, responses: Responses) -> None:
        self._responses = responses
        self._settled: set[str] = set()

    def continues(self, answer: Answer | None, call_id: str) -> bool:
        """Return True if a call continues the answer before it. After a result, a call continues the answer only if a
        candidate has one more such call. Even then a new answer starts if the answer is complete without this call and
        another response begins with it."""
        if answer is None or answer.reached != RESULT:
            return True
        if not any(self._lacks(answer, each, call_id) for each in answer.candidates):
            return False
        own = self.best_match(answer)
        others = (each for each, _ in self._responses.calls(call_id) if each != own and each not in self._settled)
        begins = any(str(self._calls(each)[0].get("id")) == call_id for each in others)
        return not (begins and any(self._is_complete(answer, each) for each in answer.candidates))

    def find_callers(
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
        own = () if answer is None else answer.candidates
        found = [each for each in known if answer is not None and self._lacks(answer, each[0], call_id)]
        if not found:
            others = (each for each in known if each[0] not in self._settled and each[0] not in own)
            found = [*islice(others, MAX_CANDIDATES)]
        return [each for each in found if held_call(each[1], item, form)] or found

    def _lacks(self, answer: Answer, response_id: str, call_id: str) -> bool:
        """Return True if a response is a candidate and has more calls with this id than the answer so far."""
        if response_id not in answer.candidates:
            return False
        return answer.count(call_id) < sum(str(call.get("id")) == call_id for call in self._calls(response_id))

    def _is_complete(self, answer: Answer, response_id: str) -> bool:
        return len(self._calls(response_id)) == len(answer.calls)

    def _calls(self, response_id: str) -> Sequence[Message]:
        return (self._responses.answer(response_id) or {}).get("tool_calls") or ()

    def find_by_reasoning(self, text: str, answer: Answer | None) -> Sequence[str]:
        """Return the responses whose reasoning equals a text; none if the answer already has its reasoning."""
        if answer is not None and answer.thoughts and answer.reached == REASONING:
            return ()
        thinkers = (each for each in self._responses.find_by_reasoning(text) if each not in self._settled)
        return [*islice(thinkers, MAX_CANDIDATES)]

    def best_match(self, answer: Answer) -> str | None:
        """Return the best candidate: the same number of calls, then the same text, then the earliest; None without
        candidates."""

        def unlike(response_id: str) -> tuple[bool, bool]:
            held = self._responses.answer(response_id) or {}
            return not self._is_complete(answer, response_id), not same_words(text_of(held), answer.text)

        return min(answer.candidates, key=unlike, default=None)

    def settle(self, answer: Answer) -> None:
        """Match a complete answer with one response, which is then no candidate for later answers."""
        best = self.best_match(answer)
        if best is not None:
            answer.candidates = (best,)
            self._settled.add(best)


def same_words(one: str, other: str) -> bool:
    """Return True if two texts differ in white space at most."""
    return one == other or "".join(one.split()) == "".join(other.split())

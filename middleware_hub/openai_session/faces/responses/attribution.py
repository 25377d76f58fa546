"""Which held answers the items of a request are of, where their ids do not say it.

Call ids may be the same in several turns (Kimi counts `bash:0`), so an item may be of several responses. Each further
item of an answer leaves fewer of them. A response that an earlier answer of the request is of is not offered again:
held answers are matched in the order in which they were recorded.
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

#: The order in which an answer's items come.
REASONING, TEXT, CALL, RESULT = range(4)
#: Responses that an item without an id is compared with.
MAX_CANDIDATES = 64


@dataclass
class Answer:
    """A message of the assistant as it grows. `of`: the responses that it may be of; none if nothing is known."""

    message: dict[str, Any]
    of: Sequence[str] = ()
    reached: int = REASONING
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[Message] = field(default_factory=list)
    guessed: bool = False  # its reasoning came back as a text

    @property
    def text(self) -> str:
        """What it said."""
        return "".join(self.texts)

    def goes_on(self, step: int, found: Sequence[str]) -> bool:
        """Return whether an item is part of it: by the responses that both may be of, else by the order of items."""
        if self.of and found:
            return not set(found).isdisjoint(self.of)
        if self.reached == RESULT:
            return False
        return bool(self.calls) or self.reached < step or self.reached == step != TEXT

    def narrow(self, found: Sequence[str]) -> None:
        """Leave the responses that its next item may be of, too."""
        self.of = [each for each in self.of if each in found] if self.of and found else self.of or found

    def count(self, call_id: str) -> int:
        """Return how many of its calls have this id."""
        return sum(call.get("id") == call_id for call in self.calls)


class Attribution:
    """The responses of one session that the answers of one request may be of."""

    def __init__(self, responses: Responses) -> None:
        self._responses = responses
        self._settled: set[str] = set()

    def goes_on(self, answer: Answer | None, call_id: str) -> bool:
        """Return whether a call may be of the answer in front of it. One behind an output is where the answer lacks it,
        and either is not whole without it, or no other answer begins with it."""
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
        """Return the responses that a call may be of, with the held calls; those that hold just this call, if any."""
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
        """Whether a response that an answer may be of has one more call with this id."""
        if of not in answer.of:
            return False
        return answer.count(call_id) < sum(str(call.get("id")) == call_id for call in self._calls(of))

    def _is_whole(self, answer: Answer, of: str) -> bool:
        return len(self._calls(of)) == len(answer.calls)

    def _calls(self, of: str) -> Sequence[Message]:
        return (self._responses.answer(of) or {}).get("tool_calls") or ()

    def thinkers(self, text: str, answer: Answer | None) -> Sequence[str]:
        """Return the responses whose reasoning a text is, if it is that of an answer that begins."""
        if answer is not None and answer.thoughts and answer.reached == REASONING:
            return ()
        thinkers = (each for each in self._responses.thinkers(text) if each not in self._settled)
        return [*islice(thinkers, MAX_CANDIDATES)]

    def of(self, answer: Answer) -> str | None:
        """Return the response that an answer is of: the first of those that are most like it."""

        def unlike(of: str) -> tuple[bool, bool]:
            held = self._responses.answer(of) or {}
            return not self._is_whole(answer, of), not same_words(text_of(held), answer.text)

        return min(answer.of, key=unlike, default=None)

    def settle(self, answer: Answer) -> None:
        """Decide whose an answer is that will not grow any more."""
        of = self.of(answer)
        if of is not None:
            answer.of = (of,)
            self._settled.add(of)


def same_words(one: str, other: str) -> bool:
    """Return whether two texts are the same but for white space."""
    return one == other or "".join(one.split()) == "".join(other.split())

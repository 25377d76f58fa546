"""Measure the text that a template writes behind an answer, in a short conversation. The cost depends only on the
appended messages, not of the whole history.

    user, answer, appended messages  ──►  ...... MARKER <tail>

The marker is the answer's content, or stands in the arguments of its last tool call; then the tail begins with the rest
of that call. The tail continues with the end of the answer, the appended messages, and the prompt for the next answer.
A template may rewrite the history in front of the marker once messages are appended (reasoning removed, dates, trimmed
text). That does not matter, because the recorded ids of the history are used. Pure, except for rendering.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from middleware_hub.openai_session.continuing.templates import CannotRender, Renderer
from middleware_hub.openai_session.sessions.messages import Message
from middleware_hub.openai_session.sessions.turn import Context
from miles_router.errors import RouterError

#: No template changes this text, and no conversation contains it in front of the answer.
MARKER = "qz7answer7zq"
SYSTEM: Message = {"role": "system", "content": "qz7system7zq"}
USER: Message = {"role": "user", "content": "qz7question7zq"}


class NotAppendOnly(RouterError):
    """The messages cannot be appended to this answer exactly. The reason contains no text of theirs."""


class AnswerShape(NamedTuple):
    """The shape of an answer: id and name of each tool call, and whether it has reasoning."""

    calls: tuple[tuple[str | None, str | None], ...] = ()
    reasoning: bool = False

    def message(self, content: str = "") -> Message:
        """Return an answer of this shape, with the marker in its last call, or as its content if it has no calls."""
        message: dict[str, Any] = {"role": "assistant", "content": content if self.calls else MARKER}
        if self.reasoning:
            message["reasoning_content"] = "qz7reasoning7zq"
        if self.calls:
            last = len(self.calls) - 1
            message["tool_calls"] = [_call(place, each, place == last) for place, each in enumerate(self.calls)]
        return message


def _call(place: int, call: tuple[str | None, str | None], marked: bool) -> Mapping[str, Any]:
    call_id, name = call
    arguments = f'{{"q": "{MARKER if marked else place}"}}'
    function = {"name": name or "function", "arguments": arguments}
    return {"id": call_id or f"call_{place}", "type": "function", "function": function}


class Ending(NamedTuple):
    """The measured end of answers of one shape.

    Attributes:
        rest: the rest of the tool call, with which every tail begins; None if the end of a call cannot be separated
            from
            the end of the answer.
        with_prompt: the tail with nothing appended.
        without_prompt: the same without the prompt for another answer.
    """

    rest: str | None
    with_prompt: str
    without_prompt: str


class Endings:
    """Tails and endings of one renderer, measured in the shortest conversation that its template accepts."""

    def __init__(self, renderer: Renderer, context: Context) -> None:
        self._renderer = renderer
        self._before = self._shortest(context)

    def _shortest(self, context: Context) -> tuple[Message, ...]:
        """Return a user message; behind a system message if the template requires one.

        Raises:
            CannotRender: the template accepts neither.
        """
        try:
            self.split_at_answer(AnswerShape(), (), context, before=(USER,))
            return (USER,)
        except CannotRender:
            self.split_at_answer(AnswerShape(), (), context, before=(SYSTEM, USER))
            return SYSTEM, USER

    def measure(self, answer: AnswerShape, context: Context) -> Ending:
        """Return the ending of answers of a shape.

        Raises:
            CannotRender: the template refuses such an answer.
        """
        with_prompt, without_prompt = (
            self.tail(answer, (), context),
            self.tail(answer, (), context, generation_prompt=False),
        )
        if not answer.calls:
            return Ending("", with_prompt, without_prompt)
        plain = self.tail(AnswerShape(reasoning=answer.reasoning), (), context)
        rest = with_prompt.removesuffix(plain) if with_prompt.endswith(plain) else None
        return Ending(rest, with_prompt, without_prompt)

    def tail(
        self, answer: AnswerShape, appended: Sequence[Message], context: Context, *, generation_prompt: bool = True
    ) -> str:
        """Return the text behind an answer, with `appended` behind it.

        Raises:
            CannotRender: the template refuses the messages.
        """
        return self.split_at_answer(answer, appended, context, generation_prompt=generation_prompt)[1]

    def split_at_answer(
        self,
        answer: AnswerShape,
        appended: Sequence[Message],
        context: Context,
        *,
        before: Sequence[Message] | None = None,
        content: str = "",
        generation_prompt: bool = True,
    ) -> tuple[str, str]:
        """Return the text in front of the marker and the text behind it. The conversation is `before`, or the shortest
        one if it is None. `content` is the answer's text next to tool calls.

        Raises:
            CannotRender: the template refuses the messages, or omits the answer.
        """
        history = self._before if before is None else before
        refusal = CannotRender("the template leaves an answer out")
        for message in _answer_variants(answer, content):
            try:
                text = self._renderer.render(
                    [*history, message, *appended],
                    context.tools,
                    generation_prompt=generation_prompt,
                    template_kwargs=context.template_kwargs,
                )
            except CannotRender as error:
                refusal = error
                continue
            head, marker, tail = text.partition(MARKER)
            if marker:
                return head, tail
        raise refusal


def _answer_variants(answer: AnswerShape, content: str) -> Iterator[Message]:
    """Yield variants of an answer for different templates. Some accept no text next to calls, some require reasoning in
    every answer behind the last question, and some write no calls at all."""
    yield answer.message(content)
    if content and answer.calls:
        yield answer.message()
    if not answer.reasoning:
        yield answer._replace(reasoning=True).message(content)
    if answer.calls:
        yield answer.message(MARKER)


def strip_call_end(tail: str, ending: Ending) -> str | None:
    """Return a tail without the rest of a tool call, or None if that rest cannot be separated from the answer's end.

    Raises:
        NotAppendOnly: the tail does not begin with the rest of a call that was measured.
    """
    if ending.rest is None:
        return None
    if not tail.startswith(ending.rest):
        raise NotAppendOnly("what the template writes for a tool call depends on what follows it")
    return tail[len(ending.rest) :]


def common_start(tail: str, ending: Ending) -> str:
    """Return the common beginning of a tail and of both tails with nothing appended: the end of a call and of the
    answer."""
    tails = zip(tail, ending.with_prompt, ending.without_prompt, strict=False)
    return "".join(each[0] for each in takewhile(lambda each: each[0] == each[1] == each[2], tails))

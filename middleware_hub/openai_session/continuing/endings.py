"""What a template writes behind an answer: measured in a short conversation, so that it costs what is appended and not
what came before.

    user, answer, appended messages  ──►  ...... MARKER <tail>

The marker is the answer's content, or stands in the arguments of its last tool call; then the tail begins with the rest
of that call. The tail goes on with what ends the answer, the appended messages, and the prompt for the next answer.
History in front of the marker may be written in any other way once something is appended (reasoning left out, dates,
trimmed text): it is not looked at, because its ids are held. Pure but for the rendering.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from middleware_hub.openai_session.continuing.templates import CannotRender, Renderer
from middleware_hub.openai_session.sessions.messages import Message
from middleware_hub.openai_session.sessions.prompting import Context
from miles_router.errors import RouterError

#: No template changes it, and no conversation holds it in front of the answer.
MARKER = "qz7answer7zq"
SYSTEM: Message = {"role": "system", "content": "qz7system7zq"}
USER: Message = {"role": "user", "content": "qz7question7zq"}


class NotAppendOnly(RouterError):
    """These messages cannot be given behind this answer exactly; the reason is in words, without text of theirs."""


class AnswerShape(NamedTuple):
    """The shape of an answer: id and name of each tool call, and whether it has reasoning."""

    calls: tuple[tuple[str | None, str | None], ...] = ()
    reasoning: bool = False

    def message(self, content: str = "") -> Message:
        """An answer of this shape; its last call is marked, or its content where it has none."""
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
    """How answers of a shape end. `rest` is what every tail begins with that belongs to a tool call; None where the end
    of a call and the end of an answer are one. `asked` is the tail of nothing appended, `alone` the same without the
    prompt for another answer."""

    rest: str | None
    asked: str
    alone: str


class Endings:
    """Tails and endings of one renderer, in the shortest conversation that its template takes."""

    def __init__(self, renderer: Renderer, context: Context) -> None:
        self._renderer = renderer
        self._before = self._shortest(context)

    def _shortest(self, context: Context) -> tuple[Message, ...]:
        """Some templates may take no conversation without a system message.

        Raises:
            CannotRender: the template takes neither.
        """
        try:
            self.parts(AnswerShape(), (), context, before=(USER,))
            return (USER,)
        except CannotRender:
            self.parts(AnswerShape(), (), context, before=(SYSTEM, USER))
            return SYSTEM, USER

    def measure(self, answer: AnswerShape, context: Context) -> Ending:
        """How answers of a shape end.

        Raises:
            CannotRender: the template refuses such an answer.
        """
        asked, alone = self.tail(answer, (), context), self.tail(answer, (), context, generation_prompt=False)
        if not answer.calls:
            return Ending("", asked, alone)
        plain = self.tail(AnswerShape(reasoning=answer.reasoning), (), context)
        return Ending(asked.removesuffix(plain) if asked.endswith(plain) else None, asked, alone)

    def tail(
        self, answer: AnswerShape, appended: Sequence[Message], context: Context, *, generation_prompt: bool = True
    ) -> str:
        """What stands behind an answer, with these messages appended.

        Raises:
            CannotRender: the template refuses them.
        """
        return self.parts(answer, appended, context, generation_prompt=generation_prompt)[1]

    def parts(
        self,
        answer: AnswerShape,
        appended: Sequence[Message],
        context: Context,
        *,
        before: Sequence[Message] | None = None,
        content: str = "",
        generation_prompt: bool = True,
    ) -> tuple[str, str]:
        """The text in front of the marker and the text behind it, in the shortest conversation or behind `before`;
        `content` stands beside tool calls.

        Raises:
            CannotRender: the template refuses these messages, or leaves the answer out.
        """
        history = self._before if before is None else before
        refusal = CannotRender("the template leaves an answer out")
        for message in _spellings(answer, content):
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


def _spellings(answer: AnswerShape, content: str) -> Iterator[Message]:
    """An answer of a shape as templates want it: some take no text beside calls, some want reasoning in every answer
    behind the last question, some write no calls at all."""
    yield answer.message(content)
    if content and answer.calls:
        yield answer.message()
    if not answer.reasoning:
        yield answer._replace(reasoning=True).message(content)
    if answer.calls:
        yield answer.message(MARKER)


def behind(tail: str, ending: Ending) -> str | None:
    """A tail without the rest of a tool call; None where that cannot be told from the end of the answer.

    Raises:
        NotAppendOnly: it begins with another rest than measured.
    """
    if ending.rest is None:
        return None
    if not tail.startswith(ending.rest):
        raise NotAppendOnly("what the template writes for a tool call depends on what follows it")
    return tail[len(ending.rest) :]


def shared(tail: str, ending: Ending) -> str:
    """What a tail has in common with those of nothing appended: the end of a call and of the answer."""
    tails = zip(tail, ending.asked, ending.alone, strict=False)
    return "".join(each[0] for each in takewhile(lambda each: each[0] == each[1] == each[2], tails))

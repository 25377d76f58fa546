"""Compare recorded tokens with the tokens that the chat template writes for the same messages.

Recorded tokens are what the engine read and sampled; they are right by definition. Where the template writes something
else, a model that is served without sessions reads that instead, so trainers watch how often it happens.
`miles-tito-tokenizers` compares, and names the kinds of differences.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from middleware_hub.openai_session.continuing.templates import CannotRender, Renderer
from middleware_hub.openai_session.sessions.messages import Message


class Comparison:
    """A comparison for one model. It does no I/O and may run in a thread.

    Args:
        longest: the maximum length that is compared, in ids and in characters of the rendered text.
        skip: called for a longer sample.
    """

    def __init__(self, renderer: Renderer, *, longest: int, skip: Callable[[], None]) -> None:
        self._renderer = renderer
        self._longest = longest
        self._skip = skip

    def mismatches(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        template_kwargs: Mapping[str, Any],
        ids: Sequence[int],
    ) -> list[dict[str, Any]] | None:
        """Return each difference with its `type`. None if the library is not installed, the template refuses the
        messages, or the sample is too long: other samples wait for the same thread."""
        comparator = self._comparator
        if comparator is None:
            return None
        if len(ids) > self._longest:
            self._skip()
            return None
        try:
            text = self._renderer.render(messages, tools, generation_prompt=False, template_kwargs=template_kwargs)
        except CannotRender:
            return None
        if len(text) > self._longest:
            self._skip()
            return None
        expected = self._renderer.encode(text)
        found = comparator.compare_sequences(expected, ids, trim_trailing_ids=self._trailing_blanks(expected))
        return [each.to_dict() for each in found]

    @functools.cached_property
    def _comparator(self) -> Any:
        try:
            from miles_tito_tokenizers import TokenSeqComparator, get_tito_tokenizer
        except ImportError:
            return None
        renderer = self._renderer
        if renderer.family:
            return get_tito_tokenizer(renderer.tokenizer, renderer.family).create_comparator()
        return TokenSeqComparator(renderer.tokenizer, assistant_start_str=self._answer_prompt())

    def _answer_prompt(self) -> str | None:
        """Return the first line that the template writes in front of an answer, or None."""
        asked: list[Message] = [{"role": "user", "content": "a"}]
        try:
            texts = [
                self._renderer.render(asked, None, generation_prompt=prompt, template_kwargs={})
                for prompt in (False, True)
            ]
        except CannotRender:
            return None
        return texts[1].removeprefix(texts[0]).split("\n")[0] or None

    def _trailing_blanks(self, ids: Sequence[int]) -> set[int]:
        """Return the ids of white space at the end of a rendered conversation: the engine does not sample those."""
        end = len(ids)
        while end and not self._renderer.is_added(ids[end - 1]) and not self._renderer.spelling(ids[end - 1]).strip():
            end -= 1
        return set(ids[end:])

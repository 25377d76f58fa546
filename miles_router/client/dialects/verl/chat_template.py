"""Messages as token ids: the first prompt, and what a chat template writes after sampled ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Messages = Sequence[Mapping[str, Any]]
#: A placeholder for the model's turn: sampled tokens are never rendered or encoded again.
ANSWER = "answer"
TURN: Messages = ({"role": "user", "content": "question"}, {"role": "assistant", "content": ANSWER})


class UnusableTemplate(ValueError):
    """A chat template that changes earlier text when a message is appended, so that nothing can be appended to token
    ids."""


class ChatTemplate:
    """A tokenizer's chat template.

    Args:
        tokenizer: of `transformers`; its `apply_chat_template`, `encode` and `decode` are used.
        settings: further arguments of `apply_chat_template` (`apply_chat_template_kwargs`).
    """

    def __init__(self, tokenizer: Any, **settings: Any) -> None:
        self._tokenizer = tokenizer
        self._settings = settings

    def prompt(self, messages: Messages, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Return the token ids of a first prompt, up to the start of the model's turn."""
        return self._encode(self._render(messages, tools, begin=True))

    def continuation(
        self, messages: Messages, sampled: Sequence[int], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Return the token ids that follow `sampled`: the end of the model's turn if `sampled` lacks it, then
        `messages`, up to the start of the model's next turn.

        Raises:
            UnusableTemplate: the template changes earlier text when messages follow.
        """
        before = self._render(TURN, tools, begin=False)
        after = self._render([*TURN, *messages], tools, begin=True)
        at = before.rfind(ANSWER)
        if at < 0 or not after.startswith(before):
            raise UnusableTemplate("the chat template writes a turn differently once messages follow it")
        rest = after[at + len(ANSWER) :]
        last = self.text(sampled[-1:])
        return self._encode(rest[len(last) :] if last and rest.startswith(last) else rest)

    def text(self, ids: Sequence[int]) -> str:
        """Decode token ids, special tokens included."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False)) if ids else ""

    def _render(self, messages: Messages, tools: Sequence[Mapping[str, Any]], *, begin: bool) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                add_generation_prompt=begin,
                tokenize=False,
                **self._settings,
            )
        )

    def _encode(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=False)]

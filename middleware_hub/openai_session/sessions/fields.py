"""Fields of chat messages that SGLang drops without a word, made into those that it reads.

SGLang 0.5.23 gives a template `content` of a user's message, and of others what `ChatCompletionMessageGenericParam`
has. Other servers and libraries say more in other fields. What is text there becomes content or reasoning, and the
record of the turn names what is left.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from middleware_hub.openai_session.sessions.media import Media
from middleware_hub.openai_session.sessions.messages import Message

USER, ASSISTANT = "user", "assistant"
#: What reaches a template, and marks that say nothing to a model.
OF_A_USER = frozenset(("role", "content", "cache_control"))
OF_OTHERS = OF_A_USER | {
    *("tool_call_id", "name", "phase", "reasoning_content", "tool_calls", "tools", "prefix"),
}
#: Where clients keep what the assistant thought, the best first; SGLang reads that of the first name.
REASONING = ("reasoning_content", "reasoning", "reasoning_details", "thinking_blocks")
#: Of a block of reasoning, where its text is.
TEXTS = ("text", "thinking", "summary")
SAID = ("refusal", "audio")
FUNCTION_CALL = "function_call"
#: Names that the record of a turn has at most, and characters of each.
MOST_NAMES, LONGEST_NAME = 32, 64


class Unread:
    """The fields of one request that the model is not told of.

    Attributes:
        first: whether the request is a session's first turn, in which fields that mean much are refused.
        names: of those that are not refused, each once.
    """

    def __init__(self, *, first: bool) -> None:
        self.first = first
        self.names: list[str] = []

    def note(self, names: Iterable[str]) -> None:
        """Name fields."""
        for name in names:
            if name[:LONGEST_NAME] not in self.names and len(self.names) < MOST_NAMES:
                self.names.append(name[:LONGEST_NAME])

    @property
    def facts(self) -> dict[str, Any]:
        """What the record of a turn says of them."""
        return {"unread_fields": self.names} if self.names else {}


def readable_fields(messages: Sequence[Message], media: Media, unread: Unread) -> Sequence[Message]:
    """Return messages whose text stands in fields that SGLang reads; the same object if it does in all.

    Raises:
        BadRequest: a message has audio without a transcript, and the policy for media refuses it.
    """
    changed = [_message(message, f"messages[{place}]", media, unread) for place, message in enumerate(messages)]
    return messages if all(map(operator.is_, messages, changed)) else changed


def _message(message: Message, where: str, media: Media, unread: Unread) -> Message:
    role = message["role"].lower()
    known = OF_A_USER if role == USER else OF_OTHERS
    if message.keys() <= known:
        return message
    others = {name for name in message.keys() - known if message[name] not in (None, False, "", [], {})}
    if role == ASSISTANT and others:
        message, others = _assistant(message, others - {FUNCTION_CALL}, where, media)
    if others:
        unread.note(sorted(others))
    return message


def _assistant(message: Message, others: set[str], where: str, media: Media) -> tuple[Message, set[str]]:
    """Return an answer with its text in fields that are read, and the other fields that are left."""
    said = [text for name in SAID if name in others and (text := _said(message[name], name, where, media))]
    thought = {name: text for name in REASONING if (text := _thought(message.get(name)))}
    if not said and not thought.keys() & others:
        return message, others
    kept = {name: value for name, value in message.items() if name not in (*SAID, *thought)}
    if said:
        kept["content"] = _joined(kept.get("content"), said)
    if thought:
        kept[REASONING[0]] = next(iter(thought.values()))
    lost = {name for name, text in thought.items() if text != kept[REASONING[0]]} & others - {*REASONING[2:]}
    return kept, (others & kept.keys()) | lost


def _said(value: object, name: str, where: str, media: Media) -> str:
    if name != "audio":
        return value if isinstance(value, str) else ""
    transcript = value.get("transcript") if isinstance(value, Mapping) else None
    return transcript if isinstance(transcript, str) and transcript else media.text(name, f"{where}.{name}")


def _thought(value: object) -> str:
    """Return the text of reasoning, of which clients also keep blocks."""
    if not isinstance(value, list):
        return value if isinstance(value, str) else ""
    blocks = [block for block in value if isinstance(block, Mapping)]
    texts = (next((text for name in TEXTS if isinstance(text := block.get(name), str)), "") for block in blocks)
    return "".join(texts)


def _joined(content: Any, said: Sequence[str]) -> Any:
    if not content:
        content, said = (said[0], said[1:])
    if not said:
        return content
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    return [*parts, *({"type": "text", "text": text} for text in said)]

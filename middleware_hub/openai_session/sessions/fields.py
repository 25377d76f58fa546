"""Conversion of message fields that SGLang drops without an error into fields that it reads.

SGLang 0.5.23 passes only `content` of a user message to the chat template, and of other messages only the fields of
`ChatCompletionMessageGenericParam`. Other servers and libraries use more fields. Text in these becomes content or
reasoning; the record of the turn names the fields that remain.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from middleware_hub.openai_session.sessions.media import Media
from middleware_hub.openai_session.sessions.messages import Message

USER, ASSISTANT = "user", "assistant"
#: Fields that reach a chat template, and cache marks, which a model does not read.
OF_A_USER = frozenset(("role", "content", "cache_control"))
OF_OTHERS = OF_A_USER | {
    *("tool_call_id", "name", "phase", "reasoning_content", "tool_calls", "tools", "prefix"),
}
#: Fields in which clients keep the reasoning, the best first; SGLang reads only the first.
REASONING = ("reasoning_content", "reasoning", "reasoning_details", "thinking_blocks")
#: Fields that hold the text of a reasoning block.
TEXTS = ("text", "thinking", "summary")
SAID = ("refusal", "audio")
FUNCTION_CALL = "function_call"
#: The most field names in the record of a turn, and the most characters of each.
MOST_NAMES, LONGEST_NAME = 32, 64


class Unread:
    """The names of fields in one request that the model does not see.

    Attributes:
        first: whether the request is the session's first turn: there, important fields are refused instead.
        names: the names of unread fields, each once.
    """

    def __init__(self, *, first: bool) -> None:
        self.first = first
        self.names: list[str] = []

    def note(self, names: Iterable[str]) -> None:
        """Add names, up to `MOST_NAMES`."""
        for name in names:
            if name[:LONGEST_NAME] not in self.names and len(self.names) < MOST_NAMES:
                self.names.append(name[:LONGEST_NAME])

    @property
    def facts(self) -> dict[str, Any]:
        """The facts for the record of the turn."""
        return {"unread_fields": self.names} if self.names else {}


def readable_fields(messages: Sequence[Message], media: Media, unread: Unread) -> Sequence[Message]:
    """Return the messages with their text in fields that SGLang reads; the same object if nothing changes.

    Raises:
        BadRequest: a message has audio without a transcript, and the media policy refuses it.
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
    """Return an answer with its text in fields that SGLang reads, and the names of the fields that remain unread."""
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
    """Return the text of reasoning, given as a string or as a list of blocks."""
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

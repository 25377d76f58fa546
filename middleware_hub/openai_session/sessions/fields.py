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
USER_FIELDS = frozenset(("role", "content", "cache_control"))
OTHER_FIELDS = USER_FIELDS | {
    *("tool_call_id", "name", "phase", "reasoning_content", "tool_calls", "tools", "prefix"),
}
#: Fields in which clients keep the reasoning, the best first; SGLang reads only the first.
REASONING = ("reasoning_content", "reasoning", "reasoning_details", "thinking_blocks")
#: Fields that hold the text of a reasoning block.
TEXT_FIELDS = ("text", "thinking", "summary")
SPOKEN_FIELDS = ("refusal", "audio")
FUNCTION_CALL = "function_call"
#: The most field names in the record of a turn, and the most characters of each.
MAX_NAMES, MAX_NAME_LENGTH = 32, 64


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
        """Add names, up to `MAX_NAMES`."""
        for name in names:
            if name[:MAX_NAME_LENGTH] not in self.names and len(self.names) < MAX_NAMES:
                self.names.append(name[:MAX_NAME_LENGTH])

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
    known = USER_FIELDS if role == USER else OTHER_FIELDS
    if message.keys() <= known:
        return message
    unread_names = {name for name in message.keys() - known if message[name] not in (None, False, "", [], {})}
    if role == ASSISTANT and unread_names:
        message, unread_names = _assistant(message, unread_names - {FUNCTION_CALL}, where, media)
    if unread_names:
        unread.note(sorted(unread_names))
    return message


def _assistant(message: Message, unread_names: set[str], where: str, media: Media) -> tuple[Message, set[str]]:
    """Return an answer with its text in fields that SGLang reads, and the names of the fields that remain unread."""
    spoken = [
        text
        for name in SPOKEN_FIELDS
        if name in unread_names and (text := _spoken_text(message[name], name, where, media))
    ]
    reasoning = {name: text for name in REASONING if (text := _reasoning_text(message.get(name)))}
    if not spoken and not reasoning.keys() & unread_names:
        return message, unread_names
    kept = {name: value for name, value in message.items() if name not in (*SPOKEN_FIELDS, *reasoning)}
    if spoken:
        kept["content"] = _joined(kept.get("content"), spoken)
    if reasoning:
        kept[REASONING[0]] = next(iter(reasoning.values()))
    lost = {name for name, text in reasoning.items() if text != kept[REASONING[0]]} & unread_names - {*REASONING[2:]}
    return kept, (unread_names & kept.keys()) | lost


def _spoken_text(value: object, name: str, where: str, media: Media) -> str:
    if name != "audio":
        return value if isinstance(value, str) else ""
    transcript = value.get("transcript") if isinstance(value, Mapping) else None
    return transcript if isinstance(transcript, str) and transcript else media.replace(name, f"{where}.{name}")


def _reasoning_text(value: object) -> str:
    """Return the text of reasoning, given as a string or as a list of blocks."""
    if not isinstance(value, list):
        return value if isinstance(value, str) else ""
    blocks = [block for block in value if isinstance(block, Mapping)]
    texts = (next((text for name in TEXT_FIELDS if isinstance(text := block.get(name), str)), "") for block in blocks)
    return "".join(texts)


def _joined(content: Any, spoken: Sequence[str]) -> Any:
    if not content:
        content, spoken = (spoken[0], spoken[1:])
    if not spoken:
        return content
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    return [*parts, *({"type": "text", "text": text} for text in spoken)]

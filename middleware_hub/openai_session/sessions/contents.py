"""Conversion of messages, as agent libraries write them, into contents and fields that the engine accepts and reads.

SGLang 0.5.23 refuses a whole request for one part of an unknown type, and an agent sends its whole history with every
turn. So text parts of other APIs become text. A session records text only: media and all other parts are refused or
replaced by a fixed text. By default they are refused in the first turn of a session and replaced in later turns: an
agent that has begun must be able to go on.

SGLang passes only `content` of a user message to the chat template, and of other messages only the fields of
`ChatCompletionMessageGenericParam`; others it drops without an error. Text in these becomes content or reasoning; the
record of the turn names the fields that remain.
"""

from __future__ import annotations

import operator
from base64 import b64decode
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from middleware_hub.openai_session.episodes.contract import REFUSE, REPLACE
from middleware_hub.openai_session.sessions.messages import (
    ASSISTANT,
    FUNCTION_CALL,
    TEXT_PARTS,
    USER,
    Message,
    Unread,
    function_of,
)
from miles_router.errors import BadRequest

#: The policies of a run; a session's contract may set the last two.
REFUSE_FIRST = "refuse_first"
POLICIES = (REFUSE_FIRST, REFUSE, REPLACE)
#: The kind of medium for each part type of any agent API.
KINDS: Mapping[str, str] = {
    **{
        f"{before}{kind}{behind}": kind
        for kind in ("image", "audio", "video", "file")
        for before, behind in (("", ""), ("input_", ""), ("", "_url"))
    },
    **{"document": "document", "container_upload": "file", "computer_screenshot": "image"},
}
#: The kind of a part with any other type.
OTHER = "content"
HINT = "to send a fixed text instead, set media to 'replace', in openai_session_middleware or the session's contract"


class Media:
    """The media policy of one request, and the count of replaced parts.

    Attributes:
        refuses: True to refuse media, False to replace them.
        replaced: the number of replaced parts of each kind.
    """

    def __init__(self, *, refuses: bool) -> None:
        self.refuses = refuses
        self.replaced: Counter[str] = Counter()

    def replace(self, kind: str, where: str) -> str:
        """Count a part of this type and return the text that replaces it.

        Raises:
            BadRequest: the policy refuses media.
        """
        if self.refuses:
            raise BadRequest(f"{where}: {kind[:64]!r} is not text, and a session records text only; {HINT}")
        name = KINDS.get(kind, OTHER)
        self.replaced[name] += 1
        return f"[{name} omitted]"

    def replace_unknown(self, kind: object, where: str) -> str:
        """Count a part of an unknown type and return the text that replaces it.

        Raises:
            BadRequest: the policy refuses media.
        """
        if self.refuses:
            raise BadRequest(f"{where}: a session cannot record blocks of the type {str(kind)[:64]!r}; {HINT}")
        return self.replace(str(kind), where)

    @property
    def facts(self) -> dict[str, Any]:
        """The facts for the record of the turn."""
        return {"media_replaced": dict(self.replaced)} if self.replaced else {}


def text_of_data(url: object) -> str | None:
    """Return the text of a base64 `data:text/` URL; None for anything else."""
    if not isinstance(url, str) or not url.startswith("data:text/"):
        return None
    head, _, data = url.partition(",")
    return text_of_base64(data) if head.endswith(";base64") else None


def text_of_base64(data: object) -> str | None:
    """Return the UTF-8 text that `data` encodes in base64; None if it is not base64 of UTF-8."""
    try:
        return b64decode(data, validate=True).decode() if isinstance(data, str) else None
    except ValueError:
        return None


DOCUMENT, SEARCH_RESULT = "document", "search_result"
#: The block in which MCP servers return a file.
RESOURCE = "resource"
#: Types of parts that are text or become text, in any agent API.
TEXTUAL = frozenset(("text", "input_text", "output_text", "refusal", DOCUMENT, SEARCH_RESULT, RESOURCE))
#: Fields that a text part without a type may have.
UNTYPED = frozenset(("type", "text", "cache_control", "annotations"))


def as_parts(result: object) -> object:
    """Return a tool's result as a string, None or a list of parts. Any other value becomes its JSON text."""
    if result is None or isinstance(result, str):
        return result
    kind = result.get("type") if isinstance(result, Mapping) else None
    if isinstance(kind, str) and (kind in TEXTUAL or kind in KINDS):
        return [result]
    if isinstance(result, list) and all(map(_is_part, result)):
        return result
    return orjson.dumps(result).decode()


def _is_part(value: object) -> bool:
    if not isinstance(value, Mapping):
        return isinstance(value, str)
    return isinstance(value.get("type"), str) or (isinstance(value.get("text"), str) and value.keys() <= UNTYPED)


def text_of(block: Mapping[str, Any], where: str, media: Media) -> str:
    """Return the text that replaces a block.

    Raises:
        BadRequest: blocks of this type have no text, and the media policy refuses them.
    """
    kind = block.get("type")
    if kind == SEARCH_RESULT:
        return _joined(block, ("title", "source"), _content(block.get("content"), f"{where}.content", media))
    if kind == DOCUMENT:
        text = _document(block.get("source"), f"{where}.source", media)
        if text is not None:
            return _joined(block, ("title", "context"), text)
    resource = block.get("resource")
    if kind == RESOURCE and isinstance(resource, Mapping) and isinstance(resource.get("text"), str):
        return str(resource["text"])
    if isinstance(kind, str) and kind in KINDS:
        return media.replace(kind, where)
    return media.replace_unknown(kind, where)


def _document(source: object, where: str, media: Media) -> str | None:
    """Return a document's text; None if the source is not text."""
    if not isinstance(source, Mapping):
        return None
    kind, data = source.get("type"), source.get("data")
    if kind == "text" and isinstance(data, str):
        return data
    if kind == "content":
        return _content(source.get("content"), f"{where}.content", media)
    is_text = kind == "base64" and str(source.get("media_type")).startswith("text/")
    return text_of_base64(data) if is_text else None


def _content(content: object, where: str, media: Media) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        return media.replace_unknown(type(content).__name__, where)
    texts = []
    for place, block in enumerate(content):
        block = block if isinstance(block, Mapping) else {"type": "text", "text": block}
        kind, text, path = block.get("type"), block.get("text"), f"{where}.{place}"
        if kind in ("text", None) and isinstance(text, str | None):
            texts.append(text or "")
        else:
            texts.append(media.replace("image", path) if kind == "image" else media.replace_unknown(kind, path))
    return "\n".join(texts)


def _joined(block: Mapping[str, Any], names: tuple[str, ...], text: str) -> str:
    heading = [block[name] for name in names if isinstance(block.get(name), str) and block[name]]
    return "\n".join([*heading, text])


RESULTS = ("tool", "function")
THINKING, REDACTED = ("thinking", "reasoning"), "redacted_thinking"
#: Fields of a thinking part that a model does not read, if the part has no text.
UNREADABLE = frozenset(("type", "id", "thinking", "text", "reasoning", "signature", "encrypted_content"))
#: The engine accepts this part, and a chat template may render it.
TOOL_REFERENCE = "tool_reference"


def readable_contents(messages: Sequence[Message], media: Media) -> Sequence[Message]:
    """Return the messages with contents that the engine accepts; the same object if nothing changes.

    Raises:
        BadRequest: a message has media or unknown parts, and the media policy refuses them.
    """
    changed = [  # most messages are plain text, and are not looked at twice
        message
        if isinstance(message.get("content"), str) and "tool_calls" not in message
        else _message(message, f"messages[{place}]", media)
        for place, message in enumerate(messages)
    ]
    return messages if all(map(operator.is_, messages, changed)) else changed


def _message(message: Message, where: str, media: Media) -> Message:
    content, calls, role = message.get("content"), message.get("tool_calls"), message["role"].lower()
    if isinstance(calls, list):
        typed = [*map(_call, calls)]
        if not all(map(operator.is_, calls, typed)):
            message = {**message, "tool_calls": typed}
    if isinstance(content, str):
        return message
    if content is None:
        return {**message, "content": ""} if role == "user" and "content" in message else message
    if role in RESULTS:
        content = as_parts(content)
    if not isinstance(content, list):
        return message if content is message["content"] else {**message, "content": content}
    parts = [_part(part, role, where, media) for part in content]
    if content is message["content"] and all(map(operator.is_, content, parts)):
        return message
    return {**message, "content": [part for part in parts if part is not None]}


def _call(call: Any) -> Any:
    """Return the call with a type if its own is null, and with arguments that are a string or an object."""
    if not isinstance(call, Mapping):
        return call
    function = function_of(call)
    if not isinstance(arguments := function.get("arguments"), str | Mapping | None):
        call = {**call, "function": {**function, "arguments": orjson.dumps(arguments).decode()}}
    return {**call, "type": "function"} if call.get("type", "") is None else call


def _part(part: Any, role: str, where: str, media: Media) -> Any:
    """Return the part in the engine's form, None for an empty part, or an invalid part unchanged.

    The engine refuses the invalid part.
    """
    if isinstance(part, str):
        return _text(part)
    if not isinstance(part, Mapping):
        return part
    kind, text = part.get("type"), part.get("text")
    if kind in TEXT_PARTS or (kind is None and isinstance(text, str)):
        is_plain = kind == "text" and isinstance(text, str)
        is_readable = "text" in part and isinstance(text, str | None)
        return _text(text or "") if is_readable and not is_plain else part
    if role == ASSISTANT and kind in THINKING:
        return _thinking(part, where, media)
    if role == ASSISTANT and kind == REDACTED:
        return None
    if kind == TOOL_REFERENCE:
        return part
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return _text(part["refusal"])
    file = part.get("file")
    text = text_of_data(file.get("file_data")) if isinstance(file, Mapping) else None
    if kind is None:
        part = {**part, "type": next((name for name in part if name in KINDS), None)}
    return _text(text_of(part, where, media) if text is None else text)


def _thinking(part: Mapping[str, Any], where: str, media: Media) -> Any:
    """Return a part with exactly one text, as SGLang requires, or None if the part has no text."""
    texts = [text for name in ("thinking", "text", "reasoning") if isinstance(text := part.get(name), str)]
    if texts:
        is_plain = len(texts) == 1 and part.get("reasoning") is None
        return part if is_plain else {"type": "thinking", "thinking": texts[0]}
    if any(part[name] for name in part.keys() - UNREADABLE):
        # A part such as a summary: no template renders it, so it is dropped and counted.
        media.replace_unknown(part["type"], where)
    return None


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


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


def readable_fields(messages: Sequence[Message], media: Media, unread: Unread) -> Sequence[Message]:
    """Return the messages with their text in fields that SGLang reads; the same object if nothing changes.

    Raises:
        BadRequest: a message has audio without a transcript, and the media policy refuses it.
    """
    changed = [
        message if message.keys() <= USER_FIELDS else _with_read_fields(message, f"messages[{place}]", media, unread)
        for place, message in enumerate(messages)
    ]
    return messages if all(map(operator.is_, messages, changed)) else changed


def _with_read_fields(message: Message, where: str, media: Media, unread: Unread) -> Message:
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
        kept["content"] = _with_spoken(kept.get("content"), spoken)
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


def _with_spoken(content: Any, spoken: Sequence[str]) -> Any:
    if not content:
        content, spoken = (spoken[0], spoken[1:])
    if not spoken:
        return content
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    return [*parts, *({"type": "text", "text": text} for text in spoken)]

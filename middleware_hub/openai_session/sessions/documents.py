"""Text of documents, search results and tool results in messages; media in them follow the run's media policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from middleware_hub.openai_session.sessions.media import KINDS, Media, text_of_base64

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

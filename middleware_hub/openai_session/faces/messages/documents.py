"""Blocks beside text that a model may read: documents and search results as their text, media by the run's policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from middleware_hub.openai_session.faces.messages.errors import invalid
from middleware_hub.openai_session.sessions.media import KINDS, Media, text_of_base64

DOCUMENT, SEARCH_RESULT = "document", "search_result"


def text_of(block: Mapping[str, Any], where: str, media: Media) -> str:
    """Return the text that stands for a block.

    Raises:
        BadRequest: there is none for blocks of this type, or media are refused.
    """
    kind = block.get("type")
    if kind == SEARCH_RESULT:
        return _joined(block, ("title", "source"), _content(block.get("content"), f"{where}.content", media))
    if kind == DOCUMENT:
        text = _document(block.get("source"), f"{where}.source", media)
        if text is not None:
            return _joined(block, ("title", "context"), text)
    if isinstance(kind, str) and kind in KINDS:
        return media.text(kind, where)
    raise invalid(where, f"blocks of the type {str(kind)[:64]!r} cannot be traced here")


def _document(source: object, where: str, media: Media) -> str | None:
    """Return a document's text; None where it is no text."""
    if not isinstance(source, Mapping):
        raise invalid(where, "Input should be an object")
    kind, data = source.get("type"), source.get("data")
    if kind == "text" and isinstance(data, str):
        return data
    if kind == "content":
        return _content(source.get("content"), f"{where}.content", media)
    is_text = kind == "base64" and str(source.get("media_type")).startswith("text/")
    return text_of_base64(data) if is_text else None


def _content(content: object, where: str, media: Media) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(where, "Input should be a valid string or a list of blocks")
    texts = []
    for place, block in enumerate(content):
        at = f"{where}.{place}"
        if not isinstance(block, Mapping):
            raise invalid(at, "Input should be an object")
        text = block.get("text") if block.get("type") == "text" else None
        texts.append(text if isinstance(text, str) else _image(block, at, media))
    return "\n".join(texts)


def _image(block: Mapping[str, Any], where: str, media: Media) -> str:
    if block.get("type") != "image":
        raise invalid(where, f"blocks of the type {str(block.get('type'))[:64]!r} cannot be traced here")
    return media.text("image", where)


def _joined(block: Mapping[str, Any], names: tuple[str, ...], text: str) -> str:
    said = [block[name] for name in names if isinstance(block.get(name), str) and block[name]]
    return "\n".join([*said, text])

"""gpt-oss: channels that are separated by marks (SGLang 0.5.23, `harmony_parser.py`, `gpt_oss_detector.py`). Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from miles_router.engines.parsers.reading import (
    ParsedCall,
    ParsedCalls,
    Tools,
    Unparsable,
    known_calls,
    partial_mark_length,
    to_json,
)
from miles_router.engines.parsers.thinking import Split

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_END, _CALL, _RETURN = "<|end|>", "<|call|>", "<|return|>"
_MARKS = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, _END, _CALL, _RETURN)
_MARK = re.compile("|".join(map(re.escape, _MARKS)))
#: The marks that end a block, by its channel. A block without a channel is a tool's answer.
_ENDS = {"analysis": (_END, _CALL), "commentary": (_END, _CALL), "final": (_RETURN,), "": (_END, _CALL, _RETURN)}
_FILLER = "commentary"
_NAMED = re.compile(r"analysis|commentary|assistantfinal", re.IGNORECASE)
_INVOKED = re.compile(
    r"to=([a-zA-Z_][a-zA-Z0-9_.-]*)\s*<\|constrain\|>json<\|message\|>(.*?)(?:<\|call\|>|$)", re.DOTALL
)


class _Part(NamedTuple):
    """A mark, or the text between two marks, with an empty `mark`."""

    mark: str
    begin: int
    end: int


class _Block(NamedTuple):
    """The content of one block. The content of a call includes its marks."""

    kind: Literal["reasoning", "text", "call"]
    content: str


class Harmony:
    """The format of reasoning and calls. Reasoning is read first, and calls stay in the rest with their marks."""

    #: Content ends at its first mark.
    begin = "<|"
    end = _CALL

    def split(self, text: str, *, thinking: bool) -> Split:
        return _split(*_read(text))

    def split_certain(self, text: str, *, thinking: bool) -> Split:
        certain = text[: len(text) - _partial_mark_length(text)]
        if _START not in certain and _CHANNEL not in certain:
            return Split("", None)
        return _split(*_read(certain))

    def read(self, text: str, tools: Tools) -> ParsedCalls:
        if "<|start|>assistant<|channel|>commentary" not in text:
            return ParsedCalls(text, [])
        blocks, _ = _read(text)
        content = " ".join(each.content for each in blocks if each.kind == "text").strip()
        return ParsedCalls(
            content, [call for each in blocks if each.kind == "call" for call in _parsed_calls(each, tools)]
        )

    def unfinished(self, text: str, tools: Tools) -> ParsedCall | None:
        block = text.rpartition(_CHANNEL)[2]
        found = None if _CALL in block or _END in block else _INVOKED.search(block)
        name = found[1].rpartition(".")[2] if found is not None else ""
        return ParsedCall(name, found[2]) if found is not None and name in tools else None


def _split(blocks: Sequence[_Block], open_call: str) -> Split:
    reasoning = "".join(each.content for each in blocks if each.kind == "reasoning")
    return Split(reasoning, "".join(each.content for each in blocks if each.kind != "reasoning"), open_call)


def _parsed_calls(block: _Block, tools: Tools) -> list[ParsedCall]:
    """Return the call of a block; an empty list if the engine drops the call."""
    found = _INVOKED.search(block.content)
    if found is None:
        return []
    try:
        call = ParsedCall(found[1].rpartition(".")[2], to_json(json.loads(found[2]) if found[2].strip() else {}))
    except json.JSONDecodeError:
        return []
    return known_calls([call], tools)


def _read(text: str) -> tuple[list[_Block], str]:
    """Return the blocks of a text, and the incomplete block at its end, which may become a call.

    Raises:
        Unparsable: the text contains names of channels, but no marks.
    """
    if _START not in text and _CHANNEL not in text:
        if _NAMED.search(text):
            raise Unparsable("the text names channels, but has no marks")
        return [], ""  # the engine waits for the first mark
    parts, at = list(_parts(text)), 0
    blocks: list[_Block] = []
    while at < len(parts):
        part, content = parts[at], "" if parts[at].mark else text[parts[at].begin : parts[at].end]
        if part.mark in (_START, _CHANNEL):
            message, channel = _heading(text, parts, at)
            found = _block(text, parts, at, message, channel)
            if found is None and channel == "analysis":
                blocks.append(_Block("reasoning", text[parts[message].end :]))
            if found is None:
                return _without_filler(blocks, text), text[part.begin :]
            block, at = found
            blocks.append(block)
            continue
        if at == len(parts) - 1:
            content = content[: len(content) - _partial_mark_length(content)]
        elif content.strip() in _MARKS or (at and parts[at - 1].mark == _CALL and content.strip().lower() == _FILLER):
            content = ""
        if content:
            blocks.append(_Block("text", content))
        at += 1
    return _without_filler(blocks, text), ""


def _partial_mark_length(text: str) -> int:
    """Return the length of the longest beginning of a mark at the end of `text`."""
    return max(partial_mark_length(text, mark) for mark in _MARKS)


def _parts(text: str) -> Iterator[_Part]:
    """Yield the marks and the texts between them. An unknown mark becomes text, with all text up to the next mark."""
    at, odd, last_close = 0, False, text.rfind("|>")
    while (begin := text.find("<|", at)) >= 0:
        if begin > at:
            yield _Part("", at, begin)
        mark = _MARK.match(text, begin)
        if mark is not None or any(each.startswith(text[begin : begin + len(each)]) for each in _MARKS):
            at = mark.end() if mark is not None else len(text)
            yield _Part(mark[0] if mark is not None else "", begin, at)
            continue
        odd, at = True, begin + 2
        yield _Part("", begin, at)
        if last_close >= at:
            following = text.find("<|", text.find("|>", at) + 2)
            yield _Part("", at, following if following >= 0 else len(text))
            at = following if following >= 0 else len(text)
    if at < len(text) or (odd and text.endswith(_MARKS)):
        yield _Part("", at, len(text))


def _heading(text: str, parts: Sequence[_Part], at: int) -> tuple[int, str | None]:
    """Return the index of the message mark (-1 if missing) and the channel of the block that begins at part `at`.

    The channel is "" for a block without one; None without a message mark, or for an unknown channel.
    """
    at += parts[at].mark == _START
    message = next((place for place in range(at, len(parts)) if parts[place].mark == _MESSAGE), -1)
    channel = next((part for part in parts[at:message] if part.mark == _CHANNEL), None) if message >= 0 else None
    if message < 0 or channel is None:
        return message, None if message < 0 else ""
    header = text[channel.end : parts[message].begin].strip().lower()
    return message, next((each for each in _ENDS if each and header.startswith(each)), None)


def _block(text: str, parts: Sequence[_Part], at: int, message: int, channel: str | None) -> tuple[_Block, int] | None:
    """Return the block that begins at part `at`, and the index of the next part; None if the block is incomplete."""
    if channel is None:
        return None
    begin = parts[message].end
    end = next((place for place in range(message + 1, len(parts)) if parts[place].mark in _ENDS[channel]), None)
    if end is None:
        return (_Block("text", text[begin:]), len(parts)) if channel == "final" else None
    behind = end + 1
    if channel == "final" and behind < len(parts) and not parts[behind].mark:
        content = text[begin : parts[end].begin] + text[parts[behind].begin : parts[behind].end]
        return _Block("text", content), behind + 1
    if channel and parts[end].mark == _CALL:
        return _Block("call", text[parts[at].begin : parts[end].end]), behind
    return _Block("reasoning" if channel == "analysis" else "text", text[begin : parts[end].begin]), behind


def _without_filler(blocks: Sequence[_Block], text: str) -> list[_Block]:
    """Return the blocks without the word `commentary` behind a call, which may be spread over several blocks."""
    kept: list[_Block] = []
    ends, behind_call, word = text.rstrip().endswith(_CALL), False, ""
    for block in blocks:
        if block.kind == "text" and (behind_call or word):
            word += block.content.strip().lower()
            if _FILLER.startswith(word):
                behind_call, word = behind_call and word != _FILLER, "" if word == _FILLER else word
                continue
            behind_call, word = False, ""
        if block.kind == "call":
            word = ""
        behind_call = behind_call or ends or block.kind == "call"
        kept.append(block)
    return kept

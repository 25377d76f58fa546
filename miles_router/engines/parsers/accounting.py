"""Accounts for a sampled text in the message that was parsed from it, for the parsers of all engines. Pure.

A parser only divides a text. So the words of the text must be those of the message, in any order, except markup: tags,
special tokens, and the vocabulary of calls. Numbers compare by value, escaped characters as what they stand for.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

#: The account of an answer without a reason.
WHOLE = "whole"
#: Why an answer is not whole.
REASONS = TEXT_LEFT_OVER, ARGUMENT_ALTERED, UNKNOWN_TOOL, INVALID_JSON, CALL_IN_TEXT, CUT_SHORT = (
    "text_left_over",  # the message has this text nowhere
    "argument_altered",  # an argument of a shown call is missing or different
    "unknown_tool",  # a call, shown or not, of a tool that the request does not have
    "invalid_json",  # a call, shown or not, whose arguments are not a JSON object
    "call_in_text",  # a call of a known tool that was shown as text
    "cut_short",  # the answer was cut inside a call, which is shown open or not at all
)

_ESCAPE = re.compile(r"\\+(?:u([0-9a-fA-F]{4})|[nrtbf])?|&(?:lt|gt|amp|quot|apos|#\d{1,7});")
_WORD = re.compile(r"\d*\.?\d+(?:[eE][+-]?\d+)?|[^\W\d]\w*")
_MARKUP = re.compile(
    r"""<[/|｜]{0,2}[\w"][^<>\n]{0,200}> | <[^<>\s]{0,40}\Z | \[/?[A-Z][A-Z_]{2,30}\] | ◁/?think▷
    | :\d+\s{0,8}(?=<\|tool_call_argument) | "(?:tool_call_)?id"\s{0,8}:\s{0,8}"[^"\n]{0,80}" | \[CALL_ID\]\w{0,80}""",
    re.VERBOSE,
)
#: The name of a function or a parameter in a tag.
_NAMED = re.compile(r"""\b(?:function=|parameter=|name=)"?([^"<>\n]+)""")
#: The beginning of a call with the name of its function, in the formats of all families.
_HEAD = re.compile(
    r"""(?:\A|[\n>\]},]|"function"\s{0,8}:)\s{0,8}\[?\s{0,8}\{\s{0,8}
        (?:"(?:type|\w{0,20}id)"\s{0,8}:\s{0,8}"[^"\n]{0,80}"\s{0,8},\s{0,8})?"(?:tool_)?name"\s{0,8}:\s{0,8}"([^"\n]{1,128})"
    | <[^<>\s]{0,20}(?:function=|(?:function|invoke|tool)\s{1,4}name=")([^"<>\n]{1,128})
    | <tool_call>\s{0,8}([A-Za-z_][\w.\-]{0,127})\s{0,8}(?=<)
    | <\|tool_call_begin\|>\s{0,8}(?:functions\.)?([\w.\-]{1,128}):\d
    | <｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?([\w.\-]{1,128})
    | <\|(?:channel|start)\|>[^<\n]{0,40}\bto=(?:functions\.)?([\w.\-]{1,128})
    | \[TOOL_CALLS\]\s{0,8}([A-Za-z_][\w.\-]{0,127})\s{0,8}(?=[\[{])
    | (?:\A|>)\s{0,8}\[\s{0,8}([A-Za-z_][\w.]{0,127})\(
    | <\|tool_call>call:([\w.\-]{1,128})""",
    re.VERBOSE,
)
#: Words of call formats, which messages need not have.
_VOCABULARY = frozenset(
    (
        *("name", "arguments", "parameters", "function", "functions", "type", "id", "tool_name", "call", "json"),
        *("null", "assistant", "analysis", "commentary", "final", "to", "tool_call", "tool_calls", "action"),
    )
)
#: Literals that parsers write for other words: by a parameter's type, and of Python.
_LITERALS: Mapping[str, str] = {"True": "true", "False": "false", "None": "null"}
_COERCED = frozenset(("yes", "no", "on", "off", "nil", "none", "TRUE", "FALSE", "NULL", "1.0", "0.0"))
#: A parameter in a tag, in formats whose arguments are not JSON.
_PARAMETER = re.compile(r"<[^<>\s]{0,20}(?:parameter|param|arg_key)\b")
_VALUE = json.JSONDecoder()
#: What may end a call.
_ENDS = ">}])"


class _Shown(NamedTuple):
    """The parts of a message: its texts, and the names and the arguments of its calls."""

    texts: Sequence[str]
    names: Sequence[str]
    arguments: Sequence[str]

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> _Shown:
        calls = message.get("tool_calls")
        functions = [each.get("function") for each in calls if isinstance(each, Mapping)] if calls else []
        return cls(
            [_text(message, "reasoning_content"), _text(message, "content")],
            [_text(each, "name") for each in functions],
            [_text(each, "arguments") for each in functions],
        )


def account(
    text: str, message: Mapping[str, Any], tools: Collection[str], *, cut: bool = False, stop: object = None
) -> list[str]:
    """Return why a message is not all of a text, as some of `REASONS`; an empty list if it is.

    Takes linear time: where the parts of the message stand in the text as they are, a search for each, else a count of
    all words.

    Args:
        text: the whole sampled text, with special tokens.
        message: the message that the agent was shown.
        tools: the names of the tools whose calls the engine looks for; none if it looks for no calls.
        cut: whether the answer ended before the model ended it.
        stop: what ended the answer; a stop string is not part of a message.
    """
    if isinstance(stop, str) and stop and stop in text:
        text = text[: text.rindex(stop)]
    shown = _Shown.of(message)
    found = _faults_of_calls(shown, tools, cut=cut)
    if tools and any(name in tools for name, _ in _heads(_readable(shown))):
        found.add(CALL_IN_TEXT)
    if not _is_whole(*_unmatched(text, shown)) and not _is_whole([text], shown):
        found |= _explain(text, shown, tools, cut=cut)
    return [reason for reason in REASONS if reason in found]


def _text(holder: object, name: str) -> str:
    found = holder.get(name) if isinstance(holder, Mapping) else None
    return found.strip() if isinstance(found, str) else ""


def _readable(shown: _Shown) -> str:
    """Return the text in which a call is one that was not taken as such. Reasoning may quote calls, unless it is the
    whole answer."""
    reasoning, content = shown.texts
    return content or ("" if shown.names else reasoning)


def _faults_of_calls(shown: _Shown, tools: Collection[str], *, cut: bool) -> set[str]:
    found = {UNKNOWN_TOOL for name in shown.names if tools and name not in tools}
    for left, arguments in zip(range(len(shown.arguments) - 1, -1, -1), shown.arguments, strict=True):
        if not _is_object(arguments):
            found.add(CUT_SHORT if cut and not left else INVALID_JSON)
    return found


def _is_object(arguments: str) -> bool:
    """Return whether arguments are a JSON object. Nothing and null stand for no arguments."""
    try:
        return not arguments or isinstance(json.loads(arguments), dict | None)
    except (ValueError, RecursionError):
        return False


def _heads(text: str) -> Iterator[tuple[str, int]]:
    """Yield the name and the place of each call in a text."""
    for match in _HEAD.finditer(text):
        yield match[match.lastindex or 0].strip(), match.start()


# Words


def _unmatched(text: str, shown: _Shown) -> tuple[list[str], _Shown]:
    """Return what remains of a text and of a message when the message's parts are found in the text in their order, up
    to the first part that is not found."""
    pieces, at, parts = [], 0, [*shown.texts, *shown.arguments]
    for place, part in enumerate(parts):
        found = text.find(part, at)
        if found < 0:
            begun = max(0, place - len(shown.texts))
            return [*pieces, text[at:]], _Shown(shown.texts[place:], shown.names, shown.arguments[begun:])
        pieces.append(text[at:found])
        at = found + len(part)
    return [*pieces, text[at:]], _Shown((), shown.names, ())


def _is_whole(pieces: Sequence[str], shown: _Shown) -> bool:
    """Return whether a message has the words of these pieces of its text, and its arguments no others."""
    left, altered = _difference(pieces, shown)
    return not left and not altered


def _difference(pieces: Sequence[str], shown: _Shown) -> tuple[Counter[str], Counter[str]]:
    """Return the words that the message lacks, and the words of its arguments that the text does not have."""
    left = Counter(word for piece in pieces for word in _required(piece)) - _count(_words_of(shown))
    if not left and not any(shown.arguments):
        return left, Counter()
    written = _count(pieces)
    for joined in _count(shown.texts) - written:  # a parser joins the texts around a call
        for begin in [word for word in left if joined.startswith(word)]:
            if (end := joined.removeprefix(begin)) in left:
                left -= Counter((begin, end))
    altered = _count(shown.arguments) - written
    literals = altered.keys() & {*_LITERALS.values()}
    for word in [*left] if literals else ():
        if word in _COERCED:
            del left[word]
    for word in literals:
        del altered[word]
    return left, altered


def _count(parts: Iterable[str]) -> Counter[str]:
    return Counter(word for part in parts for word in _words(part))


def _words_of(shown: _Shown) -> Iterator[str]:
    yield from (*shown.texts, *shown.names, *shown.arguments)


def _words(text: str) -> Iterator[str]:
    for word in _WORD.findall(_unescaped(text)):
        yield str(float(word)) if word[0] in ".0123456789" else _LITERALS.get(word, word)


def _unescaped(text: str) -> str:
    """Return a text without the escapes of JSON and XML, the same for a value that was escaped and one that was not."""
    if "\\" not in text and "&" not in text:
        return text
    plain = _ESCAPE.sub(lambda match: chr(int(match[1], 16)) if match[1] else " ", text)
    return plain.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _required(text: str) -> Iterator[str]:
    """Yield the words of a text that its message must have."""
    words = _words(_MARKUP.sub(_name_in_tag, text))
    return (word for word in words if word not in _VOCABULARY)


def _name_in_tag(tag: re.Match[str]) -> str:
    named = _NAMED.search(tag[0])
    return " " if named is None else f" {named[1]} "


# Reasons


def _explain(text: str, shown: _Shown, tools: Collection[str], *, cut: bool) -> set[str]:
    """Return the reasons for a message that lacks words of its text, or has others in its arguments."""
    taken = Counter(name for part in _words_of(shown) for name, _ in _heads(part)) + Counter(shown.names)
    budget, found = _count(_words_of(shown)), set[str]()
    heads = [*_heads(text)]
    dropped = Counter(name for name, _ in heads) - taken
    begins = [("", 0), *heads]
    if cut and not heads:
        begins.append(("", max((tag.start() for tag in _MARKUP.finditer(text)), default=0)))
    for place, (name, begin) in enumerate(begins):
        is_last = place == len(begins) - 1
        segment = text[begin:] if is_last else text[begin : begins[place + 1][1]]
        end = max(map(segment.rfind, _ENDS)) + 1 if name else 0
        inside, behind = (_left_of(part, budget) for part in (segment[:end], segment[end:]))
        if (inside or behind) and cut and is_last:
            found.add(CUT_SHORT)
            continue
        if inside and dropped[name]:
            dropped[name] -= 1
            found.add(_reason_of_dropped(name, segment, tools))
        elif inside:
            found.add(ARGUMENT_ALTERED)
        if behind:
            found.add(TEXT_LEFT_OVER)
    return found or {ARGUMENT_ALTERED}


def _left_of(part: str, budget: Counter[str]) -> bool:
    """Take the words of a part of the text out of those of the message; return whether the message has too few."""
    left = False
    for word in _required(part):
        budget[word] -= 1
        left = left or budget[word] < 0
    return left


def _reason_of_dropped(name: str, call: str, tools: Collection[str]) -> str:
    """Return the reason for a call that the message does not have."""
    if name not in tools:
        return UNKNOWN_TOOL
    begin = call.find("{")
    if begin < 0 or _PARAMETER.search(call):
        return TEXT_LEFT_OVER
    try:
        _VALUE.raw_decode(call, begin)
    except (ValueError, RecursionError):
        return INVALID_JSON
    return TEXT_LEFT_OVER

"""Accounts for a sampled text in the message that was parsed from it, for the parsers of all engines. Pure.

A parser only divides a text. So the text and the message must have the same words, in any order, except markup: tags,
special tokens, and the vocabulary of calls. Numbers compare by value, escaped characters as what they stand for.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
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
    "cut_short",  # the message lacks the end of an answer that was cut, or has an open call
)

_ESCAPE = re.compile(r"\\+(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|[nrtbf])?|&(?:lt|gt|amp|quot|apos|#\d{1,7});")
_WORD = re.compile(r"[^\W\d]\w*|\d*\.?\d+(?:[eE][+-]?\d+)?")
_SPACE, _NAME = r"\s{0,8}", r"([A-Za-z_][\w.\-]{0,127})"


def _beginning(*patterns: tuple[str, str]) -> re.Pattern[str]:
    """Return a pattern of alternatives, each given as its first character and the rest; the search for one of several
    characters is fast."""
    rests = "|".join(rf"(?<=[{first}])(?:{rest})" for first, rest in patterns)
    return re.compile(rf"[{''.join(first for first, _ in patterns)}](?:{rests})")


#: Texts around the parts of a message: tags, special tokens, and ids of calls.
_MARKUP = _beginning(
    ("<", r"\|open\|>[^<\n]{0,200}<\|sep\|>"),
    ("<", r"\|close\|>[^<\n]{0,80}<\|sep\|>"),
    ("<", r"\|message_\w{1,20}\|>[\w.\-]{0,128}(?=<\|content_)"),
    ("<", r"\|(?:channel|start|constrain)\|>[^<\n]{0,200}(?=<\|(?:channel|constrain|message)\|>)"),
    ("<", r"\|channel>[a-z]{0,20}\n"),
    ("<", r'[/|｜]{0,2}[\w"][^<>\n]{0,200}>'),
    ("<", r"!\[CDATA\[|[^<>\s]{0,40}\Z"),
    (r"\]", r"<\]\w{1,20}\[>\["),
    (r"\[", r"CALL_ID\]\w{0,80}|/?[A-Z][A-Z_]{2,30}\]"),
    ("◁", r"/?think▷"),
    (":", rf"\d+{_SPACE}(?=<\|tool_call_argument)"),
    ('"', rf'(?:tool_call_)?id"{_SPACE}:{_SPACE}"[^"\n]{{0,80}}"'),
)
#: The name of a function or a parameter, or the recipient, in markup.
_NAMED = re.compile(r"""\b(?:(?:function=|parameter=|name=|tool=|key=)"?([^"<>\n]+)|to=([^\s<]+))""")
_OBJECT = (
    rf'{_SPACE}\[?{_SPACE}\{{{_SPACE}(?:"(?:type|\w{{0,20}}id)"{_SPACE}:{_SPACE}"[^"\n]{{0,80}}"{_SPACE},{_SPACE})?'
    rf'"(?:tool_)?name"{_SPACE}:{_SPACE}"([^"\n]{{1,128}})"'
)
#: The beginning of a call with the name of its function, in the formats of all families. A text begins a line.
_HEAD = _beginning(
    (r"\n>\]},;", _OBJECT),
    ('"', rf'function"{_SPACE}:{_OBJECT}'),
    ("<", r'[^<>\s]{0,20}\s?(?:function=|(?:function|invoke|tool)\s{1,4}name=")([^"<>\n]{1,128})'),
    ("<", rf"[^<>/\s]{{0,12}}tool_call>{_SPACE}{_NAME}{_SPACE}(?=<)"),
    ("<", rf"\|tool_call_begin\|>{_SPACE}(?:functions\.)?{_NAME}:\d"),
    ("<", rf"｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?{_NAME}"),
    ("<", rf"\|(?:channel|start)\|>[^<\n]{{0,40}}\bto=(?:functions\.)?{_NAME}"),
    ("<", rf"\|tool_call>call:{_NAME}"),
    ("<", r'\|open\|>call tool="([^"\n]{1,128})'),
    ("<", rf"\|tools_prefix\|>{_SPACE}\[{_SPACE}\{{{_SPACE}" r'"([^"\n]{1,128})'),
    (r"\[", rf"TOOL_CALLS\]{_SPACE}{_NAME}{_SPACE}(?=[\[{{])"),
    (r"\n>", rf"{_SPACE}\[{_SPACE}{_NAME}\("),
)
#: Words of call formats, which messages need not have.
_VOCABULARY = frozenset(
    (
        *(
            "name",
            "arguments",
            "parameters",
            "function",
            "functions",
            "functools",
            "type",
            "id",
            "tool_name",
            "call",
            "json",
        ),
        *("null", "assistant", "analysis", "commentary", "final", "to", "tool_call", "tool_calls", "action", "args"),
    )
)
#: Literals that parsers write for other words: by a parameter's type, and of Python.
_LITERALS: Mapping[str, str] = {"True": "true", "False": "false", "None": "null"}
_COERCED = frozenset(("yes", "no", "on", "off", "nil", "none", "TRUE", "FALSE", "NULL", "1.0", "0.0"))
#: A parameter in a tag, in formats whose arguments are not JSON.
_PARAMETER = re.compile(r"<[^<>\s]{0,20}(?:parameter|param|arg_key)\b")
_VALUE = json.JSONDecoder()
_LONGEST_JOINED = 100
#: So many digits are exact as a float.
_EXACT_DIGITS = 15
#: The most calls of a text whose words are compared one by one.
_MOST_CALLS = 100
#: Texts of which every call has one, unless it begins with a bracket.
_HINTS = ('name"', 'name="', "function=", "tool_call", "tool▁call", "TOOL_CALLS", " to=", 'tool="', "tools_prefix")
#: Characters that belong to the call that they begin; others stand in front of one.
_OF_HEAD = '<["'
#: What may end a call, and the tag in front of the next one, which does not.
_ENDS, _NEXT = ">}])", re.compile(r"<[^<>/]{1,40}>\s*\Z")
#: What ends a call in formats whose arguments are not JSON.
_CLOSED = re.compile(r"</[^<>\s]{0,20}(?:function|invoke|tool_call)>|<\|close\|>call")


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
            [_text(message, "reasoning_content") or _text(message, "reasoning"), _text(message, "content")],
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
    if tools:
        found |= _faults_of_texts(text, shown, tools, cut=cut)
    if not _is_whole(*_unmatched(text, shown)) and not _is_whole([text], shown):
        found |= _explain(text, shown, tools, cut=cut)
    return [reason for reason in REASONS if reason in found]


def _text(holder: object, name: str) -> str:
    found = holder.get(name) if isinstance(holder, Mapping) else None
    return found.strip() if isinstance(found, str) else ""


def _faults_of_texts(text: str, shown: _Shown, tools: Collection[str], *, cut: bool) -> set[str]:
    """Return the faults of a message whose text has a call that is not among the shown ones. Reasoning may quote calls,
    unless it is the whole answer and the model ended it. What was cut within a call is no fault of the parser."""
    reasoning, content = shown.texts
    part = content or ("" if shown.names else reasoning)
    missing = _missing_calls(text, shown.names)
    begins = [begin for name, begin in _heads(part) if name in tools and missing[name]]
    found = set[str]()
    if cut and begins and _is_open(part[begins[-1] :]):
        found.add(CUT_SHORT)
        begins.pop()
    if begins and (content or not cut):
        found.add(CALL_IN_TEXT)
    return found


def _missing_calls(text: str, names: Iterable[str]) -> Counter[str]:
    return Counter(name for name, _ in _heads(text)) - Counter(names)


def _faults_of_calls(shown: _Shown, tools: Collection[str], *, cut: bool) -> set[str]:
    found = {UNKNOWN_TOOL for name in shown.names if tools and name not in tools}
    for left, arguments in zip(range(len(shown.arguments) - 1, -1, -1), shown.arguments, strict=True):
        if not _is_object(arguments):
            found.add(CUT_SHORT if cut and not left else INVALID_JSON)
    return found


def _is_object(arguments: str) -> bool:
    """Return whether the text is a JSON object. An empty text and `null` also count: they stand for no arguments."""
    try:
        return not arguments or isinstance(json.loads(arguments), dict | None)
    except (ValueError, RecursionError):
        return False


def _heads(text: str) -> Iterator[tuple[str, int]]:
    """Yield the name and the place of each call in a text."""
    if not any(hint in text for hint in _HINTS) and not text.lstrip().startswith("["):
        return
    for match in _HEAD.finditer("\n" + text):
        yield match[match.lastindex or 0].strip(), match.start() - (match[0][0] in _OF_HEAD)


# Words


def _unmatched(text: str, shown: _Shown) -> tuple[list[str], _Shown]:
    """Find the message's parts in the text, in their order, up to the first part that is missing. Return the rest of
    the text and of the message."""
    parts, at = [*shown.texts, *shown.arguments], 0
    pieces: list[str] = []
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
    if not any(map(str.strip, pieces)) and not any(shown.arguments):
        return True
    left, altered = _difference(pieces, shown)
    return not left and not altered


def _difference(pieces: Sequence[str], shown: _Shown) -> tuple[Counter[str], Counter[str]]:
    """Return the words that the message lacks, and the words of its arguments that the text does not have."""
    left = _required(pieces) - _count(_parts(shown))
    written = _count(pieces)
    for joined in _count(shown.texts) - written:  # a parser joins the texts around a call
        for end in range(1, min(len(joined), _LONGEST_JOINED)):
            if joined[:end] in left and joined[end:] in left:
                left -= Counter((joined[:end], joined[end:]))
    altered = _count(shown.arguments) - written
    literals = altered.keys() & {*_LITERALS.values()}
    for word in literals:
        del altered[word]
    for word in _COERCED if literals else ():
        del left[word]
    return left, altered


def _parts(shown: _Shown) -> Iterator[str]:
    yield from (*shown.texts, *shown.names, *shown.arguments)


def _count(parts: Iterable[str]) -> Counter[str]:
    """Count the words of texts, without the escapes of JSON and XML: the same for a value, escaped or not."""
    text = " ".join(parts)
    if "\\" in text or "&" in text:
        text = _ESCAPE.sub(lambda match: chr(int(match[match.lastindex], 16)) if match.lastindex else " ", text)
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    count = Counter(_WORD.findall(text))
    for word in [word for word in count if word in _LITERALS or _is_respelled(word)]:
        times = count.pop(word)
        count[_LITERALS.get(word) or _spell(float(word))] += times
    return count


def _is_respelled(word: str) -> bool:
    """Return whether a word is a number, except a whole one in its usual spelling."""
    return word[0] in ".0123456789" and (len(word) > _EXACT_DIGITS or word[0] == "0" or not word.isdigit())


def _spell(number: float) -> str:
    return str(int(number)) if abs(number) < 10**_EXACT_DIGITS and number.is_integer() else str(number)


def _required(parts: Iterable[str]) -> Counter[str]:
    """Count the words of texts that their message must have."""
    count = _count([_MARKUP.sub(_name_in_tag, " ".join(parts))])
    for word in _VOCABULARY & count.keys():
        del count[word]
    return count


def _name_in_tag(tag: re.Match[str]) -> str:
    named = _NAMED.search(tag[0])
    return " " if named is None else f" {named[1] or named[2]} "


# Reasons


def _explain(text: str, shown: _Shown, tools: Collection[str], *, cut: bool) -> set[str]:
    """Return the reasons for a message that lacks words of its text, or has others in its arguments."""
    quoted = (name for part in _parts(shown) for name, _ in _heads(part))
    dropped = _missing_calls(text, (*shown.names, *quoted))
    found, heads = set[str](), [*islice(_heads(text), _MOST_CALLS)]
    of_calls, of_texts = _count((*shown.names, *shown.arguments)), _count(shown.texts)
    begins = [("", 0), *heads]
    if cut and not heads:
        begins.append(("", max((tag.start() for tag in _MARKUP.finditer(text)), default=0)))
    for place, (name, begin) in enumerate(begins):
        is_last = place == len(begins) - 1
        segment = text[begin:] if is_last else text[begin : begins[place + 1][1]]
        end = max(map(_NEXT.sub("", segment).rfind, _ENDS)) + 1 if name else 0
        inside = _left_of(segment[:end], of_calls, of_texts)
        behind = _left_of(segment[end:], of_texts, *([] if heads else [of_calls]))
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


def _left_of(part: str, *budgets: Counter[str]) -> bool:
    """Subtract the words of a part of the text from the words of the message; return whether the message has too
    few."""
    words = _required([part])
    for budget in budgets:
        taken = words & budget
        words -= taken
        budget.subtract(taken)
    return bool(words)


def _reason_of_dropped(name: str, call: str, tools: Collection[str]) -> str:
    """Return the reason for a call that the message does not have."""
    if name not in tools:
        return UNKNOWN_TOOL
    begin = _begin_of_json(call)
    return TEXT_LEFT_OVER if begin < 0 or _is_json(call, begin) else INVALID_JSON


def _is_open(call: str) -> bool:
    """Return whether a call, to which the rest of the text belongs, has no end."""
    begin = _begin_of_json(call)
    return not (_CLOSED.search(call) if begin < 0 else _is_json(call, begin))


def _begin_of_json(call: str) -> int:
    """Return the index at which the JSON of a call begins; -1 if the call has no JSON, or another format."""
    begin = call.find("{")
    return -1 if _PARAMETER.search(call) or "(" in call[: max(0, begin)] else begin


def _is_json(call: str, begin: int) -> bool:
    """Return whether a JSON value begins at this place of a call."""
    try:
        _VALUE.raw_decode(call, begin)
    except (ValueError, RecursionError):
        return False
    return True

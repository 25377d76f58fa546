"""Recognition of tool call arguments that were sampled as invalid JSON and come back repaired.

A model may leave out the last brace of a call, or end within it. Agent libraries close the braces, drop the incomplete
value, or call the tool without arguments. All of these still mean the sampled call.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import orjson

from middleware_hub.openai_session.sessions.messages import parse_text

#: Quoted strings, the last of which may lack its closing quote, and words and numbers. The rest is punctuation.
ATOMS = re.compile(r'"((?:[^"\\]|\\.)*)("|\\?$)|\'((?:[^\'\\]|\\.)*)(\'|\\?$)|([^\s"\'{}\[\],:]+)', re.DOTALL)
#: An incomplete escape at the end of a text; an even number of backslashes before it are complete escapes.
CUT_ESCAPE = re.compile(r"(?<!\\)((?:\\\\)*)\\(?:u[0-9a-fA-F]{0,3})?$")
WORDS = {"True": "true", "False": "false", "None": "null"}
#: The most characters of arguments that are compared: libraries repair calls, not whole files.
MAX_CHARACTERS = 1 << 20
NO_NUMBERS = frozenset(("inf", "-inf", "nan"))
_NOTHING = object()


def is_repair(held: object, sent: object) -> bool:
    """Return True if sent arguments are a repair of the recorded ones, or the same in Python's spelling.

    The strings, numbers and words of `sent` must be the first ones of `held`, in the same order.
    If `held` is not JSON, some may be missing at the end, and the last may be truncated; `sent` may also contain the
    whole text of `held` as one value. If only `sent` is not JSON, such as a printed Python dictionary, none may be
    missing.
    """
    if not isinstance(held, str) or not held.strip() or len(held) > MAX_CHARACTERS:
        return False
    value = _parsed(sent) if isinstance(sent, str) and sent.strip() else sent or {}
    if value is _NOTHING:
        respelled = isinstance(sent, str) and len(sent) <= MAX_CHARACTERS and _is_json(held) and not _is_json(sent)
        return respelled and _same_atoms([*_atoms(held)], [*_atoms(str(sent))])
    if _is_json(held):
        return False
    if isinstance(value, dict) and held in value.values():
        return True
    if not isinstance(value, dict | list):
        return False
    sent_atoms = [*_atoms(orjson.dumps(value).decode())]
    # Arguments behind a sentence, or inside a Markdown fence, begin with their brace.
    return any(_is_prefix([*_atoms(held[begin:])], sent_atoms) for begin in {0, max(0, held.find("{"))})


def plain_value(text: str) -> Any:
    """Parse a JSON text; if the value is a string that contains a JSON object, return that object.

    Raises:
        ValueError: the text is not JSON, or is nested too deep.
    """
    value = parse_text(text)
    if isinstance(value, str):
        inner = _parsed(value)
        return inner if isinstance(inner, dict) else value
    return value


def _is_prefix(held: list[str], sent_atoms: list[str]) -> bool:
    """Return True if the atoms `sent_atoms` are the atoms `held`, or their beginning."""
    if len(sent_atoms) == len(held) + 1 and sent_atoms[-1] in (WORDS["None"], ""):
        sent_atoms = sent_atoms[:-1]  # a placeholder for a missing value
    if not sent_atoms:
        return True
    before, last = len(sent_atoms) - 1, sent_atoms[-1]
    if len(sent_atoms) > len(held) or not _same_atoms(held[:before], sent_atoms[:before]):
        return False
    if _same_atoms(held[before : before + 1], [last]):
        return True
    is_cut = held[before].startswith(last) or (last in WORDS.values() and last.startswith(held[before].lower()))
    return len(sent_atoms) == len(held) and is_cut


def _same_atoms(held: list[str], sent_atoms: list[str]) -> bool:
    """Return True if the atoms are the same. JavaScript writes null for infinity and NaN, which JSON does not have."""
    return len(held) == len(sent_atoms) and all(
        one == other or (other == WORDS["None"] and one in NO_NUMBERS)
        for one, other in zip(held, sent_atoms, strict=True)
    )


def _is_json(text: str) -> bool:
    """Return True if a text is JSON, even if it is nested too deep to be compared."""
    try:
        orjson.loads(text.encode("utf-8", "surrogatepass"))
    except ValueError:
        return False
    return True


def _parsed(text: str) -> object:
    try:
        return parse_text(text)
    except ValueError:
        return _NOTHING


def _atoms(text: str) -> Iterator[str]:
    """Yield the strings, numbers and words of a text, each in a normalized spelling."""
    for match in ATOMS.finditer(text):
        if match[5] is not None:
            yield _word(match[5])
        else:
            yield _unescaped(match[1] if match[1] is not None else match[3])


def _word(word: str) -> str:
    try:
        return repr(float(word))
    except ValueError:
        return WORDS.get(word, word)


def _unescaped(text: str) -> str:
    """Return a quoted string without its escapes; unchanged if the escapes are not valid JSON."""
    quoted = CUT_ESCAPE.sub(r"\1", text).replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
    try:
        return str(orjson.loads(f'"{quoted}"'))
    except ValueError:
        return text

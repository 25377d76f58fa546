"""Arguments of a call that are no JSON, and come back repaired.

A model may leave out the last brace of a call, or end within it. Agents' libraries close what is open, drop what is not
complete, or call the tool without arguments; all of them mean the call that was sampled.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import orjson

from middleware_hub.openai_session.sessions.messages import parse_text

#: Texts in quotes, of which the last may not end, and words and numbers. What stands between them is punctuation.
ATOMS = re.compile(r'"((?:[^"\\]|\\.)*)("|\\?$)|\'((?:[^\'\\]|\\.)*)(\'|\\?$)|([^\s"\'{}\[\],:]+)', re.DOTALL)
#: An escape that is cut at the end of a text; an even number of backslashes in front of it are others.
CUT_ESCAPE = re.compile(r"(?<!\\)((?:\\\\)*)\\(?:u[0-9a-fA-F]{0,3})?$")
WORDS = {"True": "true", "False": "false", "None": "null"}
#: Characters of arguments that are looked at: repairing is for calls, not for whole files.
MOST = 1 << 20
NO_NUMBERS = frozenset(("inf", "-inf", "nan"))
_NOTHING = object()


def is_repair(held: object, sent: object) -> bool:
    """Return whether arguments sent back are the held ones, made into JSON, or spelled in another language.

    Every text, number and word of `sent` must stand in `held` in the same order, from the beginning on. Where `held` is
    no JSON, some may be missing at the end, and the last one may be cut; `sent` may also hold the whole held text as a
    value. Where `sent` is none, as what Python writes of a dictionary, nothing may be missing.
    """
    if not isinstance(held, str) or not held.strip() or len(held) > MOST:
        return False
    value = _parsed(sent) if isinstance(sent, str) and sent.strip() else sent or {}
    if value is _NOTHING:
        respelled = isinstance(sent, str) and len(sent) <= MOST and _is_json(held) and not _is_json(sent)
        return respelled and _same_atoms([*_atoms(held)], [*_atoms(str(sent))])
    if _is_json(held):
        return False
    if isinstance(value, dict) and held in value.values():
        return True
    if not isinstance(value, dict | list):
        return False
    written = [*_atoms(orjson.dumps(value).decode())]
    # Behind a sentence, or within a fence of Markdown, arguments begin with their brace.
    return any(_is_begin([*_atoms(held[begin:])], written) for begin in {0, max(0, held.find("{"))})


def plain_value(text: str) -> Any:
    """Return the JSON that a text spells; of an object that was written as a text within it, the object.

    Raises:
        ValueError: it spells none.
    """
    value = parse_text(text)
    if isinstance(value, str):
        inner = _parsed(value)
        return inner if isinstance(inner, dict) else value
    return value


def _is_begin(said: list[str], written: list[str]) -> bool:
    """Return whether what was written is what was said, or its beginning."""
    if len(written) == len(said) + 1 and written[-1] in (WORDS["None"], ""):
        written = written[:-1]  # stands for a value that is missing
    if not written:
        return True
    before, last = len(written) - 1, written[-1]
    if len(written) > len(said) or not _same_atoms(said[:before], written[:before]):
        return False
    if _same_atoms(said[before : before + 1], [last]):
        return True
    is_cut = said[before].startswith(last) or (last in WORDS.values() and last.startswith(said[before].lower()))
    return len(written) == len(said) and is_cut


def _same_atoms(said: list[str], written: list[str]) -> bool:
    """Return whether atoms are the same. JavaScript writes null for numbers that JSON has not."""
    return len(said) == len(written) and all(
        one == other or (other == WORDS["None"] and one in NO_NUMBERS) for one, other in zip(said, written, strict=True)
    )


def _is_json(text: str) -> bool:
    """Return whether a text is JSON, also JSON that is nested too deep to be compared."""
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
    """The texts, numbers and words of a text, each in one spelling."""
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
    """What a text in quotes says; as it is written, where that is no JSON."""
    quoted = CUT_ESCAPE.sub(r"\1", text).replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
    try:
        return str(orjson.loads(f'"{quoted}"'))
    except ValueError:
        return text

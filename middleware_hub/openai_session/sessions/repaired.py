"""Arguments of a call that are no JSON, and come back repaired.

A model may leave out the last brace of a call, or end within it. Agents' libraries close what is open, drop what is not
complete, or call the tool without arguments; all of them mean the call that was sampled.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import orjson

from middleware_hub.openai_session.sessions.messages import parse_text

#: Texts in quotes, of which the last may not end, and words and numbers. What stands between them is punctuation.
ATOMS = re.compile(r'"((?:[^"\\]|\\.)*)("|\\?$)|\'((?:[^\'\\]|\\.)*)(\'|\\?$)|([^\s"\'{}\[\],:]+)', re.DOTALL)
#: An escape that is cut at the end of a text; an even number of backslashes in front of it are others.
CUT_ESCAPE = re.compile(r"(?<!\\)((?:\\\\)*)\\(?:u[0-9a-fA-F]{0,3})?$")
WORDS = {"True": "true", "False": "false", "None": "null"}
#: Characters of arguments that are looked at: repairing is for calls, not for whole files.
MOST = 1 << 20
_NOTHING = object()


def is_repair(held: object, sent: object) -> bool:
    """Return whether arguments sent back are the held ones, which are no JSON, made into JSON.

    Every text, number and word of `sent` must stand in `held` in the same order, from the beginning on; at the end some
    may be missing, and the last one may be cut. `sent` may also hold the whole held text as a value.
    """
    if not isinstance(held, str) or not held.strip() or len(held) > MOST or _is_json(held):
        return False
    value = _parsed(sent) if isinstance(sent, str) and sent.strip() else sent or {}
    if isinstance(value, dict) and held in value.values():
        return True
    if not isinstance(value, dict | list):
        return False
    said, written = [*_atoms(held)], [*_atoms(orjson.dumps(value).decode())]
    if len(written) == len(said) + 1 and written[-1] == WORDS["None"]:
        written.pop()  # stands for a value that is missing
    if not written:
        return True
    before, last = len(written) - 1, written[-1]
    if len(written) > len(said) or written[:before] != said[:before]:
        return False
    return last == said[before] or (len(written) == len(said) and said[before].startswith(last))


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

"""Names that clients give their generations (`rid`), and other ones for engines. Pure.

SGLang 0.5.23 aborts every generation whose name begins with the one that it is told (`Scheduler.abort_request`), and
tells itself to do so when a client leaves. A client that calls its generation `a` and leaves takes with it a sixteenth
of the generations that the engine has named by hexadecimal digits, whosesoever they are.
"""

from __future__ import annotations

import re
import string
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import orjson

from miles_router.engines.engine import Parse
from miles_router.engines.events import Event
from miles_router.engines.generate import IDS, IDS_ALIAS, RID, TEXT
from miles_router.engines.known import MADE_NAMES, NAME_FIELDS
from miles_router.engines.scan import Field, Incomplete
from miles_router.engines.writing import extended

#: Hexadecimal digits of a name that engines and this router make where a client gives none.
DIGITS = 32
#: Fields that may hold a list of prompts; the first that is there counts.
PROMPTS = (IDS, IDS_ALIAS, TEXT, "prompt")
_RID = Field(RID)
_FIELDS = {path: Field(name) for path, name in NAME_FIELDS.items()}
_HEX = frozenset(string.hexdigits)
#: A letter or an underscore that is escaped without need: in a name, too, an engine reads it.
_ESCAPED = re.compile(rb"\\u00[4-7]")


def may_begin_others(name: str) -> bool:
    """Return whether the names that engines and this router make may begin with this one, as with the empty name."""
    return any(
        made.startswith(name) or (name.startswith(made) and _is_short_hex(name[len(made) :])) for made in MADE_NAMES
    )


def _is_short_hex(name: str) -> bool:
    return len(name) < DIGITS and _HEX.issuperset(name)


def is_made(name: str) -> bool:
    """Return whether a name is as long as those that are made, so that it begins no other."""
    return len(name) == DIGITS and _HEX.issuperset(name)


@dataclass(frozen=True)
class Names:
    """What a request's generations are called by the engines, where it is not what their client calls them. An engine
    may still have what was sent to it before; it refuses a name twice, and aborts what bears the name of a stream 2 s
    after that has ended (SGLang 0.5.23, `TokenizerManager.create_abort_task`).

    Attributes:
        inward: a client's name -> the engines'.
    """

    inward: Mapping[str, str]
    _outward: Sequence[tuple[bytes, bytes]] = ()

    @classmethod
    def renamed(cls, path: str, body: bytes, parse: Parse) -> tuple[bytes, Names]:
        """Return a request with new names in place of its client's, and these; the request as it is where it has none.

        Raises:
            What `parse` raises.
        """
        field = NAME_FIELDS.get(path, RID)
        given = _given(body, field, parse)
        names: list[Any] = given if isinstance(given, list) else [given]
        if not names or not all(isinstance(each, str) for each in names):
            return body, NO_NAMES  # the engine says what is wrong with it
        parsed = parse(body)
        fresh = [uuid.uuid4().hex for _ in names]
        own = [orjson.dumps(each)[1:-1] for each in names]
        written = extended(body, {field: fresh if isinstance(given, list) else fresh[0]})
        inward = dict(zip(_all_rids(parsed, names), _all_rids(parsed, fresh), strict=True))
        return written, cls(inward, [(new.encode(), old) for new, old in zip(fresh, own, strict=True)])

    def outward(self, said: bytes) -> bytes:
        """Return what an engine says, with its client's names. No other text has the engines' by chance."""
        for new, old in self._outward:
            said = said.replace(new, old)
        return said

    def __bool__(self) -> bool:
        return bool(self._outward)


NO_NAMES = Names({})


def given_names(path: str, body: bytes, parse: Parse) -> Sequence[str] | None:
    """Return the names that a request gives, one for all of its prompts or one for each. None: its body has no such
    field. Empty: an engine refuses them, or they are nothing. A body that has the field at most once is not parsed.

    Raises:
        What `parse` raises.
    """
    field = _FIELDS.get(path, _RID)
    escaped = _ESCAPED.search(body) is not None
    if field.quoted not in body and not escaped:
        return None
    try:
        given = _given(body, field.name, parse) if escaped else field.only(body)
    except Incomplete:  # it stands several times, at several depths
        given = _given(body, field.name, parse)
    names = given if isinstance(given, list) else [given]
    strings = [name for name in names if isinstance(name, str) and name]
    return strings if len({*strings}) == len(names) else ()


def engine_names(path: str, body: bytes, parse: Parse) -> Sequence[str]:
    """Return what an engine calls the generations of a request that gives names.

    Raises:
        What `parse` raises.
    """
    names = [*(given_names(path, body, parse) or ())]
    if len(names) != 1:
        return names
    parsed = parse(body)
    return names if isinstance(parsed[NAME_FIELDS.get(path, RID)], list) else _all_rids(parsed, names)


def needs_others(path: str, body: bytes, parse: Parse, *, private: bool) -> bool:
    """Return whether engines must not see the names that a request gives. Where it gives none, or those that it gives
    begin no other, nothing is parsed.

    Args:
        private: its client shares no names with others, so that its own begin none of theirs either.

    Raises:
        What `parse` raises.
    """
    field = _FIELDS.get(path, _RID)
    if field.quoted not in body and _ESCAPED.search(body) is None:
        return False
    if _ESCAPED.search(body) is None:
        with suppress(Incomplete):  # which the parser finds out
            if not any(_must_change(value, private=private) for value in field.values(body)):
                return False
    return _must_change(_given(body, field.name, parse), private=private)


def _must_change(given: object, *, private: bool) -> bool:
    names = given if isinstance(given, list) else [given]
    return any(isinstance(name, str) and (not is_made(name) if private else may_begin_others(name)) for name in names)


def _given(body: bytes, field: str, parse: Parse) -> object:
    """The name, or names, that a request gives."""
    if b'"%b"' % field.encode("ascii") not in body and _ESCAPED.search(body) is None:
        return None
    parsed = parse(body)
    return parsed.get(field) if isinstance(parsed, Mapping) else None


def _all_rids(parsed: Mapping[str, Any], names: list[str]) -> list[str]:
    """One name makes those of a whole list: `r_0`, `r_1`."""
    prompts = next((given for name in PROMPTS if (given := parsed.get(name)) is not None), None)
    if len(names) > 1 or not isinstance(prompts, list) or (prompts and isinstance(prompts[0], int)):
        return names
    return [*names, *(f"{names[0]}_{index}" for index in range(len(prompts)))]


class RenamedRequest:
    """A request to an engine that is asked as it came but for its names; its client sees its own."""

    heeds_cache_key = True
    target: bytes | None = None

    def __init__(self, path: str, body: bytes, parse: Parse) -> None:
        self.body, self._names = Names.renamed(path, body, parse)
        self.rids = self._names.inward

    def whole(self, answer: bytes, version: str | None) -> bytes:
        """Return a whole answer with the client's names."""
        return self._names.outward(answer)

    def event(self, event: Event, version: str | None) -> bytes:
        """Return an event of a stream with the client's names."""
        return self._names.outward(event.raw)

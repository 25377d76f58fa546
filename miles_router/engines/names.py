"""Request ids (`rid`) from clients, and the ids that replace them towards engines. No I/O.

SGLang 0.5.23 aborts every generation whose id begins with the given one (`Scheduler.abort_request`), and sends itself
such an abort when a client disconnects. A client that names its generation `a` and disconnects thus aborts one
sixteenth of all generations with hexadecimal ids, including those of other clients.
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
from miles_router.engines.json_bytes import Field, Incomplete
from miles_router.engines.known import MADE_NAMES, NAME_FIELDS
from miles_router.engines.writing import extended

#: The number of hexadecimal digits in an id that engines or this router make.
DIGITS = 32
#: Fields that may hold a list of prompts; the first one present counts.
PROMPTS = (IDS, IDS_ALIAS, TEXT, "prompt")
_RID = Field(RID)
_FIELDS = {path: Field(name) for path, name in NAME_FIELDS.items()}
_HEX = frozenset(string.hexdigits)
#: A needlessly escaped letter or underscore. Engines decode it in field names too.
_ESCAPED = re.compile(rb"\\u00[4-7]")


def may_prefix_others(name: str) -> bool:
    """Return whether a generated id may begin with this one, such as with the empty id."""
    return any(
        made.startswith(name) or (name.startswith(made) and _is_short_hex(name[len(made) :])) for made in MADE_NAMES
    )


def _is_short_hex(name: str) -> bool:
    return len(name) < DIGITS and _HEX.issuperset(name)


def is_generated(name: str) -> bool:
    """Return whether an id has the length of generated ids, so that it is a prefix of no other."""
    return len(name) == DIGITS and _HEX.issuperset(name)


@dataclass(frozen=True)
class Names:
    """The ids of a request's generations towards engines, where they differ from the client's.

    Each attempt needs new ids, since an engine may still hold earlier ones. It refuses an id twice, and aborts an id 2
    s after its stream has ended (SGLang 0.5.23, `TokenizerManager.create_abort_task`).

    Attributes:
        inward: a client's id -> the engine's id.
    """

    inward: Mapping[str, str]
    _client_names: Sequence[tuple[bytes, bytes]] = ()

    @classmethod
    def renamed(cls, path: str, body: bytes, parse: Parse) -> tuple[bytes, Names]:
        """Return the body with fresh ids in place of the client's, and the mapping; the unchanged body if it has no
        ids.

        Raises:
            Exception: any error of `parse`.
        """
        field = NAME_FIELDS.get(path, RID)
        given = _client_rids(body, field, parse)
        names: list[Any] = given if isinstance(given, list) else [given]
        if not names or not all(isinstance(each, str) for each in names):
            return body, NO_NAMES  # the engine reports what is wrong
        parsed = parse(body)
        fresh = [uuid.uuid4().hex for _ in names]
        own = [orjson.dumps(each)[1:-1] for each in names]
        written = extended(body, {field: fresh if isinstance(given, list) else fresh[0]})
        inward = dict(zip(_expand_rids(parsed, names), _expand_rids(parsed, fresh), strict=True))
        return written, cls(inward, [(new.encode(), old) for new, old in zip(fresh, own, strict=True)])

    def to_client(self, data: bytes) -> bytes:
        """Return an engine's answer with the client's ids. The engine's ids are random, so no other text contains
        them."""
        for new, old in self._client_names:
            data = data.replace(new, old)
        return data

    def __bool__(self) -> bool:
        return bool(self._client_names)


NO_NAMES = Names({})


@dataclass(frozen=True)
class GivenNames:
    """The ids in a request.

    Attributes:
        valid: one id for all prompts, or one for each. Empty: the ids are invalid or blank.
        values: every value of the field, at any depth; None if the body must be parsed to know them.
    """

    valid: Sequence[str]
    values: Sequence[object] | None


def given_names(path: str, body: bytes, parse: Parse) -> GivenNames | None:
    """Return the ids in a request; None if the body has no such field.

    The body is not parsed if the field occurs at most once, and not even searched if it is the last field: engines take
    the last of several.

    Raises:
        Exception: any error of `parse`.
    """
    field = _FIELDS.get(path, _RID)
    values: list[object] | None = None
    with suppress(Incomplete):
        values = [field.last(body)]
    if values is None:
        escaped = _may_be_escaped(body)
        first = body.find(field.quoted)  # `not in` takes three times as long on short bodies
        if not escaped and first < 0:
            return None
        if not escaped:
            with suppress(Incomplete):  # an incomplete value: `parse` reports it below
                values = [*field.values(body, first)]
    only = values is not None and len(values) == 1  # otherwise the field occurs several times, at different depths
    given = values[0] if values is not None and only else _client_rids(body, field.name, parse)
    names = given if isinstance(given, list) else [given]
    strings = [name for name in names if isinstance(name, str) and name]
    return GivenNames(strings if len({*strings}) == len(names) else (), values)


def engine_names(path: str, body: bytes, parse: Parse) -> Sequence[str]:
    """Return the engine's ids for the generations of a request that contains ids.

    Raises:
        Exception: any error of `parse`.
    """
    given = given_names(path, body, parse)
    names = [] if given is None else [*given.valid]
    if len(names) != 1:
        return names
    parsed = parse(body)
    return names if isinstance(parsed[NAME_FIELDS.get(path, RID)], list) else _expand_rids(parsed, names)


def must_rename(path: str, body: bytes, parse: Parse, given: GivenNames, *, private: bool) -> bool:
    """Return whether the ids in a request must be replaced before an engine sees them.

    The body is not parsed if all ids are no prefix of others.

    Args:
        private: the client shares no ids with other clients, so its ids must not be a prefix of theirs either.

    Raises:
        Exception: any error of `parse`.
    """
    if given.values is not None and not any(_must_change(value, private=private) for value in given.values):
        return False
    return _must_change(_client_rids(body, NAME_FIELDS.get(path, RID), parse), private=private)


def _must_change(given: object, *, private: bool) -> bool:
    names = given if isinstance(given, list) else [given]
    return any(
        isinstance(name, str) and (not is_generated(name) if private else may_prefix_others(name)) for name in names
    )


def _may_be_escaped(body: bytes) -> bool:
    """Return whether a field's name may be spelled with an escape."""
    return body.find(b"\\") >= 0 and _ESCAPED.search(body) is not None  # without a backslash `find` is far quicker


def _client_rids(body: bytes, field: str, parse: Parse) -> object:
    if b'"%b"' % field.encode("ascii") not in body and not _may_be_escaped(body):
        return None
    parsed = parse(body)
    return parsed.get(field) if isinstance(parsed, Mapping) else None


def _expand_rids(parsed: Mapping[str, Any], names: list[str]) -> list[str]:
    """Return the ids of all generations. A single id for a list of prompts becomes `r`, `r_0`, `r_1` and so on."""
    prompts = next((given for name in PROMPTS if (given := parsed.get(name)) is not None), None)
    if len(names) > 1 or not isinstance(prompts, list) or (prompts and isinstance(prompts[0], int)):
        return names
    return [*names, *(f"{names[0]}_{index}" for index in range(len(prompts)))]


class RenamedRequest:
    """A translation that replaces only the request ids; the client sees its own ids."""

    heeds_cache_key = True
    target: bytes | None = None

    def __init__(self, path: str, body: bytes, parse: Parse) -> None:
        self.body, self._names = Names.renamed(path, body, parse)
        self.rids = self._names.inward

    def whole(self, answer: bytes, version: str | None) -> bytes:
        return self._names.to_client(answer)

    def event(self, event: Event, version: str | None) -> bytes:
        return self._names.to_client(event.raw)

"""The registry of engines, and functions that find the engine of a worker or the reader of a request. No I/O.

No other module names an engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import parse_qsl, unquote

from miles_router.engines.actions import Action, Order
from miles_router.engines.control import BETWEEN, Arguments, BadArguments, ControlRequest, other
from miles_router.engines.engine import WITHHELD, Documents, Engine, Names, Parse
from miles_router.engines.facts import Facts
from miles_router.engines.models import with_model
from miles_router.engines.refusals import Overflow, refusal_of
from miles_router.engines.sglang.engine import SGLANG, SGLang
from miles_router.engines.sglang_jax.engine import SGLangJax
from miles_router.engines.vllm.engine import VLLM

#: The first kind that recognizes a worker's documents is its engine.
KINDS: Sequence[type[Engine]] = (SGLangJax, SGLang, VLLM)
#: The engine that is assumed for a worker that reports nothing about itself.
USUAL: Engine = SGLANG
#: The paths that identify a worker whose engine is unknown.
ALIVE: Sequence[Names] = tuple(dict.fromkeys(kind.alive for kind in KINDS))
DOCUMENTS: Sequence[Names] = tuple(dict.fromkeys(names for kind in KINDS for names in kind.documents))
#: The union of the attributes of all kinds; `Engine` describes them.
GENERATION = frozenset[str]().union(*(kind.generates for kind in KINDS))
COMPUTED = frozenset[str]().union(*(kind.computes for kind in KINDS))
ASIDE = frozenset[str]().union(*(kind.aside for kind in KINDS))
MADE_NAMES = tuple(dict.fromkeys(made for kind in KINDS for made in kind.made_names))
NAME_FIELDS = {path: field for kind in reversed(KINDS) for path, field in kind.name_fields.items()}
PLACES = frozenset[str]().union(*(kind.places for kind in KINDS))
TOKENIZERS = frozenset[str]().union(*(kind.tokenizers for kind in KINDS))
CLIENT_PATHS = frozenset[str]().union(*(kind.client_paths for kind in KINDS))
#: Every control request by its path. If several kinds have the path, the first one's reader counts.
CONTROL: dict[str, ControlRequest] = {}
for each_kind in KINDS:
    for each_request in each_kind.control:
        CONTROL.setdefault(each_request.path, each_request)


def read_facts(documents: Documents) -> Facts:
    """Return the facts in these documents. `Facts.engine` is None if no kind recognizes them."""
    for kind in KINDS:
        if (engine := kind.recognized(documents)) is not None:
            return engine.facts(documents)
    return replace(USUAL.facts(documents), engine=None)


def facts_of(documents: Documents) -> Facts:
    """Return the facts of a worker that was asked for all its documents. If all of them were answered, a missing LoRA
    flag means False, and an unrecognized engine is `USUAL`."""
    facts = read_facts(documents)
    engine = facts.engine or (USUAL if USUAL.has_said_all(documents) else None)
    has_said = engine is not None and engine.has_said_all(documents) and WITHHELD not in documents.values()
    if facts.lora is None and has_said:
        facts = replace(facts, lora=False)
    return replace(facts, engine=engine)


def with_adapter(path: str, body: bytes, adapter: str, parse: Parse) -> bytes:
    """Return the request changed so that its route applies the adapter, in the form of the engine that has the route.
    Raises as `Engine.with_adapter`."""
    if any(path in kind.adapter_by_model for kind in KINDS):
        return with_model(body, adapter)
    return USUAL.with_adapter(path, body, adapter, parse)


def overflow_of(parsed: object) -> Overflow | None:
    """Parse a refusal about the context window, in the form of any engine; None if the refusal is about something
    else."""
    message = refusal_of(parsed).message
    return next((found for kind in KINDS if (found := kind.overflow(message)) is not None), None)


def own_request(path: str) -> ControlRequest:
    """Return the reader for a user-defined control path."""
    found = (each for kind in KINDS if (each := kind.own_request(path)) is not None)
    return next(found, other(path))


@dataclass(frozen=True)
class ReadOrder:
    """A control request from a client, and the action that it means."""

    path: str
    arguments: Arguments
    action: Action

    @classmethod
    def read(cls, request: ControlRequest, target: bytes, fields: Mapping[str, Any]) -> ReadOrder:
        """Parse a request. `fields` are the fields of its body.

        Raises:
            BadArguments: the arguments are invalid for every engine.
        """
        query: dict[str, str] = {}  # the values of repeated names are joined by `BETWEEN`
        for name, value in parse_qsl(target.partition(b"?")[2].decode("latin-1"), keep_blank_values=True):
            query[name] = f"{query[name]}{BETWEEN}{value}" if name in query else value
        arguments = Arguments(fields, query)
        return cls(request.path, arguments, request.read(arguments))

    @classmethod
    def from_order(cls, order: Order, parse: Parse) -> ReadOrder | None:
        """Parse an order that was sent before; None for a path that no engine has."""
        request = CONTROL.get(unquote(order.target.partition(b"?")[0].decode("latin-1")))
        return None if request is None else cls.read(request, order.target, parse(order.body) if order.body else {})

    @property
    def is_common(self) -> bool:
        """Whether every kind of engine accepts the request unchanged, so that the worker's kind does not matter."""
        return all(map(self.is_spelled_by, KINDS))

    def is_spelled_by(self, engine: Engine | type[Engine]) -> bool:
        """Return whether an engine accepts the request unchanged. User-defined paths are meant for every engine."""
        if self.path not in CONTROL:
            return True
        try:
            return engine.read(self.path, self.arguments) == self.action
        except BadArguments:
            return False


def may_come_twice(method: str, target: bytes) -> bool:
    """Return whether a request to an engine may be sent again after its connection was lost. An update may already have
    begun. An abort has no further effect the second time, and thousands of them may be sent."""
    named = CONTROL.get(target.partition(b"?")[0].decode("latin-1"))
    return method in ("GET", "HEAD") or (named is not None and named.may_come_twice)

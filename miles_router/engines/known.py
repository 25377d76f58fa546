"""The engines that the router knows, and which of them a worker is. No engine is named elsewhere. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import parse_qsl, unquote

from miles_router.engines.actions import Action, Order
from miles_router.engines.control import Arguments, BadArguments, ControlRequest, other
from miles_router.engines.engine import WITHHELD, Documents, Engine, Names, Parse
from miles_router.engines.facts import Facts
from miles_router.engines.models import with_model
from miles_router.engines.refusals import Overflow, refusal_of
from miles_router.engines.sglang.engine import SGLANG, SGLang
from miles_router.engines.sglang_jax.engine import SGLangJax
from miles_router.engines.vllm.engine import VLLM

#: The first that recognizes a worker is its engine.
KINDS: Sequence[type[Engine]] = (SGLangJax, SGLang, VLLM)
#: What a worker is taken for that says nothing about itself.
USUAL: Engine = SGLANG
#: What a worker is asked before its engine is known.
ALIVE: Sequence[Names] = tuple(dict.fromkeys(kind.alive for kind in KINDS))
DOCUMENTS: Sequence[Names] = tuple(dict.fromkeys(names for kind in KINDS for names in kind.documents))
#: The same of paths as `Engine` says of each kind.
GENERATION = frozenset[str]().union(*(kind.generates for kind in KINDS))
COMPUTED = frozenset[str]().union(*(kind.computes for kind in KINDS))
ASIDE = frozenset[str]().union(*(kind.aside for kind in KINDS))
MADE_NAMES = tuple(dict.fromkeys(made for kind in KINDS for made in kind.made_names))
NAME_FIELDS = {path: field for kind in reversed(KINDS) for path, field in kind.name_fields.items()}
PLACES = frozenset[str]().union(*(kind.places for kind in KINDS))
TOKENIZERS = frozenset[str]().union(*(kind.tokenizers for kind in KINDS))
CLIENT_PATHS = frozenset[str]().union(*(kind.client_paths for kind in KINDS))
#: Every control request by its path, as the first kind reads it that has it.
CONTROL: dict[str, ControlRequest] = {}
for each_kind in KINDS:
    for each_request in each_kind.control:
        CONTROL.setdefault(each_request.path, each_request)


def read_facts(documents: Documents) -> Facts:
    """Return what these documents say; which engine they are from among it, where one recognizes them."""
    for kind in KINDS:
        if (engine := kind.recognized(documents)) is not None:
            return engine.facts(documents)
    return replace(USUAL.facts(documents), engine=None)


def facts_of(documents: Documents) -> Facts:
    """Return what a worker says that was asked for all its documents: what it had the opportunity to say and left out,
    it has not."""
    facts = read_facts(documents)
    engine = facts.engine or (USUAL if USUAL.has_said_all(documents) else None)
    has_said = engine is not None and engine.has_said_all(documents) and WITHHELD not in documents.values()
    if facts.lora is None and has_said:
        facts = replace(facts, lora=False)
    return replace(facts, engine=engine)


def with_adapter(path: str, body: bytes, adapter: str, parse: Parse) -> bytes:
    """Return a request so that its route applies the adapter, as the engine spells it whose route that is. Raises as
    `Engine.with_adapter`."""
    if any(path in kind.adapter_by_model for kind in KINDS):
        return with_model(body, adapter)
    return USUAL.with_adapter(path, body, adapter, parse)


def overflow_of(parsed: object) -> Overflow | None:
    """Return what a refusal says of the context window, as one of the engines says it; None where it is about something
    else."""
    message = refusal_of(parsed).message
    return next((found for kind in KINDS if (found := kind.overflow(message)) is not None), None)


def own_request(path: str) -> ControlRequest:
    """Return how a control request is read whose path is the user's own."""
    found = (each for kind in KINDS if (each := kind.own_request(path)) is not None)
    return next(found, other(path))


@dataclass(frozen=True)
class ReadOrder:
    """A control request that came, and the action that is meant by it."""

    path: str
    arguments: Arguments
    action: Action

    @classmethod
    def read(cls, request: ControlRequest, target: bytes, fields: Mapping[str, Any]) -> ReadOrder:
        """Read a request. `fields`: those of its body.

        Raises:
            BadArguments: no engine could make sense of it.
        """
        query: dict[str, str] = {}  # of a name that stands several times the values, as a list that commas separate
        for name, value in parse_qsl(target.partition(b"?")[2].decode("latin-1"), keep_blank_values=True):
            query[name] = f"{query[name]},{value}" if name in query else value
        arguments = Arguments(fields, query)
        return cls(request.path, arguments, request.read(arguments))

    @classmethod
    def again(cls, order: Order, parse: Parse) -> ReadOrder | None:
        """Read an order that was given before; None for a path that no engine has."""
        request = CONTROL.get(unquote(order.target.partition(b"?")[0].decode("latin-1")))
        return None if request is None else cls.read(request, order.target, parse(order.body) if order.body else {})

    @property
    def is_common(self) -> bool:
        """Whether every kind of engine takes it as it came, so that nobody needs to know which one a worker is."""
        return all(map(self.is_spelled_by, KINDS))

    def is_spelled_by(self, engine: Engine | type[Engine]) -> bool:
        """Return whether an engine takes it as it came. A path of the user's own is meant for all of them."""
        if self.path not in CONTROL:
            return True
        try:
            return engine.read(self.path, self.arguments) == self.action
        except BadArguments:
            return False


def may_come_twice(method: str, target: bytes) -> bool:
    """Return whether a request to an engine may be sent again that was lost. An engine may have begun an update; an
    abort, of which there may be thousands, does no more the second time."""
    named = CONTROL.get(target.partition(b"?")[0].decode("latin-1"))
    return method in ("GET", "HEAD") or (named is not None and named.may_come_twice)

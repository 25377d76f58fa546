"""The engines that the router knows, and which of them a worker is. No engine is named elsewhere. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from miles_router.engines.engine import WITHHELD, Documents, Engine, Names
from miles_router.engines.facts import Facts
from miles_router.engines.sglang.engine import SGLANG, SGLang
from miles_router.engines.sglang_jax.engine import SGLangJax

#: The first that recognizes a worker is its engine.
KINDS: Sequence[type[Engine]] = (SGLangJax, SGLang)
#: What a worker is taken for that says nothing about itself.
USUAL: Engine = SGLANG
#: What a worker is asked before its engine is known.
ALIVE: Sequence[Names] = tuple(dict.fromkeys(kind.alive for kind in KINDS))
DOCUMENTS: Sequence[Names] = tuple(dict.fromkeys(names for kind in KINDS for names in kind.documents))


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
    if facts.lora is None and engine is not None and WITHHELD not in documents.values():
        facts = replace(facts, lora=False)
    return replace(facts, engine=engine)

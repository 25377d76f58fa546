"""Local parsers for the reasoning and tool calls of each model family. Pure.

A local parser makes the same message of a whole text as the engine's own parser. If the engine's result is not
certain, the local parser raises `Unparsable`.
"""

from miles_router.engines.parsers.local import FAMILIES, LocalParser, Parsers, reasoning_marks
from miles_router.engines.parsers.reading import PARSE_ERRORS, ParsedCall, ParsedCalls, Unparsable

__all__ = [
    "FAMILIES",
    "PARSE_ERRORS",
    "LocalParser",
    "ParsedCall",
    "ParsedCalls",
    "Parsers",
    "Unparsable",
    "reasoning_marks",
]

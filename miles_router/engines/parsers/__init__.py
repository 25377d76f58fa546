"""Local parsers for the reasoning and tool calls of each model family. Pure.

A local parser makes the same message of a whole text as the engine's own parser. If the engine's result is not
certain, the local parser raises `Unparsable`.
"""

from miles_router.engines.parsers.local import FAMILIES, LocalParser, Parsers, reasoning_marks
from miles_router.engines.parsers.reading import UNREAD, ReadCall, ReadCalls, Unparsable

__all__ = ["FAMILIES", "UNREAD", "LocalParser", "Parsers", "ReadCall", "ReadCalls", "Unparsable", "reasoning_marks"]

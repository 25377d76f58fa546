"""What model families write: reasoning and tool calls in a text, a file for each family. Pure.

A local parser reads a whole text as the engine's does: it makes the same message of it. Where how the engine would
read a text is not certain, it says so (`Unparsable`).
"""

from miles_router.engines.parsers.local import FAMILIES, LocalParser, Parsers, reasoning_marks
from miles_router.engines.parsers.reading import UNREAD, ReadCall, ReadCalls, Unparsable

__all__ = ["FAMILIES", "UNREAD", "LocalParser", "Parsers", "ReadCall", "ReadCalls", "Unparsable", "reasoning_marks"]

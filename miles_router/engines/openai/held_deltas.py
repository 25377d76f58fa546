"""Holds back deltas of a chat stream that the model may not have sampled. Pure.

Source: SGLang 0.5.23, `_check_for_unstreamed_tool_args`. If the length limit or an abort ends an answer inside a call's
arguments, the engine completes the JSON itself. A client would see a complete call that the model did not sample. So
the last delta of a call waits for the next chunk. At such an end the delta is shown only if it was sampled.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

#: Finish reasons after which every delta was sampled by the model.
OWN_ENDS = frozenset({"stop", "tool_calls"})
#: Marks that end a call in formats whose arguments are not JSON.
CLOSED = (
    "</function>",
    "</tool_call>",
    "</invoke>",
    "</minimax:tool_call>",
    "</｜DSML｜invoke>",
    "</｜DSML｜function_calls>",
    "</｜DSML｜tool_calls>",
)
#: Endings of special token texts. An aborted answer shows its end token if that was the last token.
SPECIAL_ENDS = (">", "]")
#: The most characters of a stop string that are compared with the end of a text: a client may send long ones.
LONGEST_BEGINNING = 256
#: The field of a logprob entry with the token's id. SGLang's own chat has no such field.
TOKEN_ID = "token_id"
_VALUE = json.JSONDecoder()

Chunk = dict[str, Any]


def may_end(text: str | None, stops: Iterable[str] = ()) -> bool:
    """Return True if a text may end with a special token, contains a stop string, or ends with the start of one.

    Engines hold such text back and trim it. But if an abort ends the answer there, they send all of it.
    """
    if not text:
        return False
    text = str(text)
    return text.endswith(SPECIAL_ENDS) or any(stop in text or _begins(stop, text) for stop in stops)


def _begins(stop: str, text: str) -> bool:
    longest = min(len(stop) - 1, len(text), LONGEST_BEGINNING)
    return any(text.endswith(stop[:length]) for length in range(1, longest + 1))


def token_bytes(entry: Mapping[str, Any]) -> bytes:
    """Return the bytes of a token from its logprob entry. Raises one of `MALFORMED` if they are malformed."""
    values = entry.get("bytes") or []
    if not isinstance(values, list) or not all(type(each) is int and 0 <= each < 256 for each in values):
        raise TypeError("the bytes of a token are not a list of numbers from 0 to 255")
    return bytes(values)


class HeldDelta:
    """The delta of one choice that waits for the next chunk, such as the last delta of a tool call.

    Args:
        texts: whether text waits too that may be an end token or part of a stop string.
        stops: the stop strings of the request.
        until_logprobs: whether text waits until a chunk with logprobs arrives.
    """

    def __init__(self, *, texts: bool = False, stops: Sequence[str] = (), until_logprobs: bool = False) -> None:
        self._texts = texts
        self._stops = stops
        self._until_logprobs = until_logprobs
        self._held: dict[str, Any] | None = None
        self._holds_text = False  # the delta has text and no call
        self._waits_for_logprobs = False  # the delta waits only for logprobs
        self._place: object = None  # the index of the last call
        self._arguments = ""
        self._sampled = bytearray()  # since the name of that call

    def pieces(self, chunk: Chunk) -> list[Chunk]:
        """Add a chunk that contains only this choice. Return the chunks to show now."""
        (choice,) = chunk["choices"]
        delta, logprobs = choice.get("delta") or {}, choice.get("logprobs")
        shown: list[Chunk] = []
        calls = delta.get("tool_calls")
        if any(delta.values()) or (logprobs and self._waits_for_logprobs):
            shown += self.release()
        if calls:
            self._add_call(calls[-1])
        for entry in (logprobs or {}).get("content") or ():
            self._sampled += token_bytes(entry)
        texts = [delta.get("content"), delta.get("reasoning_content")]
        self._waits_for_logprobs = self._until_logprobs and not calls and not logprobs and any(texts)
        ends = self._texts and any(may_end(text, self._stops) for text in texts)
        if not (calls or ends or self._waits_for_logprobs):
            return [*shown, chunk]
        self._waits_for_logprobs = self._waits_for_logprobs and not ends
        self._held, self._holds_text = {**chunk, "choices": [{**choice, "logprobs": None}]}, not calls
        return [*shown, {**chunk, "choices": [{**choice, "delta": {}}]}] if logprobs else shown

    def _add_call(self, call: Mapping[str, Any]) -> None:
        function = call.get("function") or {}
        if call.get("index") != self._place or function.get("name"):
            self._place, self._arguments = call.get("index"), ""
            self._sampled.clear()
        self._arguments += function.get("arguments") or ""

    def at_end(self, finish: str) -> list[Chunk]:
        """Return the chunks to show before the chunk with this finish reason."""
        if self._holds_text or finish in OWN_ENDS or self._was_sampled():
            return self.release()
        return self.drop()

    def release(self) -> list[Chunk]:
        """Return the waiting chunk, if any, and forget it."""
        held, self._held = self._held, None
        return [] if held is None else [held]

    def drop(self) -> list[Chunk]:
        """Discard the waiting chunk. Return an empty list."""
        self._held = None
        return []

    def _was_sampled(self) -> bool:
        """Return False if the arguments are complete JSON, but the sampled tokens do not complete them."""
        try:
            arguments = json.loads(self._arguments)
        except json.JSONDecodeError:
            return True
        except (ValueError, RecursionError):  # too many digits, or nested too deep to check
            return False
        text = self._sampled.decode(errors="replace")
        closed, begin = text.rstrip().endswith(CLOSED), text.find("{")
        if begin < 0:
            return closed
        try:
            return bool(_VALUE.raw_decode(text, begin)[0] == arguments) or closed
        except json.JSONDecodeError as error:  # in cut JSON, an end mark may be part of an open string
            return closed and not error.msg.startswith("Unterminated string")
        except (ValueError, RecursionError):
            return False

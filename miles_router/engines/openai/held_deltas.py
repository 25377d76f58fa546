"""Tool calls in chat streams that end in the middle (SGLang 0.5.23, `_check_for_unstreamed_tool_args`). Pure.

Where an answer ends by its length or by an abort within the arguments of a call, the engine closes them by itself: a
client sees a complete call that nobody has sampled. So the last delta of a call waits for what comes behind it, and is
shown at such an end only if it was sampled.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

#: Finish reasons behind which everything that was shown is the model's own.
OWN_ENDS = frozenset({"stop", "tool_calls"})
#: What a call ends with in formats whose arguments are no JSON.
CLOSED = (
    "</function>",
    "</tool_call>",
    "</invoke>",
    "</minimax:tool_call>",
    "</｜DSML｜invoke>",
    "</｜DSML｜function_calls>",
    "</｜DSML｜tool_calls>",
)
#: What the text of a special token ends with. A token that ends an answer is shown where the answer is aborted with it.
SPECIAL_ENDS = (">", "]")
#: Characters of a stop string that are looked for at the end of a text: a client may send long ones.
LONGEST_BEGINNING = 256
#: In a logprob's entry, the id of its token. SGLang's own chat does not tell it.
TOKEN_ID = "token_id"
_VALUE = json.JSONDecoder()

Chunk = dict[str, Any]


def may_end(text: str | None, stops: Iterable[str] = ()) -> bool:
    """Whether a text may be that of a token which ends an answer, or has a stop string, or the beginning of one at its
    end. Engines keep those back, and trim them; but where the answer is aborted with such a token, they say all."""
    if not text:
        return False
    text = str(text)
    return text.endswith(SPECIAL_ENDS) or any(stop in text or _begins(stop, text) for stop in stops)


def _begins(stop: str, text: str) -> bool:
    """Whether a stop string may begin at the end of a text."""
    longest = min(len(stop) - 1, len(text), LONGEST_BEGINNING)
    return any(text.endswith(stop[:length]) for length in range(1, longest + 1))


def token_bytes(entry: Mapping[str, Any]) -> bytes:
    """The bytes of a token, from its logprob's entry. Raises one of `MALFORMED` where they are none."""
    told = entry.get("bytes") or []
    if not isinstance(told, list) or not all(type(each) is int and 0 <= each < 256 for each in told):
        raise TypeError("a token's bytes that are none")
    return bytes(told)


class HeldDelta:
    """The last delta of a tool call of one choice.

    Args:
        texts: a text that may be the token which ends the answer waits too,
        stops: or of one of these stop strings.
        told_only: a text waits until the logprobs of its tokens have come.
    """

    def __init__(self, *, texts: bool = False, stops: Sequence[str] = (), told_only: bool = False) -> None:
        self._texts = texts
        self._stops = stops
        self._told_only = told_only
        self._held: dict[str, Any] | None = None
        self._holds_text = False  # and no call
        self._until_told = False  # it waits for logprobs alone
        self._place: object = None  # of the call
        self._arguments = ""
        self._sampled = bytearray()  # since the call was named

    def pieces(self, chunk: Chunk) -> list[Chunk]:
        """What is shown now of a chunk with this choice alone."""
        (choice,) = chunk["choices"]
        delta, logprobs = choice.get("delta") or {}, choice.get("logprobs")
        shown: list[Chunk] = []
        calls = delta.get("tool_calls")
        if any(delta.values()) or (logprobs and self._until_told):
            shown += self.release()
        if calls:
            self._note(calls[-1])
        for entry in (logprobs or {}).get("content") or ():
            self._sampled += token_bytes(entry)
        texts = [delta.get("content"), delta.get("reasoning_content")]
        self._until_told = self._told_only and not calls and not logprobs and any(texts)
        ends = self._texts and any(may_end(text, self._stops) for text in texts)
        if not (calls or ends or self._until_told):
            return [*shown, chunk]
        self._until_told = self._until_told and not ends
        self._held, self._holds_text = {**chunk, "choices": [{**choice, "logprobs": None}]}, not calls
        return [*shown, {**chunk, "choices": [{**choice, "delta": {}}]}] if logprobs else shown

    def _note(self, call: Mapping[str, Any]) -> None:
        function = call.get("function") or {}
        if call.get("index") != self._place or function.get("name"):
            self._place, self._arguments = call.get("index"), ""
            self._sampled.clear()
        self._arguments += function.get("arguments") or ""

    def at_end(self, finish: str) -> list[Chunk]:
        """What is shown before the chunk with this finish reason."""
        if self._holds_text or finish in OWN_ENDS or self._was_sampled():
            return self.release()
        return self.drop()

    def release(self) -> list[Chunk]:
        """What waits is shown."""
        held, self._held = self._held, None
        return [] if held is None else [held]

    def drop(self) -> list[Chunk]:
        """What waits is not shown."""
        self._held = None
        return []

    def _was_sampled(self) -> bool:
        """Whether the arguments, if they are complete, are so by what was sampled."""
        try:
            arguments = json.loads(self._arguments)
        except json.JSONDecodeError:
            return True
        except (ValueError, RecursionError):  # too many digits, or nested too deep, to know
            return False
        text = self._sampled.decode(errors="replace")
        closed, begin = text.rstrip().endswith(CLOSED), text.find("{")
        if begin < 0:
            return closed
        try:
            return bool(_VALUE.raw_decode(text, begin)[0] == arguments) or closed
        except json.JSONDecodeError as error:  # in JSON that is cut, only a text can end as a call does
            return closed and not error.msg.startswith("Unterminated string")
        except (ValueError, RecursionError):
            return False

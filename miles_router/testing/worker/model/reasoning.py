"""Separate reasoning from generated text as SGLang's `qwen3` parser does: up to `</think>` or a tool call."""

from miles_router.testing.worker.model.tool_calls import overlap

_BEGIN, _END, _CALL = "<think>", "</think>", "<tool_call>"
_MARKERS = (_BEGIN, _END, _CALL)


def separated(text: str, *, thinking: bool) -> tuple[str, str]:
    """Split a finished text into (reasoning, rest). With `thinking`, the text begins inside its reasoning."""
    return ReasoningStream(thinking=thinking).push(text, last=True)


class ReasoningStream:
    """A streaming parser that splits text into reasoning and the rest.

    It holds back text that may be the start of a marker.
    """

    def __init__(self, *, thinking: bool) -> None:
        self._thinking = thinking
        self._begun = False
        self._buffer = ""

    def push(self, delta: str, *, last: bool) -> tuple[str, str]:
        """Parse more text. Return the new reasoning and the new rest. `last` releases held-back text."""
        self._buffer += delta
        if not last and any(marker != self._buffer and marker.startswith(self._buffer) for marker in _MARKERS):
            return "", ""
        if not self._begun and _BEGIN in self._buffer:
            self._begun = self._thinking = True
            self._buffer = self._buffer.replace(_BEGIN, "", 1)
        if not self._thinking:
            return "", self._take(len(self._buffer))
        for marker, shown in ((_END, ""), (_CALL, _CALL)):
            if marker in self._buffer:
                reasoning, _, rest = self._take(len(self._buffer)).partition(marker)
                self._thinking = False
                return reasoning, shown + rest
        held = 0 if last else max(overlap(self._buffer, marker) for marker in _MARKERS)
        return self._take(len(self._buffer) - held), ""

    def _take(self, length: int) -> str:
        taken, self._buffer = self._buffer[:length], self._buffer[length:]
        return taken

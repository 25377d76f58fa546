"""The ids of prompts as a request has them. What a prompt begins with is what its parent was given and has sampled:
the text of that is kept from turn to turn, because writing it anew takes as long as the history is."""

from __future__ import annotations

from collections import OrderedDict
from weakref import ref

import orjson

from middleware_hub.openai_session.sessions.pending import TokenPrompt
from middleware_hub.openai_session.sessions.tree import Turn
from miles_router.trajectory.pieces import Tokens

#: Bytes of texts that are kept. The sessions that were used last have theirs; others' are written anew.
MAX_BYTES = 256 * 1024 * 1024


class WrittenIds:
    """Texts of the turns that are likely to be gone on from: of each session's last one."""

    def __init__(self, most: int = MAX_BYTES) -> None:
        self.nbytes = 0
        self._most = most
        self._open: OrderedDict[str, tuple[ref[Turn], bytes]] = OrderedDict()  # by session; lists without their end

    def prompt(self, session_id: str, prompt: TokenPrompt) -> bytes:
        """The ids of a prompt, as a list in JSON."""
        turn, text = self._open.get(session_id, (None, b""))
        if turn is None or turn() is not prompt.parent:
            return _list(prompt.ids())
        for _ in range(prompt.dropped):
            text = text[: text.rindex(b",")]
        return _with(text, prompt.given.tokens) + b"]"

    def keep(self, session_id: str, turn: Turn, prompt: bytes) -> None:
        """A turn was recorded whose prompt was written so."""
        self.forget(session_id)
        text = prompt[:-1]
        for piece in turn.sampled:
            text = _with(text, piece.tokens)
        self._open[session_id] = ref(turn), text
        self.nbytes += len(text)
        while self.nbytes > self._most:
            _, (_, text) = self._open.popitem(last=False)
            self.nbytes -= len(text)

    def forget(self, session_id: str) -> None:
        """A session's text is of no use any more."""
        _, text = self._open.pop(session_id, (None, b""))
        self.nbytes -= len(text)


def _list(ids: Tokens) -> bytes:
    return orjson.dumps(ids, option=orjson.OPT_SERIALIZE_NUMPY)


def _with(text: bytes, ids: Tokens) -> bytes:
    """A list without its end, and more ids in it."""
    return b"".join((text, b",", memoryview(_list(ids))[1:-1])) if len(ids) else text

"""The ids of the sessions that were used last, as they were written: a turn costs what it adds.

Most of the ids that the engine is given are those that it was given and has sampled with the last turn.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from weakref import ref

import orjson

from middleware_hub.openai_session.sessions.agent_request import PromptIds
from middleware_hub.openai_session.sessions.turn import Turn
from miles_router.trajectory import Piece
from miles_router.trajectory.pieces import Tokens

#: Bytes that are kept.
MAX_BYTES = 256 * 1024 * 1024


class WrittenIds:
    """The ids of each session's last turn as a request has them: a list in JSON, without its end.

    Args:
        most: bytes that are kept; where there is no room for all, those of the sessions that were used last.
    """

    def __init__(self, most: int = MAX_BYTES) -> None:
        self.nbytes = 0
        self._most = most
        self._kept: OrderedDict[str, tuple[ref[Turn], bytes]] = OrderedDict()

    def prompt(self, session_id: str, prompt: PromptIds) -> tuple[bytes, ...]:
        """Return the ids of a prompt as a list in JSON, in pieces: a long text is not copied more often than it must
        be."""
        turn, text = self._kept.get(session_id, (None, b""))
        if turn is None or turn() is not prompt.parent:
            text = _list(prompt.parent.trajectory().tokens)[:-1]
        for _ in range(prompt.dropped):
            text = text[: text.rindex(b",")]
        return text, *_more(prompt.given), b"]"

    def recorded(self, session_id: str, turn: Turn, prompt: Sequence[bytes]) -> None:
        """Keep the ids of a turn that was recorded; its prompt was written so."""
        *pieces, _ = prompt
        for piece in turn.sampled:
            pieces += _more(piece)
        text = b"".join(pieces)
        self.forget(session_id)
        self._kept[session_id] = ref(turn), text
        self.nbytes += len(text)
        while self.nbytes > self._most:
            self._drop(next(iter(self._kept)))

    def forget(self, session_id: str) -> None:
        """Keep nothing of a session."""
        if session_id in self._kept:
            self._drop(session_id)

    def _drop(self, session_id: str) -> None:
        self.nbytes -= len(self._kept.pop(session_id)[1])


def _list(ids: Tokens) -> bytes:
    return orjson.dumps(ids, option=orjson.OPT_SERIALIZE_NUMPY)


def _more(piece: Piece) -> tuple[bytes, ...]:
    """More ids for a list that has some."""
    return (b",", _list(piece.tokens)[1:-1]) if len(piece) else ()

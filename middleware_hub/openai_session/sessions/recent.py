"""A cache of serialized token ids, so that a turn serializes only its new ids.

Most ids of a prompt are the prompt and answer of the session's last turn.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from weakref import ref

import orjson

from middleware_hub.openai_session.sessions.session import PromptIds
from middleware_hub.openai_session.sessions.turn import Turn
from miles_router.trajectory import Piece
from miles_router.trajectory.pieces import Tokens

#: The size of the cache in bytes.
MAX_BYTES = 256 * 1024 * 1024


class WrittenIds:
    """The ids of each session's last turn as a JSON list without its closing bracket.

    Args:
        max_bytes: the size in bytes; the sessions recorded longest ago are dropped first.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.nbytes = 0
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, tuple[ref[Turn], bytes]] = OrderedDict()

    def prompt(self, session_id: str, prompt: PromptIds) -> tuple[bytes, ...]:
        """Return the ids of a prompt as a JSON list, in pieces, to avoid copies of a long text."""
        turn, text = self._kept.get(session_id, (None, b""))
        if turn is None or turn() is not prompt.parent:
            text = _list(prompt.parent.trajectory().tokens)[:-1]
        for _ in range(prompt.dropped):
            text = text[: text.rindex(b",")]
        return text, *_extension(prompt.given), b"]"

    def keep(self, session_id: str, turn: Turn, prompt: Sequence[bytes]) -> None:
        """Keep the ids of a recorded turn.

        Args:
            prompt: the JSON list of its prompt ids, in pieces; the last piece is the closing bracket.
        """
        *pieces, _ = prompt
        for piece in turn.sampled:
            pieces += _extension(piece)
        text = b"".join(pieces)
        self.forget(session_id)
        self._kept[session_id] = ref(turn), text
        self.nbytes += len(text)
        while self.nbytes > self._max_bytes:
            self._drop(next(iter(self._kept)))

    def forget(self, session_id: str) -> None:
        """Drop the ids of a session."""
        if session_id in self._kept:
            self._drop(session_id)

    def _drop(self, session_id: str) -> None:
        self.nbytes -= len(self._kept.pop(session_id)[1])


def _list(ids: Tokens) -> bytes:
    return orjson.dumps(ids, option=orjson.OPT_SERIALIZE_NUMPY)


def _extension(piece: Piece) -> tuple[bytes, ...]:
    """Return the pieces that extend a JSON list, which must not be empty, by these ids."""
    return (b",", _list(piece.tokens)[1:-1]) if len(piece) else ()

"""A turn as bytes, and back. Messages, contexts and tools are rows of their own, once however many turns have them; ids
and logprobs are the bytes that they are in memory.

    header (`with_header`), ids given (int32), and for each piece that was sampled ids (int32) and logprobs (float32)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import orjson

from middleware_hub.openai_session.sessions.messages import Message
from middleware_hub.openai_session.sessions.turn import Turn
from miles_router.middlewares.rows import TrajectoryRows
from miles_router.middlewares.state import header_of, with_header
from miles_router.trajectory import Piece
from miles_router.trajectory.pieces import frozen
from miles_router.trajectory.rows import KINDS

IDS, LOGPROBS = np.dtype("<i4"), np.dtype("<f4")
#: Fields of a turn that JSON has as they are.
PLAIN = (*("path", "answer", "dropped", "finish_reason", "ended_itself", "choice", "segment", "facts", "side_call"),)


def digest_of(data: bytes) -> str:
    """The key of a row that is known by what it says."""
    return blake2b(data, digest_size=16).hexdigest()


def message_row(message: Message) -> tuple[str, bytes]:
    """The key and the bytes of a message."""
    data = orjson.dumps(message, default=dict)
    return digest_of(data), data


def written_turn(turn: Turn, messages: Sequence[str]) -> bytes:
    """Return the row of a turn whose request added the messages of these keys."""
    same = None if turn.request == turn.number else turn.request
    header = {
        **{name: getattr(turn, name) for name in PLAIN},
        "parent": None if turn.parent is None else turn.parent.number,
        "messages": messages,
        "context": digest_of(turn.context),
        "tools": digest_of(turn.tools) if turn.tools else None,
        "given": len(turn.given) if same is None else 0,
        "given_of": same,
        "sampled": [[len(piece), piece.version, piece.trained] for piece in turn.sampled],
        "rows": {kind.name: taken.reason for kind, taken in turn.rows.items()},
    }
    arrays = [] if same is not None else [turn.given.tokens.astype(IDS, copy=False)]
    for piece in turn.sampled:
        assert piece.logprobs is not None
        arrays += [piece.tokens.astype(IDS, copy=False), piece.logprobs.astype(LOGPROBS, copy=False)]
    return with_header(header, (array.tobytes() for array in arrays))


def read_turn(
    data: bytes,
    turns: Sequence[Turn],
    messages: Mapping[str, Message],
    contexts: Mapping[str, bytes],
    tools: Mapping[str, bytes],
) -> Turn:
    """The turn that was written so, behind those before it, without its rows: why it had none, or None.

    Raises:
        KeyError, IndexError, ValueError: it is none, or what it refers to is missing.
    """
    header, begin = header_of(data)
    arrays = _ArrayReader(data, begin)
    of = header["given_of"]
    given = Piece(arrays.take(IDS, header["given"])) if of is None else turns[of].given
    sampled = [
        Piece(arrays.take(IDS, count), arrays.take(LOGPROBS, count), version, trained=trained)
        for count, version, trained in header["sampled"]
    ]
    arrays.end()
    reasons = header["rows"]
    return Turn(
        **{name: header[name] for name in PLAIN},
        parent=None if header["parent"] is None else turns[header["parent"]],
        appended=tuple(messages[key] for key in header["messages"]),
        context=contexts[header["context"]],
        tools=tools[header["tools"]] if header["tools"] is not None else b"",
        given=given,
        sampled=tuple(sampled),
        number=len(turns),
        request=len(turns) if of is None else turns[of].request,
        rows={kind: TrajectoryRows(None, reasons[kind.name]) for kind in KINDS if kind.name in reasons},
    )


class _ArrayReader:
    """Arrays behind each other; each that is taken is memory of its own."""

    def __init__(self, data: bytes, begin: int) -> None:
        self._data, self._at = data, begin

    def take(self, kind: np.dtype[Any], count: int) -> Any:
        """The next one. Raises ValueError where the data ends before it does."""
        array = np.frombuffer(self._data, kind, count, self._at).astype(kind.newbyteorder("="))
        self._at += count * kind.itemsize
        return frozen(array)

    def end(self) -> None:
        """Nothing may be left."""
        if self._at != len(self._data):
            raise ValueError(f"{len(self._data) - self._at} bytes are left")

"""Rows of turns as bytes, and back (`--state-rows`): each turn's own, behind those of the turn that it continues.

length of the header (4 bytes, little-endian), header (JSON: start, width, type, parent), ids in rows
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

import numpy as np
import orjson

from middleware_hub.openai_session.sessions.tree import Turn
from miles_router.middlewares import RowChannel, TrajectoryRows
from miles_router.trajectory import InvalidTrajectory
from miles_router.trajectory.rows import AlignedRows, RowKind

_LENGTH = struct.Struct("<I")
#: Why a turn that was read back has no rows.
NOT_HELD = "the router was restarted since, and --state-rows was off"


def key_of_rows(kind: RowKind, number: int) -> str:
    """The key of the rows of a turn."""
    return f"{kind.name} {number}"


def written_rows(turn: Turn, kind: RowKind, turns: Sequence[Turn]) -> bytes | None:
    """The rows of a turn; None where it has none that can be read. `turns`: those of its session."""
    rows = turn.rows[kind].rows
    if rows is None or not rows.complete():
        return None
    owner = None if rows.parent is None else _owner(rows.parent, kind, turns)
    start = 0 if owner is None else rows.start
    own = rows.array(start)
    own = own.astype(own.dtype.newbyteorder("<"), copy=False)
    about = {"start": start, "width": own.shape[1], "type": own.dtype.str, "parent": owner}
    header = orjson.dumps(about)
    return b"".join((_LENGTH.pack(len(header)), header, own.tobytes()))


def _owner(rows: AlignedRows, kind: RowKind, turns: Sequence[Turn]) -> int | None:
    return next((each.number for each in turns if each.rows.get(kind, (None,))[0] is rows), None)


def read_rows(
    data: bytes | None, kind: RowKind, turns: Sequence[Turn], channels: Mapping[RowKind, RowChannel]
) -> TrajectoryRows:
    """The rows that were written so, kept by the layer that captures them now.

    Raises:
        KeyError, IndexError, ValueError: they are none.
    """
    hold = channels[kind].hold if kind in channels else None
    if data is None or hold is None:
        return TrajectoryRows(None, NOT_HELD if data is None else "no layer keeps them any more")
    (length,) = _LENGTH.unpack_from(data)
    header = orjson.loads(data[_LENGTH.size : _LENGTH.size + length])
    own = np.frombuffer(data, np.dtype(header["type"]), offset=_LENGTH.size + length).reshape(-1, header["width"])
    before: TrajectoryRows | None = None if header["parent"] is None else turns[header["parent"]].rows[kind]
    if before is not None and before.rows is None:
        return before
    try:
        return TrajectoryRows(hold(own.copy(), header["start"], None if before is None else before.rows))
    except InvalidTrajectory as error:
        return TrajectoryRows(None, str(error))

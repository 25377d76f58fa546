"""Rows as bytes, and back, for layers whose trajectories outlive the process (`--state-rows`): the own rows of one
generation, behind those of the one that it continues. The header (`state.rows`) has start, width, type and parent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from miles_router.middlewares.rows import RowChannel, TrajectoryRows
from miles_router.state.rows import header_of, with_header
from miles_router.trajectory import InvalidTrajectory
from miles_router.trajectory.rows import AlignedRows, RowKind

#: Why a trajectory that was read back has no rows, where none were written.
NOT_WRITTEN = "the router was restarted since, and --state-rows was off"


def key_of_rows(kind: RowKind, number: int) -> str:
    """The key of the rows of a generation, in the rows of its owner."""
    return f"{kind.name} {number}"


def can_be_written(rows: AlignedRows, parent: int | None) -> bool:
    """Whether rows can be read as far as `written_rows` has to."""
    return rows.complete() if _whole(rows, parent) else rows.held or len(rows) == rows.start


def written_rows(rows: AlignedRows, parent: int | None) -> bytes:
    """Own rows behind those of the generation with the number `parent`; without one, all that it has.

    Raises:
        InvalidTrajectory: they are no longer held.
    """
    start = 0 if _whole(rows, parent) else rows.start
    own = rows.array(start)
    own = own.astype(own.dtype.newbyteorder("<"), copy=False)
    header = {"start": start, "width": own.shape[1], "type": own.dtype.str, "parent": parent}
    return with_header(header, [own.tobytes()])


def _whole(rows: AlignedRows, parent: int | None) -> bool:
    """Whether rows are repeated that are another generation's."""
    return parent is None and rows.parent is not None


def parent_of(data: bytes) -> int | None:
    """The number of the generation whose rows these go on from.

    Raises:
        KeyError, ValueError: they are none.
    """
    parent: int | None = header_of(data)[0]["parent"]
    return parent


def read_rows(
    data: bytes | None,
    kind: RowKind,
    before: Callable[[int], TrajectoryRows],
    channels: Mapping[RowKind, RowChannel],
    rid: str | None = None,
) -> TrajectoryRows:
    """The rows that were written so, kept by the layer that captures them now.

    Args:
        before: gives the rows of the generation with a number, which were read before.
        rid: of the generation.

    Raises:
        KeyError, IndexError, ValueError: they are none.
    """
    hold = channels[kind].hold if kind in channels else None
    if data is None or hold is None:
        return TrajectoryRows(None, NOT_WRITTEN if data is None else "no layer keeps them any more")
    header, begin = header_of(data)
    own = np.frombuffer(data, np.dtype(header["type"]), offset=begin).reshape(-1, header["width"])
    parent = None if header["parent"] is None else before(header["parent"])
    if parent is not None and parent.rows is None:
        return parent
    try:
        return TrajectoryRows(hold(own.copy(), header["start"], None if parent is None else parent.rows, rid))
    except InvalidTrajectory as error:
        return TrajectoryRows(None, str(error))

"""Entries to bytes, and back. A prefix shared with a parent in the same family is not repeated. Ids, logprobs and ends
are written as the bytes that they are in memory.

    header (`with_header`), own text (UTF-8), block of own tokens (`entry`), sampling mask if it has one
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from middleware_hub.radix_tree.archive.text_rows import ROWS_ARE_GONE
from middleware_hub.radix_tree.cache import RestoredEntry
from middleware_hub.radix_tree.entry import (
    FAR,
    IDS,
    LOGPROBS,
    NEAR,
    Entry,
    TextRecord,
    unpacked_ends,
    unpacked_pieces,
)
from miles_router.engines.recomputing import AskedSampling
from miles_router.middlewares.rows import NOT_WRITTEN, RowsByKind, TrajectoryRows
from miles_router.middlewares.state import header_of, with_header
from miles_router.trajectory import Trajectory
from miles_router.trajectory.rows import KINDS
from miles_router.trajectory.sampling_mask import SamplingMask

#: Python strings may contain lone surrogates, which JSON can express.
_HALVES = "surrogatepass"
NOTHING = TextRecord("", 0, Trajectory(), np.zeros(0, dtype=np.uint32), "", "")


def parent_in_family(entry: Entry) -> Entry | None:
    """Return the entry's parent if it is in the same family, else None. The entry is written as what follows it."""
    parent = entry.parent
    return parent if parent is not None and parent.family is entry.family else None


def write_entry(entry: Entry, text: str, parent_text: str | None, *, with_rows: bool) -> bytes:
    """Return an entry as bytes.

    Args:
        text: the text of the entry, hidden tail included.
        parent_text: the same of its parent in the family, or None without one.
        with_rows: whether its rows are written, too.
    """
    parent = parent_in_family(entry)
    own = entry if parent is not None else _without_parent(entry, text)
    shared = own.reused_chars
    if parent_text is None or not text.startswith(parent_text[:shared]):
        shared = 0
    spelled = text[shared:].encode("utf-8", _HALVES)
    header = {
        "rid": entry.rid,
        "finish": entry.finish,
        "shown_chars": entry.shown_chars,
        "rank": entry.rank,
        "cache_versions": entry.cache_versions,
        "asked": None if entry.asked is None else list(entry.asked),
        "worker": entry.worker,
        "parent": None if parent is None else parent.serial,
        "reused": own.reused,
        "reused_chars": own.reused_chars,
        "shared_chars": shared,
        "text": len(spelled),
        "own": own.own,
        "far": own.end_type is FAR,
        "runs": own.runs,
        "block": len(own.block),
        "rows": {kind.name: taken.reason or (None if with_rows else NOT_WRITTEN) for kind, taken in entry.rows.items()},
    }
    mask = b"" if own.sampling_mask is None else own.sampling_mask.to_bytes()
    return with_header(header, (spelled, own.block, mask))


def _without_parent(entry: Entry, text: str) -> Entry:
    """Return a copy of the entry that owns all of its tokens."""
    if entry.parent is None:
        return entry
    trajectory, ends = entry.prefix(len(entry))
    record = TextRecord(text, entry.shown_chars, trajectory, ends, entry.rid, entry.finish)
    return Entry(record, parent=None, reused=0, reused_chars=0, rank=entry.rank, serial=entry.serial)


def read_entry(serial: int, data: bytes, before: Mapping[int, RestoredEntry]) -> RestoredEntry:
    """Read an entry, without its rows.

    Args:
        before: the entries of the family read so far, by serial.

    Raises:
        KeyError, TypeError, ValueError: the bytes are not an entry, or its parent is missing.
    """
    header, begin = header_of(data)
    parent, shared_chars = header["parent"], header["shared_chars"]
    reused, reused_chars, own = header["reused"], header["reused_chars"], header["own"]
    above = NOTHING if parent is None else before[parent].record
    if reused > len(above.trajectory) or shared_chars > len(above.text):
        raise ValueError(f"the prefix shared with entry {parent} is missing")
    end = begin + header["text"]
    runs = [(upto, sampled, version) for upto, sampled, version in header["runs"]]
    behind = end + header.get("block", len(data) - end)  # without the field, a router before 0.3 wrote it
    block, kind = data[end:behind], FAR if header["far"] else NEAR
    _check_block(block, own, runs, kind)
    mask = SamplingMask.from_bytes(data[behind:], own) if len(data) > behind else None
    record = TextRecord(
        text=above.text[:shared_chars] + data[begin:end].decode("utf-8", _HALVES),
        shown_chars=header["shown_chars"],
        trajectory=above.trajectory[:reused].append(*unpacked_pieces(block, own, runs, mask, own)),
        ends=np.concatenate([above.ends[:reused], unpacked_ends(block, own, kind, reused_chars)]),
        rid=header["rid"],
        finish=header["finish"],
        rows=_rows(header["rows"]),
        cache_versions=tuple(header["cache_versions"]),
        asked=None if (asked := header["asked"]) is None else AskedSampling(*asked),
        worker=header["worker"],
    )
    return RestoredEntry(record, serial, header["rank"], parent, reused, reused_chars)


def _check_block(block: bytes, own: int, runs: list[tuple[int, bool, str | None]], kind: np.dtype[Any]) -> None:
    """Raise ValueError if the block's length does not fit its header."""
    begins = [0, *(upto for upto, _, _ in runs)]
    sampled = sum(upto - begin for begin, (upto, each, _) in zip(begins, runs, strict=False) if each)
    if begins[-1] != own or begins != sorted(begins):
        raise ValueError(f"the runs cover {begins[-1]} tokens, the entry has {own}")
    if len(block) != own * (IDS.itemsize + kind.itemsize) + sampled * LOGPROBS.itemsize:
        raise ValueError(f"the block has {len(block)} bytes, which do not fit {own} tokens")


def _rows(reasons: Mapping[str, str | None]) -> RowsByKind:
    kinds = [kind for kind in KINDS if kind.name in reasons]
    return {kind: TrajectoryRows(None, reasons[kind.name]) if reasons[kind.name] else ROWS_ARE_GONE for kind in kinds}

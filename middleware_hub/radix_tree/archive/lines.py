"""Recorded texts as lines of JSON, one generation a line; needs no router."""

from __future__ import annotations

from collections.abc import Iterator

import orjson

from middleware_hub.radix_tree.archive.archive import HEAD
from middleware_hub.radix_tree.archive.entry_rows import read_entry
from middleware_hub.radix_tree.cache import RestoredEntry
from middleware_hub.radix_tree.entry import TextRecord
from miles_router.middlewares.state import Blobs


def lines_of(owner: str, blobs: Blobs) -> Iterator[bytes]:
    """Iterate over the generations of a family in the order of recording, each as the line `{"text": {...}}`.

    Raises:
        KeyError, TypeError, ValueError: the blobs are not a family.
    """
    read: dict[int, RestoredEntry] = {}
    for serial in (number for number in blobs if number != HEAD):
        read[serial] = read_entry(serial, blobs[serial], read)
        yield _line(read[serial].record)


def _line(record: TextRecord) -> bytes:
    trajectory = record.trajectory
    found = {
        "rid": record.rid,
        "finish_reason": record.finish,
        # JSON has no lone surrogates; the ids are exact.
        "response": record.text[: record.shown_chars].encode("utf-8", "replace").decode(),
        "tokens": trajectory.tokens,
        "loss_mask": trajectory.loss_mask,
        "rollout_logp": trajectory.logprobs,
        "weight_versions": [run._asdict() for run in trajectory.weight_versions],
        "cache_versions": record.cache_versions,
    }
    return orjson.dumps({"text": found}, option=orjson.OPT_SERIALIZE_NUMPY)

"""Read a samples file one sample at a time: the router's JSON and safetensors, and the files of training frameworks.

The file is memory-mapped: memory holds one sample, and the header of a safetensors file.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from middleware_hub.view.dialects import miles
from middleware_hub.view.sheets import TokenSheet, sheet_of
from miles_router.trajectory import Malformed, Sample
from miles_router.trajectory.json_items import objects_of_list
from miles_router.trajectory.safetensors import LENGTH, unpack
from miles_router.trajectory.sample import samples_of

#: Key of the list of samples in the router's JSON.
SAMPLES = "samples"
#: JSON must begin within so many bytes; only white space may come before it.
BEGINNING = 64


@dataclass(frozen=True)
class SamplesFile:
    """The contents of a samples file.

    Attributes:
        sheets: each sample, with the share of the file (0 to 1) up to its end.
        why_empty: the file's reason for having no samples, if it gives one.
    """

    sheets: Iterator[tuple[TokenSheet, float]]
    why_empty: str | None = None


def open_samples(path: Path) -> SamplesFile:
    """Open a samples file. Errors in a sample are raised while iterating `sheets`.

    Raises:
        Malformed: the file is not a samples file, or is truncated.
        InvalidTrajectory: the arrays of a sample contradict each other.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        if not path.stat().st_size:
            raise Malformed("it is empty")
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if not _has_tensors(data):
        if not data[:BEGINNING].lstrip().startswith(b"{"):
            raise Malformed("it is neither JSON nor safetensors, or it is truncated")
        return SamplesFile(_of_json(data))
    arrays, metadata = unpack(data)
    if miles.META in arrays:
        entries, why_empty = miles.read(arrays)
        return SamplesFile(_counted(miles.sheets_of(arrays, entries), len(entries)), why_empty)
    count = sum(name.endswith(".tokens") for name in arrays)
    return SamplesFile(_counted(map(sheet_of, samples_of(arrays, metadata)), count))


def _has_tensors(data: mmap.mmap) -> bool:
    """Return True if the data can be safetensors: the header length in its first bytes fits into the file."""
    return len(data) > LENGTH.size and LENGTH.unpack_from(data)[0] <= len(data) - LENGTH.size


def _of_json(data: mmap.mmap) -> Iterator[tuple[TokenSheet, float]]:
    for each, end in objects_of_list(data, SAMPLES):
        yield sheet_of(Sample.from_json(each)), end / len(data)


def _counted(sheets: Iterator[TokenSheet], count: int) -> Iterator[tuple[TokenSheet, float]]:
    for place, sheet in enumerate(sheets, 1):
        yield sheet, place / count

"""One self-contained page with every sample of a file: it asks nobody for anything, and nothing in it but our own
script can run.

    head     a Content-Security-Policy with the hashes of our script and our style sheet
    blocks   data in elements that browsers do not run: base64 of deflated safetensors, so that no text of a file
             stands in the page as itself. `sample-0`, `sample-1`, ...; behind them `vocabulary` and `index`
    script   the modules of `assets/` in one

A page is written while the file is read; one sample is held.
"""

from __future__ import annotations

import base64
import hashlib
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import orjson
import pybase64

from miles_router.trajectory import InvalidTrajectory, Malformed
from miles_router.trajectory.safetensors import pack
from miles_router.view.files import SamplesFile
from miles_router.view.sheets import TokenSheet, as_json
from miles_router.view.tree import BranchTree

#: What a token spells; None where the tokenizer has no such token, or nobody knows.
BytesOf = Callable[[int], bytes | None]
ENTRY = "file_page"
_IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./(\w+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?function|class|const) (\w+)", re.MULTILINE)
#: Characters of a sample's metadata that a search looks through.
SEARCHED = 1000


def asset(name: str) -> str:
    """A file of the view, as text."""
    return resources.files("miles_router.view").joinpath("assets").joinpath(name).read_text(encoding="utf-8")


@cache
def script() -> str:
    """All modules that the page needs in one script, each in a scope of its own behind those that it imports."""
    parts: dict[str, str] = {}

    def add(name: str) -> None:
        if name not in parts:
            source = asset(f"{name}.js")
            for _, imported in _IMPORT.findall(source):
                add(imported)
            exported = ", ".join(each for _, each in _EXPORT.findall(source))
            inner = _EXPORT.sub(r"\1 \2", _IMPORT.sub(r"const \1 = $\2;", source))
            parts[name] = f"const ${name} = (() => {{\n{inner}return {{{exported}}};\n}})();\n"

    add(ENTRY)
    return "".join(parts.values())


def policy(script: str, style: str) -> str:
    """Nothing but this script and this style sheet; no text becomes markup, nobody is asked."""
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (script, style)]
    return (
        f"default-src 'none'; script-src 'sha256-{hashes[0]}'; style-src 'sha256-{hashes[1]}'; base-uri 'none'; "
        "form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )


@dataclass
class Summary:
    """What a page shows."""

    samples: int = 0
    tokens: int = 0


def write_page(
    out: IO[bytes],
    name: str,
    samples: SamplesFile,
    bytes_of: BytesOf | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> Summary:
    """The page of a file.

    Args:
        name: of the file, for people.
        bytes_of: without it ids alone are shown.
        progress: is told which share of the file has been written.

    Raises:
        Malformed: it is no samples file, is cut, or one of its samples is none that a rollout can have.
    """
    page, style, code = asset("file_page.html"), asset("view.css"), script()
    head, rest = page.split("<!-- blocks -->")
    out.write(head.replace("<!-- policy -->", policy(code, style)).replace("<!-- style -->", style).encode())
    index = _Index(name, samples.why_empty, bytes_of)
    try:
        for sheet, share in samples.sheets:
            out.write(_block(f"sample-{index.summary.samples}", sheet.packed()))
            index.add(sheet)
            progress(share)
    except (InvalidTrajectory, Malformed) as error:
        raise Malformed(f"sample {index.summary.samples}: {error}") from None
    out.write(_block("vocabulary", index.vocabulary()))
    out.write(_block("index", index.packed()))
    out.write(rest.replace("<!-- script -->", code).encode())
    return index.summary


def _block(name: str, data: bytes) -> bytes:
    """Data under an id, in an element that browsers do not run."""
    text = pybase64.b64encode(zlib.compress(data))
    return b'<script type="application/octet-stream" id="%b">%b</script>\n' % (name.encode("ascii"), text)


@dataclass
class _Index:
    """What the page must know before it opens a sample: a line of each, the trees of sessions, the tokens' texts."""

    name: str
    why_empty: str | None
    bytes_of: BytesOf | None
    summary: Summary = field(default_factory=Summary)
    _lines: list[dict[str, Any]] = field(default_factory=list)
    _trees: dict[str, BranchTree] = field(default_factory=dict)
    _ids: set[int] = field(default_factory=set)

    def add(self, sheet: TokenSheet) -> None:
        if sheet.session_id is not None and sheet.path:
            self._trees.setdefault(sheet.session_id, BranchTree()).add(self.summary.samples, sheet)
        self._lines.append(_line(sheet))
        if self.bytes_of is not None:
            self._ids.update(np.unique(sheet.tokens).tolist())
        self.summary.samples += 1
        self.summary.tokens += len(sheet)

    def packed(self) -> bytes:
        trees = {session: tree.lines() for session, tree in self._trees.items()}
        branched = {session: lines for session, lines in trees.items() if len(lines) > 1}
        about = {
            "file": self.name,
            "why_empty": self.why_empty,
            "spelled": self.bytes_of is not None,
            "samples": self._lines,
            "trees": [{"session_id": session, "lines": lines} for session, lines in branched.items()],
        }
        return pack({}, {"facts": orjson.dumps(about).decode()})

    def vocabulary(self) -> bytes:
        """Ids in order, int32, where the bytes of each end, int32, and the bytes; of ids that have some."""
        return pack(vocabulary_arrays({} if self.bytes_of is None else spelled(sorted(self._ids), self.bytes_of)), {})


def spelled(ids: Iterable[int], bytes_of: BytesOf) -> dict[int, bytes]:
    """What ids spell, of those that spell something."""
    found = {token: bytes_of(token) for token in ids}
    return {token: each for token, each in found.items() if each is not None}


def vocabulary_arrays(known: Mapping[int, bytes]) -> dict[str, npt.NDArray[Any]]:
    """What ids spell, as the view reads it: the ids, where the bytes of each end, and the bytes."""
    return {
        "ids": np.fromiter(known, dtype=np.int32, count=len(known)),
        "ends": np.cumsum([len(each) for each in known.values()], dtype=np.int32),
        "bytes": np.frombuffer(b"".join(known.values()), dtype=np.uint8),
    }


def _line(sheet: TokenSheet) -> dict[str, Any]:
    """What the list of samples shows of one, and searches."""
    return {
        "session_id": sheet.session_id,
        "status": sheet.status,
        "reward": None if sheet.reward is None else as_json(sheet.reward),
        "tokens": len(sheet),
        "trained": sheet.trained,
        "turns": len(sheet.path),
        "reasons": sorted({str(turn["reason"]) for turn in sheet.turns if turn.get("reason") is not None}),
        "searched": as_json({"label": sheet.label, **sheet.metadata})[:SEARCHED],
    }

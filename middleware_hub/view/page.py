"""Write one self-contained HTML page with every sample of a file. The page makes no requests, and only its own script
can run in it.

    head     a Content-Security-Policy with the hashes of the page's script and style sheet
    blocks   data in elements that browsers do not run: base64 of deflated safetensors, so that texts from the file
             cannot act as markup. `sample-0`, `sample-1`, ..., then `vocabulary` and `index`
    script   the modules of `assets/` in one

The page is written while the file is read; memory holds one sample at a time.
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

from middleware_hub.view.files import SamplesFile
from middleware_hub.view.sheets import TokenSheet, as_json
from middleware_hub.view.tree import BranchTree
from miles_router.trajectory import InvalidTrajectory, Malformed
from miles_router.trajectory.safetensors import pack

#: Returns the bytes of a token id; None if the tokenizer has no such token or its bytes are unknown.
BytesOf = Callable[[int], bytes | None]
ENTRY = "file_page"
_IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./(\w+)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?function|class|const) (\w+)", re.MULTILINE)
#: Characters of a sample's metadata that the page's search covers.
SEARCHED = 1000


def asset(name: str) -> str:
    """Return the text of a file in `assets/`."""
    return resources.files("middleware_hub.view").joinpath("assets").joinpath(name).read_text(encoding="utf-8")


@cache
def script() -> str:
    """Return all modules of the page as one script. Each has its own scope and comes after the modules it imports."""
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
    """Return a Content-Security-Policy that allows only this script and style sheet, no requests, and no text as
    markup."""
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (script, style)]
    return (
        f"default-src 'none'; script-src 'sha256-{hashes[0]}'; style-src 'sha256-{hashes[1]}'; base-uri 'none'; "
        "form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )


@dataclass
class Summary:
    """The numbers of samples and tokens on a page."""

    samples: int = 0
    tokens: int = 0


def write_page(
    out: IO[bytes],
    name: str,
    samples: SamplesFile,
    bytes_of: BytesOf | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> Summary:
    """Write the page of a samples file to `out`.

    Args:
        name: the file's name, shown on the page.
        bytes_of: without it the page shows token ids only.
        progress: called with the share of the file that has been written, 0 to 1.

    Raises:
        Malformed: the file is not a samples file, is truncated, or has a sample with contradicting arrays.
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
    """Return an HTML element with this id that holds the data and that browsers do not run."""
    text = pybase64.b64encode(zlib.compress(data))
    return b'<script type="application/octet-stream" id="%b">%b</script>\n' % (name.encode("ascii"), text)


@dataclass
class _Index:
    """The data that the page needs before it opens a sample: list lines, sessions' branches, tokens' bytes."""

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
        """Return the packed `vocabulary_arrays` of all token ids on the page, in ascending order."""
        return pack(vocabulary_arrays({} if self.bytes_of is None else spelled(sorted(self._ids), self.bytes_of)), {})


def spelled(ids: Iterable[int], bytes_of: BytesOf) -> dict[int, bytes]:
    """Return the bytes of each id, leaving out ids without bytes."""
    found = {token: bytes_of(token) for token in ids}
    return {token: each for token, each in found.items() if each is not None}


def vocabulary_arrays(known: Mapping[int, bytes]) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays from which the view reads tokens' bytes: int32 `ids`, int32 `ends` (the end offset of each id's
    bytes), uint8 `bytes`."""
    return {
        "ids": np.fromiter(known, dtype=np.int32, count=len(known)),
        "ends": np.cumsum([len(each) for each in known.values()], dtype=np.int32),
        "bytes": np.frombuffer(b"".join(known.values()), dtype=np.uint8),
    }


def _line(sheet: TokenSheet) -> dict[str, Any]:
    """Return the fields of a sample that the page's list shows and searches."""
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

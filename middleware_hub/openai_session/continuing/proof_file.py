"""Store the proofs of a template in a file for the next start.

A proof depends on the template and its settings, on the libraries that render it, and on this project's code. The
file's name is a digest of all these. A damaged file, a file about another proof, and a file that another user may have
written are ignored: the log reports the file, and the proof is made again.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import platform
import stat
import tempfile
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import orjson

logger = logging.getLogger(__name__)

#: Libraries that influence how a template is rendered.
LIBRARIES = ("jinja2", "miles-tito-tokenizers", "orjson", "tokenizers", "transformers")
HUB = Path(__file__).parents[2]
CODE = ("openai_session/continuing", "openai_session/sessions", "tokenizing")
#: The most files in the directory; the oldest are deleted.
MAX_FILES = 256
MAX_BYTES = 1 << 20

#: For each shape that is proved at the start, why it is refused, or None.
Refusals = Sequence[str | None]


class Unusable(ValueError):
    """The reason why a proof file is ignored."""


class ProofFile:
    """The file with the proof of one template. `subject` is everything except code that its rendering depends on."""

    def __init__(self, subject: Mapping[str, object]) -> None:
        content = [subject, platform.python_version(), [_version(name) for name in LIBRARIES], _code_digest()]
        self.digest = _digest(orjson.dumps(content, default=repr, option=orjson.OPT_SORT_KEYS))
        self._directory = default_directory()

    @property
    def path(self) -> Path | None:
        """The path of the file; None on a machine without a cache directory."""
        return self._directory / f"{self.digest}.json" if self._directory is not None else None

    def read(self, count: int) -> Refusals | None:
        """Return the `count` refusals of the proof, or None if there is no usable file."""
        if self.path is None:
            return None
        try:
            return self._refusals(_read_own_file(self.path), count)
        except FileNotFoundError:
            return None
        except (OSError, Unusable) as reason:
            logger.warning("proof_ignored", extra={"fields": {"file": str(self.path), "reason": str(reason)}})
            return None

    def write(self, refusals: Refusals) -> None:
        """Write a proof. If that fails, the next start proves again."""
        if self.path is None:
            return
        content = {"subject": self.digest, "refusals": refusals, "digest": _digest(orjson.dumps(refusals))}
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _replace(self.path, orjson.dumps(content))
            _delete_oldest(self.path.parent)
        except OSError as reason:
            logger.info("proof_not_saved", extra={"fields": {"file": str(self.path), "reason": str(reason)}})

    def _refusals(self, data: bytes, count: int) -> Refusals:
        try:
            content = orjson.loads(data)
        except orjson.JSONDecodeError:
            raise Unusable("the file is damaged") from None
        if not isinstance(content, dict) or content.get("subject") != self.digest:
            raise Unusable("the file contains another proof")
        refusals = content.get("refusals")
        if not isinstance(refusals, list) or content.get("digest") != _digest(orjson.dumps(refusals)):
            raise Unusable("the file is damaged")
        if len(refusals) != count or not all(each is None or isinstance(each, str) for each in refusals):
            raise Unusable("the file contains another proof")
        return refusals


def default_directory() -> Path | None:
    """Return `$XDG_CACHE_HOME/miles-router/proofs`, or the same below `~/.cache`; None without a home directory."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        base = named if named.is_absolute() else Path.home() / ".cache"
    except RuntimeError:  # an account without a home
        return None
    return base / "miles-router" / "proofs"


def _read_own_file(path: Path) -> bytes:
    """Return the content of a file that only this process's user may write."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise Unusable("another user may have written the file")
        if status.st_size > MAX_BYTES:
            raise Unusable("the file is damaged")
        return file.read()


def _replace(path: Path, data: bytes) -> None:
    """Replace a file atomically."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


def _delete_oldest(directory: Path) -> None:
    ages = []
    for path in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process deletes files as well
            ages.append((path.stat().st_mtime, path))
    for _, path in sorted(ages)[:-MAX_FILES]:
        path.unlink(missing_ok=True)


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()


@functools.cache
def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


@functools.cache
def _code_digest() -> str:
    """Return a digest of this project's own code that a proof depends on."""
    files = sorted(path for folder in CODE for path in (HUB / folder).glob("*.py"))
    return _digest(b"\0".join(path.read_bytes() for path in files))

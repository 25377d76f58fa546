"""What a checkpoint says, in a directory or on the hub."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from miles_router.middlewares.checkpoint import load_generation_config
from miles_router.settings.config import RouterConfig
from tests.support.waiting import PATIENCE

WRITTEN = '{"temperature": 0.6}'
CODE = """
from miles_router.middlewares.checkpoint import load_generation_config
from miles_router.settings.config import RouterConfig
for name in ("some/model", "no/model"):
    print(load_generation_config(RouterConfig(hf_checkpoint=name)).get("temperature"))
"""


@pytest.mark.parametrize("written", [WRITTEN, None])
def test_the_generation_config_of_a_directory(tmp_path: Path, written: str | None) -> None:
    if written is not None:
        (tmp_path / "generation_config.json").write_text(written)
    found = load_generation_config(RouterConfig(hf_checkpoint=str(tmp_path)))
    assert found == ({} if written is None else {"temperature": 0.6})


def test_the_generation_config_of_a_model_on_the_hub(tmp_path: Path) -> None:
    model = tmp_path / "hub" / "models--some--model"
    for file, text in (("refs/main", "abc"), ("snapshots/abc/generation_config.json", WRITTEN)):
        (model / file).parent.mkdir(parents=True)
        (model / file).write_text(text)
    offline = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=offline, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.stdout.split() == ["0.6", "None"], done.stderr

"""`miles-router state` on directories that nobody made for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from miles_router import cli
from miles_router.state.store import StateStore


def test_a_look_leaves_files_alone_that_are_no_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.sqlite").touch()
    with pytest.raises(SystemExit):
        cli.main(["state", str(tmp_path)])
    assert "holds no state" in capsys.readouterr().err
    assert [(path.name, path.stat().st_size) for path in tmp_path.iterdir()] == [("mine.sqlite", 0)]


async def test_no_name_on_the_disk_speaks_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = StateStore(tmp_path)
    await store.append("evil\x1b[2J", {0: b'{"kind": "session"}'})
    await store.close()
    cli.main(["state", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "'evil\\x1b[2J'" in shown
    assert "\x1b" not in shown

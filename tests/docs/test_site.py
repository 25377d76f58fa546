"""The documentation as a site."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_site_is_built_without_a_broken_link(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Quickstart" in (tmp_path / "index.html").read_text(encoding="utf-8")
    elsewhere = [page.name for page in tmp_path.rglob("*.html") if 'src="http' in page.read_text(encoding="utf-8")]
    assert not elsewhere, "pages that load scripts or pictures from elsewhere"

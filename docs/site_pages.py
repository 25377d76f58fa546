"""Add the pages of the repository's root to the site that `make docs` builds."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
PAGES |= {"SECURITY.md": "SECURITY.md", "LICENSE": "LICENSE"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add each page under its name on the site, with links as they are there."""
    for source, name in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return a page with its links to the repository's root as they are on the site."""
    return markdown.replace("](../", "](")

"""The pictures of pages that the documentation shows: `python -m tests.docs.screenshots` takes them again.

A picture is not compared with the one that is kept: fonts differ from machine to machine. `test_screenshots.py` holds
that each can be taken, and shows what its page says.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

from transformers import AutoTokenizer

from miles_router.testing import tiny_tokenizer
from miles_router.view.command import token_bytes
from tests.docs.pages import ROOT
from tests.support.browser import Browser
from tests.support.token_pages import episode, page_of

SIZE = (1280, 1150)


async def token_view(browser: Browser, directory: Path) -> bytes:
    """A branch that begins with an edit, a token of it chosen, coloured by logprob."""
    tiny_tokenizer.build(directory / "model")
    tokenizer = AutoTokenizer.from_pretrained(str(directory / "model"))
    file = page_of(directory, episode(tokenizer), token_bytes(tokenizer))
    async with browser.page(width=SIZE[0], height=SIZE[1]) as page:
        await page.open(file.as_uri())
        await page.until("document.querySelector('#sample-line-1')")
        await page.click("#sample-line-1")
        await page.until("document.getElementById('page').dataset.shown === '1'")
        await page.choose("#colour", "logprob")
        await page.click(".token.sampled.step-2")
        await page.value("scrollTo(0, 0)")
        return await page.screenshot()


Shot = Callable[[Browser, Path], Awaitable[bytes]]
#: By the names of their files in `docs/`.
SHOTS: dict[str, Shot] = {"view.png": token_view}


async def main() -> None:
    """Take every picture again."""
    async with Browser.started() as browser:
        for name, shot in SHOTS.items():
            with tempfile.TemporaryDirectory() as directory:
                picture = await shot(browser, Path(directory))
            (ROOT / "docs" / name).write_bytes(picture)
            print(f"docs/{name} taken", file=sys.stderr)


if __name__ == "__main__":
    asyncio.run(main())

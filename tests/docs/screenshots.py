"""The pictures of pages that the documentation shows: `python -m tests.docs.screenshots` takes them again. Those of the
dashboard show a real run, of a router that another terminal starts:

    make train TRAIN='--port 31000'
    python -m tests.docs.screenshots --router http://127.0.0.1:31000

A picture is not compared with the one that is kept: fonts differ from machine to machine. `test_screenshots.py` holds
that each can be taken, and shows what its page says.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
from transformers import AutoTokenizer

from middleware_hub.view.command import token_bytes
from miles_router.testing import tiny_tokenizer
from tests.docs.pages import ROOT
from tests.support.browser import Browser, Page
from tests.support.dashboards import SYSTEM, a_run, dashboard, running_fleet
from tests.support.fleet import held
from tests.support.session_trial import user
from tests.support.stage import staged
from tests.support.token_pages import episode, page_of
from tests.support.under_way import under_way
from tests.support.waiting import until

WIDTH, HEIGHT = 1280, 1150
#: Weight versions that a run has had before its pictures are taken; `make train` makes 16.
UPDATES = 12
Shot = Callable[[Browser, Path], Awaitable[list[bytes]]]


async def token_view(browser: Browser, directory: Path) -> list[bytes]:
    """A branch that begins with an edit, a token of it chosen, coloured by logprob."""
    tiny_tokenizer.build(directory / "model")
    tokenizer = AutoTokenizer.from_pretrained(str(directory / "model"))
    file = page_of(directory, episode(tokenizer), token_bytes(tokenizer))
    async with browser.page(width=WIDTH, height=HEIGHT) as page:
        await page.open(file.as_uri())
        await page.until("document.querySelector('#sample-line-1')")
        await page.click("#sample-line-1")
        await page.until("document.getElementById('page').dataset.shown === '1'")
        await page.choose("#colour", "logprob")
        await page.click(".token.sampled.step-2")
        await page.value("scrollTo(0, 0)")
        return [await page.screenshot()]


async def _fleet(page: Page) -> None:
    """Once the chart has some points."""
    await until(lambda: sum(url.endswith("/router/info") for url in page.asked) > 8, "it has looked several times")


async def _episode(page: Page) -> None:
    await page.choose("#colour", "version")
    await page.click(".token.sampled.hue-1")
    await page.value("scrollTo(0, 0)")
    await page.hover(".name")


async def _as_it_is(page: Page) -> None:
    """Nothing is done to it."""


#: Of the dashboard: the address, what is done before a picture is taken, and its height.
VIEWS: dict[str, tuple[str, Callable[[Page], Awaitable[None]], int]] = {
    "dashboard-fleet.png": ("#/fleet", _fleet, 1150),
    "dashboard-episodes.png": ("#/episodes?group=prompt-18", _as_it_is, 1000),
    "dashboard-episode.png": ("#/episodes/sum-18-0?turn=3", _episode, 1500),
    "dashboard-run.png": ("#/run", _as_it_is, 1050),
}


async def dashboard_views(browser: Browser, directory: Path) -> list[bytes]:
    """A run in which a generation waits at a pause, and one worker is out."""
    pictures = []
    async with staged() as stage, running_fleet(stage) as trial:
        await a_run(trial)
        trial.router.pool.record_stall(trial.router.pool.get(trial.workers[1].url), "stalled: no sign of life")
        await trial.ask("POST", "/pause_generation", {"mode": "retract"})
        async with under_way(trial.turn("sum-18-2", [SYSTEM, user("Are you there?")])) as turn:
            await held(trial.router, 1)
            for address, prepare, height in VIEWS.values():
                async with dashboard(browser, trial.router.url, address, width=WIDTH, height=height) as page:
                    await prepare(page)
                    pictures.append(await page.screenshot())
            await trial.ask("POST", "/continue_generation", {})
            await turn
    return pictures


#: By the names of their files in `docs/`.
SHOTS: dict[tuple[str, ...], Shot] = {("view.png",): token_view, tuple(VIEWS): dashboard_views}


async def pictures_of_run(browser: Browser, url: str) -> None:
    """Take the dashboard's pictures of this router's run once `UPDATES` updates have come."""
    async with aiohttp.ClientSession(url) as http:

        async def ask(path: str) -> Any:
            async with http.get(path) as answer:
                return await answer.json()

        async with dashboard(browser, url, "#/fleet", width=WIDTH, height=VIEWS["dashboard-fleet.png"][2]) as page:
            while len((await ask("/router/run"))["rewards"]) < UPDATES:  # noqa: ASYNC110
                await asyncio.sleep(1)  # the router is asked; the chart shows what the page has seen
            _keep("dashboard-fleet.png", await page.screenshot())
        episodes: list[Any] = []
        while not episodes:  # a trainer deletes the sessions that it has read
            await asyncio.sleep(1)
            episodes = (await ask("/router/episodes"))["episodes"]
        shown = max(episodes, key=lambda each: int(each["turns"]))
        listed = f"#/episodes?group={quote(shown['group'])}" if shown["group"] else "#/episodes"
        places = {"dashboard-episode.png": f"#/episodes/{quote(shown['id'])}", "dashboard-episodes.png": listed}
        for name, address in (places | {"dashboard-run.png": "#/run"}).items():
            _, prepare, height = VIEWS[name]
            async with dashboard(browser, url, address, width=WIDTH, height=height) as page:
                await prepare(page)
                _keep(name, await page.screenshot())


def _keep(name: str, picture: bytes) -> None:
    (ROOT / "docs" / name).write_bytes(picture)
    print(f"docs/{name} taken", file=sys.stderr)


async def main() -> None:
    """Take every picture again."""
    async with Browser.started() as browser:
        if sys.argv[1:2] == ["--router"]:
            await pictures_of_run(browser, sys.argv[2])
            return
        for names, shot in SHOTS.items():
            with tempfile.TemporaryDirectory() as directory:
                pictures = await shot(browser, Path(directory))
            for name, picture in zip(names, pictures, strict=True):
                _keep(name, picture)


if __name__ == "__main__":
    asyncio.run(main())

"""A real Chromium without a window, driven over its DevTools protocol (https://chromedevtools.github.io).

async with Browser.started() as browser, browser.page() as page:
    await page.open(url)
    assert await page.value("document.title") == "Token view"
    await page.press("ArrowRight")

It comes from Debian's package `chromium`: `make` installs it. Where it is absent, tests fail and say so.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

from miles_router.tasks import spawn
from tests.support.waiting import soon, until

NAMES = ("chromium", "chromium-browser", "google-chrome")
#: No sandbox: it needs rights that containers do not have, and the pages are ours.
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-extensions", "--disable-background-networking", "--disable-component-update", "--mute-audio"),
    *("--force-color-profile=srgb", "--remote-debugging-port=0"),
)
LISTENING = re.compile(r"(\d+)\n(/devtools/browser/[-\w]{36})")
MAX_MESSAGE = 256 << 20
CODES = {"Home": 36, "End": 35, "PageUp": 33, "PageDown": 34, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39}
KEYS = {**CODES, "ArrowDown": 40, "Tab": 9, "Enter": 13, "Escape": 27}
CHANNELS = {"Runtime.exceptionThrown": "exceptions", "Page.javascriptDialogOpening": "dialogs"}


def program() -> str:
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        raise RuntimeError("chromium is absent, which tests of pages need: on Debian, apt-get install chromium")
    return found


class PageFailed(AssertionError):
    """An expression threw in the page, or the browser refused a command."""


class Browser:
    """One browser; its pages share nothing."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._numbers = count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}

    @classmethod
    @asynccontextmanager
    async def started(cls) -> AsyncIterator[Browser]:
        """A browser with a profile of its own, which ends with the context, and all of its processes with it."""
        with (
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
            (Path(profile) / "log").open("wb") as log,
        ):
            process = await asyncio.create_subprocess_exec(
                *(program(), *FLAGS, f"--user-data-dir={profile}", "about:blank"),
                stdout=log,  # no pipe: those of its processes that end last would keep it open
                stderr=log,
                env={"PATH": "/usr/bin:/bin", "HOME": profile, "LANG": "C.UTF-8"},
                start_new_session=True,
            )
            try:
                url = await _address(process, Path(profile))
                async with aiohttp.ClientSession() as http, http.ws_connect(url, max_msg_size=MAX_MESSAGE) as socket:
                    browser = cls(socket)
                    listening = spawn(browser._listen(), name="browser")
                    yield browser
                    await socket.close()
                    await listening
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()

    @asynccontextmanager
    async def page(self, *, width: int = 1280, height: int = 900, dark: bool = False) -> AsyncIterator[Page]:
        context = (await self.send("Target.createBrowserContext"))["browserContextId"]
        made = await self.send("Target.createTarget", url="about:blank", browserContextId=context)
        attached = await self.send("Target.attachToTarget", targetId=made["targetId"], flatten=True)
        page = self._pages[attached["sessionId"]] = Page(self, attached["sessionId"])
        try:
            for domain in ("Page", "Runtime", "Log"):
                await page.send(f"{domain}.enable")
            await page.send("Page.addScriptToEvaluateOnNewDocument", source=WATCH)
            await page.resize(width, height)
            await page.prefer(dark=dark)
            yield page
        finally:
            await self.send("Target.disposeBrowserContext", browserContextId=context)
            del self._pages[attached["sessionId"]]

    async def send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": parameters}
        await self._socket.send_str(json.dumps(message if session is None else {**message, "sessionId": session}))
        try:
            found = await soon(answer)
        finally:
            del self._answers[number]
        if "error" in found:
            raise PageFailed(f"{method}: {found['error']}")
        result: dict[str, Any] = found["result"]
        return result

    async def _listen(self) -> None:
        async for message in self._socket:
            told = json.loads(message.data)
            answer = self._answers.get(told.get("id", 0))
            page = self._pages.get(told.get("sessionId", ""))
            if answer is not None and not answer.done():
                answer.set_result(told)
            elif page is not None and "method" in told:
                page.hear(told["method"], told["params"])


async def _address(process: asyncio.subprocess.Process, profile: Path) -> str:
    """Where it listens, which it writes into a file of its profile."""
    written = profile / "DevToolsActivePort"

    def told() -> re.Match[str] | None:
        return LISTENING.match(written.read_text(encoding="ascii")) if written.exists() else None

    await until(lambda: told() is not None or process.returncode is not None, "the browser listens")
    found = told()
    if found is None or process.returncode is not None:
        said = (profile / "log").read_text(encoding="utf-8", errors="replace")
        raise RuntimeError(f"the browser ended with {process.returncode}: {said}")
    return f"ws://127.0.0.1:{found[1]}{found[2]}"


#: Counts what the page's own policy refuses.
WATCH = """
window.violations = [];
addEventListener("securitypolicyviolation", (event) => violations.push(`${event.violatedDirective} ${event.sample}`));
"""


#: The contrast of every kind of text that a page of ours has.
CONTRASTS = """
(() => {
  const channel = (value) => (value /= 255, value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (colour) => {
    const [r, g, b] = numbers(colour).map(channel);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (at) => {
    const colour = getComputedStyle(at).backgroundColor;
    return numbers(colour)[3] === 0 ? ground(at.parentElement) : colour;
  };
  const every = ".swatch:not(.dot), .legend li, dt, dd, .soft, h1, h2, h3, .tokens .token, ins, del, nav a, a, .state, "
    + ".number, td, th, [role=gridcell], [role=columnheader], #live, .notice, .chip, label, figcaption";
  return [...document.querySelectorAll(every)].map((at) => {
    const [a, b] = [light(getComputedStyle(at).color), light(ground(at))].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
  });
})()
"""


@dataclass
class Page:
    """One page. `problems` is what went wrong in it: exceptions, dialogs, errors in its log."""

    _browser: Browser
    _session: str
    problems: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    _loaded: int = 0

    async def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        return await self._browser.send(method, self._session, **parameters)

    def hear(self, method: str, told: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded += 1
        elif method in CHANNELS:
            self.problems.append(f"{CHANNELS[method]}: {json.dumps(told)[:2000]}")
        elif method == "Log.entryAdded" and told["entry"]["level"] == "error":
            self.problems.append(f"log: {told['entry']['text']}")
        elif method == "Network.requestWillBeSent":
            self.asked.append(told["request"]["url"])

    async def open(self, url: str) -> None:
        before = self._loaded
        answer = await self.send("Page.navigate", url=url)
        assert "errorText" not in answer, answer
        await until(lambda: self._loaded > before, f"{url} is loaded")

    async def value(self, expression: str) -> Any:
        """What an expression is in the page, awaited, as JSON has it.

        Raises:
            PageFailed: it throws.
        """
        found = await self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise PageFailed(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Wait until an expression is true in the page, and give it."""
        return await self.value(
            f"new Promise((done) => {{ const look = () => {{ const found = ({expression}); "
            "if (found) done(found); else setTimeout(look, 5); }; look(); })"
        )

    async def text(self, selector: str) -> str:
        found: str = await self.value(f"document.querySelector({json.dumps(selector)}).textContent")
        return found

    async def press(self, key: str) -> None:
        told = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        for kind in ("rawKeyDown", "keyUp"):
            await self.send("Input.dispatchKeyEvent", type=kind, **told)

    async def hover(self, selector: str) -> None:
        await self._mouse("mouseMoved", *await self._middle(selector))

    async def click(self, selector: str) -> None:
        """A click on the middle of an element, which is scrolled into view."""
        x, y = await self._middle(selector)
        await self._mouse("mouseMoved", x, y)
        for kind in ("mousePressed", "mouseReleased"):
            await self._mouse(kind, x, y, button="left", clickCount=1)

    async def choose(self, selector: str, value: str) -> None:
        given, at = json.dumps(value), json.dumps(selector)
        await self.value(
            f"(() => {{ const at = document.querySelector({at}); at.value = {given}; "
            'for (const kind of ["input", "change"]) at.dispatchEvent(new Event(kind, {bubbles: true})); })()'
        )

    async def resize(self, width: int, height: int) -> None:
        """Another window; below 600 pixels a phone's."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.send("Emulation.setDeviceMetricsOverride", **metrics)

    async def prefer(self, *, dark: bool) -> None:
        """Dark or light colours."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self.send("Emulation.setEmulatedMedia", features=features)

    async def screenshot(self) -> bytes:
        """A picture of what is seen, as PNG."""
        shot = await self.send("Page.captureScreenshot", format="png")
        return base64.b64decode(shot["data"])

    async def _middle(self, selector: str) -> tuple[float, float]:
        at = json.dumps(selector)
        x, y = await self.value(
            f"(() => {{ const at = document.querySelector({at}); at.scrollIntoView({{block: 'nearest'}}); "
            "const {x, y, width, height} = at.getBoundingClientRect(); return [x + width / 2, y + height / 2]; })()"
        )
        return x, y

    async def _mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        await self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)


if __name__ == "__main__":
    try:
        print(program())
    except RuntimeError as error:
        sys.exit(str(error))

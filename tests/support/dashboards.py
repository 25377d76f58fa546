"""A run to look at on the dashboard, and the dashboard in a browser."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from miles_router.testing import SimulatedWorker
from tests.support.browser import Browser, Page
from tests.support.cache_trial import checkpoint
from tests.support.experts_trial import MOE, ExpertsTrial, experts_trial
from tests.support.session_trial import ADD, SESSIONS, Message, message_of, tool_result, user
from tests.support.stage import Stage

SYSTEM: Message = {"role": "system", "content": "Add with the tool, step by step."}
#: What the workers answer, by how many answers there are before.
SCRIPT = [
    {"text": "First the tens, then the ones.", "calls": [{"name": "add", "arguments": {"a": 17, "b": 25}}]},
    "The sum is 42.",
    "Yes: 17 + 25 = 42.",
]
LIVE = "document.getElementById('live').dataset.live === 'yes'"
#: Which address the numbers on the page are of.
SHOWN = "document.getElementById('view').dataset.shown"


#: The page looks again after a fifth of a second in place of two.
QUICKLY = """
const set = window.setTimeout;
window.setTimeout = (act, after, ...more) => set(act, after >= 2000 ? 200 : after, ...more);
"""


@asynccontextmanager
async def running_fleet(stage: Stage, **settings: Any) -> AsyncIterator[ExpertsTrial]:
    """A router with sessions and experts before two workers that play the script."""
    options: dict[str, Any] = {"tokenizer": checkpoint(), "moe": MOE, "weight_version": "6", "script": SCRIPT}
    async with SimulatedWorker(**options) as one, SimulatedWorker(**options, seed=1) as other:
        trial = await experts_trial(stage, one, other, around=(SESSIONS,), **settings)
        await trial.router.probed()
        yield trial


async def sum_of(trial: ExpertsTrial, session: str, result: str = "42", **made: Any) -> list[Message]:
    """An episode of two turns with a tool between them; what it leaves as history."""
    await trial.create(session, **made)
    history = [SYSTEM, user("What is 17 plus 25?")]
    for _ in range(2):
        answer = message_of(await trial.chat(session, history, tools=[ADD], max_tokens=128))
        history += [answer, *(tool_result(call, result) for call in answer.get("tool_calls") or ())]
    return history


async def update_weights(trial: ExpertsTrial, version: str) -> None:
    answer = await trial.ask("POST", "/update_weight_version", {"new_version": version, "abort_all_requests": False})
    assert answer.status == 200, answer.body


async def forked(trial: ExpertsTrial, session: str, **made: Any) -> None:
    """One that goes on under other weights, with a tool's result edited, and with a history made shorter."""
    history = await sum_of(trial, session, **made)
    await update_weights(trial, "7")
    await trial.chat(session, [*history, user("Are you sure?")], tools=[ADD], max_tokens=128)
    edited = {**history[3], "content": "17 + 25 = 42"}
    await trial.chat(session, [*history[:3], edited], tools=[ADD], max_tokens=128)
    await trial.chat(session, [history[0], user("So far: 17 + 25.")], tools=[ADD], max_tokens=128)


async def a_run(trial: ExpertsTrial) -> None:
    """Two groups, forks, two weight versions, samples that were read, a session at the end of its budget."""
    for number in range(4):
        await sum_of(trial, f"sum-17-{number}", metadata={"group": "prompt-17", "label": "seventeen and more"})
    await trial.samples("sum-17-0", reward=0.5)
    await forked(trial, "sum-18-0", metadata={"group": "prompt-18", "label": "an agent that edits"})
    await trial.samples("sum-18-0", reward=1)
    await sum_of(trial, "sum-18-1", contract={"group": "prompt-18", "budget": {"max_turns": 2}})
    await trial.turn("sum-18-1", [SYSTEM, user("One more?")])
    await trial.create("sum-18-2", metadata={"group": "prompt-18"})


async def got(trial: Any, path: str) -> Any:
    answer = await trial.router.ask("GET", f"/router/{path}")
    assert answer.status == 200, answer.body
    return answer.json()


@asynccontextmanager
async def dashboard(browser: Browser, url: str, address: str = "#/fleet", **how: Any) -> AsyncIterator[Page]:
    """The page once it shows an address; nothing goes wrong in it, and it asks nobody but its router."""
    async with browser.page(**how) as page:
        await page.send("Network.enable")
        await page.send("Page.addScriptToEvaluateOnNewDocument", source=QUICKLY)
        await page.open(f"{url}/dashboard{address}")
        await page.until(f"{LIVE} && {SHOWN} === {json.dumps(address)}")
        yield page
        assert page.problems == []
        assert await page.value("violations") == []
        assert {each.split("/")[2] for each in page.asked} == {url.split("/")[2]}


async def go(page: Page, address: str) -> None:
    await page.value(f"location.hash = {json.dumps(address)}")
    await page.until(f"{LIVE} && {SHOWN} === {json.dumps(address)}")


async def cells(page: Page, grid: str) -> list[list[str]]:
    """Return the texts of a grid's rows, the cells of each on one line."""
    wrapped = await page.value(f"""[...document.querySelectorAll('#{grid} [role=row]')].filter((row) => {{
        const boxes = [...row.children].map((cell) => cell.getBoundingClientRect()).filter((box) => box.height);
        const middles = boxes.map((box) => box.top + box.height / 2);
        return Math.max(...middles) - Math.min(...middles) > 5;
    }}).map((row) => row.textContent)""")
    assert wrapped == []
    return await _texts(page, f"#{grid} .rows [role=row]")


async def table(page: Page, name: str) -> list[list[str]]:
    return await _texts(page, f"#{name} tbody tr")


async def _texts(page: Page, rows: str) -> list[list[str]]:
    found: list[list[str]] = await page.value(
        f"[...document.querySelectorAll('{rows}')].map((row) => [...row.children].map((cell) => cell.textContent))"
    )
    return found


async def tell(page: Page, *positions: int) -> list[dict[str, Any]]:
    """The details of positions, each made the current one, and the id that its element tells."""
    found: list[dict[str, Any]] = await page.value(f"{DETAILS}({json.dumps(positions)})")
    return found


DETAILS = """
((positions) => positions.map((position) => {
  const input = document.getElementById("goto");
  input.value = position;
  input.dispatchEvent(new Event("change"));
  const token = document.getElementById(`token-${position}`);
  const details = [...document.querySelectorAll("dd[data-field]")].map((at) => [at.dataset.field, at.textContent]);
  return {...Object.fromEntries(details), element: token.dataset.tokenId ?? null, shown: token.textContent};
}))
"""

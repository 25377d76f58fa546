"""The dashboard in a real browser, before a real router: what it shows is what the router says, it goes on by itself,
draws only what is seen, and nothing that anybody says can run in it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from middleware_hub.dashboard.page import HEADERS
from middleware_hub.openai_session.episodes.contract import SessionStatus
from tests.support import tiers
from tests.support.browser import CONTRASTS, Browser, Page, PageFailed
from tests.support.dashboards import (
    LIVE,
    SCRIPT,
    SHOWN,
    SYSTEM,
    a_run,
    cells,
    dashboard,
    go,
    got,
    running_fleet,
    sum_of,
    table,
    tell,
    update_weights,
)
from tests.support.experts_trial import ExpertsTrial
from tests.support.fleet import held
from tests.support.session_trial import ADD, message_of, simulated_sessions, user
from tests.support.stage import Stage, staged
from tests.support.under_way import under_way
from tests.support.unseen import UNSEEN, seen

FORKED = "#/episodes/sum-18-0"
COUNT = "document.getElementById('count').textContent"
LEAF = "document.getElementById('tokens-of').dataset.leaf"
NODES = "document.querySelectorAll('*').length"


@pytest.fixture(scope="module")
async def run() -> AsyncIterator[ExpertsTrial]:
    """A run that is over: tests only look at it."""
    async with staged() as stage, running_fleet(stage) as trial:
        await a_run(trial)
        yield trial


async def count_is(page: Page, text: str) -> None:
    await page.until(f"{COUNT} === {json.dumps(text)}")


# Fleet


@pytest.mark.alone("several let go of sessions that are away though no requests come: the numbers are other ones soon")
async def test_the_fleet_view_has_the_numbers_of_the_router(browser: Browser, run: ExpertsTrial) -> None:
    info, versions = await got(run, "info"), (await got(run, "run"))["versions"]
    cached, prompt = (sum(each[name] for each in versions) for name in ("cached", "prompt"))
    async with dashboard(browser, run.router.url) as page:
        assert await page.text("#workers") == "2 of 2"
        assert await page.text("#in-flight") == str(info["in_flight"]) == "0"
        assert await page.text("#tokens") == f"{sum(each['tokens'] for each in info['workers']):,}"
        assert await page.text("#hit-rate") == f"{100 * cached / prompt:.1f} %"
        assert await page.text("#weights") == info["weight_version"] == "7"
        rows = await table(page, "workers-table")
        assert [row[:6] for row in rows] == [
            [each["url"], "ready", "0", f"{each['tokens']:,}", "7", "0"] for each in info["workers"]
        ]
        steps = await page.value("[...document.querySelectorAll('#stack li')].map((step) => step.textContent)")
        assert steps == [*(each["name"] for each in info["middlewares"]), "worker"]
        assert await page.value("document.querySelectorAll('.chart canvas').length") == 1
        assert await page.text("title") == "Fleet – miles-router"


async def test_a_worker_that_takes_nothing_a_pause_and_a_load_show_themselves(browser: Browser, stage: Stage) -> None:
    async with running_fleet(stage) as trial, dashboard(browser, trial.router.url) as page:
        assert await page.text("#out-of-rotation") == "No worker is out of rotation."
        one = trial.workers[0]
        trial.router.pool.record_stall(trial.router.pool.get(one.url), "its log says <b>no</b>")
        await page.until("document.querySelector('#out tbody tr')")
        ((url, state, _, reason),) = await table(page, "out")
        assert (url, state, reason) == (one.url, "quarantined", "its log says <b>no</b>")
        ((_, changed, how, why),) = await table(page, "changes")
        assert (changed, how, why) == (one.url, "ready → quarantined", reason)
        await trial.ask("POST", "/pause_generation", {"mode": "retract"})
        session = await trial.create()
        async with under_way(trial.turn(session, [SYSTEM, user("Hi")])) as turn:
            await held(trial.router, 1)
            await page.until("document.getElementById('gate').textContent.endsWith('1 request waits.')")
            assert (await page.text("#gate")).startswith("The fleet was paused (retract) ")
            await page.until("document.querySelector('.legend .band')?.parentElement.textContent === 'paused'")
            await go(page, "#/episodes?state=waiting")
            assert [row[0] for row in await cells(page, "episodes")] == [session]
            await trial.ask("POST", "/continue_generation", {})
            await turn
        await page.until("document.getElementById('gate').hidden")


# Episodes


def row_of(row: Any) -> list[str]:
    """An episode as a line of the list, but for how long ago it was used."""
    forks = [reason if count == 1 else f"{reason} ×{count}" for reason, count in row["reasons"].items()]
    tokens = row["tokens"]
    return [
        row["id"] if row["label"] is None else f"{row['id']} {row['label']}",
        row["state"],
        row["group"] or "",
        str(row["turns"]),
        *(f"{tokens[name]:,}" for name in ("sampled", "trained", "all")),
        "0 s",
        ", ".join(forks),
        ", ".join(row["weight_versions"]),
        ", ".join(url.removeprefix("http://") for url in row["workers"]),
        row["end_reason"] or row["finish_reason"] or "",
    ]


async def test_the_list_is_the_routers_and_filters_leave_what_the_router_leaves(
    browser: Browser, run: ExpertsTrial
) -> None:
    every = (await got(run, "episodes"))["episodes"]
    worker = run.workers[1].url
    async with dashboard(browser, run.router.url, "#/episodes") as page:
        assert await page.value(COUNT) == f"{len(every)} episodes"
        assert [row[:-1] for row in await cells(page, "episodes")] == [row_of(row) for row in every]
        for field, value in (("state", "ended"), ("group", "prompt-17"), ("reason", "compaction"), ("worker", worker)):
            left = (await got(run, f"episodes?{field}={value}"))["episodes"]
            assert 0 < len(left) < len(every)
            await page.choose(f"#{field}", value)
            await page.until(f"decodeURIComponent({SHOWN}) === '#/episodes?{field}={value}'")
            assert [row[:-1] for row in await cells(page, "episodes")] == [row_of(row) for row in left]
            await page.choose(f"#{field}", "")
            await count_is(page, f"{len(every)} episodes")
        await page.choose("#search", "EDITS prompt-18")
        assert [row[0] for row in await cells(page, "episodes")] == ["sum-18-0 an agent that edits"]
        assert await page.value(COUNT) == f"1 of {len(every)} episodes"
    async with dashboard(browser, run.router.url, "#/episodes?state=ended&group=prompt-18") as page:
        assert [row[0] for row in await cells(page, "episodes")] == ["sum-18-1"]
        assert await page.value("['state', 'group'].map((id) => document.getElementById(id).value)") == [
            "ended",
            "prompt-18",
        ]


async def test_of_thousands_of_episodes_those_are_drawn_that_are_seen(browser: Browser, stage: Stage) -> None:
    many = 10_000 if tiers.nightly() else 2_000
    async with simulated_sessions(stage) as trial:
        store = trial.router.app.layers[0].store  # type: ignore[attr-defined]
        for number in range(many):
            store.create(f"many-{number}", {"group": number % 10})
        async with dashboard(browser, trial.router.url, "#/episodes") as page:
            assert await page.value(COUNT) == "200 episodes loaded, more available"
            assert await page.value(NODES) < 1500
            await page.choose("#search", "many-777")
            await count_is(page, f"{11 if many > 2_000 else 1} of {many:,} episodes")
            await page.choose("#search", "")
            await count_is(page, f"{many:,} episodes")
            await page.value("document.querySelector('#episodes .rows').scrollTop = 40 * 1000")
            await page.until(f"document.querySelector('[data-key=many-{many - 1001}]')")
            await page.value("document.getElementById('episodes').focus()")
            await page.press("End")
            assert await page.value("document.querySelector('#episodes [aria-selected=true]').dataset.key") == "many-0"
            assert await page.value(NODES) < 1500
            store.create("newest", {"group": "other"})
            top = "document.querySelector('#episodes [data-key=many-3]').getBoundingClientRect().top"
            before = await page.value(top)
            await count_is(page, f"{many + 1:,} episodes")
            assert await page.value(top) == before, "what is seen stays where it is"
            await page.choose("#group", "other")
            await count_is(page, "1 episode")


def state_of(session: str) -> str:
    """What the list says of one that is drawn."""
    return f"document.querySelector('[data-key={session}] [role=gridcell]:nth-child(2)')?.textContent"


async def scroll_to(page: Page, row: int, session: str) -> None:
    await page.value(f"document.querySelector('#episodes .rows').scrollTop = {40 * row}")
    await page.until(f"document.querySelector('[data-key={session}]')")


async def test_visible_rows_behind_the_first_page_are_read_again(browser: Browser, stage: Stage) -> None:
    async with simulated_sessions(stage) as trial:
        store = trial.router.app.layers[0].store  # type: ignore[attr-defined]
        for number in range(450):
            store.create(f"old-{number}")
        async with dashboard(browser, trial.router.url, "#/episodes") as page:
            await page.choose("#search", "old")
            await count_is(page, "450 of 450 episodes")
            await page.choose("#search", "")
            for part in range(2):  # what is new pushes those behind it off the first page
                for number in range(150):
                    store.create(f"new-{part}-{number}")
                await count_is(page, f"{450 + 150 * (part + 1)} episodes")
            await scroll_to(page, 300, "old-449")
            store.end(store.find("old-447"), SessionStatus.ABORTED)
            await page.until(f"{state_of('old-447')} === 'ended'")
            store.delete(store.find("old-249"))  # with which the second page began
            store.delete(store.find("old-250"))
            await scroll_to(page, 520, "old-225")
            store.end(store.find("old-225"), SessionStatus.ABORTED)
            await page.until(f"{state_of('old-225')} === 'ended'")
            for number in range(600):  # more than a page, between two looks
                store.create(f"newest-{number}")
            await count_is(page, "1,348 episodes")
            assert await page.value(state_of("old-225")) == "ended", "what is seen stays where it is"
            for number in range(450):
                if (session := store.find(f"old-{number}")) is not None:
                    store.delete(session)
            await page.value("document.querySelector('#episodes .rows').scrollTop = 0")
            await count_is(page, "900 episodes")


# One episode


async def test_every_token_of_an_episode_is_shown_as_the_router_says_it(
    browser: Browser, run: ExpertsTrial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it comes in slices."""
    detail = await got(run, "episodes/sum-18-0")
    lines = {leaf: await got(run, f"episodes/sum-18-0/tokens?leaf={leaf}") for leaf in (4, 2)}
    monkeypatch.setattr("middleware_hub.dashboard.episodes.MOST_TOKENS", 60)
    assert (await got(run, "episodes/sum-18-0/tokens"))["stop"] == 60 < lines[4]["length"]
    async with dashboard(browser, run.router.url, FORKED) as page:
        for leaf, told in lines.items():
            if leaf != 4:
                await page.click(".tree .row:nth-child(2) button")
                await page.until(f"{LEAF} === '{leaf}'")
            found = await tell(page, *range(told["length"]))
            assert [each["id"] for each in found] == [each["element"] for each in found] == [*map(str, told["tokens"])]
            assert [each["mask"][0] for each in found] == [*map(str, told["loss_mask"])]
            assert [each["origin"] == "sampled" for each in found] == [bool(each) for each in told["sampled"]]
            assert [each["bytes"].replace(" ", "").lower() for each in found] == [
                told["spelling"][str(token)] for token in told["tokens"]
            ]
            for each, logprob, sampled in zip(found, told["logprobs"], told["sampled"], strict=True):
                assert (float(each["logprob"]) == pytest.approx(logprob)) if sampled else (each["logprob"] == "none")
            entropy = [*(f"{bits:.3f} bits" for bits in told["expert_entropy"]), "unknown"]
            assert [each["entropy"] for each in found] == entropy
            for run_of in told["versions"]:
                versions = {each["version"] for each in found[run_of["start"] : run_of["end"]]}
                assert versions == {run_of["version"]}
            for turn in told["turns"]:
                where = {(each["turn"], each["worker"]) for each in found[turn["start"] : turn["end"]]}
                assert where == {(f"{turn['turn']}, sampled", turn["worker"])}
        turns = await cells(page, "turns")
        assert [(row[0], row[2], row[5]) for row in turns] == [
            (str(turn["turn"]), turn["reason"] or "", str(turn["end"] - turn["start"])) for turn in detail["turns"]
        ]
        assert await page.text("[data-fact=trained]") == str(detail["tokens"]["trained"])
        assert await page.text("[data-fact=turns]") == "5"


async def test_what_goes_on_is_shown_without_loading_anew(browser: Browser, stage: Stage) -> None:
    async with running_fleet(stage) as trial, dashboard(browser, trial.router.url, "#/episodes") as page:
        await page.value("window.same = true")
        assert await page.value(COUNT) == "0 episodes"
        history = await sum_of(trial, "live")
        await count_is(page, "1 episode")
        await go(page, "#/episodes/live")
        await page.until(f"{LEAF} === '1'")
        await page.value("document.querySelector('.tokens').focus()")
        await page.press("ArrowRight")
        await trial.chat("live", [*history, user("Are you sure?")], tools=[ADD])
        await page.until(f"{LEAF} === '2'")
        assert (await page.text("[data-field=position]")).startswith("1 of"), "one stays where one was"
        given = [{"turn": 1, "reward": 0.5}, {"turn": 1, "span": [0, 2], "name": "why", "value": "<b>\u202e"}]
        assert (await trial.ask("POST", "/sessions/live/rewards", given)).status == 200
        await page.until("document.getElementById('turns').textContent.includes('reward 0.5')")
        assert [row[9] for row in await cells(page, "turns")] == ["", 'reward 0.5, why[0:2] "<b>\\u202e"', ""]
        spoken = await page.value(
            "[...document.querySelectorAll('.token.sampled')].map((at) => at.textContent).join('')"
        )
        assert spoken.count("42") == 2, SCRIPT
        await go(page, "#/run")
        sampled = (await got(trial, "episodes/live"))["tokens"]["sampled"]
        await page.until(f"document.getElementById('sampled').textContent === '{sampled}'")
        assert await page.value("window.same") is True


async def test_an_episode_that_is_not_held_is_named_and_shows_nothing_of_another(
    browser: Browser, run: ExpertsTrial
) -> None:
    async with browser.page() as page:
        await page.open(f"{run.router.url}/dashboard{FORKED}")
        await page.until(f"{LEAF} === '4'")
        await page.value("location.hash = '#/episodes/gone%2F..%2Finfo'")
        await page.until("!document.getElementById('problem').hidden")
        assert (await page.text("#problem")).startswith("The router answered 4")
        assert await page.text("#episode-id") == "gone/../info"
        assert (await page.text("#facts"), await page.text("#about"), await cells(page, "turns")) == ("", "", [])


# Run


async def test_the_run_view_adds_up_to_what_the_router_says(browser: Browser, run: ExpertsTrial) -> None:
    said = await got(run, "run")
    versions = said["versions"]
    sampled, trained, given, reused = (
        sum(each[name] for each in versions) for name in ("sampled", "trained", "given", "reused")
    )
    async with dashboard(browser, run.router.url, "#/run") as page:
        assert await page.text("#sampled") == f"{sampled:,}"
        assert await page.text("#trained") == f"{trained:,} ({100 * trained / sampled:.1f} %)"
        assert await page.text("#reused") == f"{reused:,} ({100 * reused / (reused + given):.1f} %)"
        cached, prompt = (sum(each[name] for each in versions) for name in ("cached", "prompt"))
        assert await page.text("#cached") == f"{100 * cached / prompt:.1f} %"
        assert await page.text("#forks-total") == "2"
        assert await page.text("#waited") == "0 s, 0 waits"
        rows = await table(page, "versions")
        assert [(row[0], row[2], row[3], row[8], row[9]) for row in rows] == [
            *(
                (each["weight_version"], f"{each['sampled']:,}", f"{each['trained']:,}", str(each["turns"]), forks)
                for each, forks in zip(reversed(versions), ["2", "0"], strict=True)
            )
        ]
        assert {*map(tuple, await table(page, "forks"))} == {("edited_history", "1"), ("compaction", "1")}
        stale: dict[str, int] = {}
        for interval in said["intervals"]:
            for lag, tokens in interval["staleness"].items():
                stale[lag] = stale.get(lag, 0) + tokens
        assert await table(page, "staleness") == [[lag, f"{stale[lag]:,}"] for lag in ("0", "1")]
        assert await table(page, "rewards") == [["7", "1.000", "1"], ["6", "0.500", "1"]]


# Who may look, and what nobody may


async def test_the_page_asks_for_the_key_and_takes_the_right_one(browser: Browser, stage: Stage) -> None:
    router = await stage.router(api_key="clients", admin_api_key="admin")
    async with browser.page() as page:
        await page.open(f"{router.url}/dashboard#/run")
        await page.until("document.activeElement.id === 'key'")
        refused = "The router did not accept this key."
        for key, said in (("clients", refused), ("\u201cadmin\u201d", refused), ("admin", "")):
            await page.value(f"document.getElementById('key').value = {json.dumps(key)}")
            await page.click("#login button")
            await page.until(f"document.getElementById('problem').textContent === {json.dumps(said)}")
        await page.until(f"{LIVE} && {SHOWN} === '#/run'")
        assert await page.value("document.getElementById('login').hidden")
        assert await page.value("document.activeElement.id") == "main"
        assert "admin" not in await page.value("document.documentElement.outerHTML.replace('administration', '')")


async def test_with_text_off_the_page_says_so_and_shows_no_id(browser: Browser, stage: Stage) -> None:
    async with running_fleet(stage, dashboard_text="off") as trial:
        await sum_of(trial, "quiet", metadata={"label": "a secret", "group": "g"})
        history = [SYSTEM, user("What is 17 plus 25, secretly?")]
        await trial.chat("quiet", history)
        told = await got(trial, "episodes/quiet/tokens")
        async with dashboard(browser, trial.router.url, "#/episodes/quiet") as page:
            assert "hidden" in await page.text("#hidden-text")
            assert not await page.value("document.getElementById('hidden-text').hidden")
            (found,) = await tell(page, told["length"] - 1)
            assert (found["id"], found["text"], found["bytes"], found["element"]) == (
                "hidden",
                "hidden",
                "hidden",
                None,
            )
            assert (found["mask"], found["turn"]) == ("1, in the loss", "2, sampled")
            shown = await page.value("document.body.textContent")
            assert "secret" not in shown
            assert "its texts are hidden" in await page.text(".edit")
            assert await page.value("document.querySelectorAll('[data-token-id]').length") == 0
            await go(page, "#/episodes")
            assert not await page.value("document.getElementById('hidden-text').hidden")


HOSTILE = (
    "<img src=x onerror='window.ran = 1'>",
    "</script><script>window.ran = 1</script>",
    "javascript:window.ran=1",
    "\u202egnp.exe<!--",
    "__proto__",
    f"all{UNSEEN}of it",
)


async def test_hostile_text_is_text_in_every_view(browser: Browser, stage: Stage) -> None:
    evil = HOSTILE[0]
    async with running_fleet(stage) as trial:
        await update_weights(trial, evil)
        for number, text in enumerate(HOSTILE):
            session = await trial.create(f"evil-{number}", metadata={"group": text, "label": text, text: text})
            history = [SYSTEM, user(text)]
            answer = message_of(await trial.chat(session, history, model=text.replace(":", " ")))
            await trial.chat(session, [SYSTEM, user(f"{text}!"), answer, user("Go on")], model=text.replace(":", " "))
        trial.router.pool.record_stall(trial.router.pool.get(trial.workers[0].url), evil)
        async with dashboard(browser, trial.router.url) as page:
            assert await page.text("#weights") == evil
            assert (await table(page, "out"))[0][3] == evil
            await go(page, "#/run")
            assert (await table(page, "versions"))[0][0] == evil
            await go(page, "#/episodes")
            assert [row[2] for row in await cells(page, "episodes")] == [*map(seen, reversed(HOSTILE))]
            for number, text in enumerate(HOSTILE):
                await page.choose("#search", f"evil-{number}")
                assert [row[0] for row in await cells(page, "episodes")] == [f"evil-{number} {seen(text)}"]
                await go(page, f"#/episodes/evil-{number}")
                assert (await page.text("[data-fact=label]"), await page.text("[data-fact=model]")) == (
                    seen(text),
                    seen(text.replace(":", " ")),
                )
                assert json.loads(await page.text("#about"))["metadata"]["label"] == text
                assert not {*UNSEEN} & {*await page.value("document.body.innerText + document.body.textContent")}
                assert await page.text(".sent .message") == f"{seen(text)}!"
                await page.choose("#colour", "version")
                await page.value("document.querySelector('[data-fact=group] a').click()")
                await page.until("document.getElementById('side-by-side')")
                assert await page.value("document.getElementById('group').value") == text
                await go(page, "#/episodes")
            assert await page.value("[window.ran, document.querySelectorAll('img, iframe, [onerror]').length]") == [
                None,
                0,
            ]
            assert await page.value("document.querySelectorAll('script').length") == 1


async def test_the_policy_lets_nothing_run_that_is_not_the_routers_own(browser: Browser, run: ExpertsTrial) -> None:
    policy = HEADERS["Content-Security-Policy"]
    assert "unsafe" not in policy
    for path in (
        "/dashboard",
        "/dashboard/own/main.js",
        "/dashboard/view/token_view.js",
        "/dashboard/uplot/uPlot.esm.js",
    ):
        answer = await run.router.ask("GET", path)
        assert (answer.status, answer.value("content-security-policy")) == (200, policy.encode())
    assert b"<script>" not in (await run.router.ask("GET", "/dashboard")).body
    async with browser.page() as page:
        await page.open(f"{run.router.url}/dashboard")
        await page.until(LIVE)
        with pytest.raises(PageFailed, match="TrustedHTML"):
            await page.value("document.body.innerHTML = '<img src=x onerror=alert(1)>'")
        await page.value(
            "(() => { const made = document.createElement('style'); made.textContent = 'body { color: red }'; "
            "document.head.append(made); })()"
        )
        assert await page.until("violations.some((each) => each.startsWith('style-src')) && violations.length")


async def test_nothing_is_asked_while_nobody_looks(browser: Browser, run: ExpertsTrial) -> None:
    count = """
      window.waiting = new Set();
      const [set, clear] = [window.setTimeout, window.clearTimeout];
      window.setTimeout = (act, after, ...more) => {
        const made = set(() => { waiting.delete(made); act(); }, after, ...more);
        if (after >= 1000) waiting.add(made);
        return made;
      };
      window.clearTimeout = (made) => { waiting.delete(made); clear(made); };
    """
    look = (
        "(() => { Object.defineProperty(document, 'hidden', {value: %s, configurable: true}); "
        "document.dispatchEvent(new Event('visibilitychange')); return waiting.size; })()"
    )
    async with browser.page() as page:
        await page.send("Page.addScriptToEvaluateOnNewDocument", source=count)
        await page.open(f"{run.router.url}/dashboard")
        await page.until(f"{LIVE} && waiting.size === 1")
        assert await page.value(look % "true") == 0
        await page.value(look % "false")
        await page.until("waiting.size === 1")


# Everybody


@pytest.mark.parametrize("dark", [False, True])
async def test_a_phone_shows_every_view_without_scrolling_sideways_in_any_light(
    browser: Browser, run: ExpertsTrial, dark: bool
) -> None:
    async with dashboard(browser, run.router.url, width=320, height=640, dark=dark) as page:
        for address in ("#/fleet", "#/episodes?group=prompt-18", FORKED, "#/run"):
            if address != "#/fleet":
                await go(page, address)
            assert await page.value("[document.documentElement.scrollWidth, innerWidth]") == [320, 320], address
            ground = await page.value("getComputedStyle(document.body).backgroundColor")
            assert ground == ("rgb(17, 23, 29)" if dark else "rgb(255, 255, 255)")
            assert min(await page.value(CONTRASTS)) >= 4.5, address


async def test_a_reader_that_does_not_see_has_names_for_everything(browser: Browser, run: ExpertsTrial) -> None:
    named = ("grid", "combobox", "textbox", "searchbox", "spinbutton", "button", "region", "link", "listbox", "figure")
    seen: set[tuple[str, str]] = set()
    async with dashboard(browser, run.router.url) as page:
        for address in ("#/fleet", "#/episodes", FORKED, "#/run"):
            if address != "#/fleet":
                await go(page, address)
            tree = (await page.send("Accessibility.getFullAXTree"))["nodes"]
            found = [
                (each["role"]["value"], each.get("name", {}).get("value", "")) for each in tree if not each["ignored"]
            ]
            assert [role for role, name in found if role in named and not name.strip()] == [], address
            seen.update(found)
    assert {
        ("grid", "Episodes"),
        ("grid", "Turns"),
        ("listbox", "Tokens"),
        ("combobox", "state"),
        ("link", "Run"),
    } <= seen

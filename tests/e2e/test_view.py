"""The token view in a real browser: what it shows is what is in the file, and nothing in the file can run."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from middleware_hub.view.command import token_bytes
from middleware_hub.view.entropy import expert_entropy
from miles_router.testing import tiny_tokenizer
from miles_router.trajectory import Sample, VersionRun
from tests.support.browser import Browser, Page, PageFailed
from tests.support.token_pages import episode, page_of, page_of_file
from tests.support.unseen import UNSEEN, seen

GOLDEN = Path(__file__).resolve().parents[1] / "compat" / "miles_samples" / "v2_reward.safetensors"
SHOWN = "document.getElementById('page').dataset.shown"
#: Details of positions, by field, and the id that the token's element tells; each made the current one.
READ = """
((positions) => positions.map((position) => {
  const input = document.getElementById("goto");
  input.value = position;
  input.dispatchEvent(new Event("change"));
  const token = document.getElementById(`token-${position}`);
  const details = [...document.querySelectorAll("dd")].map((each) => [each.dataset.field, each.textContent]);
  return {...Object.fromEntries(details), element: token.dataset.tokenId, shown: token.textContent};
}))
"""
NODES = "document.querySelectorAll('*').length"
MOST_NODES = 4000


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    directory = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer.build(directory)
    return AutoTokenizer.from_pretrained(str(directory))


@pytest.fixture(scope="module")
def samples(tokenizer: Any) -> list[Sample]:
    return episode(tokenizer)


@pytest.fixture(scope="module")
def pages(samples: list[Sample], tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of an episode."""
    return page_of(tmp_path_factory.mktemp("pages"), samples, token_bytes(tokenizer))


@asynccontextmanager
async def opened(browser: Browser, page: Path, **how: Any) -> AsyncIterator[Page]:
    """A page once its first sample is drawn; nothing goes wrong in it, and it asks nobody."""
    async with browser.page(**how) as shown:
        await shown.send("Network.enable")
        await shown.open(page.as_uri())
        await shown.until(f"{SHOWN} || !document.getElementById('problem').hidden")
        assert await shown.value("document.getElementById('problem').textContent") == ""
        yield shown
        assert shown.problems == []
        assert await shown.value("violations") == []
        assert shown.asked == [page.as_uri()]


async def choose_sample(page: Page, place: int) -> None:
    await page.click(f"#sample-line-{place}")
    await page.until(f"{SHOWN} === '{place}'")


async def read(page: Page, positions: list[int]) -> list[dict[str, str]]:
    found: list[dict[str, str]] = await page.value(f"{READ}({json.dumps(positions)})")
    return found


def expected(sample: Sample, position: int) -> dict[str, str]:
    """What the details of a position are, by the sample itself."""
    turns = sample.metadata["turns"]
    run = next((run for run in sample.weight_versions if run.start <= position < run.end), None)
    turn = next((turn for turn in turns if turn["start"] <= position < turn["end"]), None)
    prompt = next((turn for turn in turns if position < turn["start"]), None)
    assert sample.routed_experts is not None
    entropy = expert_entropy(sample.routed_experts)
    told = turn if turn is not None else prompt
    return {
        "position": f"{position} of {len(sample):,}",
        "id": str(sample.tokens[position]),
        "element": str(sample.tokens[position]),
        "mask": "1, in the loss" if sample.loss_mask[position] else "0, not in the loss",
        "origin": "given" if turn is None else "sampled",
        "version": "none" if run is None else run.version,
        "worker": "none" if turn is None else turn["worker"],
        "turn": "unknown" if told is None else f"{told['turn']}, {'in its prompt' if turn is None else 'sampled'}",
        "entropy": f"{entropy[position]:.3f} bits" if position < len(entropy) else "unknown",
    }


async def test_every_number_is_the_files(browser: Browser, pages: Path, samples: list[Sample], tokenizer: Any) -> None:
    bytes_of = token_bytes(tokenizer)
    async with opened(browser, pages) as page:
        for place, sample in enumerate(samples):
            await choose_sample(page, place)
            for position, found in enumerate(await read(page, [*range(len(sample))])):
                wanted = expected(sample, position)
                assert {name: found[name] for name in wanted} == wanted
                spelled = bytes_of(int(sample.tokens[position])) or b""
                assert bytes.fromhex(found["bytes"]) == spelled
                if found["origin"] == "given":
                    assert found["logprob"] == found["probability"] == "none"
                else:
                    assert np.float32(found["logprob"]) == sample.logprobs[position]
                    assert len(found["logprob"]) < 16, "the digits of its type and no more"
                    assert float(found["probability"]) == pytest.approx(np.exp(sample.logprobs[position]), rel=1e-3)


async def test_texts_are_exact_and_half_characters_are_bytes(
    browser: Browser, pages: Path, samples: list[Sample], tokenizer: Any
) -> None:
    bytes_of, sample = token_bytes(tokenizer), samples[1]
    kinds = set()
    async with opened(browser, pages) as page:
        await choose_sample(page, 1)
        for token, found in zip(sample.tokens.tolist(), await read(page, [*range(len(sample))]), strict=True):
            spelled = bytes_of(token) or b""
            try:
                text = spelled.decode()
                assert json.loads(found["text"]) == text
                kinds.add("text")
            except UnicodeDecodeError:
                assert found["text"] == "part of a character"
                assert found["shown"] == spelled.hex(" ").upper().replace(" ", "·")
                kinds.add("bytes")
    assert kinds == {"text", "bytes"}


async def test_a_file_of_miles_shows_what_it_says_and_no_more(browser: Browser, tmp_path: Path) -> None:
    told = json.loads(GOLDEN.with_suffix(".json").read_text(encoding="utf-8"))["samples"][0]
    file = tmp_path / "miles.safetensors"
    file.write_bytes(GOLDEN.read_bytes())
    async with opened(browser, page_of_file(file)) as page:
        found = await read(page, [*range(9)])
        assert "Only token ids are shown" in await page.text(".notice")
        assert await page.value("document.querySelector('option[value=turn]').disabled")
    behind = [each for each in found if int(each["position"].split()[0]) >= 4]
    assert [each["shown"] for each in found] == [str(token) for token in told["tokens"]]
    assert [each["logprob"] for each in behind] == ["-0.5", "-1.25", "none", "none", "-3.0000001"]
    assert [each["mask"][0] for each in behind] == [str(each) for each in told["loss_mask"]]
    assert [each["version"] for each in behind] == ["one of 3, 4", "one of 3, 4", "none", "none", "one of 3, 4"]
    assert {each["turn"] for each in found} == {"unknown"}


async def test_a_file_without_samples_says_why(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "empty.safetensors"
    file.write_bytes(GOLDEN.with_name("all_truncated.safetensors").read_bytes())
    async with browser.page() as page:
        await page.open(page_of_file(file).as_uri())
        assert await page.until("document.getElementById('about').textContent")
        assert await page.text("#about") == "empty.safetensors has no samples (all_truncated)."
        assert page.problems == []


HOSTILE = (
    "</script><script>window.ran = 1</script>",
    '"><img src=x onerror="window.ran = 1">',
    "javascript:window.ran=1",
    "<svg/onload=alert(1)>",
    "__proto__",
    "\u202egnp.exe<!--",
    f"all{UNSEEN}of it",
    "' onfocus=alert(1) autofocus '",
    "long" * 99,
)


def hostile(text: str) -> Sample:
    """A sample that has a text wherever texts may stand."""
    edit = {"message": 1, "field": text, "held": text, "sent": f"{text}!"}
    turn = {"turn": 0, "start": 1, "end": 3, "reason": text, "edit": edit, "worker": text, "finish_reason": text}
    given: dict[str, Any] = {"tokens": [0, 1, 2], "loss_mask": [0, 1, 1], "logprobs": [0.0, -1.0, -2.0]}
    return Sample(
        **given,
        weight_versions=(VersionRun(text, 1, 3),),
        response_length=2,
        status="completed",
        reward={text: 1.0},
        label=text,
        response=text,
        metadata={"session_id": text, text: text, "turns": [turn]},
    )


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spelled = [*map(str.encode, HOSTILE)]
    given = [hostile(text) for text in HOSTILE]
    twins = [hostile(text) for text in HOSTILE]  # so that each session has a tree
    for twin in twins:
        twin.metadata["turns"][0]["turn"] = 1
    directory = tmp_path_factory.mktemp("hostile")
    return page_of(directory, [*given, *twins], lambda token: spelled[token], name="<img src=x onerror=alert(1)>")


async def test_hostile_text_is_text(browser: Browser, hostile_page: Path) -> None:
    async with opened(browser, hostile_page) as page:
        for place, text in enumerate(HOSTILE):
            await choose_sample(page, place)
            for name in ("version", "worker"):
                await page.choose("#colour", name)
            found = await read(page, [0, 1, 2])
            assert [json.loads(each["text"]) for each in found] == [*HOSTILE[:3]]
            assert (found[1]["version"], found[1]["worker"]) == (seen(text), seen(text))
            assert await page.text(".reasons strong") == seen(text)
            assert await page.text(".tree ~ *, h3 code") == seen(text)
            assert not {*UNSEEN} & {*await page.value("document.body.innerText + document.body.textContent")}
            assert text in json.loads(await page.text("details pre"))["metadata"]
            await page.choose("#search", text)
            assert await page.value("document.querySelectorAll('.list .row').length") >= 2
            await page.choose("#search", "")
        assert await page.value("[window.ran, document.querySelectorAll('img, svg, iframe, [onerror]').length]") == [
            None,
            0,
        ]
        assert await page.value("document.querySelectorAll('script:not([type])').length") == 0
        assert await page.value("({}).hue") is None


async def test_marks_that_are_piled_up_do_not_stop_the_page(browser: Browser, tmp_path: Path) -> None:
    text = "a" + "\u0301\u20dd" * 50_000
    async with opened(browser, page_of(tmp_path, [hostile(text), hostile(text)])) as page:
        await choose_sample(page, 1)
        assert await page.text(".reasons strong") == text[:9] + "⟨99992 more marks⟩"


async def test_the_policy_stops_what_would_run(browser: Browser, pages: Path) -> None:
    async with browser.page() as page:
        await page.open(pages.as_uri())
        await page.until(SHOWN)
        with pytest.raises(PageFailed, match="TrustedHTML"):
            await page.value("document.body.innerHTML = '<img src=x onerror=alert(1)>'")
        await page.value(
            "(() => { const made = document.createElement('img'); made.setAttribute('src', 'http://127.0.0.1:1/x'); "
            "document.body.append(made); })()"
        )
        assert await page.until("violations.some((each) => each.startsWith('img-src')) && violations.length")


def large(tokens: int, spelled: int) -> Sample:
    random = np.random.default_rng(3)
    mask = (np.arange(tokens) % 10 > 6).astype(np.uint8)
    return Sample(
        tokens=random.integers(0, spelled, tokens, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask == 1, -0.5, 0.0),
        response_length=tokens,
        status="completed",
        metadata={"session_id": "large"},
        routed_experts=random.integers(0, 9, (tokens - 1, 1, 2)).astype(np.uint8),
    )


async def test_of_fifty_thousand_tokens_those_are_drawn_that_are_seen(
    browser: Browser, tmp_path: Path, tokenizer: Any
) -> None:
    sample = large(50_000, 500)
    drawn = (
        "[...document.querySelectorAll('.token')].map((at) => [at.dataset.position, at.dataset.tokenId].map(Number))"
    )
    settled = """(() => {
      const {left, top, height} = document.querySelector(".tokens").getBoundingClientRect();
      return Boolean(document.elementFromPoint(left + 20, top + height / 2)?.closest(".row"));
    })()"""
    async with opened(browser, page_of(tmp_path, [sample], token_bytes(tokenizer))) as page:
        height = await page.value("document.querySelector('.tokens').scrollHeight")
        seen: set[int] = set()
        for part in (0, 0.1, 0.33, 0.5, 0.77, 0.99, 1, 0.2):
            await page.value(f"document.querySelector('.tokens').scrollTop = {height * part}")
            await page.until(settled)
            assert await page.value(NODES) < MOST_NODES
            found = await page.value(drawn)
            positions = [position for position, _ in found]
            assert positions == [*range(positions[0], positions[-1] + 1)], "in order, without a gap"
            assert [token for _, token in found] == sample.tokens[positions].tolist()
            seen.update(positions)
        assert {0, 49_999} <= seen
        outside = (
            "[...document.querySelectorAll('.token')].filter((at) => at.getBoundingClientRect().right > innerWidth)"
        )
        assert await page.value(f"{outside}.length") == 0
        for name in ("entropy", "logprob"):
            await page.choose("#colour", name)
        found = await read(page, [0, 25_000, 49_999, 123])
        assert [int(each["id"]) for each in found] == sample.tokens[[0, 25_000, 49_999, 123]].tolist()
        assert await page.value(NODES) < MOST_NODES

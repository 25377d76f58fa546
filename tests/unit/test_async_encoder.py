"""Long texts beside the event loop: the same ids wherever they are encoded, bounded, and no longer than wanted."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import random
import signal
from collections.abc import AsyncIterator
from operator import methodcaller
from typing import Any

import numpy as np
import psutil
import pytest

from middleware_hub.tokenizing import async_encoder
from middleware_hub.tokenizing.async_encoder import AT_ONCE, PROCESSES, AsyncEncoder, TextTooLong
from middleware_hub.tokenizing.encoder_process import PackedTokenizer
from middleware_hub.tokenizing.encoding import TextEncoder
from miles_router.errors import Unavailable
from tests.support.descriptors import no_descriptors
from tests.support.tokenizers import PACKAGES, tokenizer
from tests.support.waiting import until

LONGEST = 20_000_000
#: Smaller than in production, where the test is of what happens and not of how much.
SMALL, LARGER = 1 << 14, 1 << 15
WORDS = (
    "Hello",
    "  two",
    "naïve",
    "世界",
    "🚀👍🏽",
    "x</s>y",
    "\n\n",
    "<|im_end|>",
    "1234",
    "don't",
    "\t",
    "é" * 9,
    " ",
)
#: Takes minutes.
ENDLESS = "long text " * (LONGEST // 10)


def text_of(length: int) -> str:
    dice = random.Random(length)
    return " ".join(dice.choices(WORDS, k=length))[:length]


def same(one: Any, other: Any) -> bool:
    """Whether two results are equal in every part."""
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other)) and one.dtype == other.dtype
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.fixture(autouse=True)
def bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_encoder, "IN_A_THREAD", SMALL)
    monkeypatch.setattr(async_encoder, "LARGE", LARGER)


@pytest.fixture
async def encoder() -> AsyncIterator[AsyncEncoder]:
    made = AsyncEncoder(tokenizer("qwen3"), longest=LONGEST)
    async with made.lifespan():
        yield made
    await until(lambda: not processes(), "its processes have ended")


def processes() -> list[psutil.Process]:
    """Those that encode."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it ends while it is looked at
            if child.status() != psutil.STATUS_ZOMBIE and "encoder_process" in " ".join(child.cmdline()):
                found.append(child)
    return found


@pytest.mark.parametrize("name", ["llama2", "qwen3"])
async def test_a_text_has_the_same_ids_wherever_it_is_encoded(name: str) -> None:
    backend, encoder = tokenizer(name).backend_tokenizer, AsyncEncoder(tokenizer(name), longest=LONGEST)
    async with encoder.lifespan():
        for length in (AT_ONCE, AT_ONCE + 1, SMALL + 1):
            whole = await encoder.encode_whole(text := text_of(length))
            assert whole.ids.tolist() == backend.encode(text).ids  # by the call that holds the interpreter's lock
            assert same(whole.ends, encoder.encoder.encode_whole(text).ends)
        assert len(processes()) == 1


@pytest.mark.parametrize("name", sorted(PACKAGES))
def test_a_process_has_the_router_s_tokenizer(name: str) -> None:
    here, there = TextEncoder(tokenizer(name)), TextEncoder(PackedTokenizer(*PackedTokenizer.of(tokenizer(name))))
    text = text_of(2000)
    ids = here.encode_whole(text).ids.tolist()
    shown = tokenizer(name).decode(ids, skip_special_tokens=True)
    for work in (
        methodcaller("encode_whole", text),
        methodcaller("encode_rest", text),
        methodcaller("encode_behind", text, 2),
        methodcaller("spell_whole", ids),
        methodcaller("align", ids, shown, skip_special=True),
    ):
        assert same(pickle.loads(pickle.dumps(work(here))), work(there)), work


async def test_what_is_short_waits_for_nothing_and_starts_nothing(encoder: AsyncEncoder) -> None:
    with pytest.raises(StopIteration):
        encoder.encode_whole("a" * AT_ONCE).send(None)
    assert len((await encoder.encode_whole(text_of(SMALL))).ids)
    assert not processes()


async def test_what_is_too_long_is_refused_and_counted(encoder: AsyncEncoder) -> None:
    with pytest.raises(TextTooLong, match=r"20000001 characters or ids is longer than 20000000 \(--max-text-chars\)"):
        await encoder.encode_rest("a" * (LONGEST + 1))
    with pytest.raises(TextTooLong):
        await encoder.spell_whole(range(LONGEST + 1))
    assert encoder.statistics.refused == 2
    assert not processes()


async def test_work_that_nobody_waits_for_ends_and_what_waited_behind_it_is_never_begun(encoder: AsyncEncoder) -> None:
    tasks = [asyncio.ensure_future(encoder.encode_whole(ENDLESS)) for _ in range(PROCESSES + 2)]
    await until(lambda: len(processes()) == PROCESSES, "as many run as may")
    busy = processes()
    assert encoder.statistics.numbers()["pending"] == PROCESSES + 2
    for task in reversed(tasks):
        task.cancel()
    await asyncio.wait(tasks)
    await until(lambda: not any(each.is_running() for each in busy), "their processes have ended")
    assert encoder.statistics.numbers() == {"pending": 0, "abandoned": PROCESSES + 2, "refused": 0}
    assert len((await encoder.encode_whole(text_of(SMALL + 1))).ids)  # and another one does the next
    assert len(processes()) == 1


async def test_a_process_is_kept_unless_its_text_was_large(encoder: AsyncEncoder) -> None:
    await encoder.encode_whole(text_of(SMALL + 1))
    (kept,) = processes()
    await encoder.encode_whole(text_of(SMALL + 1))
    assert processes() == [kept]
    await encoder.encode_whole("a" * (LARGER + 1))
    assert not processes()


async def test_a_process_that_ends_by_itself_fails_its_own_text_alone(encoder: AsyncEncoder) -> None:
    task = asyncio.ensure_future(encoder.encode_whole(ENDLESS))
    await until(processes, "it runs")
    processes()[0].send_signal(signal.SIGKILL)
    with pytest.raises(Unavailable):
        await task
    assert len((await encoder.encode_whole(text_of(SMALL + 1))).ids)


async def test_a_process_that_ends_while_it_waits_fails_no_text(encoder: AsyncEncoder) -> None:
    await encoder.encode_whole(text_of(SMALL + 1))
    (kept,) = processes()
    kept.send_signal(signal.SIGKILL)
    assert len((await encoder.encode_whole(text_of(SMALL + 1))).ids)


async def test_where_no_process_can_be_started_the_text_may_be_repeated(encoder: AsyncEncoder) -> None:
    with no_descriptors(), pytest.raises(Unavailable):
        await encoder.encode_whole(text_of(SMALL + 1))
    assert len((await encoder.encode_whole(text_of(SMALL + 1))).ids)

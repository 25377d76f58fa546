"""`miles-router audit`: what it says in words, in JSON and as a picture, how fast it asks, and how it ends."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from middleware_hub.auditing.tool.command import DIFFERENT, GOOD
from miles_router import cli
from miles_router.settings.config import MiddlewareSpec
from miles_router.trajectory import Piece
from tests.support.audits import damaged, episode, forget_all, shifted, spoil, text_rollout, turns_of
from tests.support.cache_trial import CACHE
from tests.support.ports import free_ports
from tests.support.running_router import COMMAND
from tests.support.session_trial import SessionTrial, simulated_sessions
from tests.support.stage import staged
from tests.support.waiting import PATIENCE


@pytest.fixture(scope="module")
async def shared() -> AsyncIterator[SessionTrial]:
    async with staged() as stage, simulated_sessions(stage, more=(MiddlewareSpec(CACHE),)) as made:
        yield made


@pytest.fixture
async def trial(shared: SessionTrial) -> AsyncIterator[SessionTrial]:
    yield shared
    await forget_all(shared)


def command(*flags: str) -> subprocess.CompletedProcess[str]:
    """`miles-router audit` to its end."""
    return subprocess.run(
        [str(COMMAND), "audit", *flags], capture_output=True, text=True, timeout=PATIENCE, check=False
    )


async def test_the_command_says_in_words_what_it_found_and_draws_it(trial: SessionTrial, tmp_path: Path) -> None:
    wrong, picture = await trial.create("wrong"), tmp_path / "audit.png"
    await episode(trial, wrong)
    await text_rollout(trial)
    flags = ("--router", trial.router.url)
    done = await asyncio.to_thread(command, *flags, "--plot", str(picture))
    assert (done.returncode, done.stderr) == (GOOD, "")
    assert done.stdout.splitlines()[0] == "2 samples of 1 sessions and 1 text rollouts"
    assert "GOOD: 0.95 of 288 tokens lie within 0 nats" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    with damaged(trial, wrong, shifted):
        done = await asyncio.to_thread(command, *flags)
    assert done.returncode == DIFFERENT
    assert "TOO FAR: sample wrong/2" in done.stdout
    assert "they are shifted by one" in done.stdout
    first = turns_of(trial, wrong)[0]
    spoil(first, "given", Piece.given([*first.given.tokens[:-1].tolist(), 77]))
    done = await asyncio.to_thread(command, *flags)
    assert done.returncode == DIFFERENT
    assert "DIFFERENT PROMPTS" in done.stdout
    assert "session wrong, turn 0, position" in done.stdout


def test_the_command_says_in_one_line_what_is_wrong_with_a_flag_or_a_router(
    capsys: pytest.CaptureFixture[str],
) -> None:
    nobody = f"http://127.0.0.1:{free_ports(1)[0]}"
    for flags, words in (
        (("--router", nobody), "127.0.0.1"),
        (("--router", "nowhere"), "base_url"),
        (("--router", "http://x", "--sample", "0"), "--sample"),
        (("--router", "http://x", "--quantile", "2"), "--quantile"),
        (("--router", "http://x", "--nothing"), "--nothing"),
        (("--router", "http://x", "--plot", "audit.txt"), "audit.txt"),
        (("--router", "http://x", "--plot", "no-folder/audit.png"), "no-folder"),
        ((), "--router"),
    ):
        with pytest.raises(SystemExit) as end:
            cli.main(["audit", *flags])
        said = capsys.readouterr()
        assert (end.value.code, said.out) == (2, "")
        assert words in said.err.splitlines()[-1]


async def test_json_has_nothing_that_a_terminal_would_obey(trial: SessionTrial) -> None:
    await episode(trial, await trial.create("wrong"), turns=1)
    (turn,) = turns_of(trial, "wrong")
    escape = trial.router.app.router.tokenizer.encode("\x9b2J\u202e\x7f", add_special_tokens=False)
    spoil(turn, "given", Piece.given([*escape, *turn.given.tokens.tolist()[len(escape) :]]))
    for flags in ((), ("--json",)):
        done = await asyncio.to_thread(command, "--router", trial.router.url, *flags)
        assert done.returncode == DIFFERENT
        assert not [each for each in done.stdout if not each.isprintable() and each != "\n"]
        assert "x9b2J" in done.stdout or "u009b2J" in done.stdout

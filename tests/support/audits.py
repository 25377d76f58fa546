"""Episodes that are audited, and what may be wrong with what they hold."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import Any, NamedTuple

import numpy as np

from middleware_hub.auditing.tool.command import run
from middleware_hub.openai_session.sessions.turn import Turn
from middleware_hub.radix_tree.dashboard.turns import TextRollout
from middleware_hub.radix_tree.entry import IDS, LOGPROBS, Entry
from miles_router.trajectory import Piece
from tests.support.session_trial import Message, SessionTrial, message_of, user

GENERATE_PATH = "/generate"
SYSTEM: Message = {"role": "system", "content": "Be brief."}
#: Of a short answer with many tokens, whatever is sampled.
LONG: Any = {"max_tokens": 48, "ignore_eos": True}


class Said(NamedTuple):
    """What the command said, and how it ended."""

    status: int
    report: Any

    @property
    def parts(self) -> set[str]:
        """Kinds of what lies too far apart."""
        return {part.partition(" ")[0] for part in self.report["too_far"]}


async def audited(trial: SessionTrial, *flags: str) -> Said:
    return await audited_at(trial.router.url, *flags)


async def audited_at(url: str, *flags: str) -> Said:
    said = io.StringIO()

    def command() -> int:
        with redirect_stdout(said):
            return run(["--router", url, "--json", "--rate", "1000", *flags])

    status = await asyncio.to_thread(command)
    return Said(status, json.loads(said.getvalue()))


async def episode(trial: SessionTrial, session: str, turns: int = 3, **fields: Any) -> list[Message]:
    """An agent's turns, one behind the other; the history that they leave."""
    history = [SYSTEM, user("Hi")]
    for turn in range(turns):
        answer = await trial.chat(session, history, **{**LONG, **fields})
        history += [message_of(answer), user(f"Go on {turn}")]
    return history


async def text_rollout(trial: SessionTrial, turns: int = 3, prompt: str = "Be brief. Hi", **body: Any) -> str:
    """A rollout whose text goes on behind each answer; its id."""
    asked: Any = {"max_new_tokens": LONG["max_tokens"], "ignore_eos": True, **body.pop("sampling_params", {})}
    before, text = {rollout.id for rollout in text_rollouts(trial)}, prompt
    for turn in range(turns):
        answer = await trial.ask("POST", GENERATE_PATH, {"text": text, "sampling_params": asked, **body})
        assert answer.status == 200, answer.body
        text += f"{answer.json()['text']} Go on {turn}."
    (made,) = [rollout.id for rollout in text_rollouts(trial) if rollout.id not in before]
    return made


def layer_of(trial: SessionTrial, attribute: str) -> Any:
    """The layer that has this; None where there is none."""
    return next((layer for layer in trial.router.app.layers if hasattr(layer, attribute)), None)


def turns_of(trial: SessionTrial, session: str) -> list[Turn]:
    turns: list[Turn] = layer_of(trial, "store").store.get(session).turns
    return turns


def text_rollouts(trial: SessionTrial) -> list[TextRollout]:
    layer = layer_of(trial, "cache")
    return [] if layer is None else list(layer._rollouts)


async def forget_all(trial: SessionTrial) -> None:
    for session in (await trial.ask("GET", "/sessions")).json()["sessions"]:
        await trial.ask("DELETE", f"/sessions/{session['session_id']}")
    while layer_of(trial, "cache").cache.evict_one():
        pass


@contextmanager
def damaged(trial: SessionTrial, episode: str, change: Callable[[Piece], Piece]) -> Iterator[None]:
    """Every turn of an episode with other tokens or logprobs than it was sampled with, behind the router's back."""
    rollout = next((each for each in text_rollouts(trial) if each.id == episode), None)
    with ExitStack() as stack:
        if rollout is not None:
            for turn in rollout.turns.values():
                stack.enter_context(_with(turn.entry, "block", _damaged_block(turn.entry, change)))
        else:
            for session_turn in turns_of(trial, episode):
                stack.enter_context(_with(session_turn, "sampled", tuple(map(change, session_turn.sampled))))
        yield


def spoil(held: object, name: str, value: object) -> None:
    object.__setattr__(held, name, value)


@contextmanager
def _with(held: object, name: str, value: object) -> Iterator[None]:
    before = getattr(held, name)
    spoil(held, name, value)
    try:
        yield
    finally:
        spoil(held, name, before)


def _damaged_block(entry: Entry, change: Callable[[Piece], Piece]) -> bytes:
    pieces = [piece if piece.logprobs is None else change(piece) for piece in entry.own_pieces(entry.own)]
    ids = [piece.tokens.astype(IDS).tobytes() for piece in pieces]
    logprobs = [piece.logprobs.astype(LOGPROBS).tobytes() for piece in pieces if piece.logprobs is not None]
    begin = b"".join([*ids, *logprobs])
    return begin + entry.block[len(begin) :]


def shifted(piece: Piece) -> Piece:
    """Each token with the logprob of the next one."""
    assert piece.logprobs is not None
    return Piece.sampled(piece.tokens, np.roll(piece.logprobs, -1), piece.version)


def foreign(piece: Piece) -> Piece:
    assert piece.logprobs is not None
    ids = np.random.default_rng(7).integers(1000, 40_000, len(piece))  # within every vocabulary here
    return Piece.sampled(ids, piece.logprobs, piece.version)

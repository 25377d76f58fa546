"""Counts the tokens that trainers read from sessions, and their rewards, for the run's time series."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from middleware_hub.openai_session.sessions.session import Session
from middleware_hub.openai_session.sessions.turn import Turn
from miles_router.middlewares.episodes import RunSeries
from miles_router.trajectory import Sample


def count_read(run: RunSeries, session: Session, samples: Iterable[tuple[Turn, Sample]]) -> None:
    """Count the samples that a trainer reads from a session; each sample belongs to a leaf. A turn is counted the first
    time that it has tokens in a loss, and the session's reward the first time that a sample has one. Of an evaluation
    only the reward counts, in a series of its own."""
    trained: Counter[str | None] = Counter()
    for leaf, sample in samples:
        if sample.reward is not None and not session.rewarded:
            session.rewarded = True
            version = leaf.sampled[-1].version if leaf.sampled else None
            run.reward(version, sample.reward, evaluation=session.is_evaluation)
        for turn, span in zip(leaf.line(), sample.metadata["turns"], strict=False):
            if turn.number in session.read_turns or session.is_evaluation:
                continue
            own = _in_the_loss(turn, sample, span["end"])
            if own.total():
                session.read_turns.add(turn.number)
                trained += own
    if trained:
        run.train(trained)


def _in_the_loss(turn: Turn, sample: Sample, end: int) -> Counter[str | None]:
    """Return how many of a turn's sampled tokens before `end` are in the loss, by weight version."""
    tokens: Counter[str | None] = Counter()
    begin = turn.prompt_tokens
    for piece in turn.sampled:
        stop = min(begin + len(piece), end)
        tokens[piece.version] += int(sample.loss_mask[begin:stop].sum()) if stop > begin else 0
        begin += len(piece)
    return tokens

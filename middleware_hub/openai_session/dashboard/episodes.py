"""Sessions as episodes of the dashboard."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import orjson

from middleware_hub.openai_session.archive.archive import SessionArchive
from middleware_hub.openai_session.errors import UnusableSample
from middleware_hub.openai_session.export.records import classified, turn_span
from middleware_hub.openai_session.export.samples import SampleMaker
from middleware_hub.openai_session.export.selection import side_calls
from middleware_hub.openai_session.sessions.rewards import RewardEntry
from middleware_hub.openai_session.sessions.session import REASONS, Session, Tally, label_of, shown_group
from middleware_hub.openai_session.sessions.store import SessionStore
from middleware_hub.openai_session.sessions.turn import Classification, Turn, line_ends
from miles_router.errors import BadRequest
from miles_router.middlewares.episodes import (
    ENDED,
    IDLE,
    RUNNING,
    WAITING,
    EpisodeLine,
    EpisodePlace,
    EpisodeRow,
    EpisodeSource,
    EpisodeView,
    Facets,
    ListedEpisode,
    TokenCounts,
    TurnRow,
    version_spans,
)
from miles_router.trajectory.rows import ROUTED_EXPERTS
from miles_router.trajectory.sample import BY_FINISH_REASON, ShapedRows

KIND = "session"


class SessionEpisodes:
    """The episodes of one router's sessions (an `EpisodeSource`)."""

    def __init__(self, store: SessionStore, archive: SessionArchive, maker: SampleMaker) -> None:
        self._store = store
        self._archive = archive
        self._maker = maker

    @property
    def reasons(self) -> Collection[str]:
        """The reason codes of turns that do not simply continue the turn before."""
        return REASONS

    async def newest(self, before: EpisodePlace | None, most: int) -> Sequence[ListedEpisode]:
        """Return the newest episodes before a place, newest first, from memory and from the archive."""
        held = await self._archive.lines.newest(before, most)
        self._store.expire()
        sessions = self._store.shelf.newest(before, most)
        found: list[ListedEpisode] = [SessionView(session, self._maker) for session in sessions]
        if held:
            found += map(ArchivedView, held)
            found.sort(key=lambda view: view.place, reverse=True)
        return found[:most]

    async def find(self, episode_id: str) -> EpisodeView | None:
        """Return an episode by its id; an archived session is loaded. None if there is none."""
        await self._archive.load(episode_id)
        session = self._store.find(episode_id)
        return None if session is None else SessionView(session, self._maker)


class ArchivedView:
    """A listed session that is in the archive and not in memory.

    Args:
        line: the JSON of its `EpisodeRow`.
    """

    def __init__(self, line: bytes) -> None:
        self._line: dict[str, Any] = orjson.loads(line)

    @property
    def place(self) -> EpisodePlace:
        return self._line["started_at"], self._line["id"]

    def facets(self) -> Facets:
        line = self._line
        return Facets(line["state"], line["group"], line["reasons"].keys(), line["workers"])

    def row(self) -> EpisodeRow:
        return EpisodeRow(**{**self._line, "tokens": TokenCounts(**self._line["tokens"])})


class SessionView:
    """A session in memory."""

    def __init__(self, session: Session, maker: SampleMaker) -> None:
        self._session = session
        self._maker = maker

    @property
    def place(self) -> EpisodePlace:
        return self._session.sort_key

    def facets(self) -> Facets:
        tally = self._tally()
        return Facets(self._state(), shown_group(self._session.group), tally.reasons.keys(), tally.workers.keys())

    def row(self) -> EpisodeRow:
        session, tally = self._session, self._tally()
        contract, turns = session.episode.contract, session.turns
        return EpisodeRow(
            id=session.id,
            state=self._state(),
            group=shown_group(session.group),
            label=label_of(session.metadata),
            model=contract.model.name or contract.model.lora or session.model,
            turns=len(turns),
            under_way=session.in_flight,
            segments=len(session.roots),
            leaves=tally.leaves,
            reasons=dict(tally.reasons),
            tokens=TokenCounts(tally.tokens, tally.sampled, self._trained(tally)),
            finish_reason=turns[-1].finish_reason if turns else None,
            end_reason=session.ending.reason,
            weight_versions=[*tally.versions],
            workers=[*tally.workers],
            started_at=session.created_at,
            last_used_at=session.used_at,
            waited_s=round(tally.waited, 6),
        )

    def about(self) -> Mapping[str, Any]:
        """Return the session's metadata and contract, and how many requests passed untraced."""
        session = self._session
        contract = session.episode.given
        return {"metadata": session.metadata, "contract": contract or None, "untraced": len(session.untraced)}

    def turns(self) -> Iterator[TurnRow]:
        """Yield a row for each turn."""
        aside = side_calls(self._session)
        return (_turn_row(*each, side_call=each[0] in aside) for each in classified(self._session))

    def line(self, leaf: int | None) -> EpisodeLine:
        """Return the tokens up to a turn, by default the newest one.

        Raises:
            BadRequest: there is no such turn.
        """
        session, turns = self._session, self._session.turns
        leaf = len(turns) - 1 if leaf is None else leaf  # the newest turn is always a leaf
        if not 0 <= leaf < len(turns):
            raise BadRequest(f"leaf must be the number of a turn; the session has {len(turns)}")
        last = turns[leaf]
        line = last.line()
        trajectory, classify = last.trajectory(), session.history.classify
        return EpisodeLine(
            leaf=leaf,
            trajectory=trajectory,
            loss_mask=self._maker.loss_mask(session, last),
            turns=[
                turn_span(turn, classify(turn), end, session.rewards.of(turn.number))
                for turn, end in zip(line, line_ends(line), strict=True)
            ],
            response_length=len(trajectory) - line[0].prompt_tokens,
            status=BY_FINISH_REASON.get(last.finish_reason, "completed"),
            experts=partial(self._experts, last),
            about={**session.metadata, **session.about()},
        )

    def _experts(self, leaf: Turn, start: int, stop: int) -> ShapedRows | None:
        channel, held = self._maker.channels[ROUTED_EXPERTS], leaf.held_rows(ROUTED_EXPERTS, leaf.tokens)
        if held is None or channel.shape is None or held.count < stop:
            return None
        return channel.array(held.rows, start, stop)

    def _tally(self) -> Tally:
        return self._session.tally.updated(self._session.history)

    def _trained(self, tally: Tally) -> int | None:
        """Return the number of tokens in the loss, cached until there are more turns; None if it cannot be computed."""
        if self._session.is_evaluation:
            return 0
        trained, turns = tally.trained
        if turns != len(self._session.turns):
            try:
                trained = self._maker.trained_tokens(self._session)
            except UnusableSample:  # a branch policy of the operator failed
                trained = None
            tally.trained = trained, len(self._session.turns)
        return trained

    def _state(self) -> str:
        session = self._session
        if not session.in_flight:
            return IDLE if session.ending.reason is None else ENDED
        running = session.episode.running
        return WAITING if running and all(each.routing.waits for each in running) else RUNNING


def _turn_row(turn: Turn, found: Classification, rewards: Sequence[RewardEntry], *, side_call: bool) -> TurnRow:
    facts = turn.facts
    names = ("cached_tokens", "worker", "rid", "request_id", "turn_id", "asked_at", "first_token_at", "answered_at")
    return TurnRow(
        turn=turn.number,
        parent=None if turn.parent is None else turn.parent.number,
        reason=found.reason,
        edit=found.edit,
        side_call=side_call,
        choice=turn.choice,
        prompt_tokens=turn.prompt_tokens,
        given_tokens=len(turn.given),
        dropped_tokens=turn.dropped,
        start=turn.prompt_tokens,
        end=turn.tokens,
        spans=version_spans(turn.sampled, turn.prompt_tokens, facts.get("worker")),
        finish_reason=turn.finish_reason,
        waited_s=facts.get("waited_s", 0.0),
        rewards=rewards,
        parsed=facts.get("parsed"),
        **{name: facts.get(name) for name in names},
    )


_source: type[EpisodeSource] = SessionEpisodes

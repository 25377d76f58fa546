"""One session: its turns as a tree. A turn's parent is the turn whose tokens it extends exactly.

    request   messages ──────────────────────────────────► the deepest turn whose history they extend, or none
    turn      parent's tokens (but for `dropped` at their end) + given + sampled

Agents edit, compact and retry their history, change tools, and run sub-agents in the same session. None of this is an
error: what does not extend a held turn grows a root of its own. Pure.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import accumulate
from typing import Any, NamedTuple

import orjson

from middleware_hub.openai_session.episodes.contract import NO_CONTRACT, Contract, SessionEnd, SessionStatus
from middleware_hub.openai_session.episodes.episode import EpisodeState
from middleware_hub.openai_session.sessions.answers import RecordedAnswers
from middleware_hub.openai_session.sessions.call_ids import SameId, as_held
from middleware_hub.openai_session.sessions.edits import context_edit, edit_of
from middleware_hub.openai_session.sessions.equality import Equality
from middleware_hub.openai_session.sessions.histories import HeldMessage, Walk
from middleware_hub.openai_session.sessions.messages import Message, SentList, message_bytes
from middleware_hub.openai_session.sessions.prompting import shows_tools
from middleware_hub.openai_session.sessions.replies import RecordedReply, RepeatKey
from middleware_hub.openai_session.sessions.tally import Tally
from miles_router.middlewares.rows import NO_ROWS, RowPrefix, RowsByKind, first_prefix
from miles_router.trajectory import Piece, Trajectory
from miles_router.trajectory.rows import RowKind

#: Facts of a turn for audits, where there is something to say: what its request said of settings that an engine assumes
#: else; the setting that made its logprobs those of another distribution; the adapter that sampled it (None: not
#: known); what of its prompt no messages say.
SAMPLING, RESHAPED_BY, ADAPTER, UNRENDERED = "sampling", "reshaped_by", "adapter", "unrendered"


@dataclass(eq=False)
class Turn:
    """One generation and what it was asked. Immutable once it hangs in a tree, but for `children`."""

    path: str  # "/v1/chat/completions"
    parent: Turn | None = field(repr=False)
    appended: tuple[Message, ...]  # what the request added to the parent's messages; all of them for a root
    context: bytes  # tools and template settings
    answer: Message
    given: Piece  # what the engine was given behind the parent's tokens
    dropped: int  # tokens at the parent's end that the engine was not given again
    sampled: tuple[Piece, ...]
    finish_reason: str
    ended_itself: bool  # its last token is a stop token
    choice: int = 0
    reason: str | None = None  # why it is not simply the next turn of its parent
    edit: Mapping[str, Any] | None = None  # what its request changed in what was held
    segment: str | None = None  # for a root that continues a held history in words: why not in tokens
    facts: Mapping[str, Any] = field(default_factory=dict)  # for records: ids, times, counts
    rows: RowsByKind = field(default_factory=lambda: NO_ROWS)  # of all its tokens but the last, where they are captured
    first: Turn | None = field(default=None, repr=False)  # that answered the same request, if this one was not it
    children: list[Turn] = field(default_factory=list, repr=False)
    tools: bytes = b""  # of a root, for `sent_tools`
    unrecorded_history: bool = False  # an answer in `appended` is none that this session has recorded
    side_call: bool = False  # its agent says that it is none of the main line, or said so of its parent
    origin: Turn | None = field(default=None, repr=False)  # the root that began its conversation, if it is not that
    cache: int | None = None  # the prefix cache that the engine sampled it with, which the next turn keeps
    number: int = -1  # in the order in which turns were recorded
    prompt_tokens: int = field(init=False)
    tokens: int = field(init=False)
    messages: int = field(init=False)  # of the whole history, the answer included

    def __post_init__(self) -> None:
        before = self.parent.tokens - self.dropped if self.parent is not None else 0
        self.prompt_tokens = before + len(self.given)
        self.tokens = self.prompt_tokens + sum(map(len, self.sampled))
        self.messages = (self.parent.messages if self.parent is not None else 0) + len(self.appended) + 1

    @property
    def conversation(self) -> Turn:
        """The root that began its conversation."""
        return self.origin or self

    @property
    def sent_tools(self) -> Sequence[Any] | None:
        """The tools of a root with the names of their objects in the order in which they were sent, which `context`
        does not tell and templates write."""
        tools: Sequence[Any] | None = orjson.loads(zlib.decompress(self.tools)) if self.tools else None
        return tools

    def line(self) -> list[Turn]:
        """The turns from the root to this one."""
        line = [self]
        while (parent := line[-1].parent) is not None:
            line.append(parent)
        return line[::-1]

    def below(self) -> Iterator[Turn]:
        """This turn and all behind it."""
        turns = [self]
        while turns:
            turn = turns.pop()
            yield turn
            turns.extend(turn.children)

    def trajectory(self) -> Trajectory:
        """Everything the engine was given and sampled up to this turn's end."""
        return line_trajectory(self.line())

    def held_rows(self, kind: RowKind, tokens: int) -> RowPrefix | None:
        """The rows held of its first `tokens` tokens, or of as many of them as possible."""
        line = self.line()
        ends = accumulate((min(end, tokens) for end in reversed(line_ends(line))), min)
        return first_prefix((turn.rows.get(kind), end) for turn, end in zip(reversed(line), ends, strict=True))

    @property
    def last_id(self) -> int | None:
        """The last sampled token."""
        return int(self.sampled[-1].tokens[-1]) if self.sampled and len(self.sampled[-1]) else None


def line_trajectory(line: Sequence[Turn], *, elsewhere: Mapping[Turn, int] | None = None) -> Trajectory:
    """The tokens along a line of turns. `elsewhere`: how many of a turn's first sampled tokens are out of the loss,
    because another sample has them in it."""
    pieces: list[Piece] = []
    for turn in line:
        _drop(pieces, turn.dropped)
        pieces.append(turn.given)
        pieces += _out_of_the_loss(turn.sampled, elsewhere[turn]) if elsewhere is not None else turn.sampled
    return Trajectory(pieces)


def line_ends(line: Sequence[Turn]) -> list[int]:
    """Where in the tokens of a line each turn ends: what the next one dropped is no part of it."""
    return [turn.prompt_tokens - len(turn.given) for turn in line[1:]] + [line[-1].tokens]


def _drop(pieces: list[Piece], count: int) -> None:
    while count > 0:
        last = pieces.pop()
        if len(last) > count:
            pieces.append(last.cut(0, len(last) - count))
        count -= len(last)


def _out_of_the_loss(pieces: Iterable[Piece], count: int) -> Iterator[Piece]:
    for piece in pieces:
        out = min(count, len(piece))
        yield piece.cut(0, out).untrained()
        yield piece.cut(out, len(piece))
        count -= out


class Sent(NamedTuple):
    """The number of a request's list of messages (`SentList`), and how many turns there were then. 0 where it has none,
    or where all of the messages led somewhere."""

    number: int = 0
    turns: int = 0


NOTHING = Sent()


@dataclass(frozen=True)
class Place:
    """Where in the tree a request's turns will hang."""

    parent: Turn | None
    appended: tuple[Message, ...]
    context: bytes
    sent: Sent = field(default=NOTHING, compare=False)


class Session:
    """One agent episode."""

    def __init__(
        self,
        session_id: str,
        *,
        now: float,
        clock: float,
        metadata: Mapping[str, Any] | None = None,
        contract: Contract = NO_CONTRACT,
        by_header: bool = False,
    ) -> None:
        """
        Args:
            by_header: its first turn named it in a header; else `POST /sessions` made it.
        """
        self.id = session_id
        self.by_header = by_header
        self.ending = SessionEnd()
        self.episode = EpisodeState(contract, clock)
        self.created_at = now
        self.used_at = now
        self.idle_since = clock  # by a clock that never jumps
        self.metadata = dict(metadata or {})
        self.turns: list[Turn] = []
        self.roots: list[Turn] = []
        self.untraced: list[dict[str, Any]] = []  # requests that passed through without being recorded
        self.in_flight = 0
        self.replies: dict[object, Any] = {}  # by `repeat_key`, those under way included (turns/idempotency.py)
        self.repeats: dict[RepeatKey, RecordedReply] = {}  # of these, the replies that are whole
        self.notes: dict[str, Any] = {}  # what faces remember of its turns, by dotted names
        self.finalized_with: Mapping[str, Any] | None = None  # label, reward, and how its samples are built
        self.nbytes = 0  # arrays and messages
        self.model: str | None = None  # that the last request named
        self.tally = Tally()
        self.read: set[int] = set()  # turns that a sample which somebody has read has in its loss
        self.rewarded = False  # its reward is counted
        self._histories = HeldMessage({})  # the root of them
        self._ends: dict[Turn, HeldMessage] = {}
        self._last = 0  # the number of the list that the last turn was sent; 0 where another may be like it
        self._messages: dict[bytes, Message] = {}  # every one that was sent, by digest
        self._contexts: dict[bytes, bytes] = {}
        self._tools: dict[bytes, bytes] = {}  # as they were sent, by digest
        self._answers = RecordedAnswers(self.turns)

    @property
    def place_in_order(self) -> tuple[float, str]:
        """Where it stands among all."""
        return self.created_at, self.id

    @property
    def group(self) -> str | None:
        """Which group it is of."""
        group = self.episode.group(self.metadata)
        return None if group is None else str(group)

    @property
    def status(self) -> SessionStatus:
        """What may still happen in it."""
        return self.ending.status

    def about(self) -> dict[str, Any]:
        """Return the contract and the end reason, for records and samples."""
        told = {"contract": self.episode.given or None, "end_reason": self.ending.reason}
        return {name: value for name, value in told.items() if value is not None}

    def settle(self, turn: object, tokens: int, repeat_key: object = None) -> None:
        """Count a turn that sampled so many tokens. If a full context had ended the session, it goes on."""
        self.episode.settle(turn, tokens, repeat_key)
        self.ending = self.ending.reopened()

    def place(
        self,
        messages: Sequence[Message],
        contexts: Sequence[bytes],
        equal: Equality,
        same_id: SameId | None = None,
    ) -> Place:
        """The deepest turn that a request's messages extend in one of these contexts, the latest of several. `same_id`:
        whether two ids of a call are one; by default those that are equal."""
        best, whole, held = self._last_that_goes_on(messages, contexts, equal), False, messages
        if best is None:
            walk = self._histories.walk(messages, equal)
            if same_id is not None and walk.stops_at_calls():
                held = as_held(self._histories, messages, equal, same_id)
                walk = self._histories.walk(held, equal)
            whole = walk.whole
            for turn in walk.turns():
                if turn.context in contexts and (
                    best is None or (turn.messages, turn.number) > (best.messages, best.number)
                ):
                    best = turn
        sent = Sent(messages.number if isinstance(messages, SentList) and not whole else 0, len(self.turns))
        if best is None:
            return Place(None, tuple(messages), contexts[0], sent)
        return Place(best, tuple(held[best.messages :]), best.context, sent)

    def _last_that_goes_on(
        self, messages: Sequence[Message], contexts: Sequence[bytes], equal: Equality
    ) -> Turn | None:
        """The last turn, if a request begins with just what that was sent, goes on with its answer, and with more.

        Not all that it was sent led anywhere when it was placed, and nothing else was recorded since. So there is no
        other turn that the request goes on from as far.
        """
        if not isinstance(messages, SentList) or not messages.base or messages.base != self._last:
            return None
        turn, count = self.turns[-1], messages.shared
        if len(messages) < count + 2 or turn.context not in contexts:
            return None
        return turn if self._ends[turn].leads_here(messages[count], equal) else None

    def hold(self, place: Place) -> tuple[Place, int]:
        """`place` with the session's own object for each message and context that it has already, and the bytes of
        those that are new.

        Retries and new roots send again what other branches hold: it is stored once.
        """
        nbytes = 0 if place.context in self._contexts else len(place.context)
        context = self._contexts.setdefault(place.context, place.context)
        appended = []
        for message in place.appended:
            digest = blake2b(orjson.dumps(message), digest_size=16).digest()
            if digest not in self._messages:
                self._messages[digest] = message
                nbytes += message_bytes(message)
            appended.append(self._messages[digest])
        return Place(place.parent, tuple(appended), context, place.sent), nbytes

    def hold_tools(self, tools: Sequence[Any] | None) -> tuple[bytes, int]:
        """The session's own object for the tools of a root, as they were sent, and its bytes if it is new."""
        if not tools:
            return b"", 0
        written = orjson.dumps(tools)
        digest = blake2b(written, digest_size=16).digest()
        if digest in self._tools:
            return self._tools[digest], 0
        held = self._tools[digest] = zlib.compress(written, 1)
        return held, len(held)

    def grow(self, turn: Turn, equal: Equality, sent: Sent = NOTHING) -> None:
        """Hang a finished turn into the tree, and say why it is not simply the next one. `sent`: that of its place."""
        siblings = self.roots if turn.parent is None else turn.parent.children
        before = self._histories if turn.parent is None else self._ends[turn.parent]
        walk = before.walk(turn.appended, equal)
        if turn.parent is None:
            turn.origin = next((root.conversation for root in self.roots if _kin(root, turn, equal)), None)
            turn.origin = turn.origin or self._rewritten(turn)
        else:
            turn.origin, turn.side_call = turn.parent.conversation, turn.side_call or turn.parent.side_call
        same = [each for each in walk.asked() if each.parent is turn.parent and each.context == turn.context]
        turn.first = (same[0].first or same[0]) if same else None
        turn.reason = self._reason(turn, siblings, same, walk, equal)
        turn.edit = self._edit(turn, walk, equal)
        turn.unrecorded_history = not self._answers.have(_answers_in(turn))
        self._hang(turn)
        self._last = sent.number if sent.turns == turn.number else 0

    def hang(self, turn: Turn) -> None:
        """Put back a turn that was in this tree, as the next one. All is known of it."""
        for message in turn.appended:
            self._messages[blake2b(orjson.dumps(message), digest_size=16).digest()] = message
        self._contexts[turn.context] = turn.context
        self._hang(turn)

    def _hang(self, turn: Turn) -> None:
        turn.number = len(self.turns)
        self.turns.append(turn)
        (self.roots if turn.parent is None else turn.parent.children).append(turn)
        before = self._histories if turn.parent is None else self._ends[turn.parent]
        self._ends[turn] = before.grow(turn)

    def _rewritten(self, turn: Turn) -> Turn | None:
        """Return the conversation whose first question the agent wrote anew, as where it appends a remark to it: the
        answers behind the question are still those recorded there. A system message says whose conversation it is."""
        if turn.side_call or not turn.appended or turn.appended[0].get("role") != "user":
            return None
        found = self._answers.conversation(_answers_in(turn))
        if found is None or found.side_call or found.appended[0].get("role") != "user":
            return None
        return found if shows_tools(found.context) == shows_tools(turn.context) else None

    def _reason(
        self, turn: Turn, siblings: Sequence[Turn], same: Sequence[Turn], walk: Walk, equal: Equality
    ) -> str | None:
        if not siblings:
            return None
        if any(turn.given is other.given for other in siblings):
            return "choice"  # of one answer (`n` above 1)
        if any(not _together(turn, other) for other in same):
            return "retry"
        if turn.parent is None:
            return self._reason_of_root(turn, walk, equal)
        return "parallel" if any(_together(turn, other) for other in siblings) else "edited_history"

    def _reason_of_root(self, turn: Turn, walk: Walk, equal: Equality) -> str:
        messages = turn.appended
        if turn.segment is not None:
            return turn.segment
        if any(other.context != turn.context for other in _asked_before(walk)):
            return "changed_tools"
        kin = [root for root in self.roots if root.conversation is turn.conversation]
        if not any(equal(root.appended[0], messages[0]) for root in kin) and not self._rewritten(turn):
            return "sub_agent"
        if any(_together(turn, other) for other in kin):
            return "parallel"
        longest = max((other for root in kin for other in root.below()), key=lambda other: other.messages)
        return "compaction" if longest.parent is not None and len(messages) < longest.messages else "edited_history"

    def _edit(self, turn: Turn, walk: Walk, equal: Equality) -> Mapping[str, Any] | None:
        """What the agent changed, where the reason of a turn is a change."""
        if turn.reason == "changed_tools":
            other = next(each for each in _asked_before(walk) if each.context != turn.context)
            return context_edit(other.context, turn.context)
        if turn.reason in ("edited_history", "compaction"):
            count, held, sent = walk.departure()
            return edit_of(turn.messages - len(turn.appended) - 1 + count, held, sent)
        if turn.reason == "sub_agent" and len(turn.appended) > 1:
            alike = [root for root in self.roots if _equal_messages(root.appended[1:2], turn.appended[1:2], equal)]
            return edit_of(0, alike[-1].appended[0], turn.appended[0]) if alike else None
        return None

    def leaves(self) -> list[Turn]:
        """The turns that nothing extends, in the order in which they came."""
        return [turn for turn in self.turns if not turn.children]

    def clear(self) -> None:
        """Let go of all turns at once: parents and children hold each other, and the garbage collector would take its
        time. Requests in flight keep what they extend."""
        for turn in self.turns:
            turn.children.clear()
        self.turns.clear()
        self.roots.clear()
        self.replies.clear()
        self.repeats.clear()
        self._histories.clear()
        self._ends.clear()
        self._last = 0
        self.notes.clear()
        self._messages.clear()
        self._contexts.clear()
        self._tools.clear()
        self._answers.clear()


def _answers_in(turn: Turn) -> list[Message]:
    """The answers in the messages that a request added."""
    return [message for message in turn.appended if message.get("role") == "assistant"]


def _asked_before(walk: Walk) -> Iterator[Turn]:
    """Turns whose history a request begins with, or that were asked just this as a root."""
    yield from walk.turns()
    yield from (turn for turn in walk.asked() if turn.parent is None)


def _equal_messages(held: Sequence[Message], sent: Sequence[Message], equal: Equality) -> bool:
    return len(held) == len(sent) and all(equal(one, other) for one, other in zip(held, sent, strict=True))


def _kin(root: Turn, turn: Turn, equal: Equality) -> bool:
    """Whether two roots begin one conversation: with the same message, or with another one in front of the same
    question and with the same tools, as where a day has passed. Prompts of completions do not say whose they are."""
    one, other = root.appended, turn.appended
    if one[0].get("role") == other[0].get("role") == "prompt" or equal(one[0], other[0]):
        return True
    alike = root.context == turn.context and shows_tools(turn.context) and len(other) > 1
    return alike and _equal_messages(one[1:2], other[1:2], equal)


def _together(turn: Turn, other: Turn) -> bool:
    """Whether both were asked before either was answered."""
    return bool(turn.facts.get("asked_at", 0) < other.facts.get("answered_at", 0))

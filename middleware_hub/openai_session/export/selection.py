"""Which leaves of a session become samples, and in which of them a shared turn is trained.

A session may have side calls of its harness beside its main line: titles, summaries, probes, sub-agents. The whole
episode decides, when it is read: the main line is the conversation with the most sampled tokens among those that were
shown tools; where none was, the one with the most turns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from middleware_hub.openai_session.errors import UnusableSample
from middleware_hub.openai_session.sessions.messages import load_function
from middleware_hub.openai_session.sessions.prompting import shows_tools
from middleware_hub.openai_session.sessions.session import Session
from middleware_hub.openai_session.sessions.turn import Turn
from miles_router.errors import BadRequest, ConfigError

#: Of the leaves of a session, those that become samples. One of the operator's own chooses among all turns.
Policy = Callable[[Session, Sequence[Turn]], Sequence[Turn]]


def all_leaves(session: Session, leaves: Sequence[Turn]) -> Sequence[Turn]:
    """Every branch."""
    return leaves


def last_leaf(session: Session, leaves: Sequence[Turn]) -> Sequence[Turn]:
    """The branch that ended last."""
    return leaves[-1:]


def without_superseded(session: Session, leaves: Sequence[Turn]) -> Sequence[Turn]:
    """Every branch, but for answers that the agent asked for again and did not go on from."""
    return [leaf for leaf in leaves if not _superseded(leaf, session)]


def side_calls(session: Session) -> set[Turn]:
    """The turns that are none of the main line."""
    main, found = _main(session), session.history.classified()
    return {
        turn for turn, each in zip(session.turns, found, strict=True) if each.side_call or each.conversation is not main
    }


def _main(session: Session) -> Turn | None:
    """The root that the main line began with."""
    classify = session.history.classify
    first = [root for root in session.roots if classify(root).conversation is root and not root.side_call]
    turns, tokens = Counter[Turn](), Counter[Turn]()
    for turn, found in zip(session.turns, session.history.classified(), strict=True):
        if not found.side_call:
            turns[found.conversation] += 1
            tokens[found.conversation] += sum(map(len, turn.sampled))
    with_tools = {classify(root).conversation for root in session.roots if shows_tools(root.context)}
    among, size = ([root for root in first if root in with_tools], tokens) if with_tools else (first, turns)
    return max(among or first, key=lambda root: size[root], default=None)


def _superseded(leaf: Turn, session: Session) -> bool:
    history = session.history
    first = history.classify(leaf).first or leaf
    later = [history.classify(other) for other in history.siblings(leaf) if other.number > leaf.number]
    return any(found.reason == "retry" and found.first is first for found in later)


POLICIES: Mapping[str, Policy] = {"all": all_leaves, "last": last_leaf, "drop-superseded": without_superseded}


class Selection:
    """The policies that a request may name: ours, and those that the operator named in the options.

    Args:
        allowed: dotted paths of the operator's.
        default: the policy of a request that names none; empty for that of the form it asks in.

    Raises:
        ConfigError: one of them is none.
    """

    def __init__(self, allowed: Sequence[str], default: str = "") -> None:
        own = {path: _own(load_function(path, "branch_policies", POLICIES)) for path in allowed}
        self._policies: dict[str, Policy] = {**POLICIES, **own}
        if default and default not in self._policies:
            known = ", ".join(self._policies)
            raise ConfigError(f"openai_session_middleware.default_branches: must be one of {known}, not {default!r}")
        self.default = default

    def leaves(
        self, session: Session, policy: object = "", *, default: str = "all", without: Collection[Turn] = ()
    ) -> Sequence[Turn]:
        """The leaves that a policy selects; without one the operator's default does, or else `default`. Turns in
        `without` are as if they had never been asked.

        Raises:
            BadRequest: no such policy may be named.
            UnusableSample: a policy of the operator's gives something else than turns of this session.
        """
        policy = (self.default or default) if policy == "" else policy
        select = self._policies.get(policy) if isinstance(policy, str) else None
        if select is None:
            raise BadRequest(f"branches must be one of {', '.join(self._policies)}")
        children = session.history.children
        kept = [turn for turn in session.turns if turn not in without]
        leaves = select(session, [turn for turn in kept if all(child in without for child in children(turn))])
        if not set(session.turns).issuperset(leaves):
            raise UnusableSample("leaves_of_the_session", f"the policy {policy!r} selected what is no turn of it")
        return [leaf for leaf in leaves if leaf not in without]


def _own(select: Callable[[Session], Sequence[Turn]]) -> Policy:
    """A policy of the operator's."""
    return lambda session, leaves: select(session)


def trained_elsewhere(leaves: Sequence[Turn]) -> list[dict[Turn, int]]:
    """For each leaf and turn of its line, how many of the turn's first sampled tokens an earlier sample trains.

    A token is trained in the first sample that has it. One line can have a token more of a turn than another: where
    that other one dropped a stop token.
    """
    covered: dict[Turn, int] = {}
    plans = []
    for leaf in leaves:
        plans.append({turn: covered.get(turn, 0) for turn in leaf.line()})
        _cover(covered, leaf)
    return plans


def trained_before(leaves: Sequence[Turn], leaf: Turn) -> dict[Turn, int]:
    """Of the turns of a leaf's line, how many of each turn's first sampled tokens the samples of other leaves in front
    of it train; where it is none of them itself, all of them do."""
    covered: dict[Turn, int] = {}
    for each in leaves:
        if each is leaf:
            break
        _cover(covered, each)
    return {turn: covered.get(turn, 0) for turn in leaf.line()}


def trained_tokens(leaves: Sequence[Turn]) -> int:
    """How many sampled tokens are in the loss of the samples of these leaves."""
    covered: dict[Turn, int] = {}
    for leaf in leaves:
        _cover(covered, leaf)
    return sum(max(tokens, 0) for tokens in covered.values())


def _cover(covered: dict[Turn, int], leaf: Turn) -> None:
    """Take in the tokens of a leaf's line: for each turn, how many of its first sampled tokens some line has."""
    turn: Turn | None = leaf
    end = leaf.tokens
    while turn is not None:
        known = covered.get(turn)
        covered[turn] = max(known or 0, end - turn.prompt_tokens)
        if known is not None:
            return  # another line went this way, and to the same ends from here on
        end = turn.prompt_tokens - len(turn.given)
        turn = turn.parent

"""Select the leaves of a session that become samples, and the sample in which a shared turn is trained.

Beside its main line, a session may have side calls of its harness: titles, summaries, probes, sub-agents. The main line
is determined from the whole episode when it is read: the conversation with the most sampled tokens among those with
tools; without any tools, the conversation with the most turns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from middleware_hub.openai_session.errors import UnusableSample
from middleware_hub.openai_session.sessions.messages import load_function
from middleware_hub.openai_session.sessions.session import Session
from middleware_hub.openai_session.sessions.turn import Turn, shows_tools
from miles_router.errors import BadRequest, ConfigError

#: Selects the leaves that become samples. An operator's own policy chooses among all turns.
Policy = Callable[[Session, Sequence[Turn]], Sequence[Turn]]


def all_leaves(session: Session, leaves: Sequence[Turn]) -> Sequence[Turn]:
    """Select every branch."""
    return leaves


def last_leaf(session: Session, leaves: Sequence[Turn]) -> Sequence[Turn]:
    """Select the branch that ended last."""
    return leaves[-1:]


def without_superseded(session: Session, leaves: Sequence[Turn]) -> Sequence[Turn]:
    """Select every branch, except answers that the agent requested again and did not continue."""
    return [leaf for leaf in leaves if not _superseded(leaf, session)]


def side_calls(session: Session) -> set[Turn]:
    """Return the turns outside the main line."""
    main, found = _main_root(session), session.history.classified()
    return {
        turn for turn, each in zip(session.turns, found, strict=True) if each.side_call or each.conversation is not main
    }


def _main_root(session: Session) -> Turn | None:
    """Return the root of the main line's conversation."""
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
    """The branch policies that a request may name: the built-in ones, and the operator's.

    Args:
        allowed: dotted paths of the operator's policies.
        default: the policy for a request that names none; if empty, the form of the samples decides.

    Raises:
        ConfigError: a policy does not exist.
    """

    def __init__(self, allowed: Sequence[str], default: str = "") -> None:
        own = {path: _operator_policy(load_function(path, "branch_policies", POLICIES)) for path in allowed}
        self._policies: dict[str, Policy] = {**POLICIES, **own}
        if default and default not in self._policies:
            known = ", ".join(self._policies)
            raise ConfigError(f"openai_session_middleware.default_branches: must be one of {known}, not {default!r}")
        self.default = default

    def leaves(
        self, session: Session, policy: object = "", *, default: str = "all", without: Collection[Turn] = ()
    ) -> Sequence[Turn]:
        """Return the leaves that a policy selects; turns in `without` are ignored. An empty `policy` means the
        operator's default, or else `default`.

        Raises:
            BadRequest: there is no such policy.
            UnusableSample: an operator's policy returned something other than turns of this session.
        """
        policy = (self.default or default) if policy == "" else policy
        select = self._policies.get(policy) if isinstance(policy, str) else None
        if select is None:
            raise BadRequest(f"branches must be one of {', '.join(self._policies)}")
        children = session.history.children
        kept = [turn for turn in session.turns if turn not in without]
        leaves = select(session, [turn for turn in kept if all(child in without for child in children(turn))])
        if not set(session.turns).issuperset(leaves):
            raise UnusableSample("leaves_of_the_session", f"the policy {policy!r} must return turns of the session")
        return [leaf for leaf in leaves if leaf not in without]


def _operator_policy(select: Callable[[Session], Sequence[Turn]]) -> Policy:
    """Wrap an operator's policy."""
    return lambda session, leaves: select(session)


def trained_elsewhere(leaves: Sequence[Turn]) -> list[dict[Turn, int]]:
    """Return, for each leaf and each turn of its line, how many of the turn's first sampled tokens an earlier sample
    trains.

    A token is trained in the first sample that contains it. Two lines can contain different numbers of tokens of one
    turn, where one of them dropped a stop token.
    """
    covered: dict[Turn, int] = {}
    plans = []
    for leaf in leaves:
        plans.append({turn: covered.get(turn, 0) for turn in leaf.line()})
        _cover(covered, leaf)
    return plans


def trained_before(leaves: Sequence[Turn], leaf: Turn) -> dict[Turn, int]:
    """Return, for each turn of a leaf's line, how many of its first sampled tokens the samples of earlier leaves train.
    If `leaf` is not in `leaves`, all of them count as earlier."""
    covered: dict[Turn, int] = {}
    for each in leaves:
        if each is leaf:
            break
        _cover(covered, each)
    return {turn: covered.get(turn, 0) for turn in leaf.line()}


def trained_tokens(leaves: Sequence[Turn]) -> int:
    """Return how many sampled tokens are in the loss of the samples of these leaves."""
    covered: dict[Turn, int] = {}
    for leaf in leaves:
        _cover(covered, leaf)
    return sum(max(tokens, 0) for tokens in covered.values())


def _cover(covered: dict[Turn, int], leaf: Turn) -> None:
    """Add a leaf's line to `covered`, which maps each turn to how many of its first sampled tokens a line contains."""
    turn: Turn | None = leaf
    end = leaf.tokens
    while turn is not None:
        known = covered.get(turn)
        covered[turn] = max(known or 0, end - turn.prompt_tokens)
        if known is not None:
            return  # another line contains this turn, and from here on the same turns to the same ends
        end = turn.prompt_tokens - len(turn.given)
        turn = turn.parent

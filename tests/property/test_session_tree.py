"""Any agent's history: it goes on, retries, edits, compacts, branches, changes its tools, asks for several choices.
Turns hang where a plain search says, and samples have what was given and sampled, each position in one loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from middleware_hub.openai_session.export.records import record
from middleware_hub.openai_session.export.samples import SampleMaker, SampleRequest
from middleware_hub.openai_session.export.selection import Selection
from middleware_hub.openai_session.sessions.equality import MEANING
from middleware_hub.openai_session.sessions.history import ParentMatch, SessionHistory
from middleware_hub.openai_session.sessions.messages import Message
from middleware_hub.openai_session.sessions.turn import Turn, contexts_of, line_ends
from middleware_hub.openai_session.turns.plan import TurnPlan
from tests.support.sessions import SYSTEM, Scene, assistant, call, history, tool, user
from tests.support.tiers import examples

#: Few, so that histories meet by chance.
TEXTS = ("a", "b", "")
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("add", "sub")]
SETTINGS: tuple[Mapping[str, Any], ...] = (
    {},
    {},
    {"tools": TOOLS},
    {"tools": TOOLS, "tool_choice": "none"},
    {"tools": TOOLS[:1]},
    {"chat_template_kwargs": {"enable_thinking": False}},
)
ECHOES = (
    lambda message: message,
    lambda message: {**message, "refusal": None, "annotations": None},
    lambda message: {**message, "content": message["content"] or None},
    lambda message: {**message, "content": [{"type": "text", "text": message["content"]}]},
)
REPLIES: tuple[Message, ...] = (
    *(assistant(text) for text in TEXTS),
    assistant("", tool_calls=[call()]),
    assistant("", tool_calls=[call("add", '{"a": 1}')], reasoning_content="hm"),
)
messages_of_agents = st.lists(st.sampled_from([*map(user, TEXTS), *map(tool, TEXTS)]), max_size=2)


@dataclass
class RecordingProxy:
    """What one choice's engine was given and sampled, as seen at its proxy."""

    given: list[int]
    sampled: list[int]
    logprobs: list[float]


@dataclass
class Episode:
    """An agent at work, its steps drawn."""

    draw: Any
    scene: Scene = field(default_factory=Scene)
    sent: list[list[Message]] = field(default_factory=list)  # every request
    proxies: dict[Turn, RecordingProxy] = field(default_factory=dict)
    under_way: list[TurnPlan] = field(default_factory=list)

    def step(self) -> None:
        """One request more, or an answer to one under way."""
        if self.under_way and self.draw(st.booleans()):
            self.answer(self.under_way.pop(self.draw(st.integers(0, len(self.under_way) - 1))))
            return
        sent = self.messages() or [SYSTEM]
        self.sent.append(sent)
        fields = self.draw(st.sampled_from(SETTINGS))
        contexts = [each.key for each in contexts_of(fields)]
        place = self.scene.session.history.find_parent(sent, contexts, MEANING)
        assert place == self.expected(sent, contexts)
        asked = self.ask(sent, place, fields)
        if self.draw(st.integers(0, 4)):
            self.answer(asked)
        else:
            self.under_way.append(asked)

    def messages(self) -> list[Message]:
        turns = self.scene.session.turns
        kind = self.draw(st.sampled_from(["extend", "extend", "extend", "retry", "edit", "compact", "new"]))
        if kind == "retry" and self.sent:
            return [dict(message) for message in self.draw(st.sampled_from(self.sent))]
        if kind == "new" or not turns:
            return [SYSTEM, *self.draw(messages_of_agents)]
        before = history(self.draw(st.sampled_from(turns)))
        if kind == "edit":
            place = self.draw(st.integers(0, len(before) - 1))
            before[place] = self.draw(st.sampled_from([user("edited"), assistant("edited"), *REPLIES]))
        elif kind == "compact":
            before = [before[0], user("in short")]
        return [*(self.draw(st.sampled_from(ECHOES))(message) for message in before), *self.draw(messages_of_agents)]

    def expected(self, sent: Sequence[Message], contexts: Sequence[bytes]) -> ParentMatch:
        """By comparing with the whole history of every turn."""
        best: Turn | None = None
        for turn in self.scene.session.turns:
            held = history(turn)
            fits = len(held) <= len(sent) and all(map(MEANING, held, sent[: len(held)]))
            if fits and turn.context in contexts and (best is None or len(held) >= len(history(best))):
                best = turn
        return ParentMatch(
            best, tuple(sent[len(history(best)) if best else 0 :]), best.context if best else contexts[0]
        )

    def ask(self, sent: list[Message], place: ParentMatch, fields: Mapping[str, Any]) -> TurnPlan:
        ended = place.parent is not None and place.parent.ended_itself
        segment = self.draw(st.sampled_from([None] * 5 + ["not_text"])) if place.parent is not None else None
        dropped = int(ended and segment is None and self.draw(st.booleans()))
        given = self.draw(st.integers(dropped, 3))  # behind a dropped stop token stands the template's own
        asked = self.scene.ask(sent, given=given, dropped=dropped, segment=segment, **fields)
        if segment is not None:
            root = (ParentMatch(None, tuple(sent), place.context),)
            asked = replace(asked, request=replace(asked.request, parents=root, prompt=None), written=())
        self.scene.time += 1
        return asked

    def answer(self, asked: TurnPlan) -> None:
        made = []
        for index in range(self.draw(st.sampled_from([1, 1, 1, 2, 3]))):
            sampled = self.draw(st.integers(0, 4))
            finish = self.draw(st.sampled_from(["stop", "length", "abort"])) if sampled else "abort"
            cut = self.draw(st.integers(0, sampled))
            versions = [("1", 0, cut), ("2", cut, sampled)]
            reply = self.draw(st.sampled_from(REPLIES))
            options: dict[str, Any] = {"sampled": sampled, "stop": finish == "stop", "finish": finish, "index": index}
            made.append(self.scene.generated(asked, reply, versions=versions, **options))
        self.scene.time += 1
        for generated, turn in zip(made, self.scene.record(asked, *made), strict=True):
            given = list(generated.prompt or ())
            if asked.request.prompt is not None:
                given = orjson.loads(b"".join(asked.written))
                assert given == asked.request.prompt.ids().tolist()
            self.proxies[turn] = RecordingProxy(given, list(generated.ids), list(generated.logprobs))


def episode(data: st.DataObject) -> Episode:
    found = Episode(data.draw)
    for _ in range(data.draw(st.integers(1, 14))):
        found.step()
    return found


def check_tree(found: Episode) -> None:
    session = found.scene.session
    assert [turn.number for turn in session.turns] == list(range(len(session.turns)))
    objects = {id(message): message for turn in session.turns for message in turn.appended}
    assert len(objects) == len({repr(message) for message in objects.values()}), "each message is stored once"
    for turn in session.turns:
        siblings = session.history.siblings(turn)
        assert turn in siblings
        assert (found.scene.classify(turn).reason is None) is (siblings[0] is turn)
        assert turn.messages == len(history(turn))
        assert turn.parent is None or turn.parent.context is turn.context


def check_classification(found: Episode) -> None:
    """Whoever reads it once, at the end, finds what was read turn by turn."""
    again = SessionHistory(MEANING)
    for turn in found.scene.session.turns:
        again.restore(turn)
    assert again.classified() == found.scene.session.history.classified()


def check_tokens(found: Episode) -> None:
    for turn in found.scene.session.turns:
        whole, proxy = turn.trajectory(), found.proxies[turn]
        assert whole.tokens.tolist() == [*proxy.given, *proxy.sampled]
        assert (turn.prompt_tokens, turn.tokens) == (len(proxy.given), len(whole))
        assert record(turn, found.scene.classify(turn))["span"] == [len(proxy.given), len(whole)]
        before = len(line) and line[-1].tokens - turn.dropped if (line := turn.line()[:-1]) else 0
        assert before + len(turn.given) == turn.prompt_tokens


def check_samples(found: Episode) -> None:
    """Against the proxies: tokens of the leaf's own, logprobs and mask turn by turn."""
    session = found.scene.session
    trained: Counter[tuple[Turn, int]] = Counter()
    had: set[tuple[Turn, int]] = set()
    maker = SampleMaker(Selection(()), lambda ids: "", {})
    for sample in maker.plan(session, SampleRequest()).make():
        leaf = session.turns[sample.metadata["leaf"]]
        proxy = found.proxies[leaf]
        assert sample.tokens.tolist() == [*proxy.given, *proxy.sampled]
        logprobs, mask = sample.logprobs.tolist(), sample.loss_mask.tolist()
        sampled_at = dict.fromkeys(range(len(sample)), 0.0)
        line = leaf.line()
        for turn, end in zip(line, line_ends(line), strict=True):
            for place in range(turn.prompt_tokens, end):
                position = (turn, place - turn.prompt_tokens)
                had.add(position)
                trained[position] += mask[place]
                sampled_at[place] = found.proxies[turn].logprobs[position[1]]
                mask[place] = 0
        assert not any(mask), "what was given is in no loss"
        assert logprobs == np.array(list(sampled_at.values()), dtype=np.float32).tolist()
    assert all(trained[position] == 1 for position in had)
    for turn in session.turns:
        line_had = {place for other, place in had if other is turn}
        dropped = min((child.dropped for child in session.history.children(turn)), default=0)
        answered = any(each.sampled for leaf in session.history.descendants(turn) for each in leaf.line())
        assert line_had == set(range(len(found.proxies[turn].sampled) - dropped if answered else 0))


def check_selection(found: Episode) -> None:
    session, selection = found.scene.session, Selection(())
    every = list(selection.leaves(session, "all"))
    kept = list(selection.leaves(session, "drop-superseded"))
    assert list(selection.leaves(session, "last")) == every[-1:]
    assert set(kept) <= set(every)
    for leaf in set(every) - set(kept):
        again = [turn for turn in session.turns[leaf.number + 1 :] if found.scene.classify(turn).reason == "retry"]
        assert any(
            turn.parent is leaf.parent
            and turn.context == leaf.context
            and len(turn.appended) == len(leaf.appended)
            and all(map(MEANING, leaf.appended, turn.appended))
            for turn in again
        )


@given(st.data())
@settings(max_examples=examples(150))
def test_turns_hang_where_a_plain_search_says_and_samples_are_exact(data: st.DataObject) -> None:
    found = episode(data)
    check_tree(found)
    check_classification(found)
    check_tokens(found)
    check_samples(found)
    check_selection(found)
    scene = found.scene
    assert scene.store.nbytes == scene.session.nbytes > 0
    scene.store.delete(scene.session)
    assert (scene.store.nbytes, scene.session.turns) == (0, [])
    for asked in found.under_way:
        assert scene.record(asked, scene.generated(asked, "late")) == []
    assert scene.store.nbytes == 0

"""Holds a session's training samples against what went through the workers' proxies, position by position.

What a sample must be is put together here from nothing but the proxies' records, in the order of the turns that its
metadata names; and what the engine was given behind an answer from what the agent said, in Qwen3's own markup.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any

import aiohttp
import numpy as np

from tests.support.agent_apis import Message
from tests.support.agents import Agents, Asked
from tests.support.generations import Generation
from tests.support.oracle import Arrays, common_length, given_arrays, same
from tests.support.recording_proxy import Chats

IM_END = 151645
PAGE = 1  # tokens that the engine caches at a time

Sample = Mapping[str, Any]


@dataclass
class Turn:
    """A turn in a sample: the generation, where it begins, and how many of its sampled tokens the sample has."""

    generation: Generation
    start: int
    kept: int
    trained: bool


@dataclass
class Proved:
    """How much was compared, all of it equal."""

    sessions: int = 0
    samples: int = 0
    positions: int = 0
    trained: int = 0
    turns: int = 0
    streamed: int = 0
    carried_on: int = 0  # turns that were cut
    given_back: int = 0  # of these, as they were cut
    continued: int = 0  # turns that were sent as ids
    stayed: int = 0  # of these, those whose session had not left its worker
    dropped: int = 0  # stop tokens that the engine was not given again
    prompts: int = 0  # tokens of the prompts of continued turns
    held: int = 0  # of these, given or sampled before
    cached: int = 0  # of these, found in the engine's cache
    new_versions: Counter[str] = field(default_factory=Counter)  # turns whose weights changed on the way
    reasons: Counter[str | None] = field(default_factory=Counter)
    finishes: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        return (
            f"{self.sessions} sessions, {self.turns} turns, {self.streamed} of them streamed, {self.carried_on} "
            f"carried on; new weights in the middle of {dict(self.new_versions)}; {self.samples} samples: "
            f"{self.positions} positions compared, {self.trained} trained, {self.dropped} stop tokens dropped\n"
            f"branches {dict(self.reasons)}, ends {dict(self.finishes)}\n"
            f"{self.continued} turns continued, {self.stayed} of them on the same worker, {self.prompts} prompt "
            f"tokens: {self.held / self.prompts:.2%} held, "
            f"{self.cached / self.prompts:.2%} in the engine's prefix cache"
        )


async def check_sessions(http: aiohttp.ClientSession, agents: Agents, went: Chats, plain: Any) -> Proved:
    """Every session of agents: what they did to their history begins a branch, and nothing else does."""
    proved, kept, left = Proved(), set[str](), 0
    for session in agents.sessions:
        async with http.post(f"/sessions/{session}/samples", json={}) as reply:
            assert reply.status == 200, await reply.text()
            samples = (await reply.json())["samples"]
        recorded = {turn["rid"] for sample in samples for turn in sample["metadata"]["turns"]}
        passed = [each for each in went.of(session) if each.rid in recorded or each.request_id not in agents.log.left]
        kept |= {each.request_id for each in passed}
        left += len(went.of(session)) - len(passed)
        check_session(proved, samples, passed, agents.log.asked, plain)
        async with http.get(f"/sessions/{session}") as reply:
            found = await reply.json()
        assert found["metadata"]["untraced"] == []
        proved.given_back += sum(record["finish_reason"] == "abort" for record in found["records"])
        reasons = Counter(record["reason"] for record in found["records"])
        wanted: Counter[str | None] = Counter({why: n for (of, why), n in agents.log.reasons.items() if of == session})
        # Of two questions at once the second may come when the first is answered: then it edits history.
        late = max(0, wanted["parallel"] - reasons["parallel"])
        wanted.update(edited_history=late, parallel=-late)
        assert reasons == +wanted, (session, reasons, wanted)
    assert proved.turns + left == len(went.generations), "each belongs to one of the sessions"
    assert len(agents.log.asked) - len(kept) == agents.log.repeated
    return proved


def check_session(
    proved: Proved, samples: Sequence[Sample], passed: Sequence[Generation], asked: Mapping[str, Asked], plain: Any
) -> None:
    """Everything that can be said of one session."""
    by_rid = {each.rid: each for each in passed}
    assert len(by_rid) == len(passed), "engines name each answer of their own"
    lines = [line_of(sample, by_rid) for sample in samples]
    trained: Counter[tuple[str, int]] = Counter()
    for sample, line in zip(samples, lines, strict=True):
        trained += _check_sample(sample, line)
        proved.positions += len(sample["tokens"])
    kept = {turn.rid: 0 for turn in passed}
    for turn in (turn for line in lines for turn in line):
        kept[turn.generation.rid] = max(kept[turn.generation.rid], turn.kept)
    everything = {(turn.rid, offset) for turn in passed for offset in range(kept[turn.rid])}
    assert trained == Counter(dict.fromkeys(everything, 1)), "what was sampled is trained, once"
    parents = {turn.generation.rid: before.generation for line in lines for before, turn in pairwise(line)}
    for each in passed:
        _check_dropped(each, kept[each.rid])
        proved.dropped += len(each.sampled) - kept[each.rid]
        _check_continuation(proved, each, parents.get(each.rid), asked, plain)
    _count(proved, passed)
    reasons = {turn["rid"]: turn["reason"] for sample in samples for turn in sample["metadata"]["turns"]}
    proved.reasons.update(reasons.values())
    proved.sessions += 1
    proved.samples += len(samples)
    proved.trained += trained.total()


def _count(proved: Proved, passed: Sequence[Generation]) -> None:
    proved.turns += len(passed)
    proved.streamed += sum(each.streamed for each in passed)
    proved.carried_on += sum(each.legs > 1 for each in passed)
    proved.finishes.update(each.end["type"] for each in passed)
    changed = (each for each in passed if len(set().union(*each.versions)) > 1)
    proved.new_versions.update("streamed" if each.streamed else "whole" for each in changed)


def line_of(sample: Sample, by_rid: Mapping[str, Generation]) -> list[Turn]:
    """The turns of a sample. Each must have been given all that the sample has in front of it."""
    turns = sample["metadata"]["turns"]
    line = [by_rid[turn["rid"]] for turn in turns]
    whole = [*line[-1].prompt, *line[-1].sampled]
    untrained = set(sample["metadata"]["untrained_turns"])
    found = []
    for generation, told in zip(line, turns, strict=True):
        start = len(generation.prompt)
        assert generation.prompt == whole[:start], "each turn continues the one before"
        kept = common_length(generation.sampled, whole[start:])
        assert (told["start"], told["end"]) == (start, start + kept), (generation.sampled, whole[start:], told)
        assert told["cached_tokens"] == (generation.cached or (None if generation.streamed else 0))
        assert told["versions"] == "engine" or (generation.streamed and told["versions"] == "router")
        found.append(Turn(generation, start, kept, told["turn"] not in untrained))
    return found


def _check_sample(sample: Sample, line: Sequence[Turn]) -> Counter[tuple[str, int]]:
    """Every array of a sample; gives the positions that it trains, as the engine knows them."""
    last = line[-1].generation
    assert line[-1].kept == len(last.sampled)
    expected, found = given_arrays([*last.prompt, *last.sampled]), arrays_of(sample)
    assert len(expected) == len(found)
    trained: Counter[tuple[str, int]] = Counter()
    for turn in line:
        for offset in range(turn.kept):
            at, generation = turn.start + offset, turn.generation
            possible, told = generation.versions[offset], found.versions[at]
            expected.logprobs[at] = float(np.float32(generation.logprobs[offset]))
            expected.versions[at] = told if told in possible else min(possible)
            expected.mask[at] = int(turn.trained)
            trained[generation.rid, offset] += turn.trained
    assert same(expected, found), _difference(expected, found)
    assert sample["response_length"] == len(expected) - len(line[0].generation.prompt)
    return +trained


def arrays_of(sample: Sample) -> Arrays:
    versions: list[str | None] = [None] * len(sample["tokens"])
    for run in sample["weight_versions"]:
        versions[run["start"] : run["end"]] = [run["version"]] * (run["end"] - run["start"])
    logprobs = [float(np.float32(value)) for value in sample["logprobs"]]
    return Arrays(sample["tokens"], logprobs, sample["loss_mask"], versions)


def _difference(expected: Arrays, found: Arrays) -> str:
    lines = ["the sample differs from what went through the proxy"]
    for name in ("tokens", "mask", "logprobs", "versions"):
        one, other = getattr(expected, name), getattr(found, name)
        at = common_length(one, other)
        if at < max(len(one), len(other)):
            lines.append(f"{name} part at {at}: {one[at : at + 8]} != {other[at : at + 8]}")
    return "\n".join(lines)


def _check_dropped(turn: Generation, kept: int) -> None:
    """All that was sampled is in some sample, but for a stop token that the model's markup does not have there."""
    lost, matched = turn.sampled[kept:], turn.end["matched"]
    assert not lost or (lost == [matched] and matched in turn.body["stop_token_ids"])


def _check_continuation(
    proved: Proved, turn: Generation, parent: Generation | None, asked: Mapping[str, Asked], plain: Any
) -> None:
    """What the engine was given, and had cached, of a turn that continues one."""
    assert turn.rendered == (parent is None), "what continues a turn is sent as ids, and nothing else is"
    if parent is None:
        return
    held = common_length(turn.prompt, [*parent.prompt, *parent.sampled])
    said = asked[turn.request_id].messages[len(asked[parent.request_id].messages) + 1 :]
    text = ("" if turn.prompt[held - 1] == IM_END else "<|im_end|>") + "\n" + "".join(_markup(said))
    assert turn.prompt[held:] == plain.encode(text), (plain.decode(turn.prompt[held:]), text)
    if turn.proxy == parent.proxy:  # a session may leave a worker that has more to do
        proved.stayed += 1
        assert turn.cached >= held - 1 - PAGE, "all but the last sampled token, which it never read"
    proved.continued += 1
    proved.prompts += len(turn.prompt)
    proved.held += held
    proved.cached += turn.cached


def _markup(messages: Sequence[Message]) -> Iterator[str]:
    """What agents say, as Qwen3 reads it, and the prompt for an answer."""
    for role, group in groupby(messages, key=lambda message: message["role"]):
        contents = [message["content"] for message in group]
        if role == "tool":
            results = "".join(f"\n<tool_response>\n{content}\n</tool_response>" for content in contents)
            yield f"<|im_start|>user{results}<|im_end|>\n"
        else:
            yield from (f"<|im_start|>{role}\n{content}<|im_end|>\n" for content in contents)
    yield "<|im_start|>assistant\n"

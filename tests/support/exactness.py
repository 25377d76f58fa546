"""Compares the tokens that a router retrieves for rollouts with what its workers' proxies recorded, and measures what
encoding the text again would have made of them."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np
import orjson
from safetensors.numpy import load

from tests.support.oracle import Account, Arrays, Ledger, retrieved_arrays, same
from tests.support.recording_proxy import RecordingProxy
from tests.support.rollouts import Turn


@dataclass
class Compared:
    """How much was compared, all of it equal."""

    generations: int = 0
    positions: int = 0
    by_text: int = 0
    ambiguous: int = 0


async def compare_all(url: str, proxies: Sequence[RecordingProxy], turns: Iterable[Turn], ledger: Ledger) -> Compared:
    """Every generation by its id (JSON and safetensors) and by its text."""
    compared = Compared()
    known = {turn.rid: turn for turn in turns}
    passed = sorted((each for proxy in proxies for each in proxy.generations), key=lambda each: each.arrived)
    assert {each.rid for each in passed} == set(known), "every answer that a client got went through a proxy"
    async with aiohttp.ClientSession(url) as session:
        for generation in passed:
            candidates = ledger.enter(generation, known[generation.rid].seen)
            if ledger.evicting and not await is_held(session, generation.rid):
                ledger.leave_open(candidates)
                continue
            answer = await retrieve(session, rid=generation.rid)
            assert generation.finish is not None
            assert answer["finished"] == (generation.finish["type"] != "abort")
            assert answer["response"] == known[generation.rid].whole
            assert answer["matched_tokens"] == answer["token_length"] == len(answer["tokens"])
            arrays = retrieved_arrays(answer)
            compared.positions += ledger.compare(candidates, arrays)
            compared.generations += 1
            assert same(await retrieve_binary(session, rid=generation.rid), arrays)
        if not ledger.evicting:
            await _compare_texts(session, known, ledger, compared)
    return compared


async def _compare_texts(
    session: aiohttp.ClientSession, known: dict[str, Turn], ledger: Ledger, compared: Compared
) -> None:
    spelled: dict[str, list[Account]] = defaultdict(list)
    for account in ledger.accounts.values():
        for text in {account.text, account.text[: account.shown]}:
            spelled[text].append(account)
    texts = sorted({turn.whole for turn in known.values()})
    async with session.post("/retrieve_from_text", json={"texts": texts}) as reply:
        answers = await reply.json()
    for text, answer in zip(texts, answers, strict=True):
        distinct = {tuple(each.arrays.tokens) for each in spelled[text]}
        assert (answer["response"], answer["ambiguous"]) == (text, len(distinct) > 1)
        arrays = retrieved_arrays(answer)
        assert any(same(each.arrays, arrays) for each in spelled[text]), text
        if len(distinct) > 1:
            assert set(answer["candidates"]) <= {each.generation.rid for each in spelled[text]}
            found = {tuple(ledger.accounts[rid].arrays.tokens) for rid in answer["candidates"]}
            assert found == distinct, "every spelling has a candidate"
        compared.by_text += 1
        compared.ambiguous += len(distinct) > 1


async def is_held(session: aiohttp.ClientSession, rid: str) -> bool:
    async with session.post("/retrieve_from_text", json={"rid": rid}) as reply:
        assert reply.status in (200, 404)
        return reply.status == 200


async def retrieve(session: aiohttp.ClientSession, **asked: Any) -> dict[str, Any]:
    async with session.post("/retrieve_from_text", json=asked) as reply:
        answer = await reply.json()
        assert reply.status == 200, answer
        return dict(answer)


async def retrieve_binary(session: aiohttp.ClientSession, **asked: Any) -> Arrays:
    async with session.post("/retrieve_from_text", json=asked, headers={"Accept": "application/octet-stream"}) as reply:
        assert (reply.status, reply.content_type) == (200, "application/octet-stream")
        return binary_arrays(await reply.read())


def binary_arrays(data: bytes) -> Arrays:
    tensors = load(data)
    length = int.from_bytes(data[:8], "little")
    facts = orjson.loads(orjson.loads(data[8 : 8 + length])["__metadata__"]["facts"])
    assert [tensors[name].dtype for name in ("tokens", "logprobs", "loss_mask")] == ["int32", "float32", "uint8"]
    return retrieved_arrays(
        {
            "tokens": tensors["tokens"].tolist(),
            "rollout_logp": tensors["logprobs"].tolist(),
            "loss_mask": tensors["loss_mask"].tolist(),
            "weight_versions": facts["weight_versions"],
        }
    )


@dataclass
class Drift:
    """What encoding each rollout's final text would have changed."""

    rollouts: int = 0
    changed_rollouts: int = 0
    positions: int = 0
    changed_positions: int = 0
    sampled: int = 0
    changed_sampled: int = 0

    def __str__(self) -> str:
        return (
            f"encoding the text anew changes {self.changed_rollouts / self.rollouts:.1%} of {self.rollouts} rollouts, "
            f"{self.changed_positions / self.positions:.1%} of {self.positions} positions, "
            f"{self.changed_sampled / self.sampled:.1%} of {self.sampled} sampled tokens"
        )

    def add(self, exact: Sequence[int], sampled: Sequence[int], anew: Sequence[int]) -> None:
        """Count a rollout's exact tokens, the mask of those that were sampled, and the encoding of its text. A position
        changes where it has no counterpart in the encoding, by the longest matching blocks."""
        kept = np.zeros(len(exact), dtype=bool)
        for block in difflib.SequenceMatcher(None, exact, anew, autojunk=False).get_matching_blocks():
            kept[block.a : block.a + block.size] = True
        mask = np.array(sampled, dtype=bool)
        self.rollouts += 1
        self.changed_rollouts += list(exact) != list(anew)
        self.positions += len(exact)
        self.changed_positions += int((~kept).sum())
        self.sampled += int(mask.sum())
        self.changed_sampled += int((mask & ~kept).sum())


def drift(accounts: Iterable[Account], tokenizer: Any) -> Drift:
    """Return what encoding the texts of these accounts would have changed."""
    total = Drift()
    for account in accounts:
        anew = tokenizer.backend_tokenizer.encode(account.text[: account.shown]).ids
        total.add(account.arrays.tokens, account.arrays.mask, anew)
    return total

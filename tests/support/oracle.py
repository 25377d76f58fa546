"""An account of what every generation's tokens must be, kept apart from the router: from what went through the worker's
proxy and what the client sent and received, with nothing but the tokenizer's own `decode` and `encode`.

`Ledger.enter` checks what the engine was given against all that came before; `Ledger.compare` checks what was retrieved
for a generation against its account, position by position.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.support.generations import Generation
from tests.support.plain_encoding import PlainEncoding, plain_encoding

UNFINISHED = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Visible:
    """What a client knows of one generation: the text it sent, and when it sent and received."""

    prompt: str
    sent: float
    received: float
    ids: bool = False  # the client sent ids of its own; `prompt` is their text


@dataclass
class Arrays:
    """Aligned positions, as they must be retrieved."""

    tokens: list[int]
    logprobs: list[float]
    mask: list[int]
    versions: list[str | None]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, part: slice) -> Arrays:
        return Arrays(self.tokens[part], self.logprobs[part], self.mask[part], self.versions[part])

    def __add__(self, other: Arrays) -> Arrays:
        return Arrays(
            self.tokens + other.tokens,
            self.logprobs + other.logprobs,
            self.mask + other.mask,
            self.versions + other.versions,
        )


def given_arrays(ids: Sequence[int]) -> Arrays:
    return Arrays(list(ids), [0.0] * len(ids), [0] * len(ids), [None] * len(ids))


def sampled_arrays(generation: Generation) -> Arrays:
    assert generation.logprob_ids == generation.sampled, "logprobs were asked for and are of these tokens"
    logprobs = [float(np.float32(value)) for value in generation.logprobs]
    count = len(generation.sampled)
    return Arrays(list(generation.sampled), logprobs, [1] * count, [*generation.position_versions()])


@dataclass
class Account:
    """One generation: its arrays, and which characters of its text each token completes.

    `text` begins with what the client saw (`shown` characters) and goes on with the spelling of what was hidden.
    `ends[i]` is the number of characters up to token i, or None where a cut behind it is impossible. `certain[i]`: that
    place is beyond doubt; not so behind bytes that are no character yet.
    """

    generation: Generation
    seen: Visible
    arrays: Arrays
    text: str
    shown: int
    given: int
    ends: list[int | None]
    certain: list[bool]
    whole_run_ends: set[int] = field(default_factory=set)  # counts of tokens behind which a complete prompt ended

    def sampled(self, index: int) -> bool:
        return self.arrays.mask[index] == 1

    def must_keep(self, text: str) -> tuple[int, int]:
        """`(tokens, characters)` of the prefix to reuse for `text`: whole tokens inside the common text, the last one
        sampled, or at the end of `text`."""
        common = common_length(self.text, text)
        last, best = -1, -1
        for index, end in enumerate(self.ends):
            if end is not None and self.certain[index] and best < end <= common:
                last, best = index, end
        if last >= 0 and not (best == len(text) and last + 1 in self.whole_run_ends):
            while last >= 0 and not (self.sampled(last) and self.ends[last] is not None):
                last -= 1
        return (last + 1, self.ends[last] or 0) if last >= 0 else (0, 0)

    def first_certain(self, chars: int) -> int | None:
        """The count of tokens it takes to complete so many characters beyond doubt."""
        places = (i + 1 for i, end in enumerate(self.ends) if end == chars and self.certain[i])
        return next(places, None)

    def check_decodes(self, plain: PlainEncoding) -> None:
        """The given ids, without those that the client was never shown, decode to the text that it sent."""
        text = self.seen.prompt
        if UNFINISHED in text or not plain.reversible(text):
            return  # the tokenizer itself cannot give this text back
        before: list[int | None] = [0, *self.ends]
        given = self.arrays.tokens[: self.given]
        # A special one that was sampled within a character was skipped: shown, it would have ended that.
        skipped = [self.ends[i] is None and self.sampled(i) and plain.is_special(given[i]) for i in range(self.given)]
        spells = [self.ends[i] is None or self.ends[i] != before[i] for i in range(self.given)]
        shown = [token for i, token in enumerate(given) if spells[i] and not skipped[i]]
        assert plain.decode_whole(shown) == text, (text, shown, given, self.ends)

    def cuts(self, text: str) -> Iterator[tuple[int, int]]:
        """Every prefix that spells the beginning of `text` at all, longest first."""
        common = common_length(self.text, text)
        for index in range(len(self.ends) - 1, -1, -1):
            end = self.ends[index]
            if end is not None and end <= common:
                yield index + 1, end


@dataclass
class Ledger:
    """Accounts of all generations of a run, entered in the order in which their requests came to the proxies."""

    tokenizer: Any
    evicting: bool = False  # with evictions, nothing that was recorded need still be there
    accounts: dict[str, Account] = field(default_factory=dict)
    reused: int = 0  # generations that were given recorded tokens
    shorter: int = 0  # of these, generations for which some other entry had a longer prefix

    def __post_init__(self) -> None:
        self.plain = plain_encoding(self.tokenizer)

    def enter(self, generation: Generation, seen: Visible) -> list[Account]:
        """Check what the engine was given; the accounts it may have (several earlier ones can share its ids)."""
        assert generation.given is not None, "the worker was given text"
        held = [each for each in self.accounts.values() if each.generation.answered <= generation.arrived]
        fresh = seen.ids or generation.given in self.plain.whole(seen.prompt)
        found = [self._fresh(generation, seen)] if fresh else []
        longest = 0
        for earlier in held:
            for tokens, chars in self._explains(earlier, generation.given, seen):
                found.append(self._extended(generation, seen, earlier, tokens, chars))
                longest = max(longest, chars)
        assert found, self._unexplained(generation, seen, held)
        if not seen.ids:
            self._check_length(held, generation, seen, longest)
            for account in found:
                account.check_decodes(self.plain)
        return found

    def settle(self, account: Account) -> None:
        """The account that this generation turned out to have."""
        self.accounts[account.generation.rid] = account

    def leave_open(self, accounts: list[Account]) -> None:
        """Nobody can tell any more which account this generation had."""
        self.accounts |= {f"{each.generation.rid}#{index}": each for index, each in enumerate(accounts)}

    def _check_length(self, held: list[Account], generation: Generation, seen: Visible, longest: int) -> None:
        if self.evicting:
            return
        there = [each for each in held if each.seen.received <= seen.sent]
        self.reused += longest > 0
        self.shorter += any(each.must_keep(seen.prompt)[1] > longest for each in there)
        for each in there:
            if seen.prompt.startswith(each.text[: each.shown]):
                chars = each.must_keep(seen.prompt)[1]
                assert chars <= longest, self._too_short(each, generation, seen, longest)

    def _explains(self, earlier: Account, given: list[int], seen: Visible) -> Iterator[tuple[int, int]]:
        """Prefixes of an earlier generation that, with the encoding of the rest of the text, are what was given."""
        text = seen.prompt
        least = earlier.must_keep(text)[1]
        shared = common_length(earlier.arrays.tokens, given)
        for tokens, chars in earlier.cuts(text):
            if chars < least or not tokens:
                break
            complete = tokens == len(given) and chars == len(text)
            if tokens > shared or not (earlier.sampled(tokens - 1) or complete):
                continue
            # Of tokens that complete the same character the first is enough: those behind it spell nothing.
            first = earlier.first_certain(chars)
            if first is not None and first < tokens and earlier.sampled(first - 1):
                continue
            if seen.ids or given[tokens:] in self.plain.rest(text[chars:]):
                yield tokens, chars

    def _too_short(self, best: Account, generation: Generation, seen: Visible, longest: int) -> str:
        line = f"recorded tokens of {longest} characters were given, {best.must_keep(seen.prompt)[1]} could be"
        return "\n".join([line, self._unexplained(generation, seen, [best])])

    def _unexplained(self, generation: Generation, seen: Visible, held: list[Account]) -> str:
        best = max(held, key=lambda each: each.must_keep(seen.prompt)[1], default=None)
        lines = [
            "not an earlier generation's ids, as many as possible, and the encoding of the rest",
            f"text {seen.prompt!r}",
        ]
        lines.append(f"given {generation.given}")
        if best is not None:
            tokens, chars = best.must_keep(seen.prompt)
            lines += [f"closest {best.generation.rid}: {tokens} tokens, {chars} characters of {best.text!r}"]
            lines += [f"its ids {best.arrays.tokens}", f"its ends {best.ends}", f"its mask {best.arrays.mask}"]
            lines += [f"its text shown {best.generation.text!r} for {best.generation.sampled}"]
            lines += [f"the rest must be one of {self.plain.rest(seen.prompt[chars:])}"]
        return "\n".join(lines)

    def _fresh(self, generation: Generation, seen: Visible) -> Account:
        assert generation.given is not None
        count = len(generation.given)
        ends: list[int | None] = [None] * (count - 1) + [len(seen.prompt)]
        return self._grown(generation, seen, given_arrays(generation.given), ends, [True] * count)

    def _extended(self, generation: Generation, seen: Visible, earlier: Account, tokens: int, chars: int) -> Account:
        assert generation.given is not None
        rest = generation.given[tokens:]
        arrays = earlier.arrays[:tokens] + given_arrays(rest)
        ends = list(earlier.ends[:tokens])
        if rest:
            ends += [None] * (len(rest) - 1) + [len(seen.prompt)]
        return self._grown(generation, seen, arrays, ends, [*earlier.certain[:tokens], *[True] * len(rest)])

    def _grown(
        self, generation: Generation, seen: Visible, given: Arrays, ends: list[int | None], certain: list[bool]
    ) -> Account:
        spelled = spell(self.plain, generation)
        base = len(seen.prompt)
        return Account(
            generation,
            seen,
            given + sampled_arrays(generation),
            seen.prompt + spelled.text,
            base + len(generation.text),
            len(given),
            ends + [None if end is None else base + end for end in spelled.ends],
            certain + spelled.certain,
            {len(given)},
        )

    def compare(self, candidates: list[Account], retrieved: Arrays) -> int:
        """Settle on the candidate that was retrieved and say how many positions agree."""
        assert len({len(retrieved.logprobs), len(retrieved.mask), len(retrieved.versions), len(retrieved)}) == 1
        for account in candidates:
            if same(account.arrays, retrieved):
                self.settle(account)
                return len(retrieved)
        raise AssertionError(difference(candidates[0], retrieved))


@dataclass(frozen=True)
class Spelled:
    """Sampled tokens held against the text that came with them."""

    text: str
    ends: list[int | None]
    certain: list[bool]


def spell(plain: PlainEncoding, generation: Generation) -> Spelled:
    """Which characters each sampled token completes: of the text, and behind it of what was hidden."""
    ids, shown = generation.sampled, generation.text
    prefixes = [plain.decode(ids[: index + 1], skip_special=generation.skip_special) for index in range(len(ids))]
    full = prefixes[-1] if prefixes else ""
    if not full.startswith(shown):
        return _spell_whole(plain, generation)
    visible = _last_visible(prefixes, shown)
    ends: list[int | None] = []
    certain: list[bool] = []
    for index, prefix in enumerate(prefixes[:visible]):
        last = index == len(ids) - 1
        ends.append(len(prefix) if full.startswith(prefix) else None)
        certain.append(last or not prefix.endswith(UNFINISHED))
    head = prefixes[visible - 1] if visible else ""
    hidden = [plain.decode(ids[visible : index + 1], skip_special=False) for index in range(visible, len(ids))]
    tail = hidden[-1] if hidden else ""
    for index, prefix in enumerate(hidden):
        last = index == len(hidden) - 1
        ends.append(len(head + prefix) if tail.startswith(prefix) else None)
        certain.append(last or not prefix.endswith(UNFINISHED))
    return Spelled(head + tail, ends, certain)


def _spell_whole(plain: PlainEncoding, generation: Generation) -> Spelled:
    """The worker joined the first bytes to a character that the prompt had begun, so nobody knows what each one shows.
    Reusable whole, without what was hidden behind it; not at all if a stop string may have cut its last token."""
    ids, reason = generation.sampled, generation.finish or {}
    trimmed = None if generation.params.get("no_stop_trim") else reason.get("matched")
    count = len(ids)
    while count and (
        ids[count - 1] == trimmed or not plain.decode([ids[count - 1]], skip_special=generation.skip_special)
    ):
        count -= 1
        trimmed = None
    ends: list[int | None] = [None] * len(ids)
    tail = ""
    if count and not isinstance(reason.get("matched"), str):
        ends[count - 1] = len(generation.text)
        for index in range(count, len(ids)):
            tail += plain.decode([ids[index]], skip_special=False)
            ends[index] = len(generation.text + tail)
    return Spelled(generation.text + tail, ends, [end is not None for end in ends])


def _last_visible(prefixes: list[str], shown: str) -> int:
    """How many tokens it takes to spell what was shown, a character that ends unfinished with all its bytes."""
    if not shown:
        return 0
    count = next(i for i, prefix in enumerate(prefixes) if prefix.startswith(shown)) + 1
    if shown.endswith(UNFINISHED):
        count = max(i for i, prefix in enumerate(prefixes) if prefix == prefixes[count - 1]) + 1
    return count


def same(expected: Arrays, retrieved: Arrays) -> bool:
    """Whether every position agrees; logprobs as float32."""
    return (
        expected.tokens == retrieved.tokens
        and expected.mask == retrieved.mask
        and expected.versions == retrieved.versions
        and bool(np.array_equal(_float32(expected.logprobs), _float32(retrieved.logprobs)))
    )


def _float32(values: Sequence[float]) -> npt.NDArray[np.float32]:
    return np.asarray(values, dtype=np.float32)


def difference(account: Account, retrieved: Arrays) -> str:
    """Where a retrieved trajectory leaves its account."""
    lines = [
        f"{account.generation.rid}: {len(account.arrays)} positions went through the proxy, retrieved {len(retrieved)}"
    ]
    for name in ("tokens", "mask", "logprobs", "versions"):
        expected, found = getattr(account.arrays, name), getattr(retrieved, name)
        at = common_length(expected, found)
        if at < max(len(expected), len(found)):
            lines.append(
                f"{name} part at {at} (given {account.given}): {expected[at : at + 8]} != {found[at : at + 8]}"
            )
    return "\n".join([*lines, f"text {account.text!r}"])


def common_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    low, high = 0, min(len(first), len(second))
    if first[:high] == second[:high]:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def retrieved_arrays(answer: dict[str, Any]) -> Arrays:
    """What `/retrieve_from_text` answered, its runs of versions spread over the positions."""
    versions: list[str | None] = [None] * len(answer["tokens"])
    for run in answer["weight_versions"]:
        for index in range(run["start"], run["end"]):
            versions[index] = run["version"]
    return Arrays(answer["tokens"], answer["rollout_logp"], answer["loss_mask"], versions)

"""Samples of an episode that one can read, and pages of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from middleware_hub.view.files import open_samples
from middleware_hub.view.page import BytesOf, write_page
from miles_router.trajectory import Sample, VersionRun
from miles_router.trajectory.sample import write_safetensors

OPENING = "<|im_start|>"
SYSTEM = f"{OPENING}system\nAdd with the tool, step by step.<|im_end|>\n{OPENING}user\nWhat is 17 plus 25?<|im_end|>\n"
ASSISTANT, END = f"{OPENING}assistant\n", "<|im_end|>"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 17, "b": 25}}\n</tool_call>'
RESULT = f"\n{OPENING}tool\n42<|im_end|>\n"
#: What was given and what was sampled, by turns: two ends of one line, and a shorter history.
LINES = {
    (0, 1): [
        (SYSTEM + ASSISTANT, f"First add the tens, then the ones.\n{CALL}{END}"),
        (f"{RESULT}{ASSISTANT}", f"42{END}"),
    ],
    (0, 2): [
        (SYSTEM + ASSISTANT, f"First add the tens, then the ones.\n{CALL}{END}"),
        (
            f"\n{OPENING}tool\n17 + 25 = 42 🙂<|im_end|>\n{ASSISTANT}",
            f"The answer is 四十二 (龍🦊), the sum is 42.{END}",
        ),
    ],
    (3,): [(f"{OPENING}user\nSo far: 17 + 25.<|im_end|>\n{ASSISTANT}", f"I think that the answer is 42.{END}")],
}
EDITS = {
    2: ("edited_history", {"message": 3, "field": "content", "held": "42", "sent": "17 + 25 = 42 🙂"}),
    3: ("compaction", {"message": None, "field": "message", "held": "Add with the tool, step by step.", "sent": None}),
}
SHAPE = (4, 2)


def episode(tokenizer: Any, session_id: str = "episode-7") -> list[Sample]:
    """Its samples: three branches over two weight versions and two workers, with experts."""
    seen: set[int] = set()
    return [_sample(tokenizer, session_id, turns, parts, seen) for turns, parts in LINES.items()]


def _sample(tokenizer: Any, session_id: str, turns: Sequence[int], parts: Any, seen: set[int]) -> Sample:
    random = np.random.default_rng(sum(turns) + 7)
    tokens: list[int] = []
    told: list[dict[str, Any]] = []
    runs: list[VersionRun] = []
    trained: list[slice] = []
    for turn, (given, sampled) in zip(turns, parts, strict=True):
        tokens += tokenizer.encode(given, add_special_tokens=False)
        start = len(tokens)
        tokens += tokenizer.encode(sampled, add_special_tokens=False)
        reason, edit = EDITS.get(turn, (None, None))
        place = {"turn": turn, "start": start, "end": len(tokens), "reason": reason, "edit": edit}
        told.append({**place, "finish_reason": "stop", "worker": f"http://10.0.0.{turn % 2 + 1}:30000"})
        runs.append(VersionRun(str(7 + turn // 2), start, len(tokens)))
        trained += [] if turn in seen else [slice(start, len(tokens))]
    seen.update(turns)
    mask, logprobs = np.zeros(len(tokens), np.uint8), np.zeros(len(tokens), np.float32)
    for run in runs:
        logprobs[run.start : run.end] = -random.exponential(0.5, run.end - run.start)
    for part in trained:
        mask[part] = 1
    return Sample(
        tokens=np.array(tokens),
        loss_mask=mask,
        logprobs=logprobs,
        weight_versions=tuple(runs),
        response_length=len(tokens) - told[0]["start"],
        status="completed",
        reward=1.0,
        label="42",
        metadata={"session_id": session_id, "task": "sums", "turns": told},
        routed_experts=random.integers(0, 16, (len(tokens) - 1, *SHAPE)).astype(np.uint8),
    )


def page_of(directory: Path, samples: Sequence[Sample], bytes_of: BytesOf | None = None, name: str = "episode") -> Path:
    file = directory / f"{name}.safetensors"
    file.write_bytes(write_safetensors(samples, {}))
    return page_of_file(file, bytes_of)


def page_of_file(file: Path, bytes_of: BytesOf | None = None) -> Path:
    page = file.with_suffix(".html")
    with page.open("wb") as out:
        write_page(out, file.name, open_samples(file), bytes_of)
    return page

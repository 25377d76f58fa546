"""A real SGLang that says what a script wants. Only the next token is forced (a row of logits gets one winner);
parsers, templates, endpoints, streams, aborts and caches are SGLang's own.

The script is a file with a JSON list of lists of token ids. Each new generation takes the first one off it, and ends
behind it; when it is empty, generations are sampled as always. One whose prompt is longer than the last one's, and no
longer than what that one was given and has said, goes on with its ids: it carries it on. One with a prompt of a single
token is no agent's, but asked for a sign of life or whether a token ends answers; it has no script.

While there is a file `hold` beside the script, with a number in it, scripted generations stop before that token, and a
file `held` says so. A second number means the one behind which so many lists are left in the script. With the word
`slowly` in it, each token takes a tenth of a second.
"""

import json
import time
from pathlib import Path
from typing import Any

FORCED = 50.0
STEP = 0.002
#: In place of a number: go on, with time for the engine to hear what it is told.
SLOWLY, SLOW_STEP = "slowly", 0.1


def install(script: Path) -> None:
    """Patch the sampler of processes that are forked from now on."""
    import sglang.srt.model_executor.model_runner as model_runner

    sample_of_engine = model_runner.ModelRunner.sample
    scripted = Scripted(script)

    def sample(self: Any, logits_output: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        for row, rid in enumerate(forward_batch.rids):
            token = scripted.next_token(rid, int(forward_batch.seq_lens[row]))
            if token is not None:
                logits_output.next_token_logits[row].fill_(-FORCED)
                logits_output.next_token_logits[row][token] = FORCED
        return sample_of_engine(self, logits_output, forward_batch, *args, **kwargs)

    model_runner.ModelRunner.sample = sample


class Scripted:
    """What the generations of one engine say: of each its ids, the length of what was given before the first of them,
    its length now, and how many were left in the script behind it."""

    def __init__(self, script: Path) -> None:
        self._script = script
        self._goes: dict[str, tuple[list[int], int, int, int]] = {}
        self._last = ""  # that had a script

    def next_token(self, rid: str, length: int) -> int | None:
        """What comes behind so many tokens; None for what is not scripted."""
        if rid not in self._goes:
            self._goes[rid] = self._begun(rid, length)
        ids, began, _, left = self._goes[rid]
        self._goes[rid] = (ids, began, length + 1, left)
        if not ids:
            return None
        self._stop_before(length - began, left)
        return ids[min(length - began, len(ids) - 1)]

    def _begun(self, rid: str, length: int) -> tuple[list[int], int, int, int]:
        if length == 1:
            return [], length, length, 0
        ids, began, reached, left = self._goes.get(self._last, ([], 0, 0, 0))
        if not (began < length <= reached and length < began + len(ids)):
            texts = json.loads(self._script.read_text()) if self._script.exists() else []
            self._script.write_text(json.dumps(texts[1:]))
            ids, began, left = texts[0] if texts else [], length, len(texts) - 1
        self._last = rid if ids else self._last
        return ids, began, length, left

    def _stop_before(self, token: int, left: int) -> None:
        hold = self._script.with_name("hold")
        while (word := _text(hold)) in (str(token), f"{token} {left}"):
            self._script.with_name("held").touch()
            time.sleep(STEP)
        if word == SLOWLY:
            time.sleep(SLOW_STEP)


def _text(path: Path) -> str:
    """What stands in a file; nothing, if it is taken away, at whatever instant."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""

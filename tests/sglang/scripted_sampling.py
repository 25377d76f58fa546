"""A real SGLang that says what a script wants. Only the next token is forced (a row of logits gets one winner);
parsers, templates, endpoints, streams, aborts and caches are SGLang's own.

The script is a file with a JSON list of lists of token ids. Each new generation takes the first one off it, and ends
behind it; when it is empty, generations are sampled as always. One whose prompt is as long as what another has been
given and has said goes on with that one's script: it carries it on.
"""

import json
from pathlib import Path
from typing import Any

FORCED = 50.0


def install(script: Path) -> None:
    """Patch the sampler of processes that are forked from now on."""
    import sglang.srt.model_executor.model_runner as model_runner

    sample_of_engine = model_runner.ModelRunner.sample
    goes: dict[str, _Go] = {}

    def sample(self: Any, logits_output: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        for row, rid in enumerate(forward_batch.rids):
            length = int(forward_batch.seq_lens[row])
            if rid not in goes:
                goes[rid] = _begun(length, goes, script)
            go = goes[rid]
            if go.ids:
                logits_output.next_token_logits[row].fill_(-FORCED)
                logits_output.next_token_logits[row][go.ids[min(length - go.began, len(go.ids) - 1)]] = FORCED
            go.reached = length + 1
        return sample_of_engine(self, logits_output, forward_batch, *args, **kwargs)

    model_runner.ModelRunner.sample = sample


class _Go:
    """A generation: where its script began, and how long its sequence is now."""

    def __init__(self, ids: list[int], began: int) -> None:
        self.ids = ids
        self.began = began
        self.reached = began


def _begun(length: int, goes: dict[str, _Go], script: Path) -> _Go:
    for rid, go in goes.items():
        if go.ids and go.reached == length and length - go.began < len(go.ids):
            goes[rid] = _Go([], 0)  # it is carried on once
            return _Go(go.ids, go.began)
    texts = json.loads(script.read_text()) if script.exists() else []
    if not texts:
        return _Go([], length)
    script.write_text(json.dumps(texts[1:]))
    return _Go(texts[0], length)

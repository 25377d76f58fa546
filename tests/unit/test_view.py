"""The token view: every form of samples file as the same sheets, and nothing of what is none or is cut."""

from __future__ import annotations

import json
import os
import re
import tracemalloc
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from math import log2
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from middleware_hub.openai_session.dialects.miles import samples_file
from middleware_hub.view.command import view
from middleware_hub.view.entropy import CHUNK, expert_entropy
from middleware_hub.view.files import open_samples
from middleware_hub.view.sheets import NO_TURNS, TokenSheet, sheet_of
from middleware_hub.view.tree import BranchTree
from miles_router import cli
from miles_router.errors import ConfigError
from miles_router.trajectory import InvalidTrajectory, Malformed, Sample, VersionRun
from miles_router.trajectory.safetensors import pack
from miles_router.trajectory.sample import write_json, write_safetensors

GOLDEN = Path(__file__).resolve().parents[1] / "compat" / "miles_samples"


def sample(turns: Any = None, **changes: Any) -> Sample:
    """Ten tokens, of which 2 to 5 and 7 to 10 were sampled; the first of these runs is not in the loss."""
    given: dict[str, Any] = {
        "tokens": np.arange(10),
        "loss_mask": [0] * 7 + [1] * 3,
        "logprobs": [0.0, 0.0, -0.5, 0.0, -0.25, 0.0, 0.0, -1.5, -0.1, -0.2],
        "weight_versions": [VersionRun("1", 2, 5), VersionRun("2", 7, 10)],
        "response_length": 8,
        "status": "completed",
        "reward": 0.5,
        "label": "é",
        "metadata": {"session_id": "s", **({} if turns is None else {"turns": turns})},
        "routed_experts": np.arange(9 * 2 * 2, dtype=np.uint16).reshape(9, 2, 2) % 5,
    }
    return Sample(**{**given, **changes})


def turn(number: int, start: int, end: int, reason: str | None = None) -> dict[str, Any]:
    return {"turn": number, "start": start, "end": end, "reason": reason, "worker": f"http://w{number}:1"}


def read(path: Path, data: bytes) -> list[TokenSheet]:
    path.write_bytes(data)
    return [sheet for sheet, _ in open_samples(path).sheets]


@pytest.mark.parametrize("name", ["v1_two_samples", "v2_reward", "all_truncated"])
def test_golden_files_of_miles_are_read_as_what_went_in(name: str) -> None:
    told = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
    found = open_samples(GOLDEN / f"{name}.safetensors")
    assert found.why_empty == told["empty_reason"]
    for (sheet, _), given in zip(found.sheets, told["samples"], strict=True):
        behind = -given["response_length"]
        assert sheet.tokens.tolist() == given["tokens"]
        assert sheet.loss_mask is not None
        assert sheet.logprobs is not None
        assert sheet.loss_mask.tolist()[behind:] == given["loss_mask"]
        assert sheet.logprobs.tolist()[behind:] == given["rollout_log_probs"]
        assert not sheet.loss_mask[:behind].any()
        assert (sheet.version_names, sheet.reward) == (given["weight_versions"], given.get("reward"))
        assert (sheet.expert_entropy is not None) == (given["rollout_routed_experts"] is not None)


def entry(response_length: int) -> dict[str, Any]:
    return {"response_length": response_length, "status": "completed", "weight_versions": [], "metadata": {}}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"response_length": 4}, "response_fits"),
        ({"loss_mask": np.ones(3, np.uint8)}, "aligned"),
        ({"rollout_log_probs": np.array([0.5, 0.0])}, "logprobs_are_logprobs"),
        ({"rollout_log_probs": np.array([np.nan, 0.0])}, "logprobs_are_logprobs"),
        ({"loss_mask": np.array([1, 2], np.uint8)}, "mask_is_binary"),
        ({"tokens": np.array([1, -2, 3])}, "tokens_are_ids"),
        ({"rollout_routed_experts": np.zeros((3, 1, 1), np.int32)}, "routed_experts_fit"),
    ],
)
def test_arrays_that_no_rollout_can_have_are_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    file = samples_file([{"tokens": np.arange(3), **entry(2), **changes}], {}, None)
    with pytest.raises(InvalidTrajectory, match=said):
        read(tmp_path / "file", b"".join(file.chunks()))


def test_versions_of_newer_files_of_miles_are_those_of_their_spans(tmp_path: Path) -> None:
    spans = [[{"version": "7", "abs_start": 1, "abs_end": 2}, {"version": "8", "abs_start": 2, "abs_end": 3}]]
    file = samples_file([{"tokens": np.arange(3), **entry(2), "weight_versions": spans}], {}, None)
    (sheet,) = read(tmp_path / "file", b"".join(file.chunks()))
    assert sheet.version_names == ["7", "8"]


def with_metadata(metadata: bytes) -> bytes:
    """A sample of miles whose metadata are no object."""
    nulls = b'["tokens", "loss_mask", "rollout_log_probs", "rollout_routed_experts"]'
    told = b'"response_length": 0, "status": "completed", "weight_versions": []'
    meta = b'{"samples": [{"nulls": %b, %b, "metadata": %b}]}' % (nulls, told, metadata)
    return pack({"_samples_meta": np.frombuffer(meta, np.uint8)}, {})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x1f\x8b\x08 gzip",
        b"[]",
        b'{"tokens": [1]}',
        pack({}, {}),
        pack({"tokens": np.zeros(1, np.int32)}, {"facts": "{}"}),
        pack({"_samples_meta": np.frombuffer(b'{"samples": 1}', np.uint8)}, {}),
        pack({"_samples_meta": np.frombuffer(b'{"samples": [{"nulls": []}]}', np.uint8)}, {}),
        with_metadata(b"[1]"),
        with_metadata(b'"ab"'),
    ],
)
def test_what_is_no_samples_file_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(Malformed):
        read(tmp_path / "file", data)


@pytest.mark.parametrize("form", ["json", "safetensors", "miles"])
def test_a_file_is_refused_wherever_it_is_cut(tmp_path: Path, form: str) -> None:
    given = [sample(), sample()]
    golden = (GOLDEN / "v2_reward.safetensors").read_bytes()
    data = {"json": write_json(given, {}), "safetensors": write_safetensors(given, {}), "miles": golden}[form]
    for end in range(0, len(data), 7):
        with pytest.raises((Malformed, InvalidTrajectory)):
            read(tmp_path / "file", data[:end])


@pytest.mark.parametrize(
    "turns", [[1], [{"turn": 0}], [turn(0, 2, 11)], [turn(0, 5, 4)], [turn(0, 2, 5), turn(1, 4, 7)], [turn(0, -1, 4)]]
)
def test_turns_that_do_not_fit_are_left_out_and_a_note_says_so(turns: Any) -> None:
    sheet = sheet_of(sample(turns))
    assert ([*sheet.turns], [*sheet.path], [*sheet.notes]) == ([], [], [NO_TURNS])


def test_expert_entropy_is_that_of_the_ids_in_a_row() -> None:
    random = np.random.default_rng(5)
    rows = random.integers(0, 9, (CHUNK + 3, 6, 4)).astype(np.uint16)
    rows[0] = 3
    rows[1] = np.arange(24).reshape(6, 4)
    found = expert_entropy(rows)
    for place in [*range(10), CHUNK - 1, CHUNK, CHUNK + 2]:
        shares = [times / 24 for times in Counter(rows[place].reshape(-1).tolist()).values()]
        assert found[place] == pytest.approx(-sum(share * log2(share) for share in shares), abs=1e-6)
    assert (found[0], found[1]) == (0.0, np.float32(log2(24)))
    assert expert_entropy(np.zeros((3, 0, 4), np.uint8)).tolist() == [0.0] * 3


def test_the_tree_has_a_line_for_turns_without_a_branch_an_end_or_a_reason() -> None:
    tree = BranchTree()
    lines = [
        [turn(0, 1, 2), turn(1, 3, 4), turn(2, 5, 9)],
        [turn(0, 1, 2), turn(1, 3, 4), turn(3, 5, 7, "edited_history")],
        [turn(4, 1, 3), turn(5, 3, 4, "retry")],
        [turn(0, 1, 2)],
    ]
    for place, turns in enumerate(lines):
        tree.add(place, sheet_of(sample(turns)))
    found = [tuple(line.values()) for line in tree.lines()]
    assert found == [
        (0, 0, 0, 1, 1, None, [3]),
        (1, 1, 1, 1, 1, None, []),
        (2, 2, 2, 1, 4, None, [0]),
        (2, 3, 3, 1, 2, "edited_history", [1]),
        (0, 4, 4, 1, 2, None, []),
        (1, 5, 5, 1, 1, "retry", [2]),
    ]


@pytest.mark.parametrize("write", [write_json, write_safetensors])
def test_one_sample_is_held_at_a_time(tmp_path: Path, write: Any) -> None:
    length, path = 4000, tmp_path / "file"
    large = Sample(
        tokens=np.arange(length, dtype=np.int32),
        loss_mask=np.ones(length, np.uint8),
        logprobs=np.full(length, -0.123456, np.float32),
        response_length=length,
        status="completed",
        routed_experts=np.zeros((length - 1, 4, 4), np.uint8),
    )

    def peak(count: int) -> int:
        path.write_bytes(write([large] * count, {}))
        tracemalloc.start()
        tokens = sum(len(sheet) for sheet, _ in open_samples(path).sheets)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert tokens == count * length
        return most

    assert peak(32) < 1.5 * peak(4)


DEEP = b'"metadata":{"deep":%b%b}' % (b"[" * 300, b"]" * 300)
Run = Callable[..., tuple[str, str]]


def command_sample(tokens: int = 3) -> Sample:
    given: dict[str, Any] = {"tokens": [1] * tokens, "loss_mask": [0] * tokens, "logprobs": [0.0] * tokens}
    return Sample(**given, response_length=0, status="completed")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """The command in an empty directory: what it prints, or the line that refuses."""
    monkeypatch.chdir(tmp_path)
    import_module("transformers")  # it says once that there is no PyTorch
    capsys.readouterr()

    def run(*arguments: str) -> tuple[str, str]:
        ends: list[object] = []
        try:
            cli.main(["view", *arguments])
        except SystemExit as end:
            ends.append(end.code)
        said = capsys.readouterr()
        assert ends == ([2] if said.err.startswith("miles-router") else [])
        return said.out, said.err

    return run


def test_the_page_stands_beside_the_file_or_where_it_is_wanted(run: Run, tmp_path: Path) -> None:
    (tmp_path / "episode.json").write_bytes(write_json([command_sample(), command_sample(1500)], {}))
    said, _ = run("episode.json")
    assert re.fullmatch(r"episode\.html: 2 samples, 1,503 tokens, 0\.\d MB; token ids only, .*--hf-checkpoint\n", said)
    assert (tmp_path / "episode.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    said, _ = run("episode.json", "--output", "other.html")
    assert (tmp_path / "other.html").read_bytes() == (tmp_path / "episode.html").read_bytes()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"x" * 100, "it is neither JSON nor safetensors, or it is truncated"),
        (b'{"samples": 5}', "sample 0: the field 'samples' is not a list of objects"),
        (write_json([command_sample(), command_sample()], {})[:-5], "sample 2: invalid or incomplete JSON"),
        (write_safetensors([command_sample()], {})[:-1], "a tensor's offsets in a safetensors file do not fit"),
        (write_json([command_sample()], {}).replace(b'"loss_mask":[0', b'"loss_mask":[7'), "sample 0: mask_is_binary"),
        (
            write_json([command_sample()], {}).replace(b'"metadata":{}', DEEP),
            "sample 0: its metadata cannot be encoded",
        ),
    ],
)
def test_what_cannot_be_shown_is_refused_by_name_and_the_old_page_stays(
    run: Run, tmp_path: Path, data: bytes, why: str
) -> None:
    (tmp_path / "file").write_bytes(data)
    (tmp_path / "page.html").write_text("old", encoding="utf-8")
    said, complained = run("file", "--output", "page.html")
    assert said == ""
    assert complained.startswith(f"miles-router: view: file cannot be shown as a samples file: {why}")
    assert complained.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "page.html"]
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == "old"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["absent.json"], "view: [Errno 2] No such file or directory: 'absent.json'"),
        (["."], "view: . is a directory"),
        (["/"], "view: / is a directory"),
        (["page.html"], "view: the page would replace the file page.html"),
        (["page.html", "--output", "absent/page.html"], "view: [Errno 2] No such file or directory"),
        (["page.html", "--hf-checkpoint", "."], "hf_checkpoint: cannot load a tokenizer from '.'"),
        (["page.html", "--hf-checkpoint", "/no/such/directory"], "hf_checkpoint: cannot load a tokenizer from '/no"),
        (["page.html", "--ouput", "x"], "unrecognized arguments: --ouput x; did you mean '--output'?"),
        ([], "the following arguments are required: FILE"),
    ],
)
def test_a_wrong_use_is_refused_in_a_line(run: Run, tmp_path: Path, arguments: list[str], why: str) -> None:
    (tmp_path / "page.html").write_bytes(write_json([command_sample()], {}))
    _, complained = run(*arguments)
    assert complained.startswith(f"miles-router: {why}")


def test_a_page_replaces_files_alone(run: Run, tmp_path: Path) -> None:
    """Who may write to `/dev` has no `/dev/null` else."""
    (tmp_path / "file").write_bytes(write_json([command_sample()], {}))
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "directory").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "same").symlink_to("file")
    for name in ("pipe", "directory"):
        _, complained = run("file", "--output", name)
        assert complained == f"miles-router: view: {name} is not a regular file; name another --output\n"
    assert run("file", "--output", "same")[1].startswith("miles-router: view: the page would replace the file")
    assert run("file", "--output", "loop")[1] == ""
    assert (tmp_path / "pipe").is_fifo()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["directory", "file", "loop", "pipe", "same"]


def test_a_tokenizer_whose_tokens_nobody_can_spell_is_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    class Loaded:
        backend_tokenizer = Tokenizer(models.WordLevel({"a": 0}, "a"))

    for tokenizer, why in ((Loaded(), "tokens are unknown"), (object(), "has no fast tokenizer")):
        with pytest.raises(ConfigError, match=why):
            view(tmp_path / "file", None, tokenizer)

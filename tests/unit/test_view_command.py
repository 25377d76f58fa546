"""`miles-router view`: the page it writes and where, what it refuses, and that it leaves nothing half written."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from middleware_hub.view.command import Bar, view
from middleware_hub.view.page import asset, policy, script
from miles_router import cli
from miles_router.errors import ConfigError
from miles_router.testing import tiny_tokenizer
from miles_router.trajectory import Sample
from miles_router.trajectory.sample import write_json, write_safetensors

DEEP = b'"metadata":{"deep":%b%b}' % (b"[" * 300, b"]" * 300)
Run = Callable[..., tuple[str, str]]


def sample(tokens: int = 3) -> Sample:
    given: dict[str, Any] = {"tokens": [1] * tokens, "loss_mask": [0] * tokens, "logprobs": [0.0] * tokens}
    return Sample(**given, response_length=0, status="completed")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """The command in an empty directory: what it prints, or the line that refuses."""
    monkeypatch.chdir(tmp_path)

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
    (tmp_path / "episode.json").write_bytes(write_json([sample(), sample(1500)], {}))
    said, _ = run("episode.json")
    assert re.fullmatch(r"episode\.html: 2 samples, 1,503 tokens, 0\.\d MB; token ids only, .*--hf-checkpoint\n", said)
    assert (tmp_path / "episode.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    said, _ = run("episode.json", "--output", "other.html")
    assert (tmp_path / "other.html").read_bytes() == (tmp_path / "episode.html").read_bytes()


def test_with_a_tokenizer_nothing_is_missing(run: Run, tmp_path: Path) -> None:
    tiny_tokenizer.build(tmp_path / "model")
    (tmp_path / "episode.safetensors").write_bytes(write_safetensors([sample()], {}))
    said, _ = run("episode.safetensors", "--hf-checkpoint", "model")
    assert re.fullmatch(r"episode\.html: 1 sample, 3 tokens, 0\.\d MB\n", said)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"x" * 100, "it is neither JSON nor safetensors, or it is truncated"),
        (b'{"samples": 5}', "sample 0: the field 'samples' is not a list of objects"),
        (write_json([sample(), sample()], {})[:-5], "sample 2: invalid or incomplete JSON"),
        (write_safetensors([sample()], {})[:-1], "a tensor's offsets in a safetensors file do not fit"),
        (write_json([sample()], {}).replace(b'"loss_mask":[0', b'"loss_mask":[7'), "sample 0: mask_is_binary"),
        (
            write_json([sample()], {}).replace(b'"metadata":{}', DEEP),
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
    (tmp_path / "page.html").write_bytes(write_json([sample()], {}))
    _, complained = run(*arguments)
    assert complained.startswith(f"miles-router: {why}")


def test_a_page_replaces_files_alone(run: Run, tmp_path: Path) -> None:
    """Who may write to `/dev` has no `/dev/null` else."""
    (tmp_path / "file").write_bytes(write_json([sample()], {}))
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


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_how_far_it_is_and_nothing_of_it_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(write_safetensors([sample()] * 4, {}))
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    view(tmp_path / "file", None)
    steps = terminal.getvalue().split("\r")
    assert [step.rpartition("]")[2].strip() for step in steps if step.startswith("[")] == [
        "25 %",
        "50 %",
        "75 %",
        "100 %",
    ]
    assert steps[-2].strip() == steps[-1] == ""
    plain = io.StringIO()
    Bar(plain).draw(0.5)
    assert plain.getvalue() == ""


def test_the_policy_names_what_stands_in_the_page_and_no_more() -> None:
    given = policy(script(), asset("view.css"))
    assert "unsafe" not in given
    assert given.startswith("default-src 'none'; script-src 'sha256-")
    assert "</script" not in script()
    assert "<!--" not in script()
    assert "innerHTML" not in script()
    assert "import " not in script().replace("// ", "")

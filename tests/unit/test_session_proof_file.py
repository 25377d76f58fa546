"""Proofs kept from one start to the next: used where they are the very same, and never otherwise."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest

from middleware_hub.openai_session.continuing.continuation import Continuation, build
from middleware_hub.openai_session.continuing.probes import STANDARD, Shape
from middleware_hub.openai_session.continuing.proof import Proof
from middleware_hub.openai_session.continuing.proof_file import ProofFile, default_directory
from middleware_hub.openai_session.continuing.templates import from_tokenizer
from middleware_hub.openai_session.sessions.prompting import Context
from tests.support.chat import CHATML, with_template

#: Refuses what a system says late.
REFUSING = CHATML.replace(
    "{%- for m in messages -%}",
    "{%- for m in messages -%}{%- if m.role == 'system' and not loop.first -%}"
    "{{ raise_exception('Late system') }}{%- endif -%}",
)


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this test's proofs are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "miles-router" / "proofs"


@pytest.fixture
def proved(monkeypatch: pytest.MonkeyPatch) -> list[Shape]:
    """The shapes that are proved from now on."""
    shapes: list[Shape] = []
    prove = Proof._prove

    def noted(proof: Proof, shape: Shape, context: Context) -> None:
        shapes.append(shape)
        prove(proof, shape, context)

    monkeypatch.setattr(Proof, "_prove", noted)
    return shapes


def ignored(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Why files were not used."""
    return [each.fields["reason"] for each in caplog.records if each.message == "proof_ignored"]  # type: ignore[attr-defined]


def test_a_restart_knows_what_was_proved_and_refused_before(proved: list[Shape], directory: Path) -> None:
    first = build(with_template(REFUSING), None).proof
    assert len(proved) == 2 * len(STANDARD)
    proved.clear()
    second = build(with_template(REFUSING), None).proof
    assert proved == []
    assert second.describe() == first.describe()
    assert second.refused == {"system": "the template raises an error: Late system"}
    assert second.refusal(STANDARD["system"], {}) == "the template raises an error: Late system"
    assert second.refusal(STANDARD["user"], {}) is None
    (kept,) = directory.iterdir()
    assert kept.stat().st_mode & 0o777 == 0o600


def test_shapes_and_settings_that_come_later_are_proved_then(proved: list[Shape]) -> None:
    for _ in range(2):
        proof = build(with_template(CHATML), None).proof
        proved.clear()
        proof.require(Shape(("user", "user")), {})
        proof.require(STANDARD["user"], {"a": 1})
        assert proved == [Shape(("user", "user")), STANDARD["user"]]


def chatml() -> Continuation:
    return build(with_template(CHATML), None)


def other_special_tokens() -> Continuation:
    made = with_template(CHATML)
    made.bos_token = "<|endoftext|>"
    return build(made, None)


#: What is built, and what is replaced before.
CHANGES: Mapping[str, tuple[Callable[[], Continuation], str, object]] = {
    "another template": (lambda: build(with_template(CHATML + " "), None), "", None),
    "another family": (lambda: build(with_template(CHATML), "gpt-oss"), "", None),
    "a template of the library's": (lambda: build(with_template(CHATML), "qwen3"), "", None),
    "other special tokens": (other_special_tokens, "", None),
    "another library": (chatml, "middleware_hub.openai_session.continuing.proof_file._version", lambda name: "0"),
    "another Python": (chatml, "platform.python_version", lambda: "3.9"),
    "other code": (chatml, "middleware_hub.openai_session.continuing.proof_file._code_digest", lambda: "other"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_proof_is_used_for_nothing_else(
    change: str, proved: list[Shape], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chatml()
    proved.clear()
    build_other, replaced, by = CHANGES[change]
    if replaced:
        monkeypatch.setattr(replaced, by)
    build_other()
    assert proved
    assert len(list(directory.iterdir())) == 2


def rewritten(path: Path, **changes: Any) -> None:
    path.write_bytes(orjson.dumps({**orjson.loads(path.read_bytes()), **changes}))


def into_a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: Mapping[str, tuple[Callable[[Path], object], str]] = {
    "cut": (lambda path: os.truncate(path, path.stat().st_size - 9), "the file is damaged"),
    "empty": (lambda path: os.truncate(path, 0), "the file is damaged"),
    "endless": (lambda path: os.truncate(path, 1 << 30), "the file is damaged"),
    "no object": (lambda path: path.write_bytes(b"[]"), "the file contains another proof"),
    "a refusal taken out": (
        lambda path: rewritten(path, refusals=[None] * (2 * len(STANDARD))),
        "the file is damaged",
    ),
    "refusals that are none": (lambda path: rewritten(path, refusals=3), "the file is damaged"),
    "of something else": (lambda path: rewritten(path, subject="0"), "the file contains another proof"),
    "written by anybody": (lambda path: path.chmod(0o666), "another user may have written the file"),
    "a directory": (into_a_directory, "Is a directory"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_cannot_be_trusted_is_ignored_and_written_anew(
    damage: str, proved: list[Shape], directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build(with_template(REFUSING), None)
    (path,) = directory.iterdir()
    spoil, reason = DAMAGES[damage]
    spoil(path)
    proved.clear()
    assert build(with_template(REFUSING), None).proof.refused == {"system": "the template raises an error: Late system"}
    assert len(proved) == 2 * len(STANDARD)
    (told,) = ignored(caplog)
    assert reason in told
    if path.is_file():
        caplog.clear()
        proved.clear()
        build(with_template(REFUSING), None)
        assert (proved, ignored(caplog)) == ([], [])


def test_a_proof_of_another_length_is_none(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = ProofFile({"a": 1})
    file.write([None, "no"])
    assert file.read(2) == [None, "no"]
    assert file.read(3) is None
    file.write([None, 3])  # type: ignore[list-item]
    assert file.read(2) is None
    assert ignored(caplog) == ["the file contains another proof"] * 2


def test_without_a_place_for_it_every_start_proves_anew(
    proved: list[Shape], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "miles-router").write_text("a file in its place")
    with caplog.at_level(logging.INFO):
        chatml()
    assert [each.message for each in caplog.records] == ["proof_ignored", "proof_not_kept", "continuation_proved"]
    monkeypatch.setattr("middleware_hub.openai_session.continuing.proof_file.default_directory", lambda: None)
    proved.clear()
    chatml()
    assert proved


def test_the_place_is_the_user_s_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_directory() == tmp_path / "miles-router" / "proofs"
    monkeypatch.setenv("HOME", str(tmp_path))
    for relative in ("", "cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", relative)
        assert default_directory() == tmp_path / ".cache" / "miles-router" / "proofs"

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert default_directory() is None


def test_only_so_many_files_are_kept(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("middleware_hub.openai_session.continuing.proof_file.MAX_FILES", 4)
    for number in range(7):
        ProofFile({"number": number}).write([None])
    assert len(list(directory.iterdir())) == 4
    assert ProofFile({"number": 6}).read(1) == [None]


def test_what_is_rendered_with_is_all_in_the_subject() -> None:
    made = with_template(CHATML)
    renderer = from_tokenizer(made, template=REFUSING, settings={"a": 1}, origin="here")
    assert renderer.subject == {
        "origin": "here",
        "tokenizer": str(type(made)),
        "template": REFUSING,
        "settings": {"a": 1},
        "special tokens": made.special_tokens_map,
    }

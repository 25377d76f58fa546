"""What an engine says stands in its folder alone: paths, control requests, and fields that the router's own `/generate`
does not have. The list is made of the folders' own texts."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import miles_router
from miles_router.engines import known, paths
from miles_router.engines.openai.by_ids import SAMPLING

ROOT = Path(miles_router.__file__).parent.parent
HOUSE, HUB = ROOT / "miles_router", ROOT / "middleware_hub"
ENGINES = HOUSE / "engines"
FOLDERS = sorted({ENGINES / kind.__module__.split(".")[-2] for kind in known.KINDS})
#: They speak the API from outside, as clients and workers do, and import nothing of the server.
OUTSIDE = (HOUSE / "client", HOUSE / "testing", HUB / "view")
#: Paths of the router's own that an engine has too, and the module that has them.
OWN = {
    HOUSE / "admin" / "routes.py": {"/health", "/metrics"},
    HOUSE / "reach" / "command.py": {"/health", "/metrics", "/v1/models"},
}
#: Names of others that an engine has too: of Hugging Face, of OpenAI, and of the router itself (of registrations, too).
OF_OTHERS = {
    *("chat_template", "top_logprobs", "request_id", "resp_", "bootstrap_port", "stream_options", "reasoning_text"),
    *("max_tokens", "cached_tokens", "prompt_tokens_details", "include_usage", "stop_reason", "x-request-id"),
    *("instance_id", "max_model_len", "gpt-oss", "deepseek-r1", "deepseek-v3", "minimax-m2", "qwen3_coder"),
}
#: The router's own form of chat and completions, which layers speak with each other: an engine that differs translates.
CHAT = ENGINES / "openai"
#: A path, or a name that is no word of English alone.
WORD = re.compile(r"/[\w/.-]*\w|[A-Za-z]\w*_\w*|[a-z]+(?:-[a-z]+)+|[A-Z][a-z]+[A-Z]\w+")


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Every text in code, with its line; documentation left out."""
    tree = ast.parse(source)
    documentation = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes) and id(node) not in documentation:
            yield node.lineno, node.value if isinstance(node.value, str) else node.value.decode("latin-1")


def modules(*folders: Path) -> list[Path]:
    return [path for folder in folders for path in sorted(folder.rglob("*.py"))]


def words(*files: Path) -> set[str]:
    found = (text for file in files for _, text in texts(file.read_text(encoding="utf-8")))
    return {text for text in found if WORD.fullmatch(text)}


#: Of all engines: what is a text of its own in their folders.
SPELLED = words(*modules(*FOLDERS))
#: The router's own API for generation; all else that `engines/` itself has is what requests and answers of it have.
PATHS = {value for name, value in vars(paths).items() if name.isupper() and isinstance(value, str)}
FORM = {word for word in words(*ENGINES.glob("*.py")) if not word.startswith("/")} | {*SAMPLING.values()}
ENGINES_OWN = frozenset(SPELLED - PATHS - FORM - OF_OTHERS)


def spelled(source: str) -> list[tuple[int, str]]:
    """The words of engines in the texts of some code, with their lines."""
    return [(line, word) for line, text in sorted(texts(source)) for word in WORD.findall(text) if word in ENGINES_OWN]


def test_the_list_has_paths_control_requests_and_fields() -> None:
    assert {folder.name for folder in FOLDERS} == {"sglang", "sglang_jax", "vllm"}
    assert {"/health_generate", "/v1/tokenize", "/invocations", "/api/chat"} <= ENGINES_OWN
    assert set(known.CONTROL) <= ENGINES_OWN
    assert {"new_version", "abort_all", "routed_dp_rank", "internal_states", "GenerateReqInput"} <= ENGINES_OWN
    assert not ENGINES_OWN & {"/generate", "/v1/chat/completions", "rid", "meta_info", "lora_path"}


def test_a_word_is_found_wherever_a_text_has_it() -> None:
    assert spelled('"""On /flush_cache."""\ndef f():\n    "/flush_cache"\n    return "/flush_cache"\n') == [
        (4, "/flush_cache")
    ]
    code = 'x = f"{url}/flush_cache?a=1"\ny = b\'"new_version"\'\nz = "/flush_cache/x /flush_caches renew_version"'
    assert spelled(code) == [(1, "/flush_cache"), (2, "new_version")]


@pytest.mark.parametrize(
    "path",
    [
        path
        for path in modules(HOUSE, HUB)
        if not any(path.is_relative_to(folder) for folder in (*FOLDERS, *OUTSIDE, CHAT))
    ],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_engines_are_spelled_in_their_folders_alone(path: Path) -> None:
    own = OWN.get(path, set())
    assert [each for each in spelled(path.read_text(encoding="utf-8")) if each[1] not in own] == []

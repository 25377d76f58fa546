"""Local parsers make of whole answers what SGLang's own parsers make of them, spoilt ones too."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from miles_router.engines.facts import Facts
from miles_router.engines.openai.chat import tools_by_name
from miles_router.engines.parsers import Parsers, Unparsable
from miles_router.engines.parsers.accounting import account
from tests.sglang.environment import ensure, package
from tests.support.good_answers import GOOD_ANSWERS
from tests.support.good_answers import TOOLS as GOOD_TOOLS
from tests.support.tiers import size
from tests.support.tokenizers import tokenizer_directory
from tests.support.written_turns import FAMILIES, TOOLS, cases

pytestmark = pytest.mark.sglang

PARSE = Path(__file__).resolve().parents[1] / "sglang" / "parse.py"
RECIPE = "deepseek-recipe==0.2.0"


def by_engine(asked: list[Any]) -> list[Any]:
    tokenizer = Path(tokenizer_directory("deepseek_v3")) / "tokenizer.json"
    done = subprocess.run(
        [str(ensure().python), str(PARSE), str(package(RECIPE)), str(tokenizer)],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return list(json.loads(done.stdout))


def here(case: Any) -> Any:
    facts = Facts(tool_call_parser=case["calls"], reasoning_parser=case["thinking"])
    thinking, calls = Parsers("local").reasoning_format(facts), Parsers("local").call_format(facts)
    assert thinking is not None
    assert calls is not None
    split = thinking.split(case["text"], thinking=case["force"])
    content, found = calls.read(split.rest or "", tools_by_name(case["tools"]))
    return {"reasoning": split.reasoning, "content": content, "calls": [list(call) for call in found]}


def test_good_answers_are_whole_with_the_engine_s_parsers() -> None:
    """Step 3's parser drops an argument with a tag in it, and a call without arguments."""
    asked = [
        {"text": each.text, "tools": GOOD_TOOLS, "calls": each.parser, "thinking": None, "force": False}
        for each in GOOD_ANSWERS
    ]
    for answer, read in zip(GOOD_ANSWERS, by_engine(asked), strict=True):
        calls = [{"function": {"name": name, "arguments": arguments}} for name, arguments in read["calls"]]
        reasons = account(answer.text, {"content": read["content"], "tool_calls": calls}, tools_by_name(GOOD_TOOLS))
        lost = ["text_left_over", "argument_altered"] if answer.parser == "step3" else []
        assert reasons == lost, (answer.parser, read)


def test_every_family_reads_as_the_engine_does() -> None:
    asked = [
        {"text": text, "tools": TOOLS, "calls": family.calls, "thinking": family.thinking, "force": force}
        for name, family in FAMILIES.items()
        for text in cases(name, size(heavy=2000, otherwise=150))
        for force in ({True} if family.thinking == "minimax" else (False, True))
    ]
    unknown = 0
    for case, expected in zip(asked, by_engine(asked), strict=True):
        try:
            found = here(case)
        except Unparsable:
            unknown += 1
            continue
        assert found == expected, case
    assert unknown < len(asked) / 10

"""What SGLang's own parsers make of texts: reads a JSON list of cases on standard input, and writes one of results.

A case is `{"text", "tools", "calls": parser or null, "thinking": parser or null, "force": whether it begins within its
reasoning}`, a result `{"reasoning", "content", "calls": [[name, arguments]]}`. DeepSeek V4's are read as SGLang reads
its tokens: the arguments name the folder that has `deepseek_recipe`, and a `tokenizer.json`.
"""

import json
import logging
import os
import sys
from typing import Any

import launch_worker

DEEPSEEK = ("｜DSML｜", "<think>", "</think>", "<｜deepseek_image｜>")


class Tokens:
    """Reads as SGLang reads the tokens of DeepSeek V4."""

    def __init__(self, packages: str, tokenizer: str) -> None:
        sys.path.insert(0, packages)
        from sglang.srt.parser.deepseek_recipe_renderer import DeepSeekRecipe
        from tokenizers import AddedToken, Tokenizer

        self.tokenizer = Tokenizer.from_file(tokenizer)
        self.tokenizer.add_special_tokens([AddedToken(each, normalized=False, special=True) for each in DEEPSEEK])
        self.recipe = DeepSeekRecipe("dsv4", self.tokenizer)

    def parsed(self, case: dict[str, Any]) -> dict[str, Any]:
        from sglang.srt.parser.deepseek_recipe_output import DeepSeekRecipeOutputParser, whole_tool_calls

        stage = self.recipe.parse_start(thinking=case["force"])
        parser = DeepSeekRecipeOutputParser(self.recipe, thinking_stage=stage, parse_tool_calls=True)
        read = parser.finish(self.tokenizer.encode(case["text"], add_special_tokens=False).ids, {"type": "length"})
        calls = [[call.name, call.arguments] for call in whole_tool_calls(read)]
        return {"reasoning": read.reasoning, "content": read.content, "calls": calls}


def parsed(case: dict[str, Any]) -> dict[str, Any]:
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    text, reasoning, calls = case["text"], "", []
    if case["thinking"]:
        parser = ReasoningParser(case["thinking"], stream_reasoning=False, force_reasoning=case["force"])
        reasoning, text = parser.parse_non_stream(text)
    if case["calls"]:
        detector = FunctionCallParser([Tool(**tool) for tool in case["tools"]], case["calls"])
        text, calls = detector.parse_non_stream(text)
    return {"reasoning": reasoning, "content": text, "calls": [[call.name, call.parameters] for call in calls]}


if __name__ == "__main__":
    answers = os.dup(1)
    os.dup2(2, 1)
    launch_worker.prepare()
    logging.disable(logging.CRITICAL)
    by_tokens = Tokens(*sys.argv[1:])
    read = {"deepseekv4": by_tokens.parsed}
    results = [read.get(case["calls"], parsed)(case) for case in json.load(sys.stdin)]
    os.write(answers, json.dumps(results).encode())

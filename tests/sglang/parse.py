"""What SGLang's own parsers make of texts: reads a JSON list of cases on standard input, and writes one of results.

A case is `{"text", "tools", "calls": parser or null, "thinking": parser or null, "force": whether it begins within its
reasoning}`, a result `{"reasoning", "content", "calls": [[name, arguments]]}`.
"""

import json
import logging
import os
import sys
from typing import Any

import launch_worker


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
    results = [parsed(case) for case in json.load(sys.stdin)]
    os.write(answers, json.dumps(results).encode())

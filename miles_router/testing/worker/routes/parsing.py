"""The routes `/separate_reasoning` and `/parse_function_call`, SGLang's parsers for a whole text."""

from aiohttp import web

from miles_router.testing.worker.model.reasoning import separated
from miles_router.testing.worker.model.tool_calls import parse_calls
from miles_router.testing.worker.routes.control import Route
from miles_router.testing.worker.visit import InternalError, Visit

_REASONING, _CALLS = ("qwen3", "qwen3-thinking"), ("qwen", "qwen25")


async def separate_reasoning(visit: Visit) -> web.StreamResponse:
    """Handle POST {"text", "reasoning_parser"}. The parser cannot know whether the prompt opened the reasoning."""
    body = visit.json()
    if body.get("reasoning_parser") not in _REASONING:
        raise InternalError(f"Unsupported model type: {body.get('reasoning_parser')}")
    reasoning, text = separated(body["text"], thinking=body["reasoning_parser"] == "qwen3-thinking")
    return await visit.reply.json({"reasoning_text": reasoning, "text": text})


async def parse_function_call(visit: Visit) -> web.StreamResponse:
    """Handle POST {"text", "tools", "tool_call_parser"}. `tool_index` is the tool's index in the request."""
    body = visit.json()
    if body.get("tool_call_parser") not in _CALLS:
        raise InternalError(f"Unsupported tool_call_parser: {body.get('tool_call_parser')}")
    names = [tool["function"]["name"] for tool in body.get("tools") or ()]
    text, calls = parse_calls(body["text"], names) if names else (body["text"], None)
    parsed = [
        {
            "tool_index": names.index(call["function"]["name"]),
            "name": call["function"]["name"],
            "parameters": call["function"]["arguments"],
        }
        for call in calls or ()
    ]
    return await visit.reply.json({"normal_text": text, "calls": parsed})


PARSING_ROUTES: dict[tuple[str, str], Route] = {
    ("POST", "/separate_reasoning"): separate_reasoning,
    ("POST", "/parse_function_call"): parse_function_call,
}
